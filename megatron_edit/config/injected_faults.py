"""Which faults to inject on purpose: ``edit.debug_slow_replica`` and ``edit.debug_poison_replica``.

Both need ``edit.debug``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_edit.config.edit_config import EditConfig
from megatron_edit.errors import ConfigurationError, unknown_name

POISONS = ("nan", "inf", "scale", "tokens")


@dataclass(frozen=True)
class Slow:
    """Makes a replica's steps take ``factor`` times as long."""

    replica: int
    factor: float


@dataclass(frozen=True)
class Poison:
    """Spoils a replica in the steps ``first`` to ``last``.

    ``nan`` and ``inf`` write such a value into its parameters, ``scale`` multiplies its pseudo
    gradient by 1000, each before the step; ``tokens`` has it train on random tokens.
    """

    replica: int
    first: int
    last: int
    kind: str


def parse_slow(config: EditConfig) -> Slow | None:
    """Reads ``edit.debug_slow_replica``, ``I:FACTOR``.

    Raises:
        ConfigurationError: It is none, or ``edit.debug`` is not set.
    """
    text = _wanted(config, "debug_slow_replica")
    if text is None:
        return None
    match = re.fullmatch(r"(\d+):(\d+(?:\.\d+)?)", text)
    if match is None or float(match[2]) < 1:
        raise ConfigurationError(
            f"edit.debug_slow_replica: got {text!r}; allowed: I:FACTOR with FACTOR >= 1, "
            "such as 1:4.3"
        )
    return Slow(_replica(config, "debug_slow_replica", match[1]), float(match[2]))


def parse_poison(config: EditConfig) -> Poison | None:
    """Reads ``edit.debug_poison_replica``, ``I:STEP:KIND`` or ``I:FIRST-LAST:KIND``.

    Raises:
        ConfigurationError: It is none, or ``edit.debug`` is not set.
    """
    text = _wanted(config, "debug_poison_replica")
    if text is None:
        return None
    match = re.fullmatch(r"(\d+):(\d+)(?:-(\d+))?:(\w+)", text)
    if match is None or int(match[2]) > int(match[3] or match[2]):
        raise ConfigurationError(
            f"edit.debug_poison_replica: got {text!r}; allowed: I:STEP:KIND or I:FIRST-LAST:KIND, "
            "such as 1:120-160:tokens"
        )
    if match[4] not in POISONS:
        raise unknown_name("edit.debug_poison_replica", match[4], POISONS)
    replica = _replica(config, "debug_poison_replica", match[1])
    return Poison(replica, int(match[2]), int(match[3] or match[2]), match[4])


def _wanted(config: EditConfig, field: str) -> str | None:
    text: str | None = getattr(config, field)
    if text is not None and not config.debug:
        raise ConfigurationError(
            f"edit.{field} {text} spoils a run on purpose; give --edit-debug too, or leave it out"
        )
    return text


def _replica(config: EditConfig, field: str, text: str) -> int:
    if config.replicas is not None and int(text) >= config.replicas:
        raise ConfigurationError(
            f"edit.{field}: got replica {text}; allowed: 0 to {config.replicas - 1}"
        )
    return int(text)
