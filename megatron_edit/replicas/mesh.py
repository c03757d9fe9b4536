"""The mesh: world = R replicas x PP x S x TP, with every replica one contiguous block of ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist

from megatron_edit.platform import nccl
from megatron_edit.replicas.groups import host_group, own_group
from megatron_edit.replicas.layout import Coordinate, Layout, Place
from megatron_edit.replicas.peers import PeerChannels, PeerGroup

# Which ranks make up each kind of group: those that have these coordinates in common.
KINDS: dict[str, tuple[Coordinate, ...]] = {
    "worker": ("replica",),
    "stage": ("replica", "stage"),
    "shard": ("replica", "stage", "tensor"),
    "tensor": ("replica", "shard", "stage"),
    "pipeline": ("replica", "shard", "tensor"),
}
PEERS: tuple[Coordinate, ...] = ("shard", "stage", "tensor")


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands and the groups it belongs to.

    Attributes:
        layout: How many ranks stand along each coordinate.
        place: The coordinates of this rank.
        worker_group: The PP x S x TP ranks of this replica.
        stage_group: The S x TP ranks of this replica that hold parts of the same layers.
        shard_group: The S ranks that shard the same tensors.
        tensor_group: The TP ranks that split the same layers.
        pipeline_group: The PP ranks that pass activations on.
        peers: The R ranks, one a replica, that hold the same shard of the same layers.
        timeout: Bound of every wait in these groups.
    """

    layout: Layout
    place: Place
    worker_group: dist.ProcessGroup
    stage_group: dist.ProcessGroup
    shard_group: dist.ProcessGroup
    tensor_group: dist.ProcessGroup
    pipeline_group: dist.ProcessGroup
    peers: PeerGroup
    timeout: timedelta

    @property
    def replicas(self) -> int:
        """R, the number of full copies of the model."""
        return self.layout.replicas

    @property
    def shard(self) -> int:
        """S, ranks that shard parameters, gradients and optimizer state of one stage."""
        return self.layout.shard

    @property
    def pipeline_parallel(self) -> int:
        """PP, pipeline stages of a replica."""
        return self.layout.pipeline_parallel

    @property
    def tensor_parallel(self) -> int:
        """TP."""
        return self.layout.tensor_parallel

    @property
    def replica(self) -> int:
        """Index of this rank's replica."""
        return self.place.replica

    @property
    def shard_rank(self) -> int:
        """Index of this rank in its shard group."""
        return self.place.shard

    @property
    def pipeline_rank(self) -> int:
        """Index of this rank's pipeline stage."""
        return self.place.stage

    @property
    def tensor_rank(self) -> int:
        """Index of this rank in its tensor-parallel group."""
        return self.place.tensor

    @property
    def world_size(self) -> int:
        """Ranks of all replicas."""
        return self.layout.world_size

    @property
    def replica_size(self) -> int:
        """Ranks of one replica."""
        return self.pipeline_parallel * self.shard * self.tensor_parallel

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank's pipeline stage computes the loss."""
        return self.pipeline_rank == self.pipeline_parallel - 1

    @cached_property
    def worker_host_group(self) -> dist.ProcessGroup:
        """The ranks of this replica, for messages on the host; first asked for by all ranks of the
        world together, who make it then."""
        partition = self.layout.partition(*KINDS["worker"])
        return host_group(partition, self.timeout, "worker", like=self.worker_group)

    def sum_in_order(self, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Sums a 0-dim value over ranks of the replica, in an order that all replicas share: an
        all-reduce may choose another order in another replica, and the replicas would part."""
        if group.size() == 1:
            return value
        gathered = value.new_empty(group.size())
        dist.all_gather_single(gathered, value.reshape(1), group=group)
        return gathered.sum()

    def describe(self) -> str:
        """The first line of a run: hosts, ranks and how they are laid out."""
        return (
            f"mesh: {hosts()} host(s), {self.world_size} rank(s) = {self.replicas} replica(s) x "
            f"PP {self.pipeline_parallel} x S {self.shard} x TP {self.tensor_parallel}; "
            f"replica r is ranks r*{self.replica_size} to r*{self.replica_size}+"
            f"{self.replica_size - 1}"
        )


def hosts() -> int:
    """Hosts of the job, as the launcher (deepspeed or torchrun) says; 1 without a launcher."""
    return int(os.environ.get("CROSS_SIZE", os.environ.get("GROUP_WORLD_SIZE", "1")))


def build_mesh(
    replicas: int,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    timeout_minutes: float = 10,
    given: Mapping[str, dist.ProcessGroup] | None = None,
) -> Mesh:
    """Builds the process groups of this rank; needs an initialised default group.

    Args:
        replicas: R.
        tensor_parallel: TP.
        pipeline_parallel: PP.
        timeout_minutes: Bound of every wait in these groups.
        given: Groups of this rank that exist already, by kind (``KINDS``); the same kinds on all
            ranks.

    Raises:
        ValueError: The world size is not divisible by replicas x TP x PP, or a given group has
            other ranks than the layout puts there.
    """
    layout = Layout.of(dist.get_world_size(), replicas, tensor_parallel, pipeline_parallel)
    place = layout.place(dist.get_rank())
    timeout = timedelta(minutes=timeout_minutes)
    given = given or {}
    groups = {}
    for kind, shared in KINDS.items():
        if kind in given:
            _check_ranks(kind, given[kind], layout.partition(*shared))
            groups[f"{kind}_group"] = given[kind]
        else:
            groups[f"{kind}_group"] = own_group(layout.partition(*shared), timeout, kind)
    peers = _peers(layout, place, timeout)
    return Mesh(layout, place, **groups, peers=peers, timeout=timeout)


def _check_ranks(kind: str, group: dist.ProcessGroup, partition: list[list[int]]) -> None:
    if (ranks := dist.get_process_group_ranks(group)) not in partition:
        raise ValueError(f"the {kind} group has ranks {ranks}; the layout divides {partition}")


def _peers(layout: Layout, place: Place, timeout: timedelta) -> PeerGroup:
    partition = layout.partition(*PEERS)
    (ranks,) = (group for group in partition if dist.get_rank() in group)
    if layout.replicas == 1:
        return PeerGroup(None, ranks, place.replica)
    channels = PeerChannels(
        payload=own_group(
            partition, timeout, "payload between replicas", options=nccl.payload_options()
        ),
        scalars=own_group(partition, timeout, "scalars between replicas"),
        partition=partition,
        timeout=timeout,
    )
    return PeerGroup(channels, ranks, place.replica)
