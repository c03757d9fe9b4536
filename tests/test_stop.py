"""Reasons to stop that need no other rank."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch

from megatron_edit.run.nan_rows import NanRow, NanRows
from megatron_edit.run.stop import nan_limit, rollback_limit

ARGS = Namespace(max_nan_iterations=3, edit=Namespace(max_consecutive_rollbacks=2))


@pytest.mark.parametrize(
    ("rows", "replica"), [([2, 2], None), ([0, 3], 1), ([4, 3], 0), ([9, 9, 9], 0)]
)
def test_the_nan_limit_in_lockstep_names_the_worst_replica(
    rows: list[int], replica: int | None
) -> None:
    stop = nan_limit([NanRow(0, steps, 0) for steps in rows], ARGS)
    if replica is None:
        assert stop is None
    else:
        assert stop is not None and stop.failed and not stop.save
        assert f"replica {replica} was not finite for {max(rows)} iterations" in stop.reason


@pytest.mark.parametrize(
    ("steps", "synchronisations", "reason"),
    [
        ([0, 50], [0, 1], None),
        ([2, 50], [0, 1], None),
        ([3, 4], [0, 0], "of every replica was not finite for 3 iterations in a row"),
        ([0, 3], [0, 2], "of replica 1 was not finite for 3 iterations in a row"),
        # It failed again and again, and not just now.
        ([0, 2], [0, 9], None),
        ([3], [0], "of every replica"),
    ],
)
def test_the_nan_limit_of_replicas_that_train_apart(
    steps: list[int], synchronisations: list[int], reason: str | None
) -> None:
    rows = [NanRow(s, 0, n) for s, n in zip(steps, synchronisations, strict=True)]
    stop = nan_limit(rows, ARGS)
    if reason is None:
        assert stop is None
    else:
        assert stop is not None and stop.failed and stop.save and stop.rolls_back
        assert reason in stop.reason


def count(bad: str, lockstep: int = 0, every: int = 3, delay_steps: int = 0) -> NanRow:
    """Counts steps.

    Args:
        bad: A letter a step, x for one that was not finite.
        lockstep: How many of them were in lockstep, from the first on.
        every: A synchronisation's result begins each step whose number is a multiple of this.
        delay_steps: For how long it was under way.
    """
    rows = NanRows(2, delay_steps, torch.device("cpu"))
    for step, letter in enumerate(bad):
        landed = step > lockstep and step % every == 0
        rows.add(torch.tensor(letter == "x"), step < lockstep, landed)
    return NanRow(*(int(n) for n in (rows.steps, rows.lockstep_steps, rows.synchronisations)))


def test_rows_of_steps_that_are_not_finite() -> None:
    assert count("..xx.x") == NanRow(1, 0, 0)
    assert count("xxx..xx", lockstep=3) == NanRow(2, 3, 0)
    assert count("xxxx", lockstep=2) == NanRow(4, 2, 1)
    # Two synchronisations found it failing; the one after step 12 found that it had recovered.
    assert count("....xxxxxx") == NanRow(6, 0, 2)
    assert count("....xx.xx.xx") == NanRow(2, 0, 2)
    assert count("....xxxxx....") == NanRow(0, 0, 0)
    # With a delay of 2 steps the first of them was measured before it failed.
    assert count("....xxxxxx", delay_steps=2) == NanRow(6, 0, 1)


def test_the_longest_lockstep_row_is_that_of_one_log_line() -> None:
    rows = NanRows(2, 0, torch.device("cpu"))
    for letter in "xx.":
        rows.add(torch.tensor(letter == "x"), lockstep=True, synchronised=False)
    assert int(rows.lockstep_steps) == 2
    rows.restart()
    rows.add(torch.tensor(True), lockstep=True, synchronised=False)
    assert int(rows.lockstep_steps) == 1


def test_the_rollback_limit_names_round_unit_and_norms() -> None:
    def record(rollbacks: list[int]) -> Any:
        return Namespace(
            round=7,
            units=["embedding", "layers.0"],
            norms=[[1.0, float("nan")], [2.0, float("inf")]],
            consecutive_rollbacks=rollbacks,
        )

    assert rollback_limit([], 2) is None
    assert rollback_limit([record([1, 1])], 2) is None
    stop = rollback_limit([record([0, 0]), record([1, 2])], 2)
    assert stop is not None and stop.failed and stop.save
    assert "round 7" in stop.reason and "unit layers.0" in stop.reason
    assert "(norms nan, inf) in 2 synchronisations" in stop.reason
