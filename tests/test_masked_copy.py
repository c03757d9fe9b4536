"""Choices by a 0-dim condition on the device."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_edit.replicas.masked_copy import copy_if_, scale_, zero_if_

NAN, INF = float("nan"), float("inf")
VALUES = [1.5, -0.0, NAN, INF, -INF]
OTHERS = [INF, 0.0, -2.0, NAN, 3.0]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


def bits(values: torch.Tensor) -> list[int]:
    return values.cpu().view(torch.int32).tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("holds", [True, False])
def test_every_bit_is_that_of_the_chosen_side(holds: bool, device: str) -> None:
    target, source = torch.tensor(VALUES, device=device), torch.tensor(OTHERS, device=device)
    kept = target.clone()
    assert copy_if_(target, torch.tensor(holds, device=device), source) is target
    assert bits(target) == bits(source if holds else kept)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("holds", [True, False])
def test_zeros_replace_what_is_not_finite(holds: bool, device: str) -> None:
    target = torch.tensor(VALUES, device=device)
    kept = target.clone()
    assert zero_if_(target, torch.tensor(holds, device=device)) is target
    assert bits(target) == ([0] * len(VALUES) if holds else bits(kept))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_a_factor_of_one_changes_no_bit(factor: float, device: str) -> None:
    target = torch.tensor(VALUES, device=device)
    expected = target * factor
    assert scale_(target, torch.tensor(factor, device=device)) is target
    assert bits(target) == bits(expected)


def test_no_value_is_read_back_to_the_host() -> None:
    with FakeTensorMode(), torch.device("cuda"):
        values, condition = torch.ones(3), torch.ones((), dtype=torch.bool)
        copy_if_(values, condition, torch.zeros(3))
        zero_if_(values, condition)
        scale_(values, torch.ones(()))
