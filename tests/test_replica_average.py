"""The average of gradients over the replicas: what crosses when, in which order and type."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from distributed import run_ranks
from harness import Case, digest, loss_of, rank_batches, start

from megatron_edit.backends.megatron.units import local_of

BASE = Case(layers=2, clip_grad=0.0, edit={"warmup_steps": 9, "sync_interval": 9})
SUMMED = "parameters that are summed in a replica"
LAYOUTS = {
    "R2": BASE,
    "S2": replace(BASE, shard=2),
    "S2 optim_grads": replace(BASE, shard=2, keep_gathered=True, micro_batches=3),
    "tied": replace(BASE, tied=True, recompute=True),
    "TP2 SP": replace(BASE, tp=2),
    "PP2 tied": replace(BASE, pp=2, tied=True),
    "PP2 interleaved": replace(BASE, layers=4, pp=2, vpp=2, micro_batches=4),
}


def _starts(case: Case) -> dict[str, Any]:
    """What crossed before the last backward had ended and after it, in two steps."""
    training = start(case)
    config = training.chunks[0].config
    finalize, all_reduce = config.finalize_model_grads_func, training.mesh.peers.all_reduce
    started: list[str] = []

    def note(flat: torch.Tensor, phase: str) -> Any:
        started.append(phase.removeprefix("averaging the gradients of "))
        return all_reduce(flat, phase)

    def finalize_and_note(*args: Any, **kwargs: Any) -> None:
        started.append("end of backward")
        finalize(*args, **kwargs)

    training.mesh.peers.all_reduce = note  # type: ignore[method-assign]
    config.finalize_model_grads_func = finalize_and_note
    for _ in range(2):
        training.step()
    return {"started": started, "units": [unit.name for unit in training.engine.units]}


@pytest.mark.parametrize("name", LAYOUTS)
def test_units_cross_behind_the_backward_last_layers_first(name: str) -> None:
    case = LAYOUTS[name]
    results = run_ranks(_starts, case.world, case)
    for rank, result in enumerate(results):
        early, late = result["units"][::-1], []
        if case.tp > 1 and rank % case.tp == 0:
            late = [SUMMED]
        if case.pp > 1 and case.tied and rank % case.pp == 0:
            early.remove("embedding")
            late = [SUMMED]
        assert result["started"] == 2 * [*early, "end of backward", *late]


def _train(case: Case) -> tuple[list[float], list[str]]:
    """Losses, and a hash of the parameters after each step."""
    training = start(case)
    losses, hashes = [], []
    for _ in range(4):
        losses.append(training.step())
        shards = [local_of(p) for p in training.optimizer.named_parameters().values()]
        hashes.append(digest(shards))
    return losses, hashes


@pytest.mark.parametrize("name", ["R2", "S2"])
def test_gradients_cross_in_bf16(name: str) -> None:
    case = LAYOUTS[name]
    in_bf16 = replace(case, edit={**case.edit, "gradient_dtype": "bf16"})
    exact = run_ranks(_train, case.world, case)
    rounded = run_ranks(_train, case.world, in_bf16)
    size = case.world // case.replicas
    for rank in range(case.world):
        assert rounded[rank][1] == rounded[rank % size][1]
        assert rounded[rank][1][0] != exact[rank][1][0]
        assert rounded[rank][0] == pytest.approx(exact[rank][0], abs=1e-2)


def _backward_twice(case: Case) -> str:
    """Micro-batches without ``no_sync``."""
    training = start(case)
    training.begin()
    batch = rank_batches(case, 0, training.mesh.replica, 0)[0]
    loss_of(training.chunks[0], batch).mean().backward()
    try:
        loss_of(training.chunks[0], batch).mean().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_gradient_that_comes_after_its_average_began_is_refused() -> None:
    for message in run_ranks(_backward_twice, 2, BASE):
        assert "a gradient of head was made after its average over the replicas began" in message
        assert "no_sync" in message


def _skip_a_layer(case: Case) -> list[str]:
    """One step in which replica 1 does not run its last layer."""
    training = start(case)
    if training.mesh.replica == 1:
        layers = training.chunks[0].module.decoder.layers
        layers[-1].forward = lambda hidden_states, **_: (hidden_states, None)
    training.step()
    return [digest(unit.locals) for unit in training.engine.units]


def test_a_layer_that_one_replica_skips_is_averaged_all_the_same() -> None:
    first, second = run_ranks(_skip_a_layer, 2, BASE)
    assert first == second
