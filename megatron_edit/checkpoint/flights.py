"""Synchronisations under way, as tensors that a checkpoint can hold.

A delayed synchronisation is neither done nor to be done again when a checkpoint is written: its
averaged pseudo gradient will be applied a few steps later. Waiting for its collectives changes no
number, since nothing is applied.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_edit.backends.megatron.units import like_parameter
from megatron_edit.engine.outer_state import Flight, OuterState
from megatron_edit.engine.record import Decided, OpenRecord
from megatron_edit.engine.round import Round
from megatron_edit.engine.sync_engine import SyncEngine
from megatron_edit.replicas.peers import DONE


def describe_rounds(engine: SyncEngine) -> list[dict[str, Any]]:
    """Numbers of the rounds under way, for JSON; the same on every rank."""
    return [
        {
            "number": round_.number,
            "step": round_.record.step,
            "lands_at": round_.lands_at,
            "keeps_progress": round_.keeps_progress,
        }
        for round_ in engine.flying
    ]


def restore_rounds(engine: SyncEngine, descriptions: list[dict[str, Any]]) -> None:
    """Puts rounds under way with empty tensors, to be filled from a checkpoint."""
    replicas, units = engine.mesh.replicas, len(engine.unit_names)
    for description in descriptions:
        record = OpenRecord(description["number"], description["step"], units, engine.device)
        record.decided = Decided.zeros(replicas, units, engine.device)
        round_ = Round(
            number=description["number"],
            lands_at=description["lands_at"],
            keeps_progress=description["keeps_progress"],
            record=record,
            states=list(engine.outer),
            departed=len(engine.outer),
        )
        for state in engine.outer:
            payload = torch.zeros(state.unit.numel, device=engine.device)
            departure = torch.zeros_like(payload) if round_.keeps_progress else None
            round_.flights[state.unit.index] = Flight(payload, DONE, departure)
        engine.flying.append(round_)


def shared_tensors(engine: SyncEngine) -> dict[str, torch.Tensor]:
    """What all replicas agree on: averaged pseudo gradients and decisions, by name."""
    tensors: dict[str, torch.Tensor] = {}
    if engine.config.delay_round:
        tensors = {f"moved.{state.unit.name}": state.moved for state in engine.outer}
    for position, round_ in enumerate(engine.flying):
        assert round_.record.decided is not None, "a step ended before its round was decided"
        for table, values in round_.record.decided.tables().items():
            tensors[f"flight{position}.{table}"] = values
        for state in engine.outer:
            flight = round_.flights[state.unit.index]
            flight.pending.wait()
            flight.pending = DONE
            tensors |= _named(f"flight{position}.payload", state, flight.payload)
    return tensors


def replica_tensors(engine: SyncEngine) -> dict[str, torch.Tensor]:
    """What is a replica's own: where it was when a round departed, by name."""
    tensors: dict[str, torch.Tensor] = {}
    for position, round_ in enumerate(engine.flying):
        for state in engine.outer:
            departure = round_.flights[state.unit.index].departure
            if departure is not None:
                tensors |= _named(f"flight{position}.departure", state, departure)
    return tensors


def rank_tensors(engine: SyncEngine) -> dict[str, torch.Tensor]:
    """What is a rank's own: what its compression has lost so far, by unit."""
    tensors: dict[str, torch.Tensor] = {}
    for round_ in engine.flying:
        for flight in round_.flights.values():
            # It writes them until it is done.
            flight.pending.wait()
    for state in engine.outer:
        if state.compressor is not None:
            tensors[f"{state.unit.name}.error"] = state.compressor.error
            tensors[f"{state.unit.name}.sum_error"] = state.compressor.sum_error
    return tensors


def _named(prefix: str, state: OuterState, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    pairs = zip(state.unit.parameters.items(), state.unit.views(flat), strict=True)
    return {f"{prefix}.{name}": like_parameter(view, p) for (name, p), view in pairs}
