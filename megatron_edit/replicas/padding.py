"""A payload as rows of blocks, of which none holds values of two parameters.

Values that share a scale must be the same ones wherever a parameter has a copy: a norm weight on
every tensor-parallel rank, a tied embedding on two pipeline stages. So every parameter begins a
block of its own, whatever comes before it in the payload.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_edit.replicas.chunks import chunks
from megatron_edit.replicas.encodings import BLOCK


@dataclass(frozen=True)
class Stretch:
    """Some blocks of a row that are worked on together.

    Attributes:
        row: Number of the row.
        span: Their place in the row.
        padded: Their place in all rows, one after the other.
        pieces: Places of values in the payload and, of the same values, within the stretch.
    """

    row: int
    span: slice
    padded: slice
    pieces: list[tuple[slice, slice]]

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.span.stop - self.span.start

    def add(self, payload: torch.Tensor, values: torch.Tensor) -> None:
        """Adds the stretch's part of a payload to ``values``, and nothing to the padding."""
        if self.pieces:
            torch._foreach_add_(
                [values[inside] for _, inside in self.pieces],
                [payload[place] for place, _ in self.pieces],
            )

    def scatter(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        """Copies ``values`` into the stretch's part of a payload."""
        if self.pieces:
            torch._foreach_copy_(
                [payload[place] for place, _ in self.pieces],
                [values[inside] for _, inside in self.pieces],
            )


class Padding:
    """Where the values of a payload are in R rows of blocks.

    Args:
        sizes: Elements of each parameter in the payload, in their order.
        rows: R.
        device: Of the payload.

    Attributes:
        numel: Elements of a row, a multiple of :data:`BLOCK`.
        spans: The stretches of any one row.
        stretches: Those of all rows.
    """

    def __init__(self, sizes: Sequence[int], rows: int, device: torch.device) -> None:
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + math.ceil(size / BLOCK) * BLOCK)
        self.numel = math.ceil(starts[-1] / (rows * BLOCK)) * BLOCK
        self.spans = chunks(0, self.numel, device)
        self.stretches = [
            self._stretch(row, span, sizes, starts) for row in range(rows) for span in self.spans
        ]

    def _stretch(
        self, row: int, span: slice, sizes: Sequence[int], starts: Sequence[int]
    ) -> Stretch:
        first, last = row * self.numel + span.start, row * self.numel + span.stop
        pieces, before = [], 0
        for size, start in zip(sizes, starts, strict=False):
            begin, end = max(first, start), min(last, start + size)
            if begin < end:
                place = slice(before + begin - start, before + end - start)
                pieces.append((place, slice(begin - first, end - first)))
            before += size
        return Stretch(row, span, slice(first, last), pieces)
