"""How units are sharded over the shard group: FSDP2, one unit at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.modules.module import register_module_module_registration_hook

from megatron_edit.platform import cpu
from megatron_edit.replicas.mesh import Mesh


class Sharding:
    """Shards units over the shard group of a mesh.

    With one rank in the shard group and fp32 compute there is nothing to shard or cast, and
    modules stay as they are.

    Args:
        mesh: The mesh.
        compute_dtype: float32 or bfloat16, the type of gathered parameters.
        reshard_after_forward: True is Megatron's ``optim_grads_params`` (ZeRO-3): a unit is whole
            only while it computes, its gradient only until the end of its backward. False is its
            ``optim_grads``: parameters stay gathered and gradients unreduced until the last
            backward of the step.
    """

    def __init__(
        self,
        mesh: Mesh,
        compute_dtype: torch.dtype = torch.float32,
        reshard_after_forward: bool = True,
    ) -> None:
        self.reshard_after_forward = reshard_after_forward
        # A shard that is everything saves no memory, and each reduction would copy it.
        self.reduces_every_backward = reshard_after_forward and mesh.shard > 1
        self._options: dict[str, Any] | None = None
        if mesh.shard > 1 or compute_dtype != torch.float32:
            self._options = {
                "mesh": DeviceMesh.from_group(mesh.shard_group, cpu.device().type),
                "mp_policy": MixedPrecisionPolicy(
                    param_dtype=compute_dtype,
                    reduce_dtype=torch.float32,
                    cast_forward_inputs=False,
                ),
            }

    def shard(self, modules: list[nn.Module]) -> None:
        """Shards the modules of a unit, unless that was done as they were built."""
        if not any(isinstance(module, FSDPModule) for module in modules):
            self._fully_shard(modules, self.reshard_after_forward)

    def shard_root(self, chunk: nn.Module) -> None:
        """Shards what no unit of a chunk has sharded, which stays gathered with the chunk."""
        self._fully_shard([chunk], reshard_after_forward=False)

    def _fully_shard(self, modules: Sequence[nn.Module], reshard_after_forward: bool) -> None:
        """Applies FSDP2. Marks on parameters that it drops are put back."""
        if self._options is None:
            return
        marks = [
            (module, name, dict(vars(parameter)))
            for module in modules
            for name, parameter in module.named_parameters()
        ]
        fully_shard(list(modules), reshard_after_forward=reshard_after_forward, **self._options)
        for module, name, kept in marks:
            parameter = module.get_parameter(name)
            for mark, value in kept.items():
                setattr(parameter, mark, value)


class ShardedLayer(TransformerLayer):
    """A layer that is sharded as soon as it has been built: of the layers of a model no two are
    whole at a time.

    Args:
        args: Those of megatron-core's layer, like ``kwargs``.
        sharding: How to shard it.
    """

    def __init__(self, *args: Any, sharding: Sharding, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        sharding.shard([self])


@contextmanager
def embeddings_sharded_when_built(sharding: Sharding) -> Iterator[None]:
    """Context in which an embedding is sharded when its model takes it up, before any layer."""

    def take_up(parent: nn.Module, name: str, child: nn.Module) -> None:
        if isinstance(child, LanguageModelEmbedding):
            sharding.shard([child])

    handle = register_module_module_registration_hook(take_up)
    try:
        yield
    finally:
        handle.remove()
