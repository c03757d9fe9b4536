"""The mesh of a megatron-core training, whose process groups megatron-core makes where it can."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_edit.replicas import mesh
from megatron_edit.replicas.layout import Layout
from megatron_edit.replicas.mesh import Mesh

# megatron-core's default order puts the pipeline outermost, so that a replica would be strewn over
# the hosts and its own traffic would cross the slow link.
RANK_ORDER = "tp-cp-ep-pp-dp"


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
    # Refused in our words, before megatron-core does it in its own.
    Layout.of(dist.get_world_size(), replicas, tensor_parallel, pipeline_parallel)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel,
        pipeline_model_parallel_size=pipeline_parallel,
        virtual_pipeline_model_parallel_size=virtual_pipeline_parallel,
        num_distributed_optimizer_instances=replicas,
        order=RANK_ORDER,
        distributed_timeout_minutes=timeout_minutes,  # type: ignore[arg-type]
        create_gloo_process_groups=False,
    )
    return mesh.build_mesh(
        replicas,
        tensor_parallel,
        pipeline_parallel,
        timeout_minutes,
        given={
            "worker": parallel_state.get_intra_distributed_optimizer_instance_group(),
            "shard": parallel_state.get_data_parallel_group(
                with_context_parallel=True, partial_data_parallel=True
            ),
            "tensor": parallel_state.get_tensor_model_parallel_group(),
            "pipeline": parallel_state.get_pipeline_model_parallel_group(),
        },
    )


def destroy_mesh() -> None:
    """Ends megatron-core's groups, so that another mesh can be built in this process."""
    parallel_state.destroy_model_parallel()
