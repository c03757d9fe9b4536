"""What cannot be resumed is refused in one line, before a model is built where that is possible."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from distributed import run_ranks
from pretraining import Run, command_line, pretrain, tokens

from megatron_edit import errors
from megatron_edit.checkpoint import files, whole_model
from megatron_edit.checkpoint.state import read_state
from megatron_edit.config.arguments import parse_args
from megatron_edit.data.tokenizer import NullTokenizer, model_vocab_size
from megatron_edit.errors import ConfigurationError


def _pretrain_all(lines: list[str]) -> list[Run]:
    return [pretrain(command_line(line)) for line in lines]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two replicas in the middle of their first round, at step 6."""
    folder = tmp_path_factory.mktemp("saved")
    line = f"--exit-interval 6 --edit-warmup-steps 4 --save {folder}"
    run_ranks(_pretrain_all, 2, [line])
    return folder


def state_for(load: Path, changes: str = "", without: str = "") -> Any:
    """What a run with these flags reads of a checkpoint before it builds a model."""
    args = parse_args(command_line(f"--load {load} {changes}", without), world_size=4)
    args.padded_vocab_size = model_vocab_size(args, NullTokenizer(args.vocab_size))
    return read_state(args)


@pytest.fixture
def loadable(saved: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint that claims to be of 4 ranks, S 2."""
    folder = tmp_path / "loadable"
    shutil.copytree(saved / "iter_0000006", folder / "iter_0000006")
    (folder / files.TRACKER).write_text("6")
    path = folder / "iter_0000006" / "state.json"
    state = json.loads(path.read_text())
    state["layout"]["shard_size"] = 2
    state["global_batch_size"] = 8
    path.write_text(json.dumps(state))
    return folder


REFUSED = {
    "--edit-replicas 4": "has replicas 2, this run has 4; allowed: the same layout",
    "--tensor-model-parallel-size 2": "has shard_size 2, this run has 1",
    "--pipeline-model-parallel-size 2": "has pipeline_model_parallel_size 1, this run has 2",
    "--hidden-size 64": "has hidden_size 32, this run has 64; allowed: the same model",
    "--num-layers 4": "has num_layers 2, this run has 4",
    "--ffn-hidden-size 64": "has ffn_hidden_size 32, this run has 64",
    "--untie-embeddings-and-output-weights": "untie_embeddings_and_output_weights False",
    "--normalization LayerNorm": "has normalization RMSNorm, this run has LayerNorm",
    "--vocab-size 80": "has padded_vocab_size 64, this run has 88",
    "--edit-warmup-steps 20": "would be synchronous there; allowed: warmup_steps < 6;",
    "--edit-method sync": "(method sync): the checkpoint",
}


@pytest.mark.parametrize("changes", REFUSED)
def test_another_model_layout_or_phase_is_refused(changes: str, loadable: Path) -> None:
    assert state_for(loadable)["step"] == 6
    with pytest.raises(ConfigurationError) as caught:
        state_for(loadable, changes)
    message = str(caught.value)
    assert str(loadable) in message and "\n" not in message
    assert REFUSED[changes] in message


def test_the_phase_may_change_where_replicas_start_alike(loadable: Path) -> None:
    assert state_for(loadable, "--edit-warmup-steps 20 --no-load-optim")["step"] == 6
    assert state_for(loadable, "--edit-method sync --finetune")["step"] == 6


STEP = "iter_0000006"


def _overwrite(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def _cut(name: str, size: int) -> Callable[[Path], object]:
    return lambda folder: os.truncate(folder / name, size)


def _lose(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


# What the message says of the damage -> how it comes about.
DAMAGES = {
    f"{files.TRACKER} is damaged: 'six' is no step": _overwrite(files.TRACKER, "six"),
    "iter_0000008": _overwrite(files.TRACKER, "8"),
    "state.json is damaged: Unterminated": _cut(f"{STEP}/state.json", 100),
    "state.json is damaged: format": _overwrite(f"{STEP}/state.json", "[]"),
    "state.json is damaged: step is": _overwrite(f"{STEP}/state.json", '{"format": 2}'),
    f"No such file or directory: '{{}}/{STEP}/state.json'": _lose(f"{STEP}/state.json"),
    "its format is 0": _overwrite(f"{STEP}/state.json", '{"format": 0}'),
    ".metadata is missing": _lose(f"{STEP}/.metadata"),
    ".metadata is damaged: Unpick": _cut(f"{STEP}/.metadata", 1000),
    ".metadata is damaged: EOFError": _cut(f"{STEP}/.metadata", 0),
    "__0_0.distcp is missing": _lose(f"{STEP}/__0_0.distcp"),
    "__1_0.distcp has been cut short: 5000 of ": _cut(f"{STEP}/__1_0.distcp", 5000),
    "__1_0.distcp has been cut short: 0 of ": _cut(f"{STEP}/__1_0.distcp", 0),
}


@pytest.mark.parametrize("reason", DAMAGES)
def test_a_damaged_checkpoint_is_refused(reason: str, loadable: Path) -> None:
    DAMAGES[reason](loadable)
    with pytest.raises(ConfigurationError, match="no readable checkpoint") as caught:
        state_for(loadable)
    assert reason.format(loadable) in str(caught.value)
    assert caught.value.per_host


def _refused_on_all_ranks(line: str) -> Run:
    with patch.object(errors, "REPORT_WITHIN_S", 0.0):
        return pretrain(command_line(line))


def test_tensors_that_cannot_be_read_end_all_ranks_with_one_line(
    saved: Path, tmp_path: Path
) -> None:
    load = tmp_path / "load"
    shutil.copytree(saved, load)
    tensors = load / STEP / "__1_0.distcp"
    # As long as it was, so that nobody notices before it is read.
    tensors.write_bytes(bytes(tensors.stat().st_size))
    runs = run_ranks(_refused_on_all_ranks, 2, f"--edit-warmup-steps 4 --load {load}")
    assert [run.code for run in runs] == [2, 2]
    assert runs[0].err.startswith(f"error: --load: the checkpoint {load / STEP} cannot be read: ")
    assert runs[0].err.count("\n") == 1 and runs[1].err == ""


# A tool that reads the checkpoint by itself gives the same reasons.
@pytest.mark.parametrize("reason", [r for r in DAMAGES if ".distcp" in r or ".metadata" in r])
def test_a_damaged_checkpoint_gives_no_whole_model(reason: str, loadable: Path) -> None:
    DAMAGES[reason](loadable)
    with pytest.raises(ConfigurationError, match="no readable checkpoint") as caught:
        whole_model.whole_parameters(whole_model.find_checkpoint(loadable))
    assert reason in str(caught.value)


def test_other_data_are_refused_unless_wanted(tmp_path: Path) -> None:
    first, second = tokens(1), tokens(2)
    (tmp_path / "moved").mkdir()
    for suffix in (".bin", ".idx"):
        shutil.copy(first + suffix, tmp_path / "moved" / f"first{suffix}")
    save = tmp_path / "save"
    line = "--edit-replicas 1 --train-iters 6"
    load = f"{line} --load {save}"
    lines = {
        "start": f"{line} --data-path {first} --exit-interval 4 --save {save}",
        "moved": f"{load} --data-path {tmp_path / 'moved' / 'first'}",
        "other": f"{load} --data-path {second}",
        "wanted": f"{load} --data-path {second} --override-data-path",
        "finetune": f"{load} --data-path {second} --finetune",
        "batch": f"{load} --data-path {first} --global-batch-size 4",
        "batch wanted": (
            f"{load} --data-path {first} --global-batch-size 4 --override-data-path "
            "--override-opt_param-scheduler"
        ),
    }
    ((*runs,),) = run_ranks(_pretrain_all, 1, list(lines.values()))
    run = dict(zip(lines, runs, strict=True))
    codes = {name: run.code for name, run in run.items()}
    assert codes == {**dict.fromkeys(lines, 0), "other": 2, "batch": 2}
    assert run["moved"].loaded == run["start"].state
    assert run["other"].err == (
        f"error: --data-path: the data differ from those of the checkpoint in {save}; allowed: the "
        "same files, weights, split, sequence length and seed; or --override-data-path\n"
    )
    assert "--global-batch-size 4: the checkpoint in" in run["batch"].err
    assert run["batch"].err.count("\n") == 1
    assert run["wanted"].step == run["finetune"].step == 6
