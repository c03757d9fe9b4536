"""A model under DeepSpeed's ZeRO as the engine sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from megatron_edit.backends.deepspeed.units import split_into_units
from megatron_edit.engine.backend import Unit
from megatron_edit.platform import ds_zero
from megatron_edit.replicas.peers import PeerGroup


class ZeroBackend:
    """The engine's :class:`~megatron_edit.engine.backend.Backend` of a DeepSpeed engine.

    Args:
        engine: DeepSpeed's engine, ZeRO 1, 2 or 3 inside a replica.
        gradient_dtype: Type in which gradients cross between replicas, ``fp32`` or ``bf16``.
    """

    has_spanning_unit = False
    # Until it has been seen on a GPU that ZeRO-3's own stream waits for what lands in a forward.
    lands_in_forward = False

    def __init__(self, engine: Any, gradient_dtype: str = "fp32") -> None:
        self._gradient_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[gradient_dtype]
        self._engine = engine
        self._sharded = ds_zero.stage(engine) == 3
        self.units, self.unit_names = split_into_units(
            engine.module, ds_zero.pieces(engine), self._sharded
        )

    def before_each_unit(
        self,
        before_unit: Callable[[Unit], None],
        after_forward: Callable[[Sequence[Unit]], None],
    ) -> None:
        """Hooks every module that owns a parameter, ahead of ZeRO's gather of it."""
        if self._sharded:
            for unit in self.units:
                for module in unit.modules:
                    module.register_forward_pre_hook(_calling(before_unit, unit), prepend=True)
        self._engine.module.register_forward_hook(_calling(after_forward, self.units))

    def release(self) -> None:
        """Frees gathered parameters."""
        if self._sharded:
            ds_zero.release(self._engine)

    def gather(self, unit: Unit) -> None:
        """Nothing to do: the module's own hook gathers, behind what has been written."""

    def expect_average(self, peers: PeerGroup) -> None:
        """Nothing to do: ZeRO has a step's gradients when its last backward has ended."""

    def average_gradients(self, peers: PeerGroup) -> None:
        """Averages this rank's part of the gradients over the replicas."""
        if peers.size == 1:
            return
        gradients = ds_zero.averaged_gradients(self._engine)
        flat = torch.cat([gradient.reshape(-1).float() for gradient in gradients])
        flat = flat.div_(peers.size).to(self._gradient_dtype)
        peers.all_reduce(flat, "averaging the gradients").wait()
        parts = flat.split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_(
            gradients, [part.view(g.shape) for part, g in zip(parts, gradients, strict=True)]
        )

    def flush(self) -> None:
        """ZeRO-1/2: gathers what the ranks of the shard group have written."""
        if not self._sharded:
            ds_zero.share_pieces(self._engine)


def _calling(function: Callable[..., None], argument: object) -> Callable[..., None]:
    def hook(module: nn.Module, *_: object) -> None:
        function(argument)

    return hook
