"""Settings that change at a resume are told; a schedule changes only when asked to."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
from distributed import run_ranks
from pretraining import Run, command_line, pretrain

from megatron_edit.checkpoint import files
from megatron_edit.checkpoint.settings import settle_settings
from megatron_edit.config.arguments import as_dict, parse_args
from megatron_edit.config.schedule import schedule
from megatron_edit.errors import ConfigurationError

RUN = "--train-iters 20 --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-fraction 0.3"
OVERRIDE = "--override-opt_param-scheduler"
KEEP = "--use-checkpoint-opt_param-scheduler"


def arguments(flags: str = "", without: str = "") -> Namespace:
    """Of a run on two ranks, 4 samples a step."""
    return parse_args(command_line(f"{RUN} {flags}", without), world_size=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint, as far as its settings go."""
    folder = files.checkpoint_folder(tmp_path, 6)
    folder.mkdir()
    files.write_json(folder / files.CONFIG, as_dict(arguments()))
    files.point_tracker(tmp_path, 6)
    return folder


# Flags -> what is refused. A step is 4 samples.
OTHER_SCHEDULES = {
    "--lr 3e-2": "lr 0.003 -> 0.03; allowed",
    "--min-lr 0": "min_lr 0.0003 -> 0.0; allowed",
    "--lr-decay-style linear": "lr_decay_style cosine -> linear; allowed",
    "--lr-warmup-fraction 0.5": "lr_warmup_samples 24 -> 40; allowed",
    "--weight-decay 0.1": "weight_decay 0.01 -> 0.1; allowed",
    "--train-iters 40": (
        "lr_decay_samples 80 -> 160, lr_warmup_samples 24 -> 48 (without --lr-decay-iters the "
        "decay is as long as the run); allowed"
    ),
    "--lr-decay-iters 30": "lr_decay_samples 80 -> 120, lr_warmup_samples 24 -> 36; allowed",
    "--global-batch-size 8 --override-data-path": "lr_decay_samples 80 -> 160",
}


@pytest.mark.parametrize("flags", OTHER_SCHEDULES)
def test_another_schedule_is_refused_unless_wanted(flags: str, folder: Path) -> None:
    load = f"--load {folder.parent}"
    with pytest.raises(ConfigurationError) as caught:
        settle_settings(arguments(f"{flags} {load}"), folder)
    assert OTHER_SCHEDULES[flags] in str(caught.value)
    assert OVERRIDE in str(caught.value) and KEEP in str(caught.value)

    new = arguments(f"{flags} {load} {OVERRIDE}")
    settle_settings(new, folder)
    assert schedule(vars(new)) == schedule(vars(arguments(flags.split(" --over")[0])))

    kept = arguments(f"{flags} {load} {KEEP}")
    settle_settings(kept, folder)
    assert schedule(vars(kept)) == schedule(vars(arguments())) != schedule(vars(new))
    assert kept.sources["lr"] == "checkpoint"


# The same schedule in other words, or a run of another length with a decay of its own.
SAME_SCHEDULES = [
    ("", ""),
    ("--lr-warmup-iters 6", "--lr-warmup-fraction"),
    ("--train-iters 40 --lr-decay-iters 20", ""),
    ("--train-iters 10 --lr-decay-iters 20", ""),
    ("--train-samples 80", "--train-iters"),
]


@pytest.mark.parametrize(("flags", "without"), SAME_SCHEDULES)
def test_the_same_schedule_goes_on(flags: str, without: str, folder: Path) -> None:
    args = arguments(f"{flags} --load {folder.parent}", without)
    before = dict(vars(args))
    settle_settings(args, folder)
    assert vars(args) == before
    assert schedule(vars(args)) == schedule(vars(arguments()))


def test_every_setting_that_differs_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = f"--load {folder.parent}"
    settle_settings(arguments(f"{load} --no-load-rng"), folder)
    assert capsys.readouterr().out == ""
    changes = "--adam-beta2 0.95 --edit-outer-lr 0.5 --save-interval 5 --bf16"
    args = arguments(f"{load} {changes} --save {folder.parent}")
    settle_settings(args, folder)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "settings that differ from the checkpoint's (saved -> now)"
    told = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[1:]}
    assert told == {
        "adam_beta2": "0.999 -> 0.95",
        "bf16": "false -> true",
        "params_dtype": "float32 -> bfloat16",
        "save": f"none -> {folder.parent}",
        "save_interval": "none -> 5",
        "edit.outer_lr": "0.8 -> 0.5",
    }
    args.rank = 1
    settle_settings(args, folder)
    assert capsys.readouterr().out == ""


def test_steps_of_another_size_must_divide_the_schedule(folder: Path) -> None:
    args = arguments(f"--load {folder.parent} --global-batch-size 12 {KEEP}")
    with pytest.raises(ConfigurationError, match="80 samples, not divisible by the global batch"):
        settle_settings(args, folder)


@pytest.mark.parametrize("damage", ["cut", "missing", "no lr"])
def test_damaged_settings_are_refused(damage: str, folder: Path) -> None:
    path = folder / files.CONFIG
    if damage == "cut":
        path.write_text(path.read_text()[:1000])
    elif damage == "missing":
        path.unlink()
    else:
        path.write_text(json.dumps({"values": {}}))
    with pytest.raises(ConfigurationError, match="no readable checkpoint in") as caught:
        settle_settings(arguments(f"--load {folder.parent}"), folder)
    assert str(path) in str(caught.value)


def _resumed(lines: dict[str, str]) -> dict[str, Run]:
    return {name: pretrain(command_line(line)) for name, line in lines.items()}


def test_learning_rates_of_resumed_runs(tmp_path: Path) -> None:
    one = f"{RUN} --edit-replicas 1"
    load = f"{one} --load {tmp_path}"
    lines = {
        "start": f"{one} --exit-interval 6 --save {tmp_path}",
        "whole": one,
        "whole longer": f"{one} --train-iters 25",
        "same": load,
        "longer": f"{load} --train-iters 25",
        "tenfold": f"{load} --lr 3e-2",
        "override": f"{load} --train-iters 25 {OVERRIDE}",
        "keep": f"{load} --train-iters 25 --lr 3e-2 {KEEP}",
        "finetune": f"{load} --train-iters 25 --finetune",
    }
    (run,) = run_ranks(_resumed, 1, lines)
    codes = {name: run[name].code for name in lines}
    assert codes == {**dict.fromkeys(lines, 0), "longer": 2, "tenfold": 2}
    for name in ("longer", "tenfold"):
        assert run[name].err.startswith("error: --load: this run would leave the schedule")
        assert run[name].err.count("\n") == 1 and run[name].step == -1
    assert "  train_iters     20 -> 25\n" in run["longer"].out
    assert run["same"].rates == run["whole"].rates[6:]
    assert run["override"].rates == run["whole longer"].rates[6:]
    assert run["keep"].rates == run["whole"].rates[6:] + [3e-4] * 5
    assert run["finetune"].rates == run["whole longer"].rates
    assert "settings that differ" in run["same"].out
    assert "settings that differ" not in run["finetune"].out
