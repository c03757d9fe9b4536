"""Reasons to stop that need no other rank."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from megatron_edit.run.stop import nan_limit, rollback_limit


@pytest.mark.parametrize(
    ("rows", "replica"), [([2, 2], None), ([0, 3], 1), ([4, 3], 0), ([9, 9, 9], 0)]
)
def test_the_nan_limit_names_the_worst_replica(rows: list[int], replica: int | None) -> None:
    stop = nan_limit(Namespace(most_nans_in_row=rows), 3)  # type: ignore[arg-type]
    if replica is None:
        assert stop is None
    else:
        assert stop is not None and stop.failed and not stop.save
        assert f"replica {replica} was not finite for {max(rows)} iterations" in stop.reason


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
