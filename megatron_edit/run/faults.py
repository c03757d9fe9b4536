"""Faults and stragglers on purpose, for people who want to see what the method does about them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from megatron_edit.config.edit_config import EditConfig
from megatron_edit.config.injected_faults import parse_poison, parse_slow

if TYPE_CHECKING:
    from megatron_edit.engine.sync_engine import SyncEngine
    from megatron_edit.replicas.mesh import Mesh

# What ``scale`` multiplies the pseudo gradient by.
SCALE = 1000.0


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
