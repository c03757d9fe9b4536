"""The tensors of a run by their names in a checkpoint.

Parameters and moments are kept per replica, for in the middle of a round they differ; anchor and
outer momentum once, for they do not. Sharded tensors are DTensors, named as in the whole model.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel

from megatron_edit.backends.megatron.optimizer import EDiTDistributedOptimizer
from megatron_edit.backends.megatron.units import like_parameter
from megatron_edit.checkpoint import flights
from megatron_edit.engine.sync_engine import SyncEngine
from megatron_edit.replicas.mesh import Mesh


def by_name(prefix: str, tensors: dict[str, Any], mesh: Mesh) -> dict[str, torch.Tensor]:
    """Names tensors in the checkpoint: a part that a tensor-parallel rank holds bears its rank."""
    part = f"@tp{mesh.tensor_rank}of{mesh.tensor_parallel}" if mesh.tensor_parallel > 1 else ""
    return {f"{prefix}.{name}{part}": tensor.detach() for name, tensor in tensors.items()}


def replica_tensors(optimizer: EDiTDistributedOptimizer, mesh: Mesh) -> dict[str, torch.Tensor]:
    """Parameters, moments and counters of this replica."""
    prefix = f"replica{mesh.replica}"
    counters = {
        f"{prefix}.skipped_steps": optimizer.skipped_steps,
        f"{prefix}.steps_in_round": torch.tensor(optimizer.engine.steps_in_round),
        f"{prefix}.skipped_in_round": optimizer.engine.skipped_in_round,
        f"{prefix}.round_seconds": torch.tensor(optimizer.engine.rendezvous.lasted_s),
    }
    model = by_name(f"{prefix}.model", optimizer.named_parameters(), mesh)
    moments = by_name(f"{prefix}.optimizer", optimizer.named_moments(), mesh)
    departures = by_name(prefix, flights.replica_tensors(optimizer.engine), mesh)
    return model | moments | departures | counters


def steps_in_round(replicas: int) -> dict[str, torch.Tensor]:
    """What :func:`replica_tensors` calls the steps of the open round, of every replica; zeros."""
    return {f"replica{replica}.steps_in_round": torch.tensor(0) for replica in range(replicas)}


def rank_tensors(engine: SyncEngine, rank: int) -> dict[str, torch.Tensor]:
    """What each rank's compression owes."""
    errors = flights.rank_tensors(engine)
    return {f"compression.rank{rank}.{name}": tensor for name, tensor in errors.items()}


def shared_tensors(optimizer: EDiTDistributedOptimizer, mesh: Mesh) -> dict[str, torch.Tensor]:
    """What all replicas agree on: anchor, outer momentum, detector, what is under way."""
    engine = optimizer.engine
    anchors: dict[str, torch.Tensor] = {}
    momenta: dict[str, torch.Tensor] = {}
    for state in engine.outer:
        for found, flat in ((anchors, state.anchor), (momenta, state.momentum)):
            if flat is None:
                continue
            views = state.unit.views(flat)
            for (name, parameter), view in zip(state.unit.parameters.items(), views, strict=True):
                found[name] = like_parameter(view, parameter)
    detector = {f"detector.{k}": v for k, v in engine.detector.state_dict().items()}
    under_way = by_name("shared", flights.shared_tensors(engine), mesh)
    outer = by_name("anchor", anchors, mesh) | by_name("outer_momentum", momenta, mesh)
    return outer | detector | under_way


def rng_tensors(rank: int) -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
    states |= {f"tracker.{name}": state for name, state in tracker.items()}
    return {f"rng.rank{rank}.{name}": state.clone() for name, state in states.items()}


def set_rng(rank: int, tensors: dict[str, torch.Tensor]) -> None:
    prefix = f"rng.rank{rank}."
    states = {name.removeprefix(prefix): state for name, state in tensors.items()}
    tracker = {
        name.removeprefix("tracker."): state
        for name, state in states.items()
        if name.startswith("tracker.")
    }
    tensor_parallel.get_cuda_rng_tracker().set_states(tracker)
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    torch.set_rng_state(states["cpu"])
