"""Choices by a 0-dim condition on the device, for whole buffers.

Selected, never multiplied by 0 or 1: 0 * NaN is NaN, and -0.0 + 0.0 loses the sign bit. On a GPU
the condition is never read back. On a CPU it is, as nothing waits for that there, and a `where`
with a condition that is broadcast takes ten times as long as a copy.
"""

from __future__ import annotations

import torch
from torch import Tensor


def copy_if_(target: Tensor, condition: Tensor, source: Tensor) -> Tensor:
    """Copies `source` into `target` if the condition holds.

    Args:
        target: Any shape; changed in place.
        condition: 0-dim bool, on the device of `target`.
        source: Like `target`.

    Returns:
        `target`.
    """
    if not condition.is_cpu:
        return torch.where(condition, source, target, out=target)
    return target.copy_(source) if condition else target


def scale_(target: Tensor, factor: Tensor) -> Tensor:
    """Multiplies by a factor, which often is 1.

    Args:
        target: Any shape; changed in place.
        factor: 0-dim, on the device of `target`.

    Returns:
        `target`.
    """
    if factor.is_cpu and factor == 1:
        return target
    return target.mul_(factor)


def zero_if_(target: Tensor, condition: Tensor) -> Tensor:
    """Fills `target` with zeros if the condition holds.

    Args:
        target: Any shape; changed in place.
        condition: 0-dim bool, on the device of `target`.

    Returns:
        `target`.
    """
    if not condition.is_cpu:
        return target.masked_fill_(condition, 0.0)
    return target.zero_() if condition else target
