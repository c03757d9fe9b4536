"""EDiTDataParallel: wraps a model chunk the way megatron-core's schedules expect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from torch import nn
from torch.distributed.fsdp import FSDPModule

from megatron_edit.backends.megatron.sharding import Sharding
from megatron_edit.backends.megatron.units import split_into_units
from megatron_edit.engine.backend import Unit
from megatron_edit.replicas.mesh import Mesh


class EDiTDataParallel(_BaseDataParallel):
    """A model chunk whose units are sharded inside the replica and synchronised between replicas.

    Sharding is FSDP2's, over the shard group alone: it knows nothing of replicas. What happens to
    a unit before its first forward of a step is the sync engine's business, which registers itself
    with :meth:`before_each_unit`.

    Args:
        module: The chunk, fp32 parameters on their final device.
        mesh: The mesh.
        sharding: How its units are sharded, if they are not yet.

    Attributes:
        accumulates: Whether another micro-batch of the step follows.
    """

    def __init__(
        self,
        module: GPTModel,
        mesh: Mesh,
        sharding: Sharding,
    ) -> None:
        super().__init__(config=module.config, module=module)
        self.ddp_config = DistributedDataParallelConfig()
        self.accumulates = False
        self._sharding = sharding
        self.units = split_into_units(module, mesh, sharding)

    @property
    def sharded(self) -> FSDPModule | None:
        """The chunk as an FSDP2 module, or None where nothing is sharded."""
        return self.module if isinstance(self.module, FSDPModule) else None

    def before_each_unit(
        self,
        before_unit: Callable[[Unit], None],
        after_forward: Callable[[Sequence[Unit]], None],
    ) -> None:
        """Has ``before_unit`` called before every forward of a unit, ahead of FSDP2's gather.

        Args:
            before_unit: Called with the unit, also in recomputation and evaluation.
            after_forward: Called with all units of the chunk after each of its forwards.
        """
        for unit in self.units:
            # The chunk itself gathers a tied unit, before its embedding runs.
            first = unit.modules[0]
            tied_here = unit.index == 0 and self.module.pre_process and len(unit.modules) > 1
            hooked = self.module if tied_here else first
            hooked.register_forward_pre_hook(_calling(before_unit, unit), prepend=True)
        self.module.register_forward_hook(_calling(after_forward, self.units))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context of all micro-batches of a step but the last: gradients accumulate, in the shards
        where every backward reduces them (``optim_grads_params``), else whole."""
        self._accumulate(True)
        try:
            yield
        finally:
            self._accumulate(False)

    def _accumulate(self, on: bool) -> None:
        self.accumulates = on
        if self.sharded is None:
            return
        if not self._sharding.reduces_every_backward:
            self.sharded.set_requires_gradient_sync(not on)
        self.sharded.set_is_last_backward(not on)
        if not self._sharding.reshard_after_forward:
            self.sharded.set_reshard_after_backward(not on)

    def release(self) -> None:
        """Frees gathered parameters, so that the shards are the only copy again.

        Kept parameters (``optim_grads``, or after an evaluation) would be stale once the shards
        change.
        """
        for unit in self.units:
            for module in unit.modules:
                if isinstance(module, FSDPModule):
                    module.reshard()
        if self.sharded is not None:
            self.sharded.reshard()

    def zero_grad_buffer(self) -> None:
        """Drops the gradients; megatron-core's loops call it before each step."""
        for parameter in self.module.parameters():
            parameter.grad = None

    def scale_gradients(self, scaling_factor: float) -> None:
        """Multiplies all gradients by a factor."""
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, scaling_factor)


def _calling(function: Callable[..., None], argument: object) -> Callable[..., None]:
    def hook(module: nn.Module, *_: object) -> None:
        function(argument)

    return hook
