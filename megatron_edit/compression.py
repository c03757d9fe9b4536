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
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from megatron_edit.conditional import copy_if_
from megatron_edit.sync_group import Pending, SyncGroup

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
        sync: The replicas.
        background: Where the chain of collectives runs while the device computes.
        device: Of the payload.

    Attributes:
        error: ``[numel]`` fp32, what this replica's encoding has lost so far.
        sum_error: ``[part]`` fp32, what the encoding of this rank's part of the sum has lost.
    """

    def __init__(
        self,
        compression: str,
        numel: int,
        sync: SyncGroup,
        background: Background,
        device: torch.device,
    ) -> None:
        self._compression, self._numel, self._sync = compression, numel, sync
        self._background = background
        self._part = math.ceil(numel / (sync.size * BLOCK)) * BLOCK
        self.error = torch.zeros(numel, device=device)
        self.sum_error = torch.zeros(self._part, device=device)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the encoded payload, of which a rank sends 2 (R-1)/R."""
        per_value = 2.0 if self._compression == "bf16" else 1 + 4 / BLOCK
        return int(self._part * self._sync.size * per_value)

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
        return self._background.run(lambda: self._chain(payload, accepted, any_accepted, phase))

    @torch.no_grad()
    def _chain(
        self, payload: torch.Tensor, accepted: torch.Tensor, any_accepted: torch.Tensor, phase: str
    ) -> None:
        padded = payload.new_zeros(self._part * self._sync.size)
        own = padded[: self._numel]
        copy_if_(torch.add(payload, self.error, out=own), ~accepted, payload)
        parts = padded.view(self._sync.size, self._part)
        encoded = encode(parts, self._compression)
        kept = own - decode(encoded, self._compression).view(-1)[: self._numel]
        copy_if_(self.error, accepted, kept)
        received = self._sync.all_to_all(encoded.view(-1), phase)
        total = decode(received, self._compression).sum(dim=0) + self.sum_error
        encoded_total = encode(total.unsqueeze(0), self._compression)
        kept = total - decode(encoded_total, self._compression).view(-1)
        copy_if_(self.sum_error, any_accepted, kept)
        gathered = self._sync.all_gather(encoded_total.view(-1), phase, payload=True)
        payload.copy_(decode(gathered, self._compression).view(-1)[: self._numel])


class Background:
    """Runs chains of collectives and arithmetic one after the other, behind the training.

    On a GPU they are queued on a stream of their own; on a CPU one thread waits for them.

    Args:
        device: Where the tensors are.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = None if self._stream else ThreadPoolExecutor(1, "edit-compression")

    def run(self, chain: Callable[[], None]) -> Pending:
        """Starts a chain after all earlier ones and what the current stream has been given."""
        if self._thread is not None:
            return _InThread(self._thread.submit(chain))
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            chain()
            finished = torch.cuda.Event()
            finished.record()
        return _OnStream(finished, chain)


class _InThread:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


class _OnStream:
    def __init__(self, finished: torch.cuda.Event, chain: Callable[[], None]) -> None:
        # The chain holds its inputs: given back earlier, their memory would be used again while
        # the background stream still reads it.
        self._finished, self._chain = finished, chain

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._finished)
