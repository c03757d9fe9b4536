"""For how long a replica has been unable to learn."""

from __future__ import annotations

from typing import NamedTuple

import torch


class NanRow(NamedTuple):
    """What :class:`NanRows` has counted on one replica, as of a log line."""

    steps: int
    lockstep_steps: int
    synchronisations: int


class NanRows:
    """Rows of steps of this replica whose loss or gradient was not finite.

    A replica that trains apart is left alone with them until the next synchronisation, which leaves
    it out and puts it on the anchor; what counts there is how many of them did not help.

    Args:
        limit: Steps of a row from which a replica is failing.
        delay_steps: Inner steps from the end of a round until its result is applied: a row that
            began meanwhile is not one that the synchronisation could have ended.
        device: Device of the counters.

    Attributes:
        steps: Steps of the row that the last step belongs to; 0-dim, as all counters.
        lockstep_steps: Steps of the longest row that a lockstep step belonged to since
            :meth:`restart`.
        synchronisations: How many in a row have found this replica failing.
    """

    def __init__(self, limit: int, delay_steps: int, device: torch.device) -> None:
        self._failing_from = limit + delay_steps
        self._zero = torch.zeros((), device=device)
        self.steps = self.lockstep_steps = self.synchronisations = self._zero

    def add(self, bad: torch.Tensor, lockstep: bool, synchronised: bool) -> None:
        """Adds a step.

        Args:
            bad: 0-dim bool, whether its loss or gradient was not finite.
            lockstep: Whether it averaged gradients over the replicas.
            synchronised: Whether it began with the result of a synchronisation.
        """
        if synchronised:
            found = self.steps >= self._failing_from
            self.synchronisations = torch.where(found, self.synchronisations + 1, self._zero)
        self.steps = torch.where(bad, self.steps + 1, self._zero)
        if lockstep:
            self.lockstep_steps = torch.maximum(self.lockstep_steps, self.steps)

    def restart(self) -> None:
        """Begins the steps of another log line."""
        self.lockstep_steps = self._zero
