"""What an unknown flag is told: its right spelling, or why another program's flag is not here."""

from dataclasses import fields
from pathlib import Path

import pytest
from command_lines import command_line, refusal
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megatron_edit.config.parser import known_flags, unknown_arguments
from megatron_edit.config.refused_flags import REFUSED_FLAGS, why_refused
from megatron_edit.errors import did_you_mean

CORE = [
    "--" + field.name.replace("_", "-")
    for config in (MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    for field in fields(config)
]
DEEPSPEED = ["--" + name.replace("_", "-") for name in DeepSpeedZeroConfig.model_fields]
# Of public pre-training scripts; none of them says what a flag of this program says.
OTHERS = """
    --overlap-grad-reduce --overlap-param-gather --vocab-file --merge-file --use-nccl-ub --optimizer
    --optimizer-cpu-offload --lr-decay-samples --lr-warmup-samples --lr-decay-tokens --train-tokens
    --accumulate-allreduce-grads-in-fp32 --use-flash-attn --no-position-embedding --rotary-percent
    --num-experts --moe-router-topk --expert-model-parallel-size --use-mcore-models --qk-layernorm
    --attention-backend --no-gradient-accumulation-fusion --tp-comm-overlap --cp-comm-type
    --recompute-activations --checkpoint-activations --distribute-saved-activations --ckpt-format
    --dist-ckpt-format --async-save --no-save-optim --rampup-batch-size --start-weight-decay
    --initial-loss-scale --loss-scale --hysteresis --data-impl --dataloader-type --zero-stage
    --no-pipeline-parallel --deepspeed-activation-checkpointing --ds-sequence-parallel-size
    --reset-position-ids --eod-mask-loss --log-timers-to-tensorboard --timing-log-level --profile
    --layernorm-epsilon --apply-layernorm-1p --squared-relu --manual-gc --init-method-xavier-uniform
    --master_addr --nproc-per-node --kv-channels --num-key-value-heads --fp8-recipe --skip-train
"""


@pytest.mark.parametrize("flag", OTHERS.split())
def test_a_known_flag_of_another_program_has_its_own_reason(flag: str) -> None:
    (message,) = unknown_arguments([flag, "1"])
    assert message == f"{flag}: {why_refused(flag)}"
    assert "did you mean" not in message


def test_no_setting_of_megatron_or_deepspeed_is_taken_for_another_flag() -> None:
    known = known_flags()
    strange = [name for name in [*CORE, *DEEPSPEED, *OTHERS.split()] if name not in known]
    assert len(strange) > 300
    assert [name for name in strange if did_you_mean(name, known)] == []


@pytest.mark.parametrize("pattern", REFUSED_FLAGS)
def test_every_refused_flag_says_why_and_is_no_flag(pattern: str) -> None:
    flag = pattern.replace("*", "thing")
    (message,) = unknown_arguments([flag])
    assert message.split(": ", 1)[0] == flag
    assert message.split(": ", 1)[1] in REFUSED_FLAGS.values()
    assert pattern not in known_flags()


def test_a_reason_names_only_flags_that_are_there() -> None:
    words = {word.strip(",;") for reason in REFUSED_FLAGS.values() for word in reason.split()}
    named = {word for word in words if word.startswith("--")}
    assert named - set(known_flags()) == set()


def _longest(flag: str) -> str:
    return max(flag.split("-"), key=len)


# A slip in a shorter word, or in a digit, may be another word.
SPELLABLE = [flag for flag in known_flags() if len(_longest(flag)) > 4 and flag[-1].isalpha()]


@pytest.mark.parametrize("flag", SPELLABLE)
def test_a_slip_in_a_flag_gets_its_right_spelling(flag: str) -> None:
    word = _longest(flag)
    for slip in (word[:-1], word[:3] + word[2:], word[:-2] + word[:-3:-1]):
        misspelt = flag.replace(word, slip)
        if misspelt not in known_flags():
            assert unknown_arguments([misspelt]) == [
                f"unknown flag {misspelt}; did you mean {flag!r}?"
            ]


@pytest.mark.parametrize(
    ("given", "known"),
    [
        ("int4", "int8"),
        ("--adam-beta3", "--adam-beta1"),
        ("--edit-async-interval", "--edit-sync-interval"),
        ("--outer-optimizer", "--optimizer"),
        ("--vocab-file", "--vocab-size"),
        ("--lr-warmup-steps", "--lr-warmup-iters"),
        ("--no-load-optim", "--load-optim"),
        ("bf16", "fp16"),
    ],
)
def test_another_word_is_no_slip(given: str, known: str) -> None:
    assert did_you_mean(given, [known]) == did_you_mean(known, [given]) == ""


def test_the_nearest_spelling_is_suggested() -> None:
    assert did_you_mean("hofmannn", ["hoffman", "hoffmann"]) == "; did you mean 'hoffmann'?"
    assert did_you_mean("num_Layers", ["--num-layers"]) == "; did you mean '--num-layers'?"
    assert did_you_mean("x" * 10**6, ["x" * 40]) == ""


def test_all_unknown_flags_and_keys_are_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        '{"fp16": {"enabled": true}, "trian_batch_size": 8, "zzz": 1, "yyy": 2, '
        '"zero_optimization": {"stage": 1, "overlap_com": true}, "edit": {"sync_intervl": 4}, '
        '"bf16": {"enable": true}}'
    )
    flags = "--vocab-file v.json --num-layer=4 --xyzzy -1 --fp16 --fp16"
    line = refusal(command_line(f"{flags} --deepspeed --deepspeed_config {path}"), capsys)
    assert line.removeprefix("error: ").strip().split(" | ") == [
        f"--vocab-file: {why_refused('--vocab-file')}",
        "unknown flag --num-layer; did you mean '--num-layers'?",
        "unknown flag --xyzzy; --help lists the known ones",
        f"--fp16: {why_refused('--fp16')}",
        f"{path}: top-level key: unknown name 'trian_batch_size'; did you mean 'train_batch_size'?",
        "top-level key: unknown names 'zzz', 'yyy'; allowed: train_batch_size, "
        "train_micro_batch_size_per_gpu, gradient_accumulation_steps, gradient_clipping, "
        "steps_per_print, bf16, zero_optimization, edit, tensorboard, csv_monitor, wandb, "
        "comms_logger, scheduler",
        "zero_optimization.overlap_com: unknown name 'overlap_com'; did you mean 'overlap_comm'?",
        "edit.sync_intervl: unknown name 'sync_intervl'; did you mean 'sync_interval'?",
        "bf16.enable: unknown name 'enable'; did you mean 'enabled'?",
        "fp16: a DeepSpeed key that is not honoured here; the shards are fp32, there is no loss "
        "scaling; use bf16",
        "zero_optimization.stage: got 1; allowed: one of 2, 3; give 2, which computes the same and "
        "shards the gradients too",
    ]


def test_unknown_flags_are_told_without_a_json(capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(command_line("--mock-data --fp16 --zero-stage 1"), capsys)
    assert "--fp16: fp16 is not supported" in line
    assert "| --zero-stage: use --data-parallel-sharding-strategy" in line
