"""Anchor, outer momentum and what is in flight, for one unit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_edit.config.edit_config import EditConfig
from megatron_edit.engine.backend import Unit
from megatron_edit.engine.fingerprint import bit_sum
from megatron_edit.engine.outer import outer_step_
from megatron_edit.engine.penalty import contribution_
from megatron_edit.replicas.chains import Chains
from megatron_edit.replicas.compression import Compressor
from megatron_edit.replicas.masked_copy import zero_if_
from megatron_edit.replicas.peers import PeerGroup, Pending


@dataclass
class Decision:
    """What a synchronisation decided for one unit, for this replica; 0-dim on the device.

    Attributes:
        weight: What this replica's pseudo gradient counts, fp32.
        accepted: Whether this replica takes part.
        anchor_moves: Whether any replica that takes part has moved; otherwise the anchor stays.
    """

    weight: torch.Tensor
    accepted: torch.Tensor
    anchor_moves: torch.Tensor


@dataclass
class Flight:
    """A unit's pseudo gradient on its way over the replicas.

    Attributes:
        payload: ``[numel]`` fp32; holds the sum once ``pending`` has been waited for.
        pending: The collective.
        departure: ``[numel]`` fp32 copy of the parameters at the launch, if local progress made
            since then is to be kept.
    """

    payload: torch.Tensor
    pending: Pending
    departure: torch.Tensor | None


def has_momentum(config: EditConfig) -> bool:
    """Whether there is an outer momentum to keep. With ``delay_round`` it also tells how far the
    anchor has moved since a pseudo gradient was taken, so it is kept even where mu is 0."""
    clipped = config.outer_momentum_clip is not None
    return config.outer_momentum > 0 or clipped or config.delay_round


class OuterState:
    """The outer state of this rank's part of a unit; flat fp32 buffers, sharded like the unit.

    Args:
        unit: The unit, whose parameters become the first anchor.
        config: Outer optimizer, compression, offload.
        peers: The replicas.
        chains: Runs compressed collectives.
    """

    def __init__(
        self, unit: Unit, config: EditConfig, peers: PeerGroup, chains: Chains | None
    ) -> None:
        self.unit = unit
        self._config, self._peers = config, peers
        self._device = unit.locals[0].device
        self._counted = torch.tensor([float(c) for c in unit.counted], device=self._device)
        anchor = torch.empty(unit.numel, device=self._device)
        unit.copy_to(anchor)
        self.anchor = self._at_home(anchor)
        self.momentum = self._at_home(torch.zeros_like(anchor)) if has_momentum(config) else None
        # Whether the last landing moved the anchor, and did not roll it back.
        self.moved = torch.zeros((), dtype=torch.bool, device=self._device)
        # Of the anchor that the last pseudo gradient was measured from.
        self.anchor_sum = torch.zeros((), dtype=torch.int64, device=self._device)
        # With offloading: anchor and momentum on the device, while they are in use.
        self._visiting: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self.compressor: Compressor | None = None
        if config.compression != "none" and peers.size > 1:
            assert chains is not None
            sizes = [local.numel() for local in unit.locals]
            self.compressor = Compressor(config.compression, sizes, peers, chains, self._device)

    def squared_norm(self, flat: torch.Tensor) -> torch.Tensor:
        """Sum of squares of the elements of ``flat`` that this rank counts, 0-dim fp32."""
        norms = torch.stack(torch._foreach_norm(self.unit.views(flat)))
        return (norms.square() * self._counted).sum()

    def pseudo_gradient(self) -> torch.Tensor:
        """anchor - parameters, a new ``[numel]`` fp32 buffer."""
        anchor = self._on_device(self.anchor)
        self.anchor_sum = bit_sum(anchor)
        return self._difference(anchor)

    @property
    def payload_bytes(self) -> float:
        """Bytes this rank sends to other replicas for one synchronisation of the unit."""
        size = self.unit.numel * 4 if self.compressor is None else self.compressor.payload_bytes
        return size * 2 * (self._peers.size - 1) / self._peers.size

    def launch(
        self,
        decision: Decision,
        phase: str,
        taken: torch.Tensor | None = None,
        keeps_progress: bool = False,
    ) -> Flight:
        """Sends this replica's weighted pseudo gradient off.

        Args:
            decision: Verdict and weight.
            phase: What this is part of, for the message when it fails.
            taken: The pseudo gradient, which becomes the payload, if it was taken before: for a
                landing in a later step. Otherwise the landing follows at once.
            keeps_progress: Local progress from now until the landing is to be kept.
        """
        if taken is None:
            anchor, _ = self._visit()
            taken = self._difference(anchor)
        payload = contribution_(taken, decision.weight)
        departure = None
        if keeps_progress:
            departure = torch.empty_like(payload)
            self.unit.copy_to(departure)
        if self.compressor is None:
            pending = self._peers.all_reduce(payload, phase)
        else:
            pending = self.compressor.all_reduce(
                payload,
                decision.accepted & decision.anchor_moves,
                decision.anchor_moves,
                phase,
            )
        return Flight(payload, pending, departure)

    def average(self, flight: Flight) -> torch.Tensor:
        """The averaged pseudo gradient of a flight that has been waited for, ``[numel]`` fp32.

        With ``delay_round`` the anchor has moved since the pseudo gradient was taken, by -lr times
        the momentum; it is measured from where the anchor is now (CO2).
        """
        payload = flight.payload
        if self._config.delay_round:
            _, momentum = self._visit()
            payload.sub_(torch.where(self.moved, momentum, 0.0), alpha=self._config.outer_lr)
        penalty = self._config.staleness_gap_penalty
        return payload if penalty == 1 else payload.div_(penalty)

    def land(self, flight: Flight, decision: Decision) -> torch.Tensor:
        """Outer step with the flight's payload as the gradient; the parameters follow the anchor.

        Args:
            flight: From :meth:`launch`, waited for.
            decision: What it was launched with.

        Returns:
            Squares of the counted elements of anchor and momentum, ``[2]``, for the log.
        """
        anchor, momentum = self._visit()
        outer_step_(
            anchor,
            momentum,
            flight.payload,
            self._config.outer_lr,
            self._config.outer_momentum,
            self._config.outer_nesterov,
            decision.anchor_moves,
            momentum_clip=self._config.outer_momentum_clip,
        )
        self.moved.copy_(decision.anchor_moves)
        self._follow(anchor, flight.departure, decision.accepted)
        self._leave()
        squares = [self.squared_norm(buffer) for buffer in (anchor, momentum) if buffer is not None]
        return torch.stack(
            squares if len(squares) == 2 else [*squares, torch.zeros_like(squares[0])]
        )

    def _follow(
        self, anchor: torch.Tensor, departure: torch.Tensor | None, accepted: torch.Tensor
    ) -> None:
        """Moves the parameters to the anchor, plus what was learned since the departure."""
        if departure is None:
            self.unit.copy_from(anchor)
            return
        torch._foreach_sub_(self.unit.views(departure), self.unit.locals)
        # An excluded replica's progress starts from parameters that nobody wants back.
        zero_if_(departure, ~accepted)
        self.unit.copy_from(torch.sub(anchor, departure, out=departure))

    def _difference(self, anchor: torch.Tensor) -> torch.Tensor:
        delta = anchor.clone()
        torch._foreach_sub_(self.unit.views(delta), self.unit.locals)
        return delta

    def _at_home(self, buffer: torch.Tensor) -> torch.Tensor:
        if not self._config.offload_outer_state:
            return buffer
        home = torch.empty(buffer.shape, pin_memory=buffer.is_cuda)
        return home.copy_(buffer)

    def _on_device(self, home: torch.Tensor) -> torch.Tensor:
        if not self._config.offload_outer_state:
            return home
        return torch.empty_like(home, device=self._device).copy_(home, non_blocking=True)

    def _visit(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Anchor and momentum on the device."""
        if self._visiting is None:
            momentum = None if self.momentum is None else self._on_device(self.momentum)
            self._visiting = (self._on_device(self.anchor), momentum)
        return self._visiting

    def _leave(self) -> None:
        """Brings a changed outer state home."""
        if self._visiting is not None and self._config.offload_outer_state:
            for home, visitor in zip((self.anchor, self.momentum), self._visiting, strict=True):
                if home is not None and visitor is not None:
                    home.copy_(visitor, non_blocking=True)
        self._visiting = None
