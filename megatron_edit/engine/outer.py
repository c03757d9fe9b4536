"""The outer optimizer: SGD with momentum on the anchor, fed with pseudo gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_edit.replicas.masked_copy import copy_if_


@torch.no_grad()
def outer_step_(
    anchor: Tensor,
    momentum: Tensor | None,
    pseudo_grad: Tensor,
    lr: float,
    mu: float,
    nesterov: bool,
    apply: Tensor,
    momentum_clip: float | None = None,
) -> None:
    """Updates the anchor and the outer momentum in place, unless the unit is rolled back.

    With g the pseudo gradient: m <- mu m + g, then anchor <- anchor - lr (g + mu m) with
    Nesterov momentum and anchor <- anchor - lr m without. The operations are those of
    `torch.optim.SGD`, in its order, so that the results are bitwise the same. One temporary
    of the size of the anchor is allocated.

    Args:
        anchor: fp32, any shape.
        momentum: Like `anchor`. None is allowed when `mu` is 0, where it has no effect.
        pseudo_grad: Like `anchor`, averaged over the replicas and clipped; it is not modified.
        lr: Outer learning rate.
        mu: Outer momentum.
        nesterov: Whether to look ahead along the momentum.
        apply: 0-dim bool or number on the anchor's device. 0 (every replica is anomalous) leaves
            anchor and momentum bitwise as they are, without a host sync.
        momentum_clip: Largest absolute value of an element of the momentum (CO2), or None.

    Raises:
        ValueError: `momentum` is None but `mu` is not 0 or the momentum is to be clipped.
    """
    if momentum is None and (mu != 0 or momentum_clip is not None):
        raise ValueError(f"outer momentum {mu}, clip {momentum_clip}: needs a momentum buffer")
    chosen = apply if apply.dtype == torch.bool else apply != 0
    # A condition that is known to hold spares the copies: everything is computed in its place.
    in_place = apply.is_cpu
    if in_place and not chosen:
        return
    scratch = torch.empty_like(anchor)
    update = pseudo_grad
    if momentum is not None:
        # Not `add(alpha=mu)` alone: that may fuse the product and the sum, SGD rounds twice here.
        moved = torch.mul(momentum, mu, out=momentum if in_place else scratch).add_(pseudo_grad)
        if momentum_clip is not None:
            moved.clamp_(-momentum_clip, momentum_clip)
        copy_if_(momentum, chosen, moved)
        if nesterov and mu != 0:
            update = torch.add(pseudo_grad, momentum, alpha=mu, out=scratch)
        else:
            update = momentum
    moved = torch.add(anchor, update, alpha=-lr, out=anchor if in_place else scratch)
    copy_if_(anchor, chosen, moved)
