"""Replicas that hold other bits than the rest are found, at little cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed import run_ranks
from harness import Case, start
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_edit.engine.fingerprint import (
    as_floats,
    bit_sum,
    combine,
    outnumbered,
    position_hash,
)
from megatron_edit.replicas.peers import PeerError


class LargestTensor(TorchDispatchMode):
    """Notes the bytes of the largest tensor made in its block."""

    def __init__(self, known: torch.Tensor) -> None:
        super().__init__()
        self._known = known.untyped_storage().data_ptr()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if tensor.untyped_storage().data_ptr() != self._known:
                self.bytes = max(self.bytes, tensor.nbytes)
        return result


def test_the_hash_of_a_large_tensor_makes_no_large_temporaries() -> None:
    tensor = torch.randn(3_000_001)
    words = tensor.view(torch.int32).long()
    expected = (words * (torch.arange(len(words)) % 65521 + 1)).sum()
    with LargestTensor(tensor) as largest:
        value = position_hash(tensor)
    assert value == expected
    assert largest.bytes <= 8 << 20
    with LargestTensor(tensor) as largest:
        bit_sum(tensor)
    assert largest.bytes <= 8


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("numel", [0, 1, 2, 7, 1000])
def test_one_bit_shows(numel: int, first: int) -> None:
    def copy(values: torch.Tensor) -> torch.Tensor:
        return torch.empty(first + numel)[first:].copy_(values)

    tensor = copy(torch.randn(numel))
    for position in {0, numel // 2, numel - 1} if numel else set():
        for bit in (0, 31):
            other = copy(tensor)
            other.view(torch.int32)[position] ^= -(1 << 31) if bit == 31 else 1 << bit
            assert bit_sum(other) != bit_sum(tensor)
            assert position_hash(other) != position_hash(tensor)
    assert bit_sum(copy(tensor)) == bit_sum(tensor)


def test_the_pieces_are_exact() -> None:
    number = combine([torch.tensor(0x1234_5678_9ABC_DEF1), torch.tensor(-3)])
    lower, upper = as_floats(number).tolist()
    assert int(upper) << 24 | int(lower) == int(number) & ((1 << 48) - 1)
    swapped = combine([torch.tensor(-3), torch.tensor(0x1234_5678_9ABC_DEF1)])
    assert as_floats(swapped).tolist() != [lower, upper]


@pytest.mark.parametrize(
    ("values", "parted"),
    [
        ([5], [0]),
        ([5, 5], [0, 0]),
        ([5, 6], [1, 1]),
        ([5, 6, 5], [0, 1, 0]),
        ([6, 5, 5, 5], [1, 0, 0, 0]),
        ([5, 5, 6, 6], [1, 1, 1, 1]),
    ],
)
def test_the_majority_is_right(values: list[int], parted: list[float]) -> None:
    rows = torch.tensor([[float(value), 1.0] for value in values])
    assert outnumbered(rows).tolist() == parted


CASE = Case(shard=2, layers=2, edit={"warmup_steps": 1, "sync_interval": 2})


def _corrupted(edit: dict[str, Any]) -> tuple[int, str]:
    """Rank 3, a shard of replica 1, has a bit of its anchor flipped after the first round."""
    training = start(Case(**{**vars(CASE), "edit": {**CASE.edit, **edit}}))
    for _ in range(20):
        if training.engine.step == 4 and training.mesh.replica == training.mesh.shard_rank == 1:
            training.engine.outer[1].anchor.view(torch.int32)[5] ^= 1
        try:
            training.step()
        except PeerError as error:
            return training.engine.step, str(error)
    return training.engine.step, "no error"


@pytest.mark.parametrize("edit", [{}, {"offload_outer_state": True, "delay_steps": 1}])
def test_a_replica_whose_anchor_changes_is_noticed_by_all(edit: dict[str, Any]) -> None:
    for step, message in run_ranks(_corrupted, 4, edit):
        assert message.startswith("round 1: the anchor, which all replicas share, has become ")
        assert "in replica 0, 1: " in message
        # Synchronised in the step after the fifth; read at its end, or that of the next.
        assert step == 6 + bool(edit)
