"""Process groups: one call of all ranks for all groups of a kind."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist


def own_group(
    partition: list[list[int]],
    timeout: timedelta,
    description: str,
    backend: str | None = None,
    options: Any | None = None,
) -> dist.ProcessGroup:
    """Makes the groups of a partition of the world; to be called by all ranks alike.

    Args:
        partition: Global ranks of each group; every rank of the world is in one of them.
        timeout: Bound of every wait in these groups.
        description: What the groups are for; NCCL's watchdog and flight recorder print it.
        backend: None for that of the default group.
        options: Of that backend.

    Returns:
        The group of this rank.
    """
    if backend is None and dist.group.WORLD.bound_device_id is not None:
        # Every new group would be a split of the world's communicator by all of its ranks.
        own = dist.split_group(
            split_ranks=partition, timeout=timeout, pg_options=options, group_desc=description
        )
    else:
        own, _ = dist.new_subgroups_by_enumeration(
            partition,
            timeout=timeout,
            backend=backend,
            pg_options=options,
            group_desc=description,
        )
    return own


def host_group(
    partition: list[list[int]], timeout: timedelta, description: str, like: dist.ProcessGroup
) -> dist.ProcessGroup:
    """The group of this rank for messages on the host (gloo).

    Args:
        partition: As in :func:`own_group`.
        timeout: As in :func:`own_group`.
        description: As in :func:`own_group`.
        like: A group of the same ranks, which serves if it is gloo already.
    """
    if dist.get_backend(like) == dist.Backend.GLOO:
        return like
    return own_group(partition, timeout, f"{description}, on the host", dist.Backend.GLOO)
