"""Writing and reading the files of a checkpoint, with what goes wrong in one line on all ranks.

torch.distributed.checkpoint lets all ranks know of a failure of one, but as an exception that
``except Exception`` misses and that has a traceback of each rank for a message.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from megatron_edit.errors import CheckpointError, ConfigurationError

INDEX = ".metadata"


class Writer(dcp.FileSystemWriter):
    """Writes tensors and raises what the file system said.

    torch's zip format fails once more where it closes a file that could not be written: on a full
    disk with "unexpected pos". What that was raised from does not travel to the other ranks.
    """

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Writes this rank's tensors."""
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise _said_by_file_system(error) or error from None


def _said_by_file_system(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def write_tensors(what: str, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Writes tensors of all ranks, which call it together.

    Args:
        what: What is being done, for the message.
        folder: An empty folder.
        tensors: By name; DTensors are written in shards, others by the rank that names them first.

    Raises:
        CheckpointError: A rank could not write; on all ranks.
    """
    try:
        dcp.save(tensors, storage_writer=Writer(folder))
    except CheckpointException as failures:
        rank, cause = _first(failures)
        if isinstance(cause, OSError):
            raise CheckpointError(f"{what}: rank {rank}: {_reason(cause)}") from None
        raise RuntimeError(f"{what}: rank {rank}: {cause!r}") from cause


def on_first_rank(what: str, action: Callable[[], None]) -> None:
    """Has rank 0 do something with files, while the others wait.

    Args:
        what: What is being done, for the message.
        action: May raise an OSError.

    Raises:
        CheckpointError: It has; on all ranks.
    """
    outcome: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except OSError as error:
            outcome[0] = f"{what}: {_reason(error)}"
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise CheckpointError(outcome[0])


def read_tensors(folder: Path, tensors: dict[str, torch.Tensor], no_dist: bool = False) -> None:
    """Fills tensors in place.

    Args:
        folder: The checkpoint.
        tensors: By name; this rank's part of DTensors.
        no_dist: Whether this process reads for itself; otherwise all ranks call it together.

    Raises:
        ConfigurationError: A rank cannot read what it needs; on all ranks.
    """
    try:
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=no_dist)
    except CheckpointException as failures:
        rank, cause = _first(failures)
        reason = _reason(cause) if isinstance(cause, OSError) else f"{cause!r}"
        raise ConfigurationError(
            f"--load: the checkpoint {folder} cannot be read: rank {rank}: {reason}"
        ) from cause


def read_index(folder: Path) -> Metadata:
    """What tensors a checkpoint holds, and in which of its files.

    Raises:
        ValueError: The index is missing or damaged; names it.
    """
    try:
        return dcp.FileSystemReader(folder).read_metadata()
    except FileNotFoundError:
        raise ValueError(f"{folder / INDEX} is missing") from None
    except Exception as error:
        # A damaged pickle may raise anything.
        raise ValueError(f"{folder / INDEX} is damaged: {error!r}") from None


def check_files(folder: Path) -> None:
    """Refuses a checkpoint some of whose files are missing or shorter than its index says.

    Raises:
        ValueError: Names the file.
    """
    ends: dict[str, int] = {}
    for place in read_index(folder).storage_data.values():
        ends[place.relative_path] = max(
            ends.get(place.relative_path, 0), place.offset + place.length
        )
    for name, end in sorted(ends.items()):
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path} is missing")
        if (size := path.stat().st_size) < end:
            raise ValueError(f"{path} has been cut short: {size} of {end} bytes")


def _first(failures: CheckpointException) -> tuple[int, BaseException]:
    rank, (cause, _) = next(iter(failures.failures.items()))
    return rank, cause


def _reason(error: OSError) -> str:
    text = error.strerror or repr(error)
    return text if error.filename is None else f"{text}: {error.filename}"
