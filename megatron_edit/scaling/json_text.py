"""JSON that people can read and diff: one line per entry of a list, six digits."""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def json_text(values: Mapping[str, object]) -> str:
    """Returns an object as JSON text.

    Args:
        values: The object; its lists are written with one entry per line.
    """
    lines = [f"{json.dumps(key)}: {_value(value)}" for key, value in values.items()]
    return "{\n  " + ",\n  ".join(lines) + "\n}"


def columnar(rows: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Returns rows with the same keys as a list of columns and a list of rows of values.

    Args:
        rows: At least one.
    """
    columns = list(rows[0])
    return {"columns": columns, "rows": [[row[name] for name in columns] for row in rows]}


def _value(value: object) -> str:
    if isinstance(value, list | tuple) and value:
        entries = [json.dumps(_rounded(entry)) for entry in value]
        return "[\n    " + ",\n    ".join(entries) + "\n  ]"
    if isinstance(value, Mapping) and list(value) == ["columns", "rows"]:
        return f'{{"columns": {json.dumps(value["columns"])}, "rows": {_value(value["rows"])}}}'
    if isinstance(value, Mapping) and any(isinstance(v, Mapping) for v in value.values()):
        entries = [f"{json.dumps(k)}: {json.dumps(_rounded(v))}" for k, v in value.items()]
        return "{\n    " + ",\n    ".join(entries) + "\n  }"
    return json.dumps(_rounded(value))


def _rounded(value: Any) -> Any:
    """Returns a value with every float rounded to six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(entry) for entry in value]
    return value
