"""When a round ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from megatron_edit.config.edit_config import EditConfig


class Trigger(Protocol):
    """Decides what a step begins with. Asked once per step, with the inner steps done so far."""

    def lockstep(self, step: int) -> bool:
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

    def lockstep(self, step: int) -> bool:
        return step < self.warmup_steps

    def due(self, step: int) -> bool:
        local_steps = step - self.warmup_steps
        return local_steps > 0 and local_steps % self.sync_interval == 0


@dataclass
class TimeTrigger:
    """A round lasts for a while, however many inner steps that is on this replica.

    Attributes:
        warmup_steps: Synchronous steps before the first round.
        sync_seconds: From the end of one meeting of the replicas until they set out for the next.
        clock: Seconds.
    """

    warmup_steps: int
    sync_seconds: float
    clock: Callable[[], float] = time.monotonic
    _since_s: float | None = field(default=None, init=False)
    _hurried: bool = field(default=False, init=False)

    def lockstep(self, step: int) -> bool:
        return step < self.warmup_steps

    def due(self, step: int) -> bool:
        if step <= self.warmup_steps or self._since_s is None:
            return False
        return self._hurried or self.clock() - self._since_s >= self.sync_seconds

    def restart(self, lasted_s: float = 0.0) -> None:
        """Begins a round, or goes on with one. To be called after the replicas have met: a timer
        that counted the wait for the slowest would call the fast replica to the next meeting ever
        earlier.

        Args:
            lasted_s: Seconds that the round has lasted.
        """
        self._since_s = self.clock() - lasted_s
        self._hurried = False

    @property
    def lasted_s(self) -> float:
        """Seconds that the open round has lasted."""
        return 0.0 if self._since_s is None else self.clock() - self._since_s

    def hurry(self) -> None:
        """Ends the round with the next step."""
        self._hurried = True


@dataclass(frozen=True)
class NeverTrigger:
    """Plain synchronous data parallelism over all replicas."""

    def lockstep(self, step: int) -> bool:
        return True

    def due(self, step: int) -> bool:
        return False


def build_trigger(config: EditConfig) -> Trigger:
    """The trigger that ``sync_trigger`` names."""
    if config.sync_trigger == "never":
        return NeverTrigger()
    if config.sync_trigger == "time":
        return TimeTrigger(config.warmup_steps, config.sync_seconds)
    return StepsTrigger(config.warmup_steps, config.sync_interval)
