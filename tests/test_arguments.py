"""The arguments of a run: JSON and flags merged, values completed, aliases, the description."""

import json
from pathlib import Path

import pytest
import torch
from command_lines import command_line, parse, refusal

from megatron_edit.config import checks
from megatron_edit.config.arguments import as_dict, describe, parse_args
from megatron_edit.config.ds_keys import DECAY_STYLES
from megatron_edit.config.flags import ATORCH_ALIASES, FLAG_NAMES
from megatron_edit.config.parser import known_flags

CONFIGS = Path(__file__).parent.parent / "ds_configs"


def _with_json(tmp_path: Path, config: dict[str, object], extra: str = "") -> list[str]:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    return command_line(f"--mock-data --deepspeed --deepspeed_config {path} {extra}")


# (JSON, flags added, parts of the message) on 4 ranks, the flags saying micro batch size 2
DISAGREEING: list[tuple[dict[str, object], str, list[str]]] = [
    (
        {"train_batch_size": 16},
        "--global-batch-size 8",
        ["--global-batch-size 8 and train_batch_size 16", "two switches that disagree"],
    ),
    ({"train_micro_batch_size_per_gpu": 4}, "", ["--micro-batch-size 2 and train_micro_batch"]),
    ({"bf16": {"enabled": False}}, "--bf16", ["--bf16 True and bf16.enabled False"]),
    ({"gradient_clipping": 2.0}, "--clip-grad 1", ["--clip-grad 1.0 and gradient_clipping 2.0"]),
    (
        {"zero_optimization": {"stage": 3}},
        "--data-parallel-sharding-strategy optim_grads",
        ["optim_grads and zero_optimization.stage 3 = optim_grads_params"],
    ),
    (
        {"edit": {"replicas": 4}},
        "--num-distributed-optimizer-instances 2",
        ["--num-distributed-optimizer-instances 2 and edit.replicas 4 (json)"],
    ),
    (
        {"train_batch_size": 32, "gradient_accumulation_steps": 2},
        "--edit-replicas 2",
        [
            "global batch size 32 is not micro batch size 2 x accumulation 2 x shard size 2 x "
            "replicas 2 = 16",
            "a global batch size of 16 works, or gradient_accumulation_steps 4",
        ],
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}},
        "--lr-decay-style cosine",
        ["--lr-decay-style cosine and scheduler.type WarmupLR = constant"],
    ),
    ({"edit": {"sync_intervl": 4}}, "", ["edit.sync_intervl", "did you mean 'sync_interval'?"]),
    ({"edit": {"clip": 0}}, "", ["edit.clip: got 0; allowed"]),
]


@pytest.mark.parametrize(("config", "extra", "parts"), DISAGREEING)
def test_json_and_flags_that_disagree(
    config: dict[str, object],
    extra: str,
    parts: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = refusal(_with_json(tmp_path, config, extra), capsys)
    for part in parts:
        assert part in line


def test_json_that_agrees_with_the_flags_is_accepted(tmp_path: Path) -> None:
    config = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "edit": {"replicas": 2},
    }
    extra = (
        "--global-batch-size 16 --clip-grad 1.0 --bf16 --num-distributed-optimizer-instances 2 "
        "--data-parallel-sharding-strategy optim_grads"
    )
    args = parse_args(_with_json(tmp_path, config, extra), world_size=4)
    assert (args.replicas, args.shard_size, args.num_microbatches) == (2, 2, 2)
    assert args.sources["bf16"] == "flag"


def test_json_alone_sets_values_and_is_named_as_source(tmp_path: Path) -> None:
    config = {
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "steps_per_print": 7,
        "tensorboard": {"enabled": True, "output_path": "out"},
        "edit": {"replicas": 2, "sync_interval": 8},
    }
    args = parse_args(_with_json(tmp_path, config, "--global-batch-size 8"), world_size=4)
    expected = {
        "clip_grad": 0.5,
        "bf16": True,
        "data_parallel_sharding_strategy": "optim_grads",
        "log_interval": 7,
        "tensorboard_dir": "out",
    }
    for name, value in expected.items():
        assert (getattr(args, name), args.sources[name]) == (value, "json")
    assert args.params_dtype is torch.bfloat16
    assert (args.global_batch_size, args.sources["global_batch_size"]) == (8, "flag")
    assert args.sources["edit.sync_interval"] == "json"
    assert args.sources["edit.clip"] == "method edit"


