"""The example of a loop of one's own, under torchrun and by itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from distributed import free_port, run_ranks

from examples import megatron_loop

ROOT = Path(__file__).resolve().parent.parent


def train_on_rank() -> dict[str, list[float]]:
    losses, model = megatron_loop.train()
    shards = [local for unit in model.units for local in unit.locals]
    return {"losses": losses, "parameters": torch.cat([s.reshape(-1) for s in shards]).tolist()}


def test_losses_fall_and_the_replicas_end_up_equal() -> None:
    results = run_ranks(train_on_rank, 4)
    for result in results:
        assert result["losses"][0] > 4
        assert sum(result["losses"][-5:]) / 5 < 1
    # Two shards a replica.
    for shard in range(2):
        assert results[shard]["parameters"] == results[2 + shard]["parameters"]
    assert results[0]["parameters"] != results[1]["parameters"]
    # They were apart before: the ranks of the two replicas read different data.
    assert results[0]["losses"] != results[2]["losses"]
    assert not dist.is_initialized()


def test_it_runs_under_torchrun() -> None:
    result = subprocess.run(
        [
            Path(sys.executable).parent / "torchrun", "--nproc_per_node", "2",
            "--master_port", str(free_port()), "-m", "examples.megatron_loop",
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    lines = re.findall(r"step (\d+): loss ([\d.]+), (\d+) rounds done", result.stdout)
    assert [int(step) for step, _, _ in lines] == [8, 16, 24, 32, 40]
    assert float(lines[-1][1]) < float(lines[0][1])
    # Rounds of 4 steps after 8 of warm-up; the last ends after the loop.
    assert [int(rounds) for _, _, rounds in lines] == [0, 1, 3, 5, 7]
