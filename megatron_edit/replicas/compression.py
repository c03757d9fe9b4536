"""Pseudo gradients in fewer bytes: bf16, or int8 with a scale per block, with error feedback.

A sum of encoded numbers has no encoding of its own kind, so an all-reduce will not do:

    all-to-all    every replica sends part i of its encoded payload to replica i
    sum           replica i decodes the parts it got and adds them up in fp32
    all-gather    every replica sends its encoded sum to all, who decode the same bytes

That moves 2 (R-1)/R encoded payloads per rank, as a ring all-reduce moves plain ones. What either
encoding loses is added to the next payload (error feedback), so no part of a pseudo gradient is
lost for good.
"""

from __future__ import annotations

import math

import torch

from megatron_edit.replicas.chains import Chains
from megatron_edit.replicas.masked_copy import copy_if_
from megatron_edit.replicas.peers import Gathering, PeerGroup, Pending

# Values that share one fp32 scale in int8.
BLOCK = 256


def encode(values: torch.Tensor, compression: str) -> torch.Tensor:
    """Encodes rows of fp32 values as bytes.

    Args:
        values: ``[n, m]`` fp32, m a multiple of :data:`BLOCK`.
        compression: ``bf16`` or ``int8``.

    Returns:
        ``[n, bytes]`` uint8: bf16 values, or int8 values followed by the fp32 scales of the blocks.
    """
    if compression == "bf16":
        return values.to(torch.bfloat16).view(torch.uint8)
    blocks = values.unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(dim=2, keepdim=True) / 127
    integers = (blocks / scales.clamp(min=1e-38)).round_().to(torch.int8)
    return torch.cat(
        [integers.flatten(1).view(torch.uint8), scales.flatten(1).view(torch.uint8)], dim=1
    )


def decode(encoded: torch.Tensor, compression: str) -> torch.Tensor:
    """Inverse of :func:`encode`: ``[n, bytes]`` uint8 -> ``[n, m]`` fp32."""
    if compression == "bf16":
        return encoded.view(torch.bfloat16).float()
    values = encoded.shape[1] * BLOCK // (BLOCK + 4)
    integers = encoded[:, :values].contiguous().view(torch.int8).unflatten(1, (-1, BLOCK))
    scales = encoded[:, values:].contiguous().view(torch.float32).unsqueeze(2)
    return integers.float().mul_(scales).flatten(1)


class Compressor:
    """Sums one unit's payloads over the replicas in encoded form.

    Args:
        compression: ``bf16`` or ``int8``.
        numel: Elements of the payload on this rank; any number.
        peers: The replicas.
        chains: Where the collectives run while the device computes.
        device: Of the payload.

    Attributes:
        part: Elements of the payload, rounded up, that each replica adds up.
        error: ``[numel]`` fp32, what this replica's encoding has lost so far.
        sum_error: ``[part]`` fp32, what the encoding of this rank's part of the sum has lost.
    """

    def __init__(
        self,
        compression: str,
        numel: int,
        peers: PeerGroup,
        chains: Chains,
        device: torch.device,
    ) -> None:
        self.compression, self.peers = compression, peers
        self._chains = chains
        self.part = math.ceil(numel / (peers.size * BLOCK)) * BLOCK
        self.error = torch.zeros(numel, device=device)
        self.sum_error = torch.zeros(self.part, device=device)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the encoded payload, of which a rank sends 2 (R-1)/R."""
        per_value = 2.0 if self.compression == "bf16" else 1 + 4 / BLOCK
        return int(self.part * self.peers.size * per_value)

    def all_reduce(
        self, payload: torch.Tensor, accepted: torch.Tensor, any_accepted: torch.Tensor, phase: str
    ) -> Pending:
        """Starts summing a payload over the replicas, in place.

        Args:
            payload: ``[numel]`` fp32: weight times pseudo gradient; zeros if not accepted.
            accepted: 0-dim bool, whether this replica takes part. Otherwise its error is kept back.
            any_accepted: 0-dim bool, whether any replica does. Otherwise nothing is taken as sent.
            phase: What this is part of, for the message when it fails.
        """
        stages = _Stages(self, payload, accepted, any_accepted, phase)
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
    ) -> None:
        self._compressor, self._payload, self._phase = compressor, payload, phase
        self._accepted, self._any_accepted = accepted, any_accepted
        self._parts: Gathering | None = None
        self._sums: Gathering | None = None

    @torch.no_grad()
    def send_parts(self) -> None:
        """Encodes the payload and sends part i to replica i."""
        it, payload = self._compressor, self._payload
        padded = payload.new_zeros(it.part * it.peers.size)
        own = padded[: payload.numel()]
        copy_if_(torch.add(payload, it.error, out=own), ~self._accepted, payload)
        encoded = encode(padded.view(it.peers.size, it.part), it.compression)
        kept = own - decode(encoded, it.compression).view(-1)[: payload.numel()]
        copy_if_(it.error, self._accepted, kept)
        self._parts = it.peers.start_all_to_all(encoded.view(-1), self._phase)

    @torch.no_grad()
    def send_sum(self) -> None:
        """Adds up this replica's part of all payloads, encodes the sum and sends it to all."""
        assert self._parts is not None
        it, parts = self._compressor, self._parts.wait()
        self._parts = None
        total = decode(parts, it.compression).sum(dim=0) + it.sum_error
        encoded = encode(total.unsqueeze(0), it.compression)
        kept = total - decode(encoded, it.compression).view(-1)
        copy_if_(it.sum_error, self._any_accepted, kept)
        self._sums = it.peers.start_all_gather(encoded.view(-1), self._phase, payload=True)

    @torch.no_grad()
    def receive_sums(self) -> None:
        """Puts the sum of all parts in the payload's place."""
        assert self._sums is not None
        sums = decode(self._sums.wait(), self._compressor.compression)
        self._sums = None
        self._payload.copy_(sums.view(-1)[: self._payload.numel()])