def test_auto_leaves_the_value_to_the_flags(tmp_path: Path) -> None:
    config: dict[str, object] = {
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "edit": {"replicas": 2},
    }
    args = parse_args(_with_json(tmp_path, config, "--bf16 --clip-grad 0.3"), world_size=4)
    assert (args.bf16, args.clip_grad, args.lr) == (True, 0.3, 3e-3)
    args = parse_args(_with_json(tmp_path, config), world_size=4)
    assert (args.bf16, args.clip_grad) == (False, 1.0)
    assert args.sources["bf16"] == args.sources["clip_grad"] == "default"


@pytest.mark.parametrize(("schedule", "style"), DECAY_STYLES.items())
def test_a_schedule_without_numbers_is_a_decay_style(
    schedule: str, style: str, tmp_path: Path
) -> None:
    scheduler = {"type": schedule, "params": {"warmup_num_steps": "auto"}}
    config = {"scheduler": scheduler, "edit": {"replicas": 2}}
    args = parse_args(_with_json(tmp_path, config), world_size=4)
    assert (args.lr_decay_style, args.sources["lr_decay_style"]) == (style, "json")


def test_keys_without_effect_are_told_once_at_the_start(tmp_path: Path) -> None:
    config = {"zero_optimization": {"overlap_comm": True}, "edit": {"replicas": 2}}
    args = parse_args(_with_json(tmp_path, config), world_size=4)
    lines = describe(args).splitlines()
    assert lines[0].startswith("without effect here: zero_optimization.overlap_comm (")
    assert lines[1].startswith("effective configuration")
    assert [line for line in lines[1:] if "without effect" in line] == []


def test_flags_beat_the_json_where_that_is_harmless(tmp_path: Path) -> None:
    config = {
        "steps_per_print": 7,
        "tensorboard": {"enabled": True, "output_path": "out", "job_name": "name"},
        "edit": {"replicas": 4, "sync_interval": 8},
    }
    extra = "--log-interval 3 --tensorboard-dir other --edit-replicas 2 --edit-sync-interval 5"
    args = parse_args(_with_json(tmp_path, config, extra), world_size=4)
    assert (args.log_interval, args.edit.sync_interval, args.replicas) == (3, 5, 2)
    assert args.ds_config["tensorboard"] == {
        "enabled": True,
        "output_path": "other",
        "job_name": "name",
    }


def test_monitor_flags_need_no_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: name)
    args = parse("--edit-method sync --tensorboard-dir runs --wandb-project demo")
    assert args.ds_config["tensorboard"] == {
        "enabled": True,
        "output_path": "runs",
        "job_name": "",
    }
    assert args.ds_config["wandb"] == {"enabled": True, "project": "demo"}


def test_computed_values() -> None:
    args = parse(
        "--edit-replicas 2 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--num-layers-per-virtual-pipeline-stage 1 --global-batch-size 32 --swiglu",
        world_size=16,
    )
    assert (args.world_size, args.replicas, args.shard_size) == (16, 2, 2)
    assert args.num_distributed_optimizer_instances == args.edit.replicas == 2
    assert (args.num_microbatches, args.train_samples) == (4, 240 * 32)
    assert args.virtual_pipeline_model_parallel_size == 2
    assert (args.ffn_hidden_size, args.kv_channels, args.num_query_groups) == (128, 16, 4)
    assert (args.lr_decay_iters, args.params_dtype) == (240, torch.float32)
    assert (args.deepspeed, args.ds_config, args.split) == (False, {}, "969,30,1")


def test_values_of_a_plain_run() -> None:
    args = parse("--edit-method sync --disable-bias-linear", world_size=1)
    assert (args.replicas, args.shard_size, args.num_microbatches) == (1, 1, 1)
    assert (args.global_batch_size, args.ffn_hidden_size, args.disable_bias_linear) == (
        2,
        256,
        True,
    )
    assert args.virtual_pipeline_model_parallel_size is None
    assert args.sources["edit.replicas"] == "default"


def test_one_chunk_per_stage_is_no_interleaving() -> None:
    args = parse(
        "--edit-method sync --pipeline-model-parallel-size 2 "
        "--num-layers-per-virtual-pipeline-stage 2 --global-batch-size 8"
    )
    assert args.virtual_pipeline_model_parallel_size is None


def test_samples_become_whole_steps() -> None:
    args = parse("--edit-method sync --train-samples 100", without="--train-iters")
    assert (args.train_iters, args.train_samples) == (12, 96)
    assert args.sources["train_iters"] == "computed"


