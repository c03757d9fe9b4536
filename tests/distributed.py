"""Starts gloo ranks for tests: torch and megatron-core are imported once, then ranks are forked."""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_edit.platform import cpu

_FORK = mp.get_context("fork")
# Imports megatron-core here and not once more in every rank.
cpu.install()


def free_port() -> int:
    """A TCP port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank_main(
    rank: int,
    world: int,
    port: int,
    results: Any,
    target: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    parent = os.getppid()
    try:
        cpu.install()
        dist.init_process_group("gloo", rank=rank, world_size=world)
        results.put((rank, True, target(*args)))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
    finally:
        results.close()
        results.join_thread()
        # Rank 0 serves the store that slower ranks still build groups with: no rank leaves before
        # the test has all results and kills them.
        while os.getppid() == parent:
            time.sleep(0.05)
        os._exit(0)


def run_ranks(
    target: Callable[..., Any], world: int, *args: Any, timeout_s: float = 120
) -> list[Any]:
    """Runs ``target(*args)`` on ``world`` forked gloo ranks.

    Args:
        target: Runs with the default process group up. Its result is pickled; tensors must be
            turned into lists or NumPy arrays.
        world: Number of ranks.
        args: Passed on to every rank.
        timeout_s: Seconds after which all ranks are killed and the test fails.

    Returns:
        The ranks' results, by rank.

    Raises:
        AssertionError: A rank failed; the message is its traceback.
        TimeoutError: The ranks did not end in time.
    """
    results = _FORK.Queue()
    port = free_port()
    ranks = [
        _FORK.Process(target=_rank_main, args=(rank, world, port, results, target, args))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    try:
        return _collect(results, world, time.monotonic() + timeout_s)
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _collect(results: Any, world: int, deadline: float) -> list[Any]:
    outcome: dict[int, Any] = {}
    while len(outcome) < world:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"ranks {sorted(set(range(world)) - set(outcome))} did not end")
        try:
            rank, succeeded, value = results.get(timeout=left)
        except mp.queues.Empty:  # type: ignore[attr-defined]
            continue
        assert succeeded, f"rank {rank} failed:\n{value}"
        outcome[rank] = value
    return [outcome[rank] for rank in range(world)]
