"""Anchor, outer momentum and what is in flight, for one unit."""

from __future__ import annotations

import torch

from megatron_edit.outer import outer_step_
from megatron_edit.sync_group import Pending
from megatron_edit.units import Unit


class OuterState:
    """The outer state of this rank's part of a unit; flat fp32 buffers, sharded like the unit.

    Args:
        unit: The unit, whose parameters become the first anchor.
        momentum: Whether the outer optimizer has momentum.
        offload: Keep anchor and momentum in (pinned) host memory; they visit the device from the
            launch of the unit's all-reduce until its outer step.
    """

    def __init__(self, unit: Unit, momentum: bool, offload: bool) -> None:
        self.unit = unit
        self.pending: Pending | None = None
        self._payload: torch.Tensor | None = None
        self._offload = offload
        device = unit.locals[0].device
        anchor = torch.empty(unit.numel, device=device)
        unit.copy_to(anchor)
        self.anchor = self._at_home(anchor)
        self.momentum = self._at_home(torch.zeros_like(anchor)) if momentum else None
        self._visiting: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._counted = torch.tensor([float(c) for c in unit.counted], device=device)

    def _at_home(self, buffer: torch.Tensor) -> torch.Tensor:
        if not self._offload:
            return buffer
        home = torch.empty(buffer.shape, pin_memory=buffer.is_cuda)
        return home.copy_(buffer)

    def _on_device(self, home: torch.Tensor) -> torch.Tensor:
        if not self._offload:
            return home
        return torch.empty_like(home, device=self.unit.locals[0].device).copy_(
            home, non_blocking=True
        )

    def pseudo_gradient(self) -> torch.Tensor:
        """anchor - parameters, a new ``[numel]`` fp32 buffer."""
        return self._difference(self._on_device(self.anchor))

    def _difference(self, anchor: torch.Tensor) -> torch.Tensor:
        delta = anchor.clone()
        torch._foreach_sub_(self.unit.views(delta), self.unit.locals)
        return delta

    def squared_norm(self, flat: torch.Tensor) -> torch.Tensor:
        """Sum of squares of the elements of ``flat`` that this rank counts, 0-dim fp32."""
        norms = torch.stack(torch._foreach_norm(self.unit.views(flat)))
        return norms.square().mul_(self._counted).sum()

    def prepare_payload(self) -> torch.Tensor:
        """Brings the outer state to the device and returns this replica's pseudo gradient."""
        anchor = self._on_device(self.anchor)
        momentum = None if self.momentum is None else self._on_device(self.momentum)
        self._visiting = (anchor, momentum)
        self._payload = self._difference(anchor)
        return self._payload

    def wait(self) -> torch.Tensor:
        """Waits for the all-reduce; returns the averaged pseudo gradient, ``[numel]`` fp32."""
        assert self.pending is not None and self._payload is not None
        self.pending.wait()
        self.pending = None
        return self._payload

    def step(self, lr: float, mu: float, nesterov: bool, accepted: torch.Tensor) -> torch.Tensor:
        """Outer step with the payload as the gradient; the parameters become the new anchor.

        Args:
            lr: Outer learning rate.
            mu: Outer momentum.
            nesterov: Nesterov momentum.
            accepted: 0-dim bool on the device; False rolls the parameters back to the anchor.

        Returns:
            Squares of the counted elements of anchor and momentum, ``[2]``, for the log.
        """
        assert self._visiting is not None and self._payload is not None
        anchor, momentum = self._visiting
        outer_step_(anchor, momentum, self._payload, lr, mu, nesterov, accepted)
        self.unit.copy_from(anchor)
        if self._offload:
            self.anchor.copy_(anchor, non_blocking=True)
            if self.momentum is not None:
                self.momentum.copy_(momentum, non_blocking=True)
        squares = [self.squared_norm(anchor)]
        squares.append(
            torch.zeros_like(squares[0]) if momentum is None else self.squared_norm(momentum)
        )
        self._visiting = self._payload = None
        return torch.stack(squares)
