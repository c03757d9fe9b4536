"""Aligned text tables, and numbers as people read them."""

import math
from collections.abc import Sequence

from megatron_edit.scaling.fit import Range
from megatron_edit.scaling.provenance import Constant

WIDEST_COLUMN = 24


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns rows in columns: the first aligned left, the others right."""
    cells = [list(header), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = []
    for row in cells:
        first, rest = row[0].ljust(widths[0]), zip(row[1:], widths[1:], strict=True)
        lines.append("  ".join([first, *(cell.rjust(width) for cell, width in rest)]).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def number(value: float | None, digits: int = 3) -> str:
    """Returns a number with some significant digits; `-` for none or never."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    if abs(value) >= 10**digits:
        return f"{value:,.0f}" if abs(value) < 1e6 else f"{value:.{digits}g}"
    return f"{value:.{digits}g}"


def percent(value: float, digits: int = 1) -> str:
    """Returns a share in percent."""
    return f"{100 * value:.{digits}f}"


def interval(value: Range, digits: int = 5) -> str:
    """Returns a value with its 95 % interval."""
    return f"{value.value:.{digits}g} [{value.low:.{digits}g}, {value.high:.{digits}g}]"


def duration(days: float | None) -> str:
    """Returns a time in the unit in which it is a handy number."""
    if days is None or not math.isfinite(days):
        return "never"
    for unit, length in (("days", 1.0), ("hours", 1 / 24), ("min", 1 / 1440)):
        if days >= 2 * length:
            return f"{number(days / length)} {unit}"
    return f"{number(days * 86400)} s"


def constants_table(constants: Sequence[Constant]) -> str:
    """Returns where each number comes from; long values push their own line to the right only."""
    rows = [[c.name, c.kind.value, f"{_text(c.value)} {c.unit}", c.source] for c in constants]
    widths = [min(max(len(row[i]) for row in rows), WIDEST_COLUMN) for i in range(3)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)).rstrip()
        for row in rows
    )


def _text(value: float | str) -> str:
    return value if isinstance(value, str) else number(value, 4)
