"""The mesh: world = R replicas x PP x S x TP, with every replica one contiguous block of ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_edit.replicas.peers import PeerChannels, PeerGroup

# megatron-core's default order puts the pipeline outermost, so that a replica would be strewn over
# the hosts and its own traffic would cross the slow link.
RANK_ORDER = "tp-cp-ep-pp-dp"


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands and the groups it belongs to.

    Attributes:
        replicas: R, the number of full copies of the model.
        pipeline_parallel: PP, pipeline stages of a replica.
        shard: S, ranks that shard parameters, gradients and optimizer state of one stage.
        tensor_parallel: TP.
        replica: Index of this rank's replica; likewise the other ``*_rank``.
        worker_group: The PP x S x TP ranks of this replica.
        worker_host_group: The same ranks, for messages on the host (gloo).
        stage_group: The S x TP ranks of this replica that hold parts of the same layers.
        shard_group: The S ranks that shard the same tensors.
        tensor_group: The TP ranks that split the same layers.
        pipeline_group: The PP ranks that pass activations on.
        peers: The R ranks, one a replica, that hold the same shard of the same layers.
    """

    replicas: int
    pipeline_parallel: int
    shard: int
    tensor_parallel: int
    replica: int
    pipeline_rank: int
    shard_rank: int
    tensor_rank: int
    worker_group: dist.ProcessGroup
    worker_host_group: dist.ProcessGroup
    stage_group: dist.ProcessGroup
    shard_group: dist.ProcessGroup
    tensor_group: dist.ProcessGroup
    pipeline_group: dist.ProcessGroup
    peers: PeerGroup

    @property
    def world_size(self) -> int:
        """Ranks of all replicas."""
        return self.replicas * self.replica_size

    @property
    def replica_size(self) -> int:
        """Ranks of one replica."""
        return self.pipeline_parallel * self.shard * self.tensor_parallel

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank's pipeline stage computes the loss."""
        return self.pipeline_rank == self.pipeline_parallel - 1

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
    virtual_pipeline_parallel: int | None = None,
    timeout_minutes: float = 10,
) -> Mesh:
    """Builds megatron-core's process groups and ours; needs an initialised default group.

    Args:
        replicas: R.
        tensor_parallel: TP.
        pipeline_parallel: PP.
        virtual_pipeline_parallel: Model chunks per pipeline rank (interleaved schedule), or None.
        timeout_minutes: Bound of every wait in these groups.

    Raises:
        ValueError: The world size is not divisible by replicas x TP x PP.
    """
    world = dist.get_world_size()
    if world % (replicas * tensor_parallel * pipeline_parallel):
        raise ValueError(
            f"world size {world} is not divisible by replicas {replicas} x TP {tensor_parallel} x "
            f"PP {pipeline_parallel}"
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel,
        pipeline_model_parallel_size=pipeline_parallel,
        virtual_pipeline_model_parallel_size=virtual_pipeline_parallel,
        num_distributed_optimizer_instances=replicas,
        order=RANK_ORDER,
        distributed_timeout_minutes=timeout_minutes,  # type: ignore[arg-type]
        create_gloo_process_groups=False,
    )
    replica_size = world // replicas
    replica, rank_in_replica = divmod(dist.get_rank(), replica_size)
    stage_group = _stage_group(world, pipeline_parallel, replica_size, timeout_minutes)
    shard_group = parallel_state.get_data_parallel_group(
        with_context_parallel=True, partial_data_parallel=True
    )
    peer_ranks = [r * replica_size + rank_in_replica for r in range(replicas)]
    worker_group = parallel_state.get_intra_distributed_optimizer_instance_group()
    workers = [list(range(r * replica_size, (r + 1) * replica_size)) for r in range(replicas)]
    return Mesh(
        replicas=replicas,
        pipeline_parallel=pipeline_parallel,
        shard=shard_group.size(),
        tensor_parallel=tensor_parallel,
        replica=replica,
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        shard_rank=shard_group.rank(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        worker_group=worker_group,
        worker_host_group=_host_group(workers, worker_group, timeout_minutes),
        stage_group=stage_group,
        shard_group=shard_group,
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        pipeline_group=parallel_state.get_pipeline_model_parallel_group(),
        peers=PeerGroup(_peer_channels(peer_ranks, timeout_minutes), peer_ranks, replica),
    )


def _new_group(
    partition: list[list[int]], timeout_minutes: float, backend: str | None = None
) -> dist.ProcessGroup:
    """Makes the groups of a partition of the world, on all ranks alike; returns this rank's."""
    timeout = timedelta(minutes=timeout_minutes)
    groups = {id(r): dist.new_group(r, timeout=timeout, backend=backend) for r in partition}
    return groups[next(id(ranks) for ranks in partition if dist.get_rank() in ranks)]


def _host_group(
    partition: list[list[int]], on_device: dist.ProcessGroup, timeout_minutes: float
) -> dist.ProcessGroup:
    """A gloo group of the same ranks; the group itself where it is gloo already."""
    if dist.get_backend(on_device) == dist.Backend.GLOO:
        return on_device
    return _new_group(partition, timeout_minutes, backend="gloo")


def _peer_channels(peer_ranks: list[int], timeout_minutes: float) -> PeerChannels | None:
    if len(peer_ranks) == 1:
        return None
    payload = parallel_state.get_inter_distributed_optimizer_instance_group()
    assert dist.get_process_group_ranks(payload) == peer_ranks
    replica_size = dist.get_world_size() // len(peer_ranks)
    partition = [
        list(range(first, dist.get_world_size(), replica_size)) for first in range(replica_size)
    ]
    scalars = _new_group(partition, timeout_minutes)
    return PeerChannels(payload, scalars, _host_group(partition, scalars, timeout_minutes))


def _stage_group(
    world: int, pipeline_parallel: int, replica_size: int, timeout_minutes: float
) -> dist.ProcessGroup:
    """This rank's stage group. With ``RANK_ORDER`` the data-parallel rank is outermost and the
    pipeline rank next, so that stage p of replica r is every rank with these two coordinates."""
    stride = parallel_state.get_tensor_model_parallel_world_size()
    partition = [
        [r for r in range(first, first + replica_size) if r // stride % pipeline_parallel == stage]
        for first in range(0, world, replica_size)
        for stage in range(pipeline_parallel)
    ]
    return _new_group(partition, timeout_minutes)


def destroy_mesh() -> None:
    """Ends megatron-core's groups, so that another mesh can be built in this process."""
    parallel_state.destroy_model_parallel()
