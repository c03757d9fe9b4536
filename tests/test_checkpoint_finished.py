"""A finished run that is started again is left as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed import run_ranks
from pretraining import Run, command_line, newest, pretrain

from megatron_edit.config.methods import PRESETS

# Synchronisations are due after steps 7 and 11; the run ends after step 13, in an open round.
RUN = "--train-iters 13 --lr-decay-iters 20"
METHODS = {name: f"--edit-method {name}" for name in PRESETS}
CASES = METHODS | {
    "a_edit": "--edit-method a_edit --edit-sync-seconds 0.05",
    "delay": "--edit-delay-steps 3",
    "delay, int8": "--edit-delay-steps 3 --edit-compression int8",
    "int8": "--edit-compression int8",
    "offload": "--edit-offload-outer-state true",
    "warm-up alone": "--edit-warmup-steps 20",
}


def _finished_and_started_again(save: Path) -> dict[str, tuple[Run, Run, bool]]:
    """Runs of each case, and whether the second has left all files as they were."""
    results = {}
    for name, flags in CASES.items():
        folder = save / name.replace(" ", "_")
        line = f"{RUN} {flags} --save {folder} --eval-iters 1"
        first = pretrain(command_line(line))
        before = files_of(folder)
        again = pretrain(command_line(f"{line} --load {folder}"))
        results[name] = (first, again, files_of(folder) == before)
    return results


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file in a folder, with its number on the disk and the time of its last change."""
    stats = {str(path): path.stat() for path in folder.rglob("*")}
    return {path: (stat.st_ino, stat.st_mtime_ns) for path, stat in stats.items()}


def test_a_finished_run_started_again_changes_nothing(tmp_path: Path) -> None:
    (rank_0, rank_1) = run_ranks(_finished_and_started_again, 2, tmp_path)
    for name in CASES:
        for first, again, untouched in (rank_0[name], rank_1[name]):
            assert (first.code, again.code) == (0, 0), name
            assert again.loaded == again.state == first.state, name
            assert untouched, name
        first, again, _ = rank_0[name]
        step = newest(tmp_path / name.replace(" ", "_"))
        said = f"is finished, step {step} of 13: nothing is trained, nothing is saved\n"
        assert said in again.out and said not in first.out, name
        # What it is worth is told again.
        results = first.out[first.out.index(f" validation loss at iteration {step} on") :]
        assert results.splitlines()[:4] == _last_evaluations(again), name
        assert "saved" not in again.out.replace(said, ""), name


def _last_evaluations(run: Run) -> list[str]:
    return run.out[run.out.index(" validation loss at iteration") :].splitlines()[:4]


@pytest.mark.parametrize("flags", ["", "--edit-delay-steps 3"])
def test_a_run_cut_short_is_consolidated_once(flags: str, tmp_path: Path) -> None:
    """Its steps are done; what is left is the round that was open."""
    longer = f"{RUN} {flags} --save {tmp_path} --exit-interval 9"
    shorter = f"{RUN} --train-iters 9 {flags} --save {tmp_path} --load {tmp_path}"
    for cut, ended, again in run_ranks(_pretrain_all, 2, [longer, shorter, shorter]):
        assert [run.code for run in (cut, ended, again)] == [0, 0, 0]
        assert [run.step for run in (cut, ended, again)] == [9, 9, 9]
        assert ended.loaded == cut.state != ended.state
        assert ended.state["counters"].endswith(" 0")
        assert again.state == ended.state


def _pretrain_all(lines: list[str]) -> list[Run]:
    return [pretrain(command_line(line)) for line in lines]
