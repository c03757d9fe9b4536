"""How replicas meet when each runs by its own clock (A-EDiT)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_edit.engine.trigger import TimeTrigger
from megatron_edit.replicas.mesh import Mesh


class Rendezvous:
    """Decides when this replica sets out for a meeting, and what all replicas know after one.

    All messages are on the host: they are part of the step, but the device does not wait for them.

    Args:
        trigger: The clock.
        mesh: The mesh.
        min_round_steps: Inner steps of all replicas below which nothing is synchronised.

    Attributes:
        steps: Inner steps of each replica at the last meeting.
        stop: Whether at the last meeting some replica wanted to stop.
        wants_stop: Whether this rank wants to stop.
    """

    def __init__(self, trigger: TimeTrigger, mesh: Mesh, min_round_steps: int) -> None:
        self._trigger, self._mesh, self._min_round_steps = trigger, mesh, min_round_steps
        # Made here: hosts that cannot reach one another show before the training.
        self._host_group = mesh.worker_host_group
        mesh.peers.open_host_group()
        self.steps = [0] * mesh.replicas
        self._steps_at_round = 0
        self.stop = False
        self.wants_stop = False

    def begin(self, step: int) -> None:
        """Begins the first round of a run: all replicas leave the synchronous phase, or resume."""
        gathered = self._mesh.peers.all_gather_on_host([float(step)], "beginning the first round")
        self.steps = [int(row[0]) for row in gathered]
        self._steps_at_round = sum(self.steps)
        self._trigger.restart()

    def due(self, step: int) -> bool:
        """Whether this replica sets out now: its first rank's clock decides for all its ranks."""
        if self.wants_stop:
            self._trigger.hurry()
        decision = torch.tensor([self._trigger.due(step)], dtype=torch.uint8)
        if self._mesh.replica_size > 1:
            first = self._mesh.replica * self._mesh.replica_size
            dist.broadcast(decision, src=first, group=self._host_group)
        return bool(decision)

    def meet(self, step: int) -> bool:
        """Waits for the other replicas; returns whether the round is long enough to count."""
        gathered = self._mesh.peers.all_gather_on_host(
            [float(step), float(self._wants_stop_in_replica())], "meeting the other replicas"
        )
        self._trigger.restart()
        self.steps = [int(row[0]) for row in gathered]
        self.stop = any(row[1] > 0 for row in gathered)
        # A meeting that synchronises nothing does not end the round.
        long_enough = sum(self.steps) - self._steps_at_round >= self._min_round_steps
        if long_enough:
            self._steps_at_round = sum(self.steps)
        return long_enough

    def _wants_stop_in_replica(self) -> bool:
        wants = torch.tensor([self.wants_stop], dtype=torch.uint8)
        if self._mesh.replica_size > 1:
            dist.all_reduce(wants, dist.ReduceOp.MAX, group=self._host_group)
        return bool(wants)
