"""A step whose gradients are not finite is skipped, and gains its replica no weight."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from distributed import run_ranks
from harness import Case, mean_losses, run_engine, run_reference
from test_methods import preset
from torch import Tensor

from megatron_edit.engine.record import SyncRecord

# Warm-up 3, tau 4. By round: replica 1 skips all its steps, replica 0 half of them, everybody all.
SKIPPED = {1: [*range(7, 11), *range(15, 19)], 0: [11, 13, *range(15, 19)], 2: range(15, 19)}
STEPS = {0: [4.0, 4.0, 4.0], 1: [4.0, 0.0, 4.0], 2: [2.0, 4.0, 4.0], 3: [0.0, 0.0, 0.0]}
SMALL = Case(layers=2)
CASES = {
    "edit R3": replace(SMALL, replicas=3),
    "edit, delay 2": replace(SMALL, edit={"delay_steps": 2}),
    "diloco": replace(SMALL, edit=preset("diloco")),
    "co2": replace(SMALL, edit=preset("co2")),
}


def spoiling(micro_batches: int) -> Callable[[Any], None]:
    """Returns a preparation of models by which each replica skips its steps."""
    # All replicas in one process, or one in each.
    models = itertools.count()

    def prepare(model: Any) -> None:
        skipped = SKIPPED[next(models) + dist.get_rank()]
        forwards = 0

        def count(*_: object) -> None:
            nonlocal forwards
            forwards += 1

        def spoil(gradient: Tensor) -> Tensor:
            step = (forwards - 1) // micro_batches
            return gradient * float("nan") if step in skipped else gradient

        model.register_forward_pre_hook(count)
        next(model.parameters()).register_hook(spoil)

    return prepare


@pytest.mark.parametrize("name", CASES)
def test_skipped_steps_train_like_the_reference(name: str) -> None:
    case = CASES[name]
    prepare = spoiling(case.micro_batches)
    weights, losses, anchor = run_ranks(run_reference, 1, case, prepare)[0]
    results = run_ranks(run_engine, case.world, case, weights, anchor, prepare)
    np.testing.assert_allclose(mean_losses(results), losses, rtol=0, atol=1e-5)
    assert max(result["distance"] for result in results) < 5e-5
    for result in results:
        check(case, result["records"])


def check(case: Case, records: list[SyncRecord]) -> None:
    """Weights of the rounds in which somebody skipped something."""
    for number, steps in STEPS.items():
        assert records[number].steps == steps[: case.replicas]
        assert records[number].anomalies == 0
        assert not any(records[number].consecutive_rollbacks)
    if case.config.delay_round:
        # The first result arrives a round late: what replica 1 did before its skips is not in yet.
        return
    assert set(records[1].weights[1]) == {0.0}
    others = [weights for i, weights in enumerate(records[1].weights) if i != 1]
    assert [sum(unit) for unit in zip(*others, strict=True)] == pytest.approx([1.0] * 4)
    # Half the norm would weigh e times as much.
    for own, peer in zip(records[2].weights[0], records[2].weights[1], strict=True):
        assert own < 1.3 * peer
    # Nobody moved, and momentum alone moves no anchor.
    assert records[3].averaged_norms == [0.0] * 4
    assert records[3].momentum_norm == records[2].momentum_norm
