"""The 7B script: its command line is valid for 64 ranks, and the script itself runs, made tiny."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from distributed import free_port
from small_corpus import small_corpus

from megatron_edit.backends.megatron.model import count_parameters
from megatron_edit.config.arguments import parse_args
from megatron_edit.data.tokenizer import padded_vocab_size

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "pretrain_llama_7b_edit.sh"
BIN = Path(sys.executable).parent


def environment(**variables: object) -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        **{name: str(value) for name, value in variables.items()},
    }


def run_script(*arguments: str, **variables: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *arguments],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=240,
    )


def dry_run(**variables: object) -> tuple[list[str], list[str]]:
    """The command that the script prints: what comes before pretrain_edit.py, and after."""
    result = run_script(DRY_RUN=1, **variables)
    assert result.returncode == 0, result.stderr
    words = shlex.split(result.stdout)
    script = words.index("pretrain_edit.py")
    return words[:script], words[script + 1 :]


@pytest.fixture
def places(tmp_path: Path) -> dict[str, object]:
    for suffix in (".bin", ".idx"):
        (tmp_path / f"corpus_text_document{suffix}").touch()
    return {
        "DATA_PATH": tmp_path / "corpus_text_document",
        "CHECKPOINT_PATH": tmp_path / "checkpoints",
        "TENSORBOARD_DIR": tmp_path / "tensorboard",
    }


def test_its_command_line_is_valid_for_64_ranks(
    places: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    launch, arguments = dry_run(**places)
    assert shlex.join(launch) == (
        "deepspeed -H hostfile --num_nodes 8 --num_gpus 8 --master_port 29500"
    )
    args = parse_args(arguments, world_size=64)
    assert (args.replicas, args.shard_size, args.global_batch_size) == (8, 8, 1024)
    assert args.num_microbatches == 16
    assert (args.edit.method, args.edit.sync_interval, args.edit.warmup_steps) == (
        "edit",
        128,
        1000,
    )
    assert args.bf16
    args.padded_vocab_size = padded_vocab_size(32000, args.make_vocab_size_divisible_by, 1)
    # Llama 2 7B's number of parameters.
    assert count_parameters(args) == 6_738_415_616


@pytest.mark.parametrize("layout", [{"TP": 2}, {"PP": 4}, {"TP": 4, "PP": 2, "REPLICAS": 4}])
def test_other_layouts_are_valid_too(
    layout: dict[str, int], places: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    args = parse_args(dry_run(**places, **layout)[1], world_size=64)
    model_parallel = layout.get("TP", 1) * layout.get("PP", 1)
    assert args.shard_size == 64 // args.replicas // model_parallel


@pytest.mark.parametrize(
    ("variables", "launch"),
    [
        (
            {"NODE_RANK": 3, "MASTER_ADDR": "host0"},
            "deepspeed -H hostfile --num_nodes 8 --num_gpus 8 --master_port 29500 --no_ssh "
            "--node_rank 3 --master_addr host0",
        ),
        (
            {"LAUNCHER": "torchrun", "NODE_RANK": 3, "MASTER_ADDR": "host0"},
            "torchrun --nproc_per_node 8 --nnodes 8 --node_rank 3 --master_port 29500 "
            "--master_addr host0",
        ),
        ({"NNODES": 1}, "deepspeed --num_accelerators 8 --master_port 29500"),
    ],
)
def test_ways_to_launch(variables: dict[str, object], launch: str) -> None:
    assert shlex.join(dry_run(**variables)[0]) == launch


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"HOSTFILE": "no_such_file"}, "HOSTFILE no_such_file is missing"),
        ({"NODE_RANK": 1}, "needs MASTER_ADDR"),
    ],
)
def test_it_refuses(variables: dict[str, object], complaint: str) -> None:
    result = run_script(**variables)
    assert result.returncode == 2
    assert complaint in result.stderr


def test_it_runs_on_the_cpu_when_made_tiny(places: dict[str, object]) -> None:
    corpus = small_corpus()
    tiny = {
        **places, "DATA_PATH": corpus.prefix, "TOKENIZER": corpus.tokenizer,
        "NNODES": 1, "GPUS_PER_NODE": 2, "REPLICAS": 2, "MASTER_PORT": free_port(),
        "NUM_LAYERS": 2, "HIDDEN_SIZE": 64, "FFN_HIDDEN_SIZE": 96, "NUM_ATTENTION_HEADS": 4,
        "SEQ_LENGTH": 64, "VOCAB_SIZE": 512, "GLOBAL_BATCH_SIZE": 4, "TRAIN_ITERS": 8,
        "EVAL_ITERS": 1, "OMP_NUM_THREADS": 1,
    }  # fmt: skip
    edit = ["--edit-warmup-steps", "2", "--edit-sync-interval", "2", "--log-interval", "4"]
    result = run_script(*edit, **tiny)
    assert result.returncode == 0, result.stdout + result.stderr
    losses = [float(x) for x in re.findall(r"iteration .*lm loss: ([\d.E+-]+)", result.stdout)]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert "sync round:    2" in result.stdout
    assert "validation loss at iteration 8 on validation set" in result.stdout
    assert (Path(str(places["CHECKPOINT_PATH"])) / "iter_0000008" / "state.json").is_file()
