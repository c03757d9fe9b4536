"""Where DeepSpeed's ZeRO keeps the things it has no public name for; each name once.

A test reads every name here off a live engine, and fails when one of them moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that this rank's optimizer updates.

    Attributes:
        name: Name of the parameter in the model.
        parameter: The parameter as the model holds it.
        master: ``[n]`` view of the fp32 copy that the optimizer updates; n is 0 where other ranks
            hold all of the parameter.
        compute: ``[n]`` view of this rank's part of what forward and backward use, in their type.
    """

    name: str
    parameter: nn.Parameter
    master: torch.Tensor
    compute: torch.Tensor


def stage(engine: Any) -> int:
    """ZeRO stage of a DeepSpeed engine."""
    return int(engine.zero_optimization_stage())


def pieces(engine: Any) -> list[Piece]:
    """What this rank holds of every parameter, in the order of ``named_parameters``."""
    of = _pieces_of_stage_3 if stage(engine) == 3 else _piece_of_stage_1_2
    return [of(engine.optimizer, name, p) for name, p in engine.module.named_parameters()]


def _pieces_of_stage_3(optimizer: Any, name: str, parameter: nn.Parameter) -> Piece:
    group, offset, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
    rank = dist.get_rank(parameter.ds_process_group)
    # What is beyond the parameter's end is padding, never written.
    real = max(0, min(length, parameter.ds_numel - rank * length))
    master = optimizer.fp32_partitioned_groups_flat[group].detach()
    return Piece(
        name,
        parameter,
        master.narrow(0, offset, real),
        parameter.ds_tensor.detach().view(-1).narrow(0, 0, real),
    )


def _piece_of_stage_1_2(optimizer: Any, name: str, parameter: nn.Parameter) -> Piece:
    held = parameter._hp_mapping
    if held is None:
        return Piece(name, parameter, torch.empty(0), torch.empty(0))
    return Piece(
        name, parameter, held.hp_fragment.detach().view(-1), held.lp_fragment.detach().view(-1)
    )


def share_pieces(engine: Any) -> None:
    """ZeRO-1/2: copies the masters to the parameters, on all ranks of the shard group."""
    optimizer = engine.optimizer
    optimizer.update_lp_params()
    for group in range(len(optimizer.bit16_groups)):
        optimizer._update_model_bit16_weights(group)


def is_whole(parameter: nn.Parameter) -> bool:
    """ZeRO-3: whether a parameter is gathered, or being gathered."""
    status = type(parameter.ds_status)
    return parameter.ds_status is not status.NOT_AVAILABLE


def release(engine: Any) -> None:
    """ZeRO-3: frees all gathered parameters, those that persist too."""
    engine.optimizer._partition_all_parameters()


@contextmanager
def no_prefetch(engine: Any) -> Iterator[None]:
    """ZeRO-3: context in which no parameter is gathered ahead of its module."""
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    name = "_PartitionedParameterCoordinator__prefetch_bucket_sz"
    before = getattr(coordinator, name)
    setattr(coordinator, name, 0)
    try:
        yield
    finally:
        setattr(coordinator, name, before)


def averaged_gradients(engine: Any) -> list[torch.Tensor]:
    """This rank's part of the gradients, averaged over the shard group, between the last backward
    of a step and its update; the tensors that the update will read."""
    groups = engine.optimizer.averaged_gradients
    return [gradient for group in sorted(groups) for gradient in groups[group]]


def wrap_update(engine: Any, around: Callable[[Callable[..., None]], None]) -> None:
    """Has ``around(update)`` called in the place of each update, that is where DeepSpeed's engine
    has come to the end of its gradient accumulation."""
    update = engine.optimizer.step

    def step(*args: Any, **kwargs: Any) -> None:
        around(lambda: update(*args, **kwargs))

    engine.optimizer.step = step


def was_skipped(engine: Any) -> bool:
    """Whether the last update was left out for gradients that were not finite."""
    return bool(engine.optimizer.overflow)


class ShardGroupOnly:
    """DeepSpeed's ``mpu`` that has it share nothing beyond a replica.

    Args:
        group: The shard group, all ranks of a replica.
        own_group: A group of this rank alone.
    """

    def __init__(self, group: dist.ProcessGroup, own_group: dist.ProcessGroup) -> None:
        self._group, self._own_group = group, own_group

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """The ranks over which parameters and gradients are sharded."""
        return self._group

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Their global ranks."""
        return list(dist.get_process_group_ranks(self._group))

    def get_data_parallel_world_size(self) -> int:
        """How many they are."""
        return self._group.size()

    def get_data_parallel_rank(self) -> int:
        """This rank among them."""
        return self._group.rank()

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """This rank alone: no tensor is split."""
        return self._own_group

    def get_model_parallel_world_size(self) -> int:
        """1."""
        return 1

    def get_model_parallel_rank(self) -> int:
        """0."""
        return 0

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank
