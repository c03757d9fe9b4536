"""Faults and stragglers on purpose, for people who want to see what the method does about them.

Everything here needs ``edit.debug``.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron_edit.config import EditConfig
from megatron_edit.errors import ConfigurationError, unknown_name

if TYPE_CHECKING:
    from megatron_edit.mesh import Mesh
    from megatron_edit.sync import SyncEngine

POISONS = ("nan", "inf", "scale", "tokens")
# What ``scale`` multiplies the pseudo gradient by.
SCALE = 1000.0


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


class Injection:
    """What is injected into this rank's training.

    Args:
        config: ``debug_slow_replica`` and ``debug_poison_replica``.
        mesh: The mesh.
    """

    def __init__(self, config: EditConfig, mesh: Mesh) -> None:
        slow, poison = parse_slow(config), parse_poison(config)
        self._mesh = mesh
        self._factor = slow.factor if slow and slow.replica == mesh.replica else 1.0
        self._poison = poison if poison and poison.replica == mesh.replica else None

    @torch.no_grad()
    def before_step(self, engine: SyncEngine) -> None:
        """Spoils the parameters, if this is the step and the replica to do so."""
        poison = self._poison
        if poison is None or not poison.first <= engine.step <= poison.last:
            return
        if poison.kind in ("nan", "inf"):
            for unit in engine.units:
                unit.locals[0].view(-1)[:1] = float(poison.kind)
        elif poison.kind == "scale":
            for state in engine.outer:
                delta = state.pseudo_gradient()
                state.unit.copy_from(state.anchor.to(delta.device) - SCALE * delta)

    def spoil(
        self, batches: Iterator[dict[str, torch.Tensor]], engine: SyncEngine, vocabulary: int
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Passes micro-batches on, with random tokens in the steps to be poisoned.

        Args:
            batches: Micro-batches as ``data.train_iterator`` yields them.
            engine: Tells the step.
            vocabulary: Tokens are drawn from 0 to below this.
        """
        for batch in batches:
            poison = self._poison
            if poison and poison.kind == "tokens" and poison.first <= engine.step <= poison.last:
                batch = {**batch, **_random_tokens(batch, vocabulary)}
            yield batch

    def settle(self) -> None:
        """Waits for the device of a slow replica, so that its steps can be timed on the host."""
        if self._factor > 1 and torch.cuda.is_available():
            torch.cuda.synchronize()

    def after_step(self, seconds: float) -> None:
        """Waits for as long as a slow replica would have computed on.

        Args:
            seconds: What the step took, without the meeting of the replicas at its start.
        """
        if self._factor > 1:
            time.sleep((self._factor - 1) * seconds)


def _random_tokens(batch: dict[str, torch.Tensor], vocabulary: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(int(batch["index"][0]))
    rows, columns = batch["tokens"].shape
    text = torch.randint(vocabulary, (rows, columns + 1), generator=generator)
    return {"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}
