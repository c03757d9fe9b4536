"""Every refusal of contradicting or impossible arguments, as a row of a table."""

from pathlib import Path

import pytest
import torch
from command_lines import MOCK, SYNC, command_line, parse, refusal

from megatron_edit.config import checks
from megatron_edit.config.arguments import parse_args

# (flags added to a valid sync run on 4 ranks, flags left out, parts of the message)
BAD_ARGUMENTS = [
    ("--edit-sync-intervl 8", "", ["unknown flag --edit-sync-intervl", "'--edit-sync-interval'"]),
    ("--num-layer 4", "", ["unknown flag --num-layer; did you mean '--num-layers'?"]),
    ("--xyzzy 1", "", ["unknown flag --xyzzy; --help lists the known ones"]),
    ("--seed=1 stray", "", ["unexpected argument 'stray'"]),
    ("--lr", "--lr", ["--lr: expected one argument"]),
    ("--lr fast", "--lr", ["--lr: got 'fast'; allowed: a finite number"]),
    ("--lr nan", "--lr", ["--lr: got 'nan'; allowed: a finite number"]),
    ("--num-layers 0", "", ["--num-layers: got 0; allowed: an integer >= 1"]),
    ("--num-layers 2.5", "", ["--num-layers: got '2.5'; allowed: an integer >= 1"]),
    ("--normalization RMSNrom", "", ["--normalization", "did you mean 'RMSNorm'?"]),
    ("--position-embedding-type learned_absolute", "", ["allowed: only rope"]),
    ("--edit-sync-interval 0", "", ["--edit-sync-interval: got 0; allowed: an integer >= 1"]),
    ("--edit-warmup-steps -1", "", ["--edit-warmup-steps: got -1; allowed: an integer >= 0"]),
    ("--edit-clip 0", "", ["--edit-clip: got 0.0; allowed: a number > 0, or none"]),
    ("--edit-outer-lr 3", "", ["--edit-outer-lr: got 3.0; allowed: a number > 0 and <= 2"]),
    ("--edit-outer-momentum 1", "", ["--edit-outer-momentum: got 1.0; allowed: a number >= 0"]),
    ("--edit-outer-nesterov maybe", "", ["--edit-outer-nesterov: got 'maybe'; allowed: true or"]),
    ("--edit-detector pear", "", ["--edit-detector: got 'pear'", "did you mean 'peer'?"]),
    ("--edit-detector peer", "", ["edit.detector: got peer with 1 replicas", "at least 3"]),
    (
        "--edit-weight-temperature 2 --edit-weight-temperature-relative 1",
        "",
        ["edit.weight_temperature 2.0 (flag)", "exclude each other"],
    ),
    ("--fp16", "", ["--fp16", "use --bf16"]),
    ("--fp8-format hybrid", "", ["--fp8-format", "not supported"]),
    ("--context-parallel-size 2", "", ["--context-parallel-size: got 2", "not supported"]),
    ("--local-sgd-pseudo-grad-reducer gta", "", ["use --edit-weighting"]),
    ("--outer-optimizer adam", "", ["--outer-optimizer: got 'adam'; allowed: only sgd"]),
    (
        "--local-sgd-sync-interval 4 --edit-sync-interval 8",
        "",
        ["--local-sgd-sync-interval 4 and --edit-sync-interval 8", "differ"],
    ),
    ("--deepspeed", "", ["--deepspeed needs --deepspeed_config FILE"]),
    ("", "--num-layers", ["--num-layers is missing"]),
    ("", "--lr", ["--lr is missing"]),
    ("", "--tokenizer-type", ["--tokenizer-type is missing"]),
    ("", "--vocab-size", ["NullTokenizer needs --vocab-size"]),
    ("--tokenizer-type HuggingFaceTokenizer", "", ["needs --tokenizer-model"]),
    ("", "--train-iters", ["--train-iters or --train-samples: neither is given"]),
    ("--train-samples 99", "", ["--train-iters or --train-samples: both are given"]),
    ("--train-samples 7", "--train-iters", ["--train-samples: got 7", "one global batch, 8"]),
    ("", "--micro-batch-size", ["the micro batch size is missing"]),
    ("--global-batch-size 8", "--micro-batch-size", ["the micro batch size is missing"]),
    (
        "--global-batch-size 20",
        "",
        [
            "global batch size 20 is not a multiple of micro batch size 2 x shard size 4 x "
            "replicas 1 = 8 (world 4 = replicas 1 x PP 1 x S 4 x TP 1)",
            "nearest that works: 16",
        ],
    ),
    ("--tensor-model-parallel-size 3", "", ["world size 4", "parallel-size 3", "a multiple of 3"]),
    ("--edit-replicas 3", "", ["world size 4", "1 x 1 x 3", "possible replicas: 1, 2, 4"]),
    (
        "--edit-replicas 2 --num-distributed-optimizer-instances 4",
        "",
        ["--num-distributed-optimizer-instances 4 and edit.replicas 2 (flag)", "disagree"],
    ),
    ("--edit-method edit", "", ["--edit-replicas (edit.replicas) is missing", "1, 2, 4"]),
    ("--sequence-parallel", "", ["--sequence-parallel needs --tensor-model-parallel-size > 1"]),
    ("--num-attention-heads 3", "", ["--hidden-size 64", "--num-attention-heads 3; 63 or 66"]),
    (
        "--num-attention-heads 2 --tensor-model-parallel-size 4",
        "",
        ["--num-attention-heads 2 is not divisible by --tensor-model-parallel-size 4; 4 would be"],
    ),
    ("--num-query-groups 2", "", ["--num-query-groups needs --group-query-attention"]),
    ("--group-query-attention --num-query-groups 3", "", ["heads 4", "--num-query-groups 3"]),
    (
        "--group-query-attention --num-query-groups 2 --tensor-model-parallel-size 4",
        "",
        ["--num-query-groups 2 is not divisible by --tensor-model-parallel-size 4"],
    ),
    ("--ffn-hidden-size 6 --tensor-model-parallel-size 4", "", ["--ffn-hidden-size 6", "4 or 8"]),
    (
        "--seq-length 30 --tensor-model-parallel-size 4 --sequence-parallel",
        "",
        ["--seq-length 30 is not divisible"],
    ),
    ("--hidden-size 12", "", ["--hidden-size 12", "= 3; rotary embeddings need an even number"]),
    ("--seq-length 64", "", ["--seq-length 64 is larger than --max-position-embeddings 32"]),
    ("--hidden-dropout 1", "", ["--hidden-dropout: got 1; allowed: a number >= 0 and < 1"]),
    ("--norm-epsilon 0", "", ["--norm-epsilon: got 0; allowed: a number > 0"]),
    ("--num-layers 3 --pipeline-model-parallel-size 2", "", ["--num-layers 3", "2 or 4"]),
    ("--num-layers-per-virtual-pipeline-stage 1", "", ["needs --pipeline-model-parallel-size > 1"]),
    (
        "--num-layers 6 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
        "",
        ["3 layers a stage", "--num-layers-per-virtual-pipeline-stage 2"],
    ),
    (
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
        "--global-batch-size 12",
        "",
        ["multiple of --pipeline-model-parallel-size 2, got 3", "that works: 16"],
    ),
    ("--recompute-granularity full", "", ["needs --recompute-method and --recompute-num-layers"]),
    (
        "--recompute-granularity selective --recompute-method block",
        "",
        ["--recompute-method needs --recompute-granularity full, got selective"],
    ),
    ("--recompute-num-layers 1", "", ["--recompute-num-layers needs", "got none"]),
    (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 5",
        "",
        ["--recompute-num-layers: got 5; allowed: 1 to 4"],
    ),
    ("--lr 0", "", ["--lr: got 0; allowed: a number > 0"]),
    ("--lr -1", "", ["--lr: got -1; allowed: a number > 0"]),
    ("--min-lr 0.1", "", ["--min-lr: got 0.1; allowed: 0 to --lr, which is 0.003"]),
    ("--min-lr -1", "", ["--min-lr: got -1"]),
    ("--adam-beta1 1", "", ["--adam-beta1: got 1; allowed: a number >= 0 and < 1"]),
    ("--adam-beta2 -0.1", "", ["--adam-beta2: got -0.1"]),
    ("--adam-eps 0", "", ["--adam-eps: got 0; allowed: a number > 0"]),
    ("--weight-decay -1", "", ["--weight-decay: got -1; allowed: a number >= 0"]),
    ("--clip-grad -1", "", ["--clip-grad: got -1; allowed: a number >= 0"]),
    ("--lr-warmup-iters 5 --lr-warmup-fraction 0.1", "", ["--lr-warmup-fraction are both given"]),
    ("--lr-warmup-fraction 1", "", ["--lr-warmup-fraction: got 1; allowed"]),
    ("--lr-warmup-iters 240", "", ["--lr-warmup-iters: got 240; allowed: less than the 240"]),
    ("--split 90;10", "", ["--split: got '90;10'; allowed: up to three numbers"]),
    ("--split 1,2,3,4", "", ["--split: got '1,2,3,4'"]),
    ("--split 90,-10", "", ["--split: got '90,-10'"]),
    ("--split 0,1", "", ["empty training split: --split 0,1"]),
    ("--split 100,0,0", "", ["empty validation split: --split 100,0,0 and --eval-iters 100"]),
    ("--finetune", "", ["--finetune needs --load"]),
    ("--override-data-path", "", ["--override-data-path needs --load"]),
    ("--override-opt_param-scheduler", "", ["--override-opt_param-scheduler needs --load"]),
    (
        "--load x --finetune --use-checkpoint-opt_param-scheduler",
        "",
        ["--use-checkpoint-opt_param-scheduler and --finetune exclude each other; give one"],
    ),
    (
        "--load x --override-opt_param-scheduler --use-checkpoint-opt_param-scheduler",
        "",
        ["and --override-opt_param-scheduler exclude each other; give one"],
    ),
    ("--save-interval 5", "", ["--save-interval needs --save"]),
    ("--distributed-backend mpi", "", ["--distributed-backend: got 'mpi'; allowed: one of nccl"]),
    ("--wandb-project demo", "", ["wandb is enabled and the package wandb is not installed"]),
]


