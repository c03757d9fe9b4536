"""Runs to fit laws to: a table of (method, replicas, parameters, tokens, loss), read from CSV."""

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_edit.errors import ConfigurationError, did_you_mean
from megatron_edit.scaling.command import write
from megatron_edit.scaling.forms import Array, Points

COLUMNS = ("method", "replicas", "parameters", "tokens", "loss")
SYNC = "sync"
"""The method that the others are compared with."""


@dataclass(frozen=True)
class Run:
    """One finished training run.

    Attributes:
        method: `sync`, `edit`, `diloco`, ...
        replicas: Replicas that trained apart; synchronous training counts as one.
        parameters: N, model parameters.
        tokens: D, training tokens over all replicas.
        loss: Validation loss in nats per token.
    """

    method: str
    replicas: int
    parameters: float
    tokens: float
    loss: float


@dataclass(frozen=True)
class Table:
    """Runs of one kind as arrays.

    Attributes:
        points: N, D and M of each run.
        log_loss: ln L of each run.
    """

    points: Points
    log_loss: Array

    @staticmethod
    def of(runs: Iterable[Run]) -> "Table":
        """Returns the arrays of some runs."""
        rows = list(runs)
        points = Points.of(
            [r.parameters for r in rows], [r.tokens for r in rows], [r.replicas for r in rows]
        )
        return Table(points, np.log([r.loss for r in rows]))

    def __len__(self) -> int:
        return len(self.log_loss)


def read_csv(path: Path) -> list[Run]:
    """Reads runs; columns beyond COLUMNS are ignored, lines that start with # are comments.

    Args:
        path: A CSV with a header line.

    Raises:
        ConfigurationError: Names the column or the line that cannot be used.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: cannot be read ({error})") from None
    numbered = [(i, t) for i, t in enumerate(lines, 1) if t.strip() and not t.startswith("#")]
    if not numbered:
        raise ConfigurationError(f"{path}: is empty; expected a header {','.join(COLUMNS)}")
    header = [name.strip() for name in next(csv.reader([numbered[0][1]]))]
    for column in COLUMNS:
        if column not in header:
            hint = did_you_mean(column, header)
            raise ConfigurationError(
                f"{path}: column {column!r} is missing; the header has {', '.join(header)}{hint}"
            )
    runs = []
    for number, text in numbered[1:]:
        cells = [cell.strip() for cell in next(csv.reader([text]))]
        where = f"{path}, line {number}"
        if len(cells) != len(header):
            raise ConfigurationError(f"{where}: {len(cells)} cells, the header has {len(header)}")
        runs.append(_run(dict(zip(header, cells, strict=True)), where))
    if not runs:
        raise ConfigurationError(f"{path}: has a header and no runs")
    return runs


def _run(cells: dict[str, str], where: str) -> Run:
    """Returns the run of one line.

    Raises:
        ConfigurationError: Names line and column of a cell that cannot be used.
    """
    if not cells["method"]:
        raise ConfigurationError(f"{where}: column 'method' is empty")
    numbers = {column: positive(cells[column], column, where) for column in COLUMNS[1:]}
    if numbers["replicas"] != int(numbers["replicas"]):
        raise ConfigurationError(
            f"{where}: column 'replicas' is {cells['replicas']!r}; allowed: an integer >= 1"
        )
    return Run(
        cells["method"],
        int(numbers["replicas"]),
        numbers["parameters"],
        numbers["tokens"],
        numbers["loss"],
    )


def positive(text: str, column: str, where: str) -> float:
    """Returns a cell as a finite number above 0.

    Args:
        text: The cell.
        column: Its column, for the message.
        where: File and line, for the message.

    Raises:
        ConfigurationError: The cell is empty, no number, NaN, infinite, zero or negative.
    """
    try:
        value = float(text)
    except ValueError:
        shown = "empty" if not text else repr(text)
        raise ConfigurationError(f"{where}: column {column!r} is {shown}, not a number") from None
    if not math.isfinite(value) or value <= 0:
        raise ConfigurationError(
            f"{where}: column {column!r} is {text}; allowed: a finite number > 0"
        )
    return value


def write_csv(path: Path, runs: Iterable[Run]) -> None:
    """Writes runs in the layout that `read_csv` reads."""
    rows = [",".join(COLUMNS)]
    for run in runs:
        numbers = f"{run.parameters:.10g},{run.tokens:.10g},{run.loss:.8g}"
        rows.append(f"{run.method},{run.replicas},{numbers}")
    write(path, "\n".join(rows), "--save-csv")


def groups(runs: Iterable[Run], by_replicas: bool) -> dict[str, list[Run]]:
    """Returns the runs by method, or by method and replicas.

    Args:
        runs: All runs.
        by_replicas: Whether a method's replica counts are separate groups. Synchronous runs are
            one group either way: averaging every step makes their number of replicas immaterial.
    """
    found: dict[str, list[Run]] = {}
    for run in runs:
        apart = by_replicas and run.method != SYNC
        found.setdefault(f"{run.method} R={run.replicas}" if apart else run.method, []).append(run)
    return found
