"""Process groups: one call of all ranks for all groups of a kind."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist


def own_group(
    partition: list[list[int]],
    timeout: timedelta,
    description: str,
    backend: str | None = None,
) -> dist.ProcessGroup:
    """Makes the groups of a partition of the world; to be called by all ranks alike.

    Args:
        partition: Global ranks of each group; every rank of the world is in one of them.
        timeout: Bound of every wait in these groups.
        description: What the groups are for; NCCL's watchdog and flight recorder print it.
        backend: None for that of the default group.

    Returns:
        The group of this rank.
    """
    own, _ = dist.new_subgroups_by_enumeration(
        partition, timeout=timeout, backend=backend, group_desc=description
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
