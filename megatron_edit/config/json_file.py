"""Reads JSON that a user wrote: whatever is wrong with it is told in one line."""

import json
from pathlib import Path
from typing import Any

from megatron_edit.errors import ConfigurationError

DEEPEST = 100
"""Levels of nesting that are read; what a level costs the stack differs from reader to reader."""


def read_json(path: Path, flag: str = "", **hooks: Any) -> dict[str, Any]:
    """Returns the object of a JSON file.

    Args:
        path: The file.
        flag: The flag that named it, for the message about a file that cannot be read.
        hooks: Of `json.loads`.

    Raises:
        ConfigurationError: The file is missing, malformed, nested too deeply, or no object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigurationError(
            f"{flag} {path}: {reason}; give a readable JSON file".lstrip(), per_host=True
        ) from None
    value = parse_json(text, str(path), **hooks)
    if not isinstance(value, dict):
        given = json.dumps(value)
        shown = given if len(given) < 80 else given[:77] + "..."
        raise ConfigurationError(f"{path}: got {shown}; allowed: an object {{...}}")
    return value


def parse_json(text: str, where: str, **hooks: Any) -> Any:
    """Returns the value of a JSON text.

    Args:
        text: The JSON.
        where: File, for the message.
        hooks: Of `json.loads`.

    Raises:
        ConfigurationError: It is malformed or nested too deeply.
    """
    try:
        value = json.loads(text, **hooks)
    except json.JSONDecodeError as error:
        raise ConfigurationError(
            f"{where}:{error.lineno}:{error.colno}: malformed JSON: {error.msg}"
        ) from None
    except ConfigurationError:
        raise
    except ValueError as error:
        # A number of thousands of digits.
        raise ConfigurationError(f"{where}: malformed JSON: {error}") from None
    except RecursionError:
        raise _too_deep(where) from None
    level = [value]
    for _ in range(DEEPEST):
        level = [entry for outer in level for entry in _entries(outer)]
    if level:
        raise _too_deep(where)
    return value


def _entries(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _too_deep(where: str) -> ConfigurationError:
    return ConfigurationError(f"{where}: nested deeper than {DEEPEST} levels")
