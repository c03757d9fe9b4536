"""One synchronisation under way."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megatron_edit.engine.outer_state import Decision, Flight
from megatron_edit.engine.record import OpenRecord
from megatron_edit.replicas.peers import Gathering


@dataclass
class Round:
    """A synchronisation from the exchange of norms until its last unit has landed.

    Attributes:
        number: Counted from 0.
        lands_at: Step in whose first forward the units land.
        keeps_progress: Whether local progress between departure and landing is kept.
        record: Its numbers, verdicts and weights among them.
        norms: On their way, with the counts of the round; None once it is decided.
        taken: With a delay the pseudo gradients as the round ended, by unit index, until they
            depart.
        flights: Units under way, by unit index.
        departed: How many units have departed, in the order that all replicas share.
    """

    number: int
    lands_at: int
    keeps_progress: bool
    record: OpenRecord
    norms: Gathering | None = None
    taken: dict[int, torch.Tensor] = field(default_factory=dict)
    flights: dict[int, Flight] = field(default_factory=dict)
    departed: int = 0

    def decision(self, replica: int, unit: int) -> Decision:
        """What was decided for one replica's part of a unit."""
        _, weights, accepted, *_ = self.record.decision
        taking_part = accepted[:, unit] > 0
        return Decision(weights[replica, unit], taking_part[replica], taking_part.any())
