"""Numbers by which replicas tell, without sending them, whether tensors agree bit for bit."""

from __future__ import annotations

import torch

# Weights of the positions, repeated: the largest prime below 2^16.
_PERIOD = 65521
# Elements hashed at a time, a multiple of the period: the temporaries are int64.
_CHUNK = 16 * _PERIOD
# fp32 carries integers below that exactly.
_PIECE = 24


def position_hash(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of a fp32 tensor's bits, each word weighted by its position; 0-dim int64, wraps around.

    It tells values in other places apart, too, but makes several passes over memory.
    """
    words = tensor.contiguous().view(torch.int32).reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    weights = torch.arange(min(_CHUNK, words.numel()), device=tensor.device) % _PERIOD + 1
    for chunk in words.split(_CHUNK):
        total += chunk.long().mul_(weights[: chunk.numel()]).sum()
    return total


def bit_sum(flat: torch.Tensor) -> torch.Tensor:
    """Sum of the bits of a flat fp32 buffer, read as int64; 0-dim int64, wraps around.

    One pass without temporaries. A single changed bit always changes it. It depends on whether the
    buffer begins at an odd place of its storage.
    """
    if flat.numel() < 2:
        return flat.view(torch.int32).sum()
    first = flat.storage_offset() % 2
    paired = first + (flat.numel() - first) // 2 * 2
    single = flat[:first].view(torch.int32).sum() + flat[paired:].view(torch.int32).sum()
    return flat[first:paired].view(torch.int64).sum() + single


def combine(sums: list[torch.Tensor]) -> torch.Tensor:
    """One number of the sums of several buffers, their order included; 0-dim int64."""
    total = torch.zeros_like(sums[0])
    for one in sums:
        total = total * 1_000_003 + one
    return total


def as_floats(number: torch.Tensor) -> torch.Tensor:
    """Takes a 0-dim int64 apart into ``[2]`` fp32 that hold its lower 48 bits exactly."""
    lower = number & ((1 << _PIECE) - 1)
    upper = (number >> _PIECE) & ((1 << _PIECE) - 1)
    return torch.stack([lower, upper]).float()


def outnumbered(fingerprints: torch.Tensor) -> torch.Tensor:
    """Which rows are not those of more than half of all rows.

    Args:
        fingerprints: ``[R, n]``, exact numbers.

    Returns:
        fp32 ``[R]``: 0 where a row is in the majority, else 1; so all 0 where all rows agree, and
        all 1 where none can be told to be the odd one.
    """
    same = (fingerprints.unsqueeze(0) == fingerprints.unsqueeze(1)).all(dim=2)
    return (2 * same.sum(dim=1) <= len(fingerprints)).float()
