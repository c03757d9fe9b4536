"""The two calls in which a Megatron training script becomes EDiT."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.utils import get_model_config

from megatron_edit.backends.megatron.backend import MegatronBackend
from megatron_edit.backends.megatron.data_parallel import EDiTDataParallel
from megatron_edit.backends.megatron.gradients import finalize_gradients
from megatron_edit.backends.megatron.optimizer import EDiTDistributedOptimizer
from megatron_edit.backends.megatron.sharding import Sharding
from megatron_edit.config.edit_config import EditConfig
from megatron_edit.engine.sync_engine import SyncEngine
from megatron_edit.replicas.mesh import Mesh


def get_edit_model_and_optimizer(
    model: Sequence[GPTModel],
    optimizer_config: OptimizerConfig,
    edit_config: EditConfig,
    mesh: Mesh,
    samples_per_step: int,
    sharding: Sharding | None = None,
) -> tuple[list[EDiTDataParallel], EDiTDistributedOptimizer]:
    """Wraps model chunks and makes their optimizer, as megatron-core's DDP wrapper and
    ``get_megatron_optimizer`` do.

    The model's config gets the functions that megatron-core's schedules call: gradient
    accumulation (``no_sync_func``) and ``finalize_model_grads_func``.

    Args:
        model: This rank's chunks, fp32 parameters on their final device, whole or sharded as they
            were built (``build_model``).
        optimizer_config: Of the inner AdamW.
        edit_config: When and how replicas synchronise.
        mesh: From :func:`megatron_edit.backends.megatron.mesh.build_mesh`.
        samples_per_step: Samples a replica consumes in a step: micro batch x micro-batches x S.
        sharding: How units are sharded, the same as where ``model`` was sharded as it was built;
            None is fp32 and ZeRO-3.

    Returns:
        The wrapped chunks and the optimizer. ``optimizer.engine`` is the sync engine.
    """
    sharding = sharding or Sharding(mesh)
    chunks = [EDiTDataParallel(chunk, mesh, sharding) for chunk in model]
    backend = MegatronBackend(chunks, mesh, edit_config.gradient_dtype)
    engine = SyncEngine(backend, mesh, edit_config, samples_per_step)
    optimizer = EDiTDistributedOptimizer(chunks, engine, mesh, optimizer_config)

    def finalize(*_: object, **__: object) -> None:
        # Summed inside each replica first: an average of all replicas is then the same in all.
        finalize_gradients(chunks, mesh)
        engine.average_gradients()

    config = get_model_config(chunks[0])
    no_sync: list[Callable[..., object]] = [chunk.no_sync for chunk in chunks]
    config.no_sync_func = no_sync[0] if len(no_sync) == 1 else no_sync
    config.finalize_model_grads_func = finalize
    config.grad_scale_func = None
    return chunks, optimizer
