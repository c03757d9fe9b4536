"""Anchor, outer momentum and what is in flight, for one unit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_edit.config.edit_config import EditConfig
from megatron_edit.engine.backend import Unit
from megatron_edit.engine.fingerprint import bit_sum
from megatron_edit.engine.outer import outer_step_
from megatron_edit.engine.penalty import contribution_
from megatron_edit.engine.stretches import Squares, Stretch, stretches_of
from megatron_edit.replicas.chains import Chains
from megatron_edit.replicas.compression import Compressor
from megatron_edit.replicas.masked_copy import scale_, zero_if_
from megatron_edit.replicas.peers import PeerGroup, Pending
from megatron_edit.replicas.stopwatch import Stopwatch


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
        self._stretches = stretches_of(unit)
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

    def measure(self, takes: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Measures the pseudo gradient, anchor - parameters, and sums up the anchor's bits.

        Args:
            takes: Whether it is needed, too.

        Returns:
            Sum of squares of those of its elements that this rank counts, 0-dim fp32; and, if it is
            needed, itself, a new ``[numel]`` fp32 buffer.
        """
        anchor = self._on_device(self.anchor)
        delta = torch.empty_like(anchor) if takes else None
        squares, bits = Squares(self._device), torch.zeros_like(self.anchor_sum)
        for stretch, part in self._differences(anchor, delta):
            squares.add(stretch, part)
            bits += bit_sum(anchor[stretch.span])
        self.anchor_sum = bits
        return squares.sum(), delta

    def pseudo_gradient(self) -> torch.Tensor:
        """anchor - parameters, a new ``[numel]`` fp32 buffer."""
        _, delta = self.measure(takes=True)
        assert delta is not None
        return delta

    @property
    def payload_bytes(self) -> float:
        """Bytes this rank sends to other replicas for one synchronisation of the unit."""
        size = self.unit.numel * 4 if self.compressor is None else self.compressor.payload_bytes
        return size * 2 * (self._peers.size - 1) / self._peers.size

    def launch(
        self,
        decision: Decision,
        phase: str,
        behind: Stopwatch,
        taken: torch.Tensor | None = None,
        keeps_progress: bool = False,
    ) -> Flight:
        """Sends this replica's weighted pseudo gradient off.

        Args:
            decision: Verdict and weight.
            phase: What this is part of, for the message when it fails.
            behind: Runs while a compression computes behind the training.
            taken: The pseudo gradient, which becomes the payload, if it was kept when it was
                measured. Otherwise it is computed again, and the landing follows soon.
            keeps_progress: Local progress from now until the landing is to be kept.
        """
        if taken is not None:
            payload = contribution_(taken, decision.weight)
        else:
            anchor, _ = self._visit()
            payload = torch.empty_like(anchor)
            for _, part in self._differences(anchor, payload):
                contribution_(part, decision.weight)
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
                behind,
            )
        return Flight(payload, pending, departure)

    def average(self, flight: Flight) -> torch.Tensor:
        """Makes the averaged pseudo gradient of the payload of a flight that has been waited for.

        With ``delay_round`` the anchor has moved since the pseudo gradient was taken, by -lr times
        the momentum; it is measured from where the anchor is now (CO2).

        Returns:
            Sum of squares of its elements that this rank counts, 0-dim fp32.
        """
        penalty = self._config.staleness_gap_penalty
        squares = Squares(self._device)
        for stretch in self._stretches:
            part = flight.payload[stretch.span]
            if self._config.delay_round:
                _, momentum = self._visit()
                assert momentum is not None
                moved_by = zero_if_(momentum[stretch.span].clone(), ~self.moved)
                part.sub_(moved_by, alpha=self._config.outer_lr)
            if penalty != 1:
                part.div_(penalty)
            squares.add(stretch, part)
        return squares.sum()

    def land(
        self, flight: Flight, decision: Decision, clip_coefficient: torch.Tensor | None
    ) -> torch.Tensor:
        """Outer step with the flight's payload as the gradient; the parameters follow the anchor.

        Args:
            flight: From :meth:`launch`, through :meth:`average`.
            decision: What it was launched with.
            clip_coefficient: 0-dim fp32, what the payload is multiplied by first; None is 1.

        Returns:
            Squares of the counted elements of anchor and momentum, ``[2]``, for the log.
        """
        anchor, momentum = self._visit()
        anchor_squares, momentum_squares = Squares(self._device), Squares(self._device)
        for stretch in self._stretches:
            gradient, own_anchor = flight.payload[stretch.span], anchor[stretch.span]
            own_momentum = None if momentum is None else momentum[stretch.span]
            if clip_coefficient is not None:
                scale_(gradient, clip_coefficient)
            outer_step_(
                own_anchor,
                own_momentum,
                gradient,
                self._config.outer_lr,
                self._config.outer_momentum,
                self._config.outer_nesterov,
                decision.anchor_moves,
                momentum_clip=self._config.outer_momentum_clip,
            )
            anchor_squares.add(stretch, own_anchor)
            if own_momentum is not None:
                momentum_squares.add(stretch, own_momentum)
            if flight.departure is not None:
                lost = flight.departure[stretch.span]
                stretch.less_masters(lost, out=lost)
                # An excluded replica's progress starts from parameters that nobody wants back.
                torch.sub(own_anchor, zero_if_(lost, ~decision.accepted), out=lost)
        self.moved.copy_(decision.anchor_moves)
        self.unit.copy_from(anchor if flight.departure is None else flight.departure)
        self._leave()
        return torch.stack([anchor_squares.sum(), momentum_squares.sum()])

    def _differences(
        self, anchor: torch.Tensor, buffer: torch.Tensor | None
    ) -> Iterator[tuple[Stretch, torch.Tensor]]:
        """anchor - parameters, one stretch after the other.

        Args:
            anchor: The anchor on the device.
            buffer: ``[numel]`` fp32, where they are written; None for memory that the next stretch
                uses again.
        """
        longest = max((stretch.numel for stretch in self._stretches), default=0)
        scratch = anchor.new_empty(longest) if buffer is None else buffer
        for stretch in self._stretches:
            part = scratch[: stretch.numel] if buffer is None else buffer[stretch.span]
            yield stretch, stretch.less_masters(anchor[stretch.span], out=part)

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