def test_megatrons_name_of_the_replicas() -> None:
    args = parse("--num-distributed-optimizer-instances 2")
    assert (args.replicas, args.edit.replicas, args.shard_size) == (2, 2, 2)
    assert args.sources["edit.replicas"] == "flag"


def test_world_size_comes_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    args = parse_args(command_line("--mock-data --edit-replicas 4 --local_rank=1"))
    assert (args.world_size, args.rank, args.local_rank, args.shard_size) == (8, 5, 1, 2)


ALIAS_VALUES = {
    "--use-local-sgd": ("method", "edit"),
    "--local-sgd-sync-interval 4": ("sync_interval", 4),
    "--local-sgd-warmup-steps 5": ("warmup_steps", 5),
    "--local-sgd-skip-anomaly": ("detector", "paper"),
    "--local-sgd-ewma-alpha 0.1": ("detector_alpha", 0.1),
    "--local-sgd-ewma-warmup-steps 7": ("detector_warmup", 7),
    "--local-sgd-ewma-threshold 4": ("detector_threshold", 4.0),
    "--local-sgd-pseudo-gradnorm-reduce": ("weighting", "norm"),
    "--local-sgd-clip-pseudo-grad 3": ("clip", 3.0),
    "--outer-optimizer-lr 0.5": ("outer_lr", 0.5),
    "--outer-optimizer-momentum 0.3": ("outer_momentum", 0.3),
    "--outer-optimizer-nesterov": ("outer_nesterov", True),
}


@pytest.mark.parametrize(("flag", "expected"), ALIAS_VALUES.items())
def test_atorch_alias_sets_its_field(flag: str, expected: tuple[str, object]) -> None:
    args = parse(f"--edit-replicas 2 --outer-optimizer sgd {flag}")
    field, value = expected
    assert getattr(args.edit, field) == value
    assert args.sources[f"edit.{field}"] == "flag"


def test_alias_table_is_complete_and_agreeing_flags_are_accepted() -> None:
    assert {flag.split()[0] for flag in ALIAS_VALUES} == set(ATORCH_ALIASES)
    args = parse("--edit-replicas 2 --local-sgd-sync-interval 4 --edit-sync-interval 4")
    assert args.edit.sync_interval == 4


def test_bare_and_valued_booleans() -> None:
    args = parse("--edit-replicas 2 --edit-offload-outer-state --edit-outer-nesterov false")
    assert (args.edit.offload_outer_state, args.edit.outer_nesterov) == (True, False)


def test_help_lists_every_flag_and_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(["--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert [flag for flag in known_flags() if flag not in printed] == []


def test_description_has_every_value_and_its_source() -> None:
    args = parse("--edit-replicas 2 --edit-sync-interval 8")
    lines = describe(args).splitlines()
    assert lines[0] == "effective configuration (world 4 = replicas 2 x PP 1 x S 2 x TP 1)"
    table = {line.split()[0]: line.split()[1:] for line in lines[1:]}
    assert table["edit.sync_interval"] == ["8", "flag"]
    assert table["edit.clip"] == ["10.0", "method", "edit"]
    assert table["params_dtype"] == ["float32", "computed"]
    assert set(table) == set(args.sources)
    assert set(FLAG_NAMES) < set(table)


def test_dictionary_survives_json() -> None:
    args = parse("--edit-replicas 2 --bf16")
    saved = json.loads(json.dumps(as_dict(args)))
    assert saved["values"]["params_dtype"] == "bfloat16"
    assert saved["values"]["edit.replicas"] == 2
    assert set(saved["values"]) == set(saved["sources"])


@pytest.mark.parametrize("name", ["edit_tiny_cpu", "sync_tiny_cpu"])
def test_tiny_configuration_fits_four_ranks(name: str) -> None:
    flags = f"--mock-data --deepspeed --deepspeed_config {CONFIGS / name}.json"
    args = parse_args(command_line(flags, without="--micro-batch-size"), world_size=4)
    assert (args.replicas, args.shard_size) == (2, 2)
    assert args.global_batch_size == 16
    assert args.edit.method == name.split("_")[0]


def test_7b_configuration_fits_64_ranks() -> None:
    args = parse(
        f"--tensor-model-parallel-size 2 --global-batch-size 512 "
        f"--deepspeed --deepspeed_config {CONFIGS / 'edit_7b.json'}",
        world_size=64,
    )
    assert (args.replicas, args.shard_size, args.num_microbatches) == (8, 4, 8)
    assert (args.edit.sync_interval, args.edit.warmup_steps) == (128, 1000)
    assert args.params_dtype is torch.bfloat16
