"""Whether a delayed synchronisation hides an all-reduce of two seconds.

    python -m benchmarks.hidden_sync

Two replicas, each one rank with its model twice: with a synchronisation every 32 steps that lands
12 steps later, over a link that is made to take 2 s for the whole model, and without any. The two
take turns, 32 steps each, so that whatever else the machine does meets both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

from benchmarks import local_step
from megatron_edit.config.edit_config import EditConfig
from megatron_edit.platform import cpu
from megatron_edit.replicas.peers import PeerGroup, Pending

INTERVAL, DELAY, LINK_S = 32, 12, 2.0


class SlowLink:
    """Makes the all-reduces of a peer group take their time, one after the other.

    Args:
        sync: The group.
        numel: Elements that the link carries in ``LINK_S``.
    """

    def __init__(self, sync: PeerGroup, numel: int) -> None:
        self._numel, self._free_s = numel, 0.0
        self._all_reduce = sync.all_reduce
        sync.all_reduce = self.all_reduce  # type: ignore[method-assign]

    def all_reduce(self, flat: torch.Tensor, phase: str) -> Pending:
        """Starts an all-reduce that ends when the link has carried it."""
        self._free_s = max(self._free_s, time.perf_counter())
        self._free_s += LINK_S * flat.numel() / self._numel
        return _Carried(self._all_reduce(flat, phase), self._free_s)


class _Carried:
    def __init__(self, pending: Pending, ready_s: float) -> None:
        self._pending, self._ready_s = pending, ready_s

    def wait(self) -> None:
        self._pending.wait()
        time.sleep(max(0.0, self._ready_s - time.perf_counter()))


def measure(rank: int, world: int, port: int, blocks: int, steps: int, results: Any) -> None:
    """One replica; the first hands in the seconds of each block of both, and what was exposed."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    cpu.install()
    dist.init_process_group("gloo", rank=rank, world_size=world)
    from megatron_edit.backends.megatron.mesh import build_mesh

    mesh = build_mesh(world)
    delayed, engine = local_step.our_step(
        mesh,
        EditConfig(replicas=world, warmup_steps=0, sync_interval=INTERVAL, delay_steps=DELAY),
    )
    alone, _ = local_step.our_step(
        mesh, EditConfig(replicas=world, warmup_steps=0, sync_interval=1 << 30)
    )
    SlowLink(mesh.peers, sum(unit.numel for unit in engine.units))
    # The first synchronisation departs in the second block.
    for step in (delayed, alone, delayed, alone):
        block_s(step, steps)
    engine.records()
    times = []
    for block in range(blocks):
        order = (delayed, alone) if block % 2 == 0 else (alone, delayed)
        pair = {step: block_s(step, steps) for step in order}
        times.append((pair[delayed], pair[alone]))
    exposed_ms = [record.exposed_ms for record in engine.records()]
    if rank == 0:
        results.put((times, exposed_ms))
    dist.destroy_process_group()


def block_s(step: Callable[[], None], steps: int) -> float:
    """Seconds of some steps, from one barrier to the end."""
    dist.barrier()
    started_s = time.perf_counter()
    for _ in range(steps):
        step()
    return time.perf_counter() - started_s


def main() -> None:
    """Prints the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=10)
    args = parser.parse_args()
    times, exposed_ms = local_step.ranks(measure, 2, args.blocks, INTERVAL)
    low, ratio, high = statistics.quantiles((ours / bare for ours, bare in times), n=4)
    ours, bare = (1e3 * statistics.median(column) / INTERVAL for column in zip(*times, strict=True))
    print(
        f"{args.blocks} blocks of {INTERVAL} steps, an all-reduce of {LINK_S:g} s, delay {DELAY}\n"
        f"step with it {ours:.1f} ms, without any synchronisation {bare:.1f} ms; ratio of the "
        f"blocks {ratio:.3f} (quartiles {low:.3f} to {high:.3f})\n"
        f"exposed per synchronisation: mean {statistics.fmean(exposed_ms):.1f} ms, greatest "
        f"{max(exposed_ms):.1f} ms"
    )


if __name__ == "__main__":
    main()
