"""The outer optimizer against hand-computed values and torch.optim.SGD."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_edit.engine.outer import outer_step_

YES, NO = torch.tensor(True), torch.tensor(False)


def bits(tensor: Tensor) -> list[int]:
    return tensor.view(torch.int32).tolist()


def test_nesterov_by_hand() -> None:
    anchor, momentum = torch.tensor([10.0]), torch.tensor([2.0])
    # m = 0.5 x 2 + 4 = 5; anchor = 10 - 0.25 x (4 + 0.5 x 5) = 8.375.
    outer_step_(anchor, momentum, torch.tensor([4.0]), 0.25, 0.5, True, YES)
    assert (anchor.item(), momentum.item()) == (8.375, 5.0)


def test_heavy_ball_by_hand() -> None:
    anchor, momentum = torch.tensor([10.0]), torch.tensor([2.0])
    # m = 5; anchor = 10 - 0.25 x 5 = 8.75.
    outer_step_(anchor, momentum, torch.tensor([4.0]), 0.25, 0.5, False, YES)
    assert (anchor.item(), momentum.item()) == (8.75, 5.0)


@pytest.mark.parametrize(
    "lr, mu, nesterov",
    [(0.8, 0.85, True), (0.7, 0.9, True), (0.7, 0.9, False), (0.3, 0.0, False)],
)
@pytest.mark.parametrize("size", [1, 7, 4099])
def test_bitwise_equal_to_torch_sgd(lr: float, mu: float, nesterov: bool, size: int) -> None:
    generator = torch.Generator().manual_seed(3)
    anchor = torch.randn(size, generator=generator)
    momentum = torch.zeros(size)
    parameter = torch.nn.Parameter(anchor.clone())
    optimizer = torch.optim.SGD([parameter], lr=lr, momentum=mu, nesterov=nesterov)
    for _ in range(8):
        pseudo_grad = 0.1 * torch.randn(size, generator=generator)
        given = pseudo_grad.clone()
        outer_step_(anchor, momentum, pseudo_grad, lr, mu, nesterov, YES)
        parameter.grad = given
        optimizer.step()
        assert torch.equal(pseudo_grad, given)
        assert torch.equal(anchor, parameter.detach())
        if mu:
            assert torch.equal(momentum, optimizer.state[parameter]["momentum_buffer"])


@pytest.mark.parametrize("momentum", [None, torch.zeros(64)])
def test_lr_one_without_momentum_is_plain_averaging(momentum: Tensor | None) -> None:
    generator = torch.Generator().manual_seed(5)
    anchor = torch.randn(64, generator=generator)
    local = anchor + 0.01 * torch.randn(4, 64, generator=generator)
    outer_step_(anchor, momentum, (anchor - local).mean(0), 1.0, 0.0, False, YES)
    # Not bitwise: anchor - (anchor - theta) rounds twice.
    torch.testing.assert_close(anchor, local.mean(0), rtol=0, atol=5e-7)


@pytest.mark.parametrize("refusal", [NO, torch.tensor(0.0), torch.tensor(0)])
@pytest.mark.parametrize("mu, nesterov", [(0.85, True), (0.85, False), (0.0, False)])
@pytest.mark.parametrize("value", [0.0, -0.0, 3.0, math.nan, math.inf])
def test_rollback_leaves_every_bit(
    value: float, mu: float, nesterov: bool, refusal: Tensor
) -> None:
    anchor = torch.tensor([0.0, -0.0, 1.5, 1e-45, math.nan])
    momentum = torch.tensor([-0.0, 0.0, -2.0, -1e-45, 3.0])
    before = bits(anchor), bits(momentum)
    outer_step_(anchor, momentum, torch.full((5,), value), 0.8, mu, nesterov, refusal)
    assert (bits(anchor), bits(momentum)) == before


@pytest.mark.parametrize("consent", [torch.tensor(1.0), torch.tensor(1), torch.tensor(0.25)])
def test_any_number_but_zero_applies(consent: Tensor) -> None:
    anchor, momentum = torch.tensor([10.0]), torch.tensor([2.0])
    outer_step_(anchor, momentum, torch.tensor([4.0]), 0.25, 0.5, True, consent)
    assert (anchor.item(), momentum.item()) == (8.375, 5.0)


def test_updates_views_of_a_larger_buffer() -> None:
    buffer = torch.ones(6)
    outer_step_(buffer[2:4], torch.zeros(2), torch.ones(2), 0.5, 0.0, False, YES)
    assert buffer.tolist() == [1.0, 1.0, 0.5, 0.5, 1.0, 1.0]


def test_missing_momentum_is_refused() -> None:
    with pytest.raises(ValueError, match=r"momentum 0\.9"):
        outer_step_(torch.ones(2), None, torch.ones(2), 0.7, 0.9, True, YES)


class Allocations(TorchDispatchMode):
    """Collects the storages of a given size that operators return."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.storages: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() == self.size:
            # Kept alive, so that no address is seen twice.
            self.storages[result.untyped_storage().data_ptr()] = result
        return result


@pytest.mark.parametrize("mu, nesterov", [(0.85, True), (0.85, False), (0.0, False)])
def test_allocates_one_temporary(mu: float, nesterov: bool) -> None:
    anchor, momentum, pseudo_grad = torch.ones(100), torch.ones(100), torch.ones(100)
    with Allocations(100) as seen:
        outer_step_(anchor, momentum, pseudo_grad, 0.8, mu, nesterov, YES)
    own = {tensor.untyped_storage().data_ptr() for tensor in (anchor, momentum, pseudo_grad)}
    assert len(seen.storages.keys() - own) == 1


def test_no_value_is_read_back_to_the_host() -> None:
    # Fake tensors have no values, and need no GPU to be on one.
    with FakeTensorMode(), torch.device("cuda"):
        tensors = torch.ones(8), torch.ones(8), torch.ones(8)
        for apply in (torch.ones(()), torch.ones((), dtype=torch.bool)):
            outer_step_(*tensors, 0.8, 0.85, True, apply)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_no_host_sync_on_cuda() -> None:
    tensors = [torch.ones(8, device="cuda") for _ in range(3)]
    apply = torch.ones((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        outer_step_(tensors[0], tensors[1], tensors[2], 0.8, 0.85, True, apply)
    finally:
        torch.cuda.set_sync_debug_mode("default")
