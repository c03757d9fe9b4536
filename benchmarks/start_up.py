"""What it takes one rank to make its process groups, in worlds that are only pretended.

python -m benchmarks.start_up --worlds 64 256 1024

A group is made by a call of every rank of the world. Where a process is bound to its GPU, each of
these calls is a split of the world's communicator that waits for all ranks; unbound it is
arithmetic, and the members of a group make its communicator when they first use it. The backend
here sends nothing: what is counted are calls, groups and this process's own time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_edit.platform import cpu


@contextmanager
def pretended(world: int) -> Iterator[None]:
    """A world of which this process is rank 0."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    yield
    dist.destroy_process_group()


def measure(world: int, replicas: int, tensor_parallel: int, pipeline_parallel: int) -> str:
    """One line of the table."""
    from megatron_edit.backends.megatron.mesh import build_mesh, destroy_mesh

    make = dist.distributed_c10d._new_group_with_tag
    calls = 0

    def counting(*args: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        return make(*args, **keywords)

    with (
        pretended(world),
        mock.patch.object(dist.distributed_c10d, "_new_group_with_tag", counting),
    ):
        started_s = time.perf_counter()
        build_mesh(replicas, tensor_parallel, pipeline_parallel)
        seconds = time.perf_counter() - started_s
        own = len(dist.distributed_c10d._world.pg_map) - 1
        destroy_mesh()
    return f"{world:6} {calls:8} {own:10} {seconds:9.2f}"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--tensor-parallel", type=int, default=4)
    parser.add_argument("--pipeline-parallel", type=int, default=2)
    args = parser.parse_args()
    cpu.install()
    print(" ranks    calls own groups   seconds")
    for world in args.worlds:
        print(measure(world, args.replicas, args.tensor_parallel, args.pipeline_parallel))


if __name__ == "__main__":
    main()
