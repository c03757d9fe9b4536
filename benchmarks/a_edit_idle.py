"""How long replicas of unequal speed wait for one another in `a_edit`, on a real clock.

    python -m benchmarks.a_edit_idle

Two replicas train on the embedded text through the real launcher; replica 1 is made 4.3 times
slower. Printed are the waits of the 40 rounds, and how many steps the two did of those that each
would have done alone in that time, at its own mean of the steps without a synchronisation.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

import pretrain_edit
from benchmarks.trainings import ROOT, Trainings
from megatron_edit.engine.record import SyncRecord
from megatron_edit.run import trainer
from megatron_edit.run.failure import exit_on_failure

ROUNDS, SLOWER, OUTPUT_VARIABLE = 40, 4.3, "A_EDIT_IDLE_OUTPUT"
WARMUP = 4
FLAGS: dict[str, object] = {
    "--num-layers": 2,
    "--hidden-size": 64,
    "--ffn-hidden-size": 160,
    "--num-attention-heads": 4,
    "--seq-length": 64,
    "--max-position-embeddings": 64,
    "--normalization": "RMSNorm",
    "--swiglu": True,
    "--disable-bias-linear": True,
    "--untie-embeddings-and-output-weights": True,
    "--micro-batch-size": 4,
    "--global-batch-size": 8,
    "--train-iters": 1_000_000,
    "--lr": 1e-3,
    "--lr-decay-style": "constant",
    "--eval-iters": 0,
    "--log-interval": 1_000_000,
    "--edit-method": "a_edit",
    "--edit-warmup-steps": WARMUP,
    "--edit-replicas": 2,
    "--edit-debug": "true",
    "--edit-debug-slow-replica": f"1:{SLOWER}",
}


class MeasuredTrainer(trainer.Trainer):
    """A trainer that notes when its steps begin and how long it waits, and ends after ROUNDS."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.began_s: list[float] = []
        self.rounds_before: list[int] = []
        self.records_seen: list[SyncRecord] = []

    def step(self) -> None:
        self.began_s.append(time.perf_counter())
        self.rounds_before.append(self.engine.round)
        super().step()

    def records(self) -> list[SyncRecord]:
        records = super().records()
        self.records_seen += records
        return records

    @property
    def finished(self) -> bool:
        return self.engine.together and self.engine.round > ROUNDS

    def synchronize(self) -> None:
        self._write()
        super().synchronize()

    def _write(self) -> None:
        ordinary = [
            after - before
            for before, after, round_, next_round in zip(
                self.began_s[WARMUP:], self.began_s[WARMUP + 1 :],
                self.rounds_before[WARMUP:], self.rounds_before[WARMUP + 1 :], strict=False,
            )
            if round_ == next_round
        ]  # fmt: skip
        path = Path(f"{os.environ[OUTPUT_VARIABLE]}.{self.args.rank}")
        result = {
            "step_s": statistics.fmean(ordinary),
            "slowest_step_s": max(ordinary),
            "elapsed_s": self.began_s[-1] - self.began_s[WARMUP],
            "steps": len(self.began_s) - 1 - WARMUP,
            "last_steps_s": self._last_steps()[:ROUNDS],
            "waits_s": [record.exposed_ms / 1e3 for record in self.records_seen[:ROUNDS]],
        }
        path.write_text(json.dumps(result))

    def _last_steps(self) -> list[float]:
        """Of each round the time of its last step: the round ends at the start of the next one."""
        return [
            self.began_s[step] - self.began_s[step - 1]
            for step in range(1, len(self.began_s) - 1)
            if self.rounds_before[step] != self.rounds_before[step + 1]
        ]


def rank_main() -> None:
    """One rank of the training."""
    trainer.Trainer = MeasuredTrainer  # type: ignore[assignment,misc]
    with exit_on_failure():
        code = pretrain_edit.main()
        dist.destroy_process_group()
    sys.exit(code)


def report(ranks: list[dict[str, Any]]) -> str:
    """Table and verdict."""
    lines = [
        "| replica | step, ms | steps | wait per round, ms: mean | greatest |",
        "|---|---|---|---|---|",
    ]
    for replica, rank in enumerate(ranks):
        waits = rank["waits_s"]
        lines.append(
            f"| {replica} | {1e3 * rank['step_s']:.1f} | {rank['steps']} | "
            f"{1e3 * statistics.fmean(waits):.1f} | {1e3 * max(waits):.1f} |"
        )
    alone = sum(rank["elapsed_s"] / rank["step_s"] for rank in ranks)
    share = sum(rank["steps"] for rank in ranks) / alone
    rounds = list(zip(ranks[0]["waits_s"], ranks[1]["last_steps_s"], strict=True))
    within = sum(wait <= step for wait, step in rounds)
    lines += [
        "",
        f"{len(rounds)} rounds in {ranks[0]['elapsed_s']:.0f} s; together {share:.1%} of the steps "
        f"that the two do alone. Replica 0 waited for no longer than replica 1's step under way in "
        f"{within} of {len(rounds)} rounds; the slowest of those steps took "
        f"{1e3 * max(step for _, step in rounds):.1f} ms, the slowest of all steps of replica 1 "
        f"{1e3 * ranks[1]['slowest_step_s']:.1f} ms.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Starts the training and prints what it measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "a_edit_idle", help="logs")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a round (4)")
    args = parser.parse_args()
    trainings = Trainings(args.work, vocabulary=1024, total=1)
    words = trainings.words({**FLAGS, "--edit-sync-seconds": args.seconds})
    output = args.work / "waits"
    launch = ["deepspeed", "--num_accelerators", "2", "--module", "benchmarks.a_edit_idle"]
    variables = {"OMP_NUM_THREADS": "1", OUTPUT_VARIABLE: str(output)}
    subprocess.run([*launch, *words], cwd=ROOT, env={**os.environ, **variables}, check=True)
    print(report([json.loads(Path(f"{output}.{rank}").read_text()) for rank in range(2)]))


if __name__ == "__main__":
    if OUTPUT_VARIABLE in os.environ:
        rank_main()
    else:
        main()
