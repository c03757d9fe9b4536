"""How replicas come together for a synchronisation: in step, or by the clock (A-EDiT)."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from megatron_edit.config.edit_config import EditConfig
from megatron_edit.engine.trigger import TimeTrigger, Trigger, build_trigger
from megatron_edit.replicas.mesh import Mesh


class Rendezvous(Protocol):
    """When this replica sets out for a meeting, and what all replicas know after one.

    Attributes:
        trigger: When a round ends.
        by_clock: Whether replicas do unequal numbers of steps.
        together: Whether all replicas are known to be as far as one another in this step.
        stop: Whether at the last meeting by the clock some replica wanted to stop.
        wants_stop: Whether this rank wants to stop at the next one.
        lasted_s: Seconds that the open round has lasted by the clock.
    """

    @property
    def trigger(self) -> Trigger: ...

    by_clock: bool
    together: bool
    stop: bool
    wants_stop: bool

    @property
    def lasted_s(self) -> float: ...

    def begin(self, step: int) -> None:
        """Begins a round that follows no synchronisation; all replicas together."""

    def resume(self, replica_steps: list[int], steps_in_round: int, lasted_s: float) -> None:
        """Goes on with the open round of a checkpoint.

        Args:
            replica_steps: Inner steps of each replica.
            steps_in_round: Inner steps of all replicas in the open round.
            lasted_s: Seconds that the round has lasted here.
        """

    def due(self, step: int, steps_in_round: int) -> bool:
        """Whether this replica sets out now, after so many inner steps of the run and the round."""

    def meet(self, step: int) -> bool:
        """Waits for the other replicas; returns whether the round is long enough to count."""

    def replica_steps(self, step: int) -> list[int]:
        """Inner steps of each replica, as far as this one knows, which has done ``step``; exact
        where they are together."""


def build_rendezvous(config: EditConfig, mesh: Mesh) -> Rendezvous:
    """The rendezvous that ``sync_trigger`` asks for."""
    if config.sync_trigger == "time":
        clock = TimeTrigger(config.warmup_steps, config.sync_seconds)
        return ByClock(clock, mesh, config.min_round_steps)
    return InStep(build_trigger(config), mesh.replicas)


class InStep:
    """Replicas that do the same steps are always together.

    Args:
        trigger: When a round ends.
        replicas: R.
    """

    by_clock = False
    together = True
    stop = False
    wants_stop = False
    lasted_s = 0.0

    def __init__(self, trigger: Trigger, replicas: int) -> None:
        self.trigger, self._replicas = trigger, replicas

    def begin(self, step: int) -> None:
        """Nobody has to be asked."""

    def resume(self, replica_steps: list[int], steps_in_round: int, lasted_s: float) -> None:
        """There is nothing that the step does not tell."""

    def due(self, step: int, steps_in_round: int) -> bool:
        # A run that goes on from a consolidated checkpoint has nothing to synchronise yet.
        return steps_in_round > 0 and self.trigger.due(step)

    def meet(self, step: int) -> bool:
        return True

    def replica_steps(self, step: int) -> list[int]:
        return [step] * self._replicas


class ByClock:
    """Replicas that each run by a clock meet when it is time, wherever each has got to.

    All messages are on the host: they are part of the step, but the device does not wait for them.

    Args:
        trigger: The clock.
        mesh: The mesh.
        min_round_steps: Inner steps of all replicas below which nothing is synchronised.

    Attributes:
        steps: Inner steps of each replica at the last meeting.
    """

    by_clock = True

    def __init__(self, trigger: TimeTrigger, mesh: Mesh, min_round_steps: int) -> None:
        self.trigger, self._mesh, self._min_round_steps = trigger, mesh, min_round_steps
        # Made here: hosts that cannot reach one another show before the training.
        self._host_group = mesh.worker_host_group
        mesh.peers.open_host_group()
        self.steps = [0] * mesh.replicas
        self.together = True
        self._steps_at_round = 0
        self.stop = False
        self.wants_stop = False

    def begin(self, step: int) -> None:
        gathered = self._mesh.peers.all_gather_on_host([float(step)], "beginning a round")
        self.steps = [int(row[0]) for row in gathered]
        self._steps_at_round = sum(self.steps)
        self.trigger.restart()

    def resume(self, replica_steps: list[int], steps_in_round: int, lasted_s: float) -> None:
        self.steps = list(replica_steps)
        self._steps_at_round = sum(replica_steps) - steps_in_round
        self.trigger.restart(lasted_s)

    @property
    def lasted_s(self) -> float:
        return self.trigger.lasted_s

    def due(self, step: int, steps_in_round: int) -> bool:
        """Whether this replica sets out now: its first rank's clock decides for all its ranks."""
        lockstep = self.trigger.lockstep(step)
        due = not lockstep and self._time_has_come(step)
        self.together = lockstep or due
        return due

    def _time_has_come(self, step: int) -> bool:
        if self.wants_stop:
            self.trigger.hurry()
        decision = torch.tensor([self.trigger.due(step)], dtype=torch.uint8)
        if self._mesh.replica_size > 1:
            first = self._mesh.replica * self._mesh.replica_size
            dist.broadcast(decision, src=first, group=self._host_group)
        return bool(decision)

    def meet(self, step: int) -> bool:
        gathered = self._mesh.peers.all_gather_on_host(
            [float(step), float(self._wants_stop_in_replica())], "meeting the other replicas"
        )
        self.trigger.restart()
        self.steps = [int(row[0]) for row in gathered]
        self.stop = any(row[1] > 0 for row in gathered)
        # A meeting that synchronises nothing does not end the round.
        long_enough = sum(self.steps) - self._steps_at_round >= self._min_round_steps
        if long_enough:
            self._steps_at_round = sum(self.steps)
        return long_enough

    def replica_steps(self, step: int) -> list[int]:
        since = step - self.steps[self._mesh.replica]
        return [steps + since for steps in self.steps]

    def _wants_stop_in_replica(self) -> bool:
        wants = torch.tensor([self.wants_stop], dtype=torch.uint8)
        if self._mesh.replica_size > 1:
            dist.all_reduce(wants, dist.ReduceOp.MAX, group=self._host_group)
        return bool(wants)
