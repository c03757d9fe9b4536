"""What remains to be done to the gradients of a replica after its last backward.

FSDP2 has already averaged them over the shard group. All sums here work on the shards, with one
collective for many tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn

from megatron_edit.backends.megatron.data_parallel import EDiTDataParallel
from megatron_edit.backends.megatron.units import local_of
from megatron_edit.replicas.mesh import Mesh


def finalize_gradients(chunks: Sequence[EDiTDataParallel], mesh: Mesh) -> None:
    """Completes gradients inside the replica; megatron-core's ``finalize_model_grads_func``.

    Norm weights see a part of the sequence on each tensor-parallel rank under sequence
    parallelism, and a tied embedding is used on two pipeline stages: their gradients are summed.
    """
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    if mesh.tensor_parallel > 1:
        _sum([p for p in parameters if getattr(p, "sequence_parallel", False)], mesh.tensor_group)
    if tied := _tied(parameters, mesh):
        _sum(tied, _embedding_group())


def is_summed(parameter: nn.Parameter, mesh: Mesh) -> bool:
    """Whether the gradient is complete only after :func:`finalize_gradients`."""
    if mesh.tensor_parallel > 1 and getattr(parameter, "sequence_parallel", False):
        return True
    return bool(_tied([parameter], mesh))


def hand_on_to_copies(parameters: Sequence[nn.Parameter], mesh: Mesh) -> None:
    """Gives the gradients of counted copies to the ranks of the replica that hold the others.

    Args:
        parameters: All parameters of this rank.
        mesh: The mesh.
    """
    if mesh.tensor_parallel > 1:
        copies = [p for p in parameters if not getattr(p, "tensor_model_parallel", False)]
        _broadcast(copies, mesh.tensor_group)
    if tied := _tied(parameters, mesh):
        _broadcast(tied, _embedding_group())


def _tied(parameters: Iterable[nn.Parameter], mesh: Mesh) -> list[nn.Parameter]:
    """This rank's copy of an embedding of which another pipeline stage holds one, too."""
    if mesh.pipeline_parallel == 1:
        return []
    return [p for p in parameters if getattr(p, "shared_embedding", False)]


def _embedding_group() -> dist.ProcessGroup:
    return parallel_state.get_embedding_group(check_initialized=False)


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Gradient shards; zeros take the place of a gradient that no backward made, since the other
    ranks of a collective may have one."""
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(local_of(parameter.grad))
    return gradients


@contextmanager
def _flat_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[torch.Tensor]:
    """Gradient shards as one buffer, whose values are theirs when the context ends."""
    gradients = local_gradients(parameters)
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    yield flat
    pieces = flat.split([gradient.numel() for gradient in gradients])
    views = [piece.view(g.shape) for piece, g in zip(pieces, gradients, strict=True)]
    torch._foreach_copy_(gradients, views)


def _sum(parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
    if parameters:
        with _flat_gradients(parameters) as flat:
            dist.all_reduce(flat, group=group)


def _broadcast(parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Gives the group's first rank's gradients to the others."""
    if parameters:
        with _flat_gradients(parameters) as flat:
            dist.broadcast(flat, group=group, group_src=0)
