"""What remains to be done to the gradients of a replica after its last backward.

FSDP2 has already averaged them over the shard group. All sums here work on the shards, with one
collective for many tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn

from megatron_edit.backends.megatron.data_parallel import EDiTDataParallel
from megatron_edit.backends.megatron.units import MegatronUnit, local_of
from megatron_edit.replicas.mesh import Mesh
from megatron_edit.replicas.peers import PeerGroup


def finalize_gradients(chunks: Sequence[EDiTDataParallel], mesh: Mesh) -> None:
    """Completes gradients inside the replica; megatron-core's ``finalize_model_grads_func``.

    Norm weights see a part of the sequence on each tensor-parallel rank under sequence
    parallelism, and a tied embedding is used on two pipeline stages: their gradients are summed.
    """
    _sum_over_tensor_parallel(chunks, mesh)
    _sum_tied_embedding(chunks, mesh)


def average_over_replicas(units: Iterable[MegatronUnit], peers: PeerGroup) -> None:
    """Averages gradients over the replicas: the lockstep phase. One all-reduce per unit."""
    if peers.size == 1:
        return
    in_flight = []
    for unit in units:
        gradients = _local_gradients(unit.parameters.values())
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).div_(peers.size)
        phase = f"averaging the gradients of {unit.name}"
        in_flight.append((gradients, flat, peers.all_reduce(flat, phase)))
    for gradients, flat, pending in in_flight:
        pending.wait()
        _copy_back(flat, gradients)


def _local_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Gradient shards; zeros take the place of a gradient that no backward made, since the other
    ranks of a collective may have one."""
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(local_of(parameter.grad))
    return gradients


def _copy_back(flat: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    pieces = flat.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(
        tensors, [piece.view(t.shape) for piece, t in zip(pieces, tensors, strict=True)]
    )


def _sum(parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
    if not parameters:
        return
    gradients = _local_gradients(parameters)
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=group)
    _copy_back(flat, gradients)


def _sum_over_tensor_parallel(chunks: Sequence[EDiTDataParallel], mesh: Mesh) -> None:
    if mesh.tensor_parallel == 1:
        return
    marked = [
        parameter
        for chunk in chunks
        for parameter in chunk.parameters()
        if getattr(parameter, "sequence_parallel", False)
    ]
    _sum(marked, mesh.tensor_group)


def _sum_tied_embedding(chunks: Sequence[EDiTDataParallel], mesh: Mesh) -> None:
    if mesh.pipeline_parallel == 1:
        return
    tied = [
        parameter
        for chunk in chunks
        for parameter in chunk.parameters()
        if getattr(parameter, "shared_embedding", False)
    ]
    _sum(tied, parallel_state.get_embedding_group(check_initialized=False))
