"""Folders and small files of checkpoints.

    <save>/iter_0000100/            torch.distributed.checkpoint: every tensor of the run
    <save>/iter_0000100/state.json  counters, layout, shape of the model, data
    <save>/iter_0000100/effective_config.json
    <save>/latest_checkpointed_iteration.txt

A checkpoint is written to a folder aside, which is then renamed; the tracker file is renamed into
place last. So a folder that bears a checkpoint's name is whole. One of the same step that was there
before is kept until then.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_edit.config.checks import TRACKER
from megatron_edit.errors import ConfigurationError

STATE = "state.json"
CONFIG = "effective_config.json"


def checkpoint_folder(root: str | Path, iteration: int) -> Path:
    """The folder of a checkpoint."""
    return Path(root) / f"iter_{iteration:07d}"


def find_checkpoint(root: Path, iteration: int | None = None) -> Path:
    """The folder of a checkpoint, by default of the newest.

    Raises:
        OSError: There is no tracker file, or it cannot be read.
        ValueError: It does not name a step.
    """
    if iteration is None:
        iteration = _tracked_iteration(root / TRACKER)
    folder = checkpoint_folder(root, iteration)
    if not folder.exists() and replaced(folder).exists():
        # The run was killed between the two renames that replace a checkpoint of the same step.
        return replaced(folder)
    return folder


def _tracked_iteration(tracker: Path) -> int:
    text = tracker.read_text()
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{tracker} is damaged: {text[:40]!r} is no step") from None


@contextmanager
def refusing_damage(root: str | Path) -> Iterator[None]:
    """Turns an error of reading a checkpoint in the block into the user's, in one line.

    Args:
        root: What ``--load`` names.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"--load: no readable checkpoint in {root}: {error}", per_host=True
        ) from None


def folder_aside(folder: Path) -> Path:
    """Where a checkpoint is written before it bears its name."""
    return folder.with_name(folder.name + ".tmp")


def replaced(folder: Path) -> Path:
    """Where a checkpoint goes while another of the same step takes its place."""
    return folder.with_name(folder.name + ".old")


def make_folder_aside(folder: Path) -> None:
    """Makes the empty folder aside, and removes those of saves that were cut short."""
    for left_over in folder.parent.glob("iter_*.tmp"):
        shutil.rmtree(left_over)
    folder_aside(folder).mkdir(parents=True)


def put_in_place(folder: Path) -> None:
    """Renames the folder aside, and only then removes what bore the name before."""
    old = replaced(folder)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    try:
        folder_aside(folder).rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def point_tracker(root: Path, iteration: int) -> None:
    """Makes a checkpoint the newest."""
    beside = root / (TRACKER + ".tmp")
    write(beside, str(iteration))
    os.replace(beside, root / TRACKER)


def write(path: Path, text: str) -> None:
    """Writes a file that is on the disk when this returns.

    Raises:
        OSError: With the file's name, which a failing write does not have by itself.
    """
    try:
        with path.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file that is on the disk when this returns."""
    write(path, json.dumps(content, indent=2) + "\n")


def read_json(path: Path, keys: Iterable[str]) -> dict[str, Any]:
    """Reads an object from a JSON file.

    Args:
        path: The file.
        keys: What the object must have.

    Raises:
        OSError: It cannot be read.
        ValueError: It is damaged; names it.
    """
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    missing = [key for key in keys if not isinstance(content, dict) or key not in content]
    if missing:
        raise ValueError(f"{path} is damaged: {missing[0]} is missing")
    return content
