"""One synchronisation under way."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megatron_edit.engine.backend import Unit
from megatron_edit.engine.outer_state import Decision, Flight, OuterState
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
        states: The units of this rank that it synchronises, in the order of their departure, which
            all replicas share.
        norms: On their way, with the counts of the round; None once it is decided.
        taken: Pseudo gradients as the round ended, by unit index, until they depart: with a delay
            of all units, otherwise of those that depart at once.
        flights: Units under way, by unit index.
        departed: How many units have departed.
        to_land: Those that have yet to land in the forward that has begun, by unit index.
    """

    number: int
    lands_at: int
    keeps_progress: bool
    record: OpenRecord
    states: list[OuterState]
    norms: Gathering | None = None
    taken: dict[int, torch.Tensor] = field(default_factory=dict)
    flights: dict[int, Flight] = field(default_factory=dict)
    departed: int = 0
    to_land: dict[int, OuterState] = field(default_factory=dict)

    def decision(self, replica: int, unit: int) -> Decision:
        """What was decided for one replica's part of a unit."""
        decided = self.record.decided
        assert decided is not None, "asked before it was decided"
        taking_part = decided.accepted[:, unit] > 0
        moves = (taking_part & (decided.norms[:, unit] > 0)).any()
        return Decision(decided.weights[replica, unit], taking_part[replica], moves)

    def awaited(self, unit: Unit) -> OuterState | None:
        """This rank's part of a unit, if it has yet to land."""
        state = self.to_land.get(unit.index)
        return state if state is not None and state.unit is unit else None
