"""Pseudo gradients in fewer bytes, summed over the replicas, with error feedback.

A sum of encoded numbers has no encoding of its own kind, so an all-reduce will not do:

    all-to-all    every replica sends row i of its encoded payload to replica i
    sum           replica i decodes the rows it got and adds them up in fp32
    all-gather    every replica sends its encoded sum to all, who decode the same bytes

That moves 2 (R-1)/R encoded payloads per rank, as a ring all-reduce moves plain ones. What either
encoding loses is added to the next payload (error feedback), so no part of a pseudo gradient is
lost for good.

What becomes of a value depends on those of its own parameter alone, see
:mod:`megatron_edit.replicas.padding`: copies of a parameter stay the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_edit.replicas.chains import Chains
from megatron_edit.replicas.encodings import ENCODINGS
from megatron_edit.replicas.padding import Padding
from megatron_edit.replicas.peers import Gathering, PeerGroup, Pending
from megatron_edit.replicas.stopwatch import Stopwatch


class Compressor:
    """Sums one unit's payloads over the replicas in encoded form.

    Args:
        compression: ``bf16`` or ``int8``.
        sizes: Elements of each parameter in the payload on this rank, in their order.
        peers: The replicas.
        chains: Where the collectives run while the device computes.
        device: Of the payload.

    Attributes:
        padding: Which values each replica adds up: those of its row.
        error: ``[R * row]`` fp32, what this replica's encoding has lost so far, padded.
        sum_error: ``[row]`` fp32, what the encoding of this rank's row of the sum has lost.
    """

    def __init__(
        self,
        compression: str,
        sizes: Sequence[int],
        peers: PeerGroup,
        chains: Chains,
        device: torch.device,
    ) -> None:
        self.encoding, self.peers = ENCODINGS[compression], peers
        self._chains = chains
        self.padding = Padding(sizes, peers.size, device)
        self.error = torch.zeros(peers.size * self.padding.numel, device=device)
        self.sum_error = torch.zeros(self.padding.numel, device=device)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the encoded payload, of which a rank sends 2 (R-1)/R."""
        return self.peers.size * self.encoding.row_bytes(self.padding.numel)

    def all_reduce(
        self,
        payload: torch.Tensor,
        accepted: torch.Tensor,
        any_accepted: torch.Tensor,
        phase: str,
        computing: Stopwatch,
    ) -> Pending:
        """Starts summing a payload over the replicas, in place.

        Args:
            payload: ``[numel]`` fp32: weight times pseudo gradient; zeros if not accepted.
            accepted: 0-dim bool, whether this replica takes part. Otherwise its error is kept back.
            any_accepted: 0-dim bool, whether any replica does. Otherwise nothing is taken as sent.
            phase: What this is part of, for the message when it fails.
            computing: Runs while this encodes, decodes and adds up.
        """
        stages = _Stages(self, payload, accepted, any_accepted, phase, computing)
        return self._chains.run([stages.send_parts, stages.send_sum, stages.receive_sums])


class _Stages:
    """One payload on its way: what follows each collective."""

    def __init__(
        self,
        compressor: Compressor,
        payload: torch.Tensor,
        accepted: torch.Tensor,
        any_accepted: torch.Tensor,
        phase: str,
        computing: Stopwatch,
    ) -> None:
        self._compressor, self._payload, self._phase = compressor, payload, phase
        self._accepted, self._any_accepted = accepted, any_accepted
        self._computing = computing
        self._parts: Gathering | None = None
        self._sums: Gathering | None = None

    @torch.no_grad()
    def send_parts(self) -> None:
        """Encodes the payload and sends row i to replica i."""
        it = self._compressor
        with self._computing.running():
            encoded = self._empty_rows(it.peers.size)
            for stretch in it.padding.stretches:
                owed = it.error[stretch.padded]
                stretch.add(self._payload, owed)
                row, start = encoded[stretch.row], stretch.span.start
                it.encoding.write(owed, row, start, withheld=~self._accepted)
        self._parts = it.peers.start_all_to_all(encoded.view(-1), self._phase)

    @torch.no_grad()
    def send_sum(self) -> None:
        """Adds up this replica's row of all payloads, encodes the sum and sends it to all."""
        assert self._parts is not None
        it, rows = self._compressor, self._parts.wait()
        self._parts = None
        with self._computing.running():
            encoded = self._empty_rows(1)
            scratch = self._scratch()
            for span in it.padding.spans:
                owed = it.sum_error[span]
                # One after the other: the order in which a kernel adds may depend on the place.
                for row in rows:
                    part = scratch[: owed.numel()]
                    it.encoding.read(row, span.start, part)
                    owed.add_(part)
                it.encoding.write(owed, encoded[0], span.start, withheld=~self._any_accepted)
        self._sums = it.peers.start_all_gather(encoded.view(-1), self._phase, payload=True)

    @torch.no_grad()
    def receive_sums(self) -> None:
        """Puts the sum of all rows in the payload's place."""
        assert self._sums is not None
        it, rows = self._compressor, self._sums.wait()
        self._sums = None
        with self._computing.running():
            scratch = self._scratch()
            for stretch in it.padding.stretches:
                values = scratch[: stretch.numel]
                it.encoding.read(rows[stretch.row], stretch.span.start, values)
                stretch.scatter(values, self._payload)

    def _empty_rows(self, rows: int) -> torch.Tensor:
        it = self._compressor
        row_bytes = it.encoding.row_bytes(it.padding.numel)
        return self._payload.new_empty(rows, row_bytes, dtype=torch.uint8)

    def _scratch(self) -> torch.Tensor:
        longest = max((s.numel for s in self._compressor.padding.stretches), default=0)
        return self._payload.new_empty(longest)
