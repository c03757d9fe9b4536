"""What a synchronisation computes and what it waits for are told apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from distributed import run_ranks
from harness import Case, start

from megatron_edit.engine.outer_state import OuterState
from megatron_edit.replicas import stopwatch
from megatron_edit.replicas.chains import Chains
from megatron_edit.replicas.compression import Compressor
from megatron_edit.replicas.encodings import BLOCK, Int8
from megatron_edit.replicas.mesh import build_mesh
from megatron_edit.replicas.peers import Gathering, _Work
from megatron_edit.replicas.stopwatch import Stopwatch

CPU = torch.device("cpu")


class Clock:
    """A clock that only the watched functions move."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def taking(self, seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
        """Has a function take some seconds."""

        def slow(*args: Any, **kwargs: Any) -> Any:
            self.now_s += seconds
            return function(*args, **kwargs)

        return slow


def _synchronise() -> tuple[float, float, int]:
    """Milliseconds exposed and computing of a synchronisation, and how many units it has."""
    clock = Clock()
    training = start(Case(layers=2, edit={"warmup_steps": 0, "sync_interval": 2}))
    for name, seconds in (("measure", 1), ("launch", 2), ("average", 4), ("land", 8)):
        setattr(OuterState, name, clock.taking(seconds, getattr(OuterState, name)))
    _Work.wait = clock.taking(1000, _Work.wait)  # type: ignore[method-assign]
    with patch.object(stopwatch, "time", clock):
        for _ in range(3):
            training.step()
    (record,) = training.engine.records()
    return record.exposed_ms, record.computing_ms, len(record.units)


def test_waiting_and_computing_are_told_apart() -> None:
    for exposed_ms, computing_ms, units in run_ranks(_synchronise, 2):
        assert computing_ms == 1e3 * units * (1 + 2 + 4 + 8)
        # The norms, and every unit.
        assert exposed_ms == 1e3 * (1 + units) * 1000


def _compress() -> float:
    """Milliseconds that a compressed all-reduce of two rows computes."""
    clock, watch = Clock(), Stopwatch(CPU)
    compressor = Compressor("int8", [2 * BLOCK], build_mesh(2).peers, Chains(CPU), CPU)
    yes = torch.tensor(True)
    with (
        patch.object(stopwatch, "time", clock),
        patch.object(Int8, "write", clock.taking(1, Int8.write)),
        patch.object(Int8, "read", clock.taking(10, Int8.read)),
        patch.object(Gathering, "wait", clock.taking(1000, Gathering.wait)),
    ):
        compressor.all_reduce(torch.ones(2 * BLOCK), yes, yes, "test", watch).wait()
    return watch.milliseconds()


def test_a_compression_computes_behind_without_its_waits() -> None:
    # Two rows and a sum encoded; two rows decoded for the sum, and two sums.
    assert run_ranks(_compress, 2) == [1e3 * (3 * 1 + 4 * 10)] * 2
