"""Starts gloo ranks of which some do not come back."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any

from distributed import _FORK, _rank_main, free_port


def run_dying_ranks(
    target: Callable[..., Any], world: int, lost: set[int], *args: Any, timeout_s: float = 60
) -> tuple[dict[int, Any], dict[int, int | None]]:
    """Runs ``target(*args)`` on forked gloo ranks.

    Args:
        target: As for :func:`distributed.run_ranks`.
        world: Number of ranks.
        lost: Ranks that are to die, or to hang, without a result.
        args: Passed on to every rank.
        timeout_s: Seconds after which all ranks are killed and the test fails.

    Returns:
        Results of the other ranks, and exit codes (minus the signal) of those lost; None for one
        that hung until it was killed here.
    """
    results = _FORK.Queue()
    port = free_port()
    ranks = [
        _FORK.Process(target=_rank_main, args=(rank, world, port, results, target, args))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + timeout_s
    outcome: dict[int, Any] = {}
    try:
        while len(outcome) < world - len(lost):
            try:
                rank, succeeded, value = results.get(timeout=max(0.1, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"only ranks {sorted(outcome)} ended") from None
            assert succeeded, f"rank {rank} failed:\n{value}"
            assert rank not in lost, f"rank {rank} came back with {value}"
            outcome[rank] = value
        if not outcome:
            for rank in lost:
                ranks[rank].join(max(0.1, deadline - time.monotonic()))
        return outcome, {rank: ranks[rank].exitcode for rank in lost}
    finally:
        for process in ranks:
            process.kill()
            process.join()
