"""The DeepSpeed JSON of DeepSpeed's own engine: what is refused, with key and remedy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_edit.config.zero_config import read_zero_run
from megatron_edit.errors import ConfigurationError

ROOT = Path(__file__).resolve().parent.parent
EDIT = {"replicas": 2, "warmup_steps": 0}
BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 2},
    "edit": EDIT,
}


def zero(**values: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 2, **values}}


def edit(**values: Any) -> dict[str, Any]:
    return {"edit": {**EDIT, **values}}


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (zero(stage=0), "zero_optimization.stage: ", "allowed: 1, 2 or 3"),
    ({"fp16": {"enabled": True}}, "fp16: ", '"bf16"'),
    ({"amp": {"enabled": True}}, "amp: ", '"bf16"'),
    ({"torch_autocast": {"enabled": True}}, "torch_autocast: ", '"bf16"'),
    (zero(offload_optimizer={"device": "nvme"}), "zero_optimization.offload_*", '"cpu"'),
    (zero(offload_param={"device": "cpu"}), "zero_optimization.offload_param", "offload_optimizer"),
    (zero(zero_hpz_partition_size=2), "zero_optimization.zero_hpz", "Megatron path"),
    (zero(zero_quantized_weights=True), "zero_optimization.zero_hpz", "Megatron path"),
    (zero(zero_quantized_gradients=True), "zero_optimization.zero_hpz", "Megatron path"),
    (zero(mics_shard_size=2), "zero_optimization.mics_shard_size", "edit.replicas"),
    (zero(round_robin_gradients=True), "zero_optimization.round_robin", "allowed: false"),
    (zero(zenflow={"topk_ratio": 0.1}), "zero_optimization.zenflow", "Megatron path"),
    ({"optimizer": {"type": "Muon"}}, "optimizer.type: ", "AdamW"),
    ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel: ", "Megatron path"),
    ({"sequence_parallel_size": 2}, "sequence_parallel_size: ", "Megatron path"),
    ({"elasticity": {"enabled": True}}, "elasticity: ", "leave it out"),
    ({"bf16": {"bf16_master_weights_and_grads": True}}, "bf16.bf16_master", "allowed: false"),
    ({"zero_optimisation": {}}, "top-level key", "did you mean 'zero_optimization'?"),
    (edit(sync_intervall=4), "edit.sync_intervall", "did you mean 'sync_interval'?"),
    (edit(method="a_edit"), "edit.sync_trigger time (method a_edit)", "allowed: steps"),
    (edit(compression="int8"), "edit.compression int8", "allowed: none"),
    (edit(landing="layers"), "edit.landing layers", "stage 3"),
    (edit(debug=True), "edit.debug", "allowed: false"),
    ({"edit": {}}, "edit.replicas is missing", "number of replicas"),
    (
        {**zero(offload_optimizer={"device": "cpu"}), **edit(warmup_steps=5)},
        "zero_optimization.offload_optimizer with edit.warmup_steps 5",
        "allowed: edit.warmup_steps 0",
    ),
]


@pytest.mark.parametrize(("changes", "begin", "remedy"), REFUSED)
def test_refused(changes: dict[str, Any], begin: str, remedy: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_zero_run({**BASE, **changes})
    line = str(caught.value)
    assert line.startswith(begin) and remedy in line
    assert "\n" not in line


ACCEPTED: list[dict[str, Any]] = [
    zero(offload_optimizer={"device": "cpu"}),
    zero(overlap_comm=True, contiguous_gradients=True, reduce_bucket_size="auto"),
    {"fp16": {"enabled": False}, "bf16": {"enabled": "auto"}},
    {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "scheduler": {"type": "WarmupLR"}},
    edit(method="co2"),
    edit(method="sync"),
    {"wall_clock_breakdown": True, "activation_checkpointing": {}, "flops_profiler": {}},
]


@pytest.mark.parametrize("changes", ACCEPTED)
def test_deepspeeds_own_keys_are_handed_on(changes: dict[str, Any]) -> None:
    run = read_zero_run({**BASE, **changes})
    assert "edit" not in run.json
    for key in changes.keys() - {"edit"}:
        assert run.json[key] == changes[key]


def test_the_batch_counts_all_replicas() -> None:
    run = read_zero_run({**BASE, "gradient_accumulation_steps": 3, "train_batch_size": 24})
    assert run.shard_size(4) == 2
    assert run.replica_json(2)["train_batch_size"] == 12
    with pytest.raises(ConfigurationError, match=r"world 8 = replicas 2 x S 4"):
        run.replica_json(4)
    with pytest.raises(ConfigurationError, match=r"got 2 with 3 ranks; allowed: 1, 3"):
        run.shard_size(3)
    automatic = read_zero_run({**BASE, "train_batch_size": "auto"})
    with pytest.raises(ConfigurationError, match="only a Trainer fills in"):
        automatic.replica_json(2)


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("*_hf.json")), ids=str)
def test_shipped_files_are_accepted(path: Path) -> None:
    run = read_zero_run(str(path))
    assert str(run.json["zero_optimization"]["stage"]) in path.name


def test_a_file_is_named_and_nothing_expensive_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**BASE, "fp16": {"enabled": True}}))
    code = (
        "import sys\n"
        "from megatron_edit.config.zero_config import read_zero_run\n"
        "try:\n"
        f"    read_zero_run({str(path)!r})\n"
        "except ValueError as error:\n"
        "    print(error)\n"
        "print(sorted({'deepspeed', 'megatron.core', 'transformers'} & sys.modules.keys()))\n"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert printed[0].startswith(f"{path}: fp16: ")
    assert printed[1] == "[]"
