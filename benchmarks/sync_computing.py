"""What a synchronisation computes, as a share of a local step.

    python -m benchmarks.sync_computing [--beside CHECKOUT]

Two replicas of one rank each, on a processor of its own. Every method has a model of its own in the
same two processes, and they take turns, a round each; so does another checkout of this repository,
in two more processes. Counted is processor time: that of the threads that compute, without their
waits. A local step is one of the same model that never synchronises.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
INTERVAL = 6
METHODS: dict[str, dict[str, Any]] = {
    "`edit`": {},
    "`edit`, delay 2": {"delay_steps": 2},
    "`edit`, int8": {"compression": "int8"},
    "`edit`, delay 2, int8": {"delay_steps": 2, "compression": "int8"},
}


class Watch:
    """Adds up the processor time that threads spend in some methods."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = threading.local()

    def watch(self, owner: type, *names: str) -> None:
        """Has calls of methods counted, those within one another once."""
        for name in names:
            setattr(owner, name, self._watched(getattr(owner, name)))

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "yes", False):
                return function(*args, **kwargs)
            self._inside.yes, started_s = True, time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._inside.yes = False
                self.seconds += time.thread_time() - started_s

        return watched


def serve() -> None:
    """One rank: runs a round of each method that is asked for, a line each."""
    import torch
    import torch.distributed as dist

    from benchmarks import local_step
    from megatron_edit.config.edit_config import EditConfig
    from megatron_edit.engine.sync_engine import SyncEngine
    from megatron_edit.platform import cpu
    from megatron_edit.replicas.compression import _Stages

    answers, sys.stdout = sys.stdout, sys.stderr
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(os.environ["RANK"])]})
    torch.set_num_threads(1)
    cpu.install()
    dist.init_process_group("gloo")
    from megatron_edit.backends.megatron.mesh import build_mesh

    watch = Watch()
    watch.watch(SyncEngine, "_exchange_norms", "_decide", "_depart_until", "_land")
    watch.watch(_Stages, "send_parts", "send_sum", "receive_sums")
    mesh = build_mesh(2)

    def step_of(interval: int, **settings: Any) -> Callable[[], None]:
        config = EditConfig(replicas=2, warmup_steps=0, sync_interval=interval, **settings)
        return local_step.our_step(mesh, config)[0]

    def processor_s(step: Callable[[], None]) -> float:
        dist.barrier()
        started_s = time.process_time()
        for _ in range(INTERVAL):
            step()
        return time.process_time() - started_s

    steps = {name: step_of(INTERVAL, **settings) for name, settings in METHODS.items()}
    alone = step_of(1 << 30)
    for step in (alone, *steps.values(), *steps.values()):
        processor_s(step)
    for line in sys.stdin:
        watch.seconds = 0.0
        processor_s(steps[line.strip()])
        synchronisation_s, local_s = watch.seconds, processor_s(alone) / INTERVAL
        print(json.dumps([synchronisation_s, local_s]), file=answers, flush=True)
    # The other rank may still be at it: no end together.
    os._exit(0)


class Checkout:
    """The two ranks of a checkout.

    Args:
        folder: The checkout.
    """

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        common = {"PYTHONPATH": str(folder), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self._ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--serve"],
                cwd=folder,
                env={**os.environ, **common, **place, "RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(2)
        ]

    def round(self, method: str) -> list[tuple[float, float]]:
        """Seconds of a synchronisation and of a local step, of each rank."""
        for rank in self._ranks:
            assert rank.stdin is not None
            print(method, file=rank.stdin, flush=True)
        answers = [rank.stdout.readline() for rank in self._ranks if rank.stdout is not None]
        return [tuple(json.loads(answer)) for answer in answers]

    def end(self) -> None:
        """Has both ranks end."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()
            rank.wait(timeout=60)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--beside", type=Path, help="another checkout of this repository")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve()
    folders = {"this": HERE} | ({"beside": args.beside.resolve()} if args.beside else {})
    checkouts = {name: Checkout(folder) for name, folder in folders.items()}
    shares: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for number in range(args.rounds):
        for method in METHODS:
            for name in sorted(checkouts, reverse=number % 2 == 0):
                shares.setdefault((method, name), []).extend(checkouts[name].round(method))
    for checkout in checkouts.values():
        checkout.end()
    print(
        "| method | checkout | computed, ms | of a local step | quartiles |\n|---|---|---|---|---|"
    )
    for method, name in sorted(shares):
        pairs = shares[method, name]
        low, share, high = statistics.quantiles((sync / local for sync, local in pairs), n=4)
        computed_ms = 1e3 * statistics.median(sync for sync, _ in pairs)
        print(f"| {method} | {name} | {computed_ms:.0f} | {share:.2f} | {low:.2f} to {high:.2f} |")


if __name__ == "__main__":
    main()
