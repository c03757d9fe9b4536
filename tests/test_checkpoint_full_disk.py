"""A checkpoint that cannot be written costs a line, the run, and nothing that was there before."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dying_ranks import run_dying_ranks
from pretraining import command_line, newest, pretrain

from megatron_edit.checkpoint import files, storage
from megatron_edit.run import failure

# Saves at steps 4 and 8, of which the second fails.
LINE = "--save-interval 4"
FULL = "No space left on device"


@contextmanager
def full_file(save: Path, name: str) -> Iterator[None]:
    """Has the second save write one of its files to a device that is full."""
    dcp_save, calls = dcp.save, 0

    def plant(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2 and dist.get_rank() == 0:
            (save / name).symlink_to("/dev/full")
        dist.barrier()
        return dcp_save(*args, **kwargs)

    with patch.object(dcp, "save", plant):
        yield


@contextmanager
def failing(function: str, call: int) -> Iterator[None]:
    """Has the n-th call of a method of paths, on a checkpoint's folder, find the disk full."""
    original, left = getattr(Path, function), call

    def fail(path: Path, *args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= path.name.startswith("iter_")
        if left == 0:
            raise OSError(errno.ENOSPC, FULL, str(path))
        return original(path, *args, **kwargs)

    with patch.object(Path, function, fail):
        yield


ASIDE = "iter_0000008.tmp"
# How the save of step 8 fails -> the name in the message, after the folder of all checkpoints.
PHASES: dict[str, tuple[Callable[[Path], Any], str]] = {
    # In each save torch makes it once more.
    "making the folder": (lambda save: failing("mkdir", 3), ASIDE),
    "tensors of rank 1": (lambda save: full_file(save, f"{ASIDE}/__1_0.distcp"), ""),
    "index": (lambda save: full_file(save, f"{ASIDE}/.metadata.tmp"), ""),
    "effective_config.json": (
        lambda save: full_file(save, f"{ASIDE}/{files.CONFIG}"),
        f"{ASIDE}/{files.CONFIG}",
    ),
    "state.json": (lambda save: full_file(save, f"{ASIDE}/{files.STATE}"), f"{ASIDE}/state.json"),
    "rename": (lambda save: failing("rename", 2), ASIDE),
    "tracker": (lambda save: full_file(save, f"{files.TRACKER}.tmp"), f"{files.TRACKER}.tmp"),
}


def _save_fails(save: Path, errors: Path, phase: str, line: str) -> None:
    failure.STAYS_S = 0.0
    sys.stderr = (errors / str(dist.get_rank())).open("w")
    with PHASES[phase][0](save), failure.exit_on_failure():
        pretrain(command_line(f"{line} --save {save}"))


@pytest.mark.parametrize("phase", PHASES)
def test_a_full_disk_ends_the_run_and_keeps_the_checkpoint_before(
    phase: str, tmp_path: Path
) -> None:
    save = tmp_path / "save"
    _, codes = run_dying_ranks(_save_fails, 2, {0, 1}, save, tmp_path, phase, LINE)
    assert codes == {0: 1, 1: 1}
    (line,) = (tmp_path / "0").read_text().splitlines()
    where = f"error: step 8: cannot save the checkpoint {save / 'iter_0000008'}: "
    assert line.startswith(where) and FULL in line
    assert PHASES[phase][1] in line.removeprefix(where)
    assert ("rank 1: " in line) == (phase == "tensors of rank 1")
    assert (tmp_path / "1").read_text() == ""

    assert newest(save) == 4
    folder = files.find_checkpoint(save)
    storage.check_files(folder)
    assert files.read_json(folder / files.STATE, ["step"])["step"] == 4
    assert not list(save.glob("iter_*.tmp"))


def test_a_checkpoint_of_the_same_step_is_put_back(tmp_path: Path) -> None:
    folder = files.checkpoint_folder(tmp_path, 3)
    folder.mkdir()
    (folder / "old").touch()
    files.make_folder_aside(folder)
    with failing("rename", 2), pytest.raises(OSError, match=FULL):
        files.put_in_place(folder)
    assert (folder / "old").exists()
    files.put_in_place(folder)
    assert os.listdir(folder) == [] and not files.replaced(folder).exists()
