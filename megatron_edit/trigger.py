"""When a round ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from megatron_edit.config import EditConfig


class Trigger(Protocol):
    """Decides what a step begins with. Asked once per step, with the inner steps done so far."""

    def synchronous(self, step: int) -> bool:
        """Whether the step averages gradients over the replicas instead of training apart."""

    def due(self, step: int) -> bool:
        """Whether the step begins with a synchronisation."""


@dataclass(frozen=True)
class StepsTrigger:
    """A round is a fixed number of inner steps.

    Attributes:
        warmup_steps: Synchronous steps before the first round.
        sync_interval: tau, inner steps of a round.
    """

    warmup_steps: int
    sync_interval: int

    def synchronous(self, step: int) -> bool:
        return step < self.warmup_steps

    def due(self, step: int) -> bool:
        local_steps = step - self.warmup_steps
        return local_steps > 0 and local_steps % self.sync_interval == 0


@dataclass(frozen=True)
class NeverTrigger:
    """Plain synchronous data parallelism over all replicas."""

    def synchronous(self, step: int) -> bool:
        return True

    def due(self, step: int) -> bool:
        return False


def build_trigger(config: EditConfig) -> Trigger:
    """The trigger that ``sync_trigger`` names."""
    if config.sync_trigger == "never":
        return NeverTrigger()
    return StepsTrigger(config.warmup_steps, config.sync_interval)