@pytest.mark.parametrize(("extra", "without", "parts"), BAD_ARGUMENTS)
def test_bad_arguments_end_in_one_line(
    extra: str,
    without: str,
    parts: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    method = [] if "--edit-method" in extra else SYNC
    line = refusal([*command_line(extra, without), *MOCK, *method], capsys)
    for part in parts:
        assert part in line


def test_gpu_only_choices_are_refused_without_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    base = command_line([*MOCK, *SYNC])
    assert "got nccl, and there is no GPU" in refusal(
        [*base, "--distributed-backend", "nccl"], capsys
    )
    line = refusal([*base, "--transformer-impl", "transformer_engine"], capsys)
    assert "needs a GPU and the package transformer-engine" in line


def _prefix(folder: Path, name: str) -> str:
    for suffix in (".bin", ".idx"):
        (folder / (name + suffix)).touch()
    return str(folder / name)


def test_data_arguments_that_contradict_or_miss_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = _prefix(tmp_path, "a")
    rows = [
        ([], "--data-path is missing; give a prefix, or --mock-data"),
        (["--data-path", here, "--mock-data"], "--mock-data and --data-path are both given"),
        (["--data-path", f"{tmp_path}/no"], f"the file {tmp_path}/no.bin is missing"),
        (["--data-path", f"{here}.bin"], "leave the suffix out"),
        (["--data-path", "x", here, "1", here], "got 'x' as a weight"),
        (["--data-path", "0", here], "got '0' as a weight; allowed: a number > 0"),
        (["--data-path", here, "--train-data-path", here], "--data-path and --train-data-path"),
        (["--train-data-path", here, "--split", "1,1"], "--split and --train-data-path are both"),
        (["--train-data-path", here], "empty validation split: --eval-iters is 100"),
        (["--valid-data-path", here], "--data-path is missing"),
        (["--train-data-path", here, "--valid-data-path", "no"], "--valid-data-path no: the file"),
    ]
    for extra, part in rows:
        assert part in refusal(command_line([*SYNC, *extra]), capsys)


def test_data_arguments_that_work(tmp_path: Path) -> None:
    a, b = _prefix(tmp_path, "a"), _prefix(tmp_path, "b")
    rows = [
        ["--data-path", a],
        ["--data-path", a, b],
        ["--data-path", "0.3", a, "0.7", b, "--split", "1,1"],
        ["--train-data-path", a, "--valid-data-path", b],
        ["--train-data-path", a, "--eval-iters", "0"],
    ]
    for extra in rows:
        args = parse_args(command_line([*SYNC, *extra]), world_size=4)
        assert (args.split is None) == (args.train_data_path is not None)


def test_checkpoint_folders_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = command_line([*MOCK, *SYNC])
    assert "latest_checkpointed_iteration.txt is missing" in refusal(
        [*base, "--load", str(tmp_path)], capsys
    )
    (tmp_path / "file").touch()
    unwritable = str(tmp_path / "file" / "sub")
    assert f"--save {unwritable}: cannot write there" in refusal(
        [*base, "--save", unwritable], capsys
    )
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    save = tmp_path / "new" / "folder"
    args = parse_args(
        [*base, "--load", str(tmp_path), "--save", str(save), "--override-data-path"], world_size=4
    )
    assert args.override_data_path
    assert list(save.iterdir()) == []


def test_only_rank_0_tries_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    parse(f"--edit-method sync --save {tmp_path / 'new'}")
    assert not (tmp_path / "new").exists()
