"""What crosses replicas: one shard per round and a few numbers, and nothing in between; and what
gradients hold of a rank's memory."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from distributed import run_ranks
from harness import Case, CollectiveLog, start

from megatron_edit.backends.megatron.model import count_parameters
from megatron_edit.backends.megatron.units import local_of
from megatron_edit.engine.record import COUNTS

BASE = Case(layers=2, edit={"warmup_steps": 2, "sync_interval": 3})
# Steps 0 and 1 are synchronous; step 2 creates the anchor; steps 5 and 8 synchronise.
STEPS, WARMUP, ANCHOR, SYNCHRONISING = 10, (0, 1), 2, (5, 8)
CASES = {
    "R2 S2": replace(BASE, shard=2),
    "R3": replace(BASE, replicas=3),
    "R2 TP2": replace(BASE, tp=2),
    "R2 PP2 tied": replace(BASE, pp=2, tied=True),
    "R2 bf16": replace(BASE, edit={**BASE.edit, "gradient_dtype": "bf16"}),
}

# Where a shard is an exact part of the model: no copies and no unequal stages.
WHOLE_OVER_SHARD = {"R2 S2": 2, "R3": 1}


def _traffic(case: Case) -> dict[str, Any]:
    """Every step's collectives across replicas, and what the engine says it sent."""
    training = start(case)
    steps, said = [], []
    for _ in range(STEPS):
        with CollectiveLog() as log:
            training.step()
        steps.append([(e.name, e.sent) for e in log.across_replicas(training.mesh.replica_size)])
        said += [(record.step, record.sync_bytes) for record in training.engine.records()]
    with CollectiveLog() as log:
        training.evaluate(0)
    return {
        "steps": steps,
        "evaluation": log.across_replicas(training.mesh.replica_size),
        "said": dict(said),
        "shard": sum(p.numel() for p in training.optimizer._shards.values()),
        "counted": sum(
            local.numel()
            for unit in training.engine.units
            for local, counted in zip(unit.locals, unit.counted, strict=True)
            if counted
        ),
        "parameters": len(training.optimizer._shards),
        "own units": len(training.engine.units),
        "units": len(training.engine.unit_names),
    }


def on_the_wire(name: str, sent: int, replicas: int) -> float:
    """Bytes a rank sends in a ring collective into which it put ``sent`` bytes."""
    factor = {"allreduce_": 2 * (replicas - 1) / replicas, "_allgather_base_": replicas - 1}
    return factor[name] * sent


@pytest.mark.parametrize("name", CASES)
def test_a_round_sends_one_shard_and_a_few_numbers(name: str) -> None:
    case = CASES[name]
    whole = count_parameters(case.args())
    for rank in run_ranks(_traffic, case.world, case):
        if name in WHOLE_OVER_SHARD:
            assert rank["shard"] == whole // WHOLE_OVER_SHARD[name]
        payload = 2 * (case.replicas - 1) / case.replicas * 4 * rank["shard"]
        scalars = (case.replicas - 1) * 4 * (rank["units"] + COUNTS)
        for step, collectives in enumerate(rank["steps"]):
            sent = sum(on_the_wire(kind, size, case.replicas) for kind, size in collectives)
            if step in SYNCHRONISING:
                assert sent == pytest.approx(payload + scalars, rel=1e-2)
                assert sorted(kind for kind, _ in collectives) == (
                    ["_allgather_base_"] + ["allreduce_"] * rank["own units"]
                )
                assert rank["said"][step] == pytest.approx(payload, rel=1e-6)
            elif step in WARMUP:
                # Of several copies in a replica one crosses.
                averaged = payload * rank["counted"] / rank["shard"]
                if case.config.gradient_dtype == "bf16":
                    averaged /= 2
                assert sent == pytest.approx(averaged, rel=1e-6)
            elif step == ANCHOR:
                # A hash of every parameter.
                assert collectives == [("_allgather_base_", 8 * rank["parameters"])]
            else:
                assert collectives == []
        assert rank["evaluation"] == []
        assert set(rank["said"]) == set(SYNCHRONISING)


# --- Memory of gradients ---------------------------------------------------------------------


def live_bytes() -> int:
    """Bytes of all tensors of this process, gradients that only their parameter holds included."""
    storages = {}
    seen = [found for found in gc.get_objects() if isinstance(found, torch.Tensor)]
    for tensor in [*seen, *(t.grad for t in seen if t.is_leaf and t.grad is not None)]:
        storage = local_of(tensor.detach()).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _gradient_memory(case: Case) -> dict[str, Any]:
    """Bytes that a step adds to what lives before it: when each micro-batch begins, when the
    last has ended, and after the update."""
    training = start(case)
    # Moments, and what else a first step leaves for good.
    training.step()
    for shard in training.optimizer._shards.values():
        shard.grad = None
    training.begin()
    gc.collect()
    before, added = live_bytes(), []
    model, config = training.chunks[0].module, training.chunks[0].config
    finalize = config.finalize_model_grads_func

    def look(*_: Any) -> None:
        gc.collect()
        added.append(live_bytes() - before)

    def finalize_and_look(*args: Any, **kwargs: Any) -> None:
        finalize(*args, **kwargs)
        look()

    hook = model.register_forward_pre_hook(look)
    config.finalize_model_grads_func = finalize_and_look
    training.forward(training.engine.step)
    training.finish()
    hook.remove()
    config.finalize_model_grads_func = finalize
    gc.collect()
    units = training.engine.units
    whole = [sum(p.numel() for p in unit.parameters.values()) for unit in units]
    return {
        "added": added,
        "after": live_bytes() - before,
        "shard": 4 * sum(unit.numel for unit in units),
        "whole": 4 * sum(whole),
        "largest unit": 4 * max(whole),
    }


# Losses, buffers of collectives.
FEW = 20_000
MEMORY = Case(replicas=1, shard=2, micro_batches=3, edit={"warmup_steps": 0})


@pytest.mark.parametrize("warmup_steps", [0, 9])
def test_no_gradient_outlives_the_update(warmup_steps: int) -> None:
    edit = {"warmup_steps": warmup_steps, "sync_interval": 9}
    case = replace(MEMORY, replicas=2, shard=1, edit=edit)
    for rank in run_ranks(_gradient_memory, 2, case):
        assert rank["shard"] <= rank["added"][-1] < rank["shard"] + FEW
        assert rank["after"] < FEW < rank["shard"] / 10


def test_accumulated_gradients_are_sharded_like_the_parameters() -> None:
    for rank in run_ranks(_gradient_memory, 2, MEMORY):
        # FSDP2 holds the unit it reduced last until the next.
        most = rank["shard"] + rank["largest unit"] + FEW
        assert all(rank["shard"] < added < most for added in rank["added"][1:-1])
        assert rank["shard"] <= rank["added"][-1] < rank["shard"] + FEW
        assert most < rank["whole"]


def test_optim_grads_accumulates_whole_gradients() -> None:
    for rank in run_ranks(_gradient_memory, 2, replace(MEMORY, keep_gathered=True)):
        # Beside the parameters, which stay whole, too.
        assert all(added >= 2 * rank["whole"] for added in rank["added"][1:-1])
        assert rank["shard"] <= rank["added"][-1] < rank["shard"] + FEW
