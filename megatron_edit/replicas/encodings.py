"""fp32 values in fewer bytes: bf16, or int8 with a scale per block.

A row is what encodes some values, a multiple of :data:`BLOCK`, as bytes. It is written and read in
parts, which begin at a block.
"""

from __future__ import annotations

from typing import Protocol

import torch

from megatron_edit.replicas.masked_copy import zero_if_

# Values that share one fp32 scale in int8.
BLOCK = 256


class Encoding(Protocol):
    """How values become bytes."""

    def row_bytes(self, values: int) -> int:
        """Bytes of a row of so many values."""

    def write(
        self, values: torch.Tensor, row: torch.Tensor, start: int, withheld: torch.Tensor
    ) -> None:
        """Encodes a part of a row, and subtracts what it is decoded to from the values.

        Args:
            values: ``[n]`` fp32, n a multiple of :data:`BLOCK`; what the encoding loses is left.
            row: ``[bytes]`` uint8.
            start: Number of the first of the values in the row, a multiple of :data:`BLOCK`.
            withheld: 0-dim bool. If it holds, zeros are encoded, and all of the values is left.
        """

    def read(self, row: torch.Tensor, start: int, values: torch.Tensor) -> None:
        """Decodes a part of a row into ``values``; the inverse of :meth:`write`."""


class Bf16:
    """Every value in two bytes."""

    def row_bytes(self, values: int) -> int:
        """Bytes of a row of so many values."""
        return 2 * values

    def write(
        self, values: torch.Tensor, row: torch.Tensor, start: int, withheld: torch.Tensor
    ) -> None:
        """Encodes a part of a row."""
        encoded = row.view(torch.bfloat16)[start : start + values.numel()].copy_(values)
        values.sub_(zero_if_(encoded, withheld))

    def read(self, row: torch.Tensor, start: int, values: torch.Tensor) -> None:
        """Decodes a part of a row."""
        values.copy_(row.view(torch.bfloat16)[start : start + values.numel()])


class Int8:
    """int8 values of a whole row, then the fp32 scales of its blocks."""

    def row_bytes(self, values: int) -> int:
        """Bytes of a row of so many values."""
        return values + 4 * (values // BLOCK)

    def write(
        self, values: torch.Tensor, row: torch.Tensor, start: int, withheld: torch.Tensor
    ) -> None:
        """Encodes a part of a row."""
        integers, scales = self._parts(row, start, values.numel())
        blocks = values.view(-1, BLOCK)
        steps = blocks.abs()
        torch.amax(steps, dim=1, keepdim=True, out=scales).div_(127)
        torch.div(blocks, scales.clamp(min=1e-38), out=steps).round_()
        integers.copy_(zero_if_(steps, withheld))
        blocks.sub_(steps.mul_(scales))

    def read(self, row: torch.Tensor, start: int, values: torch.Tensor) -> None:
        """Decodes a part of a row."""
        integers, scales = self._parts(row, start, values.numel())
        values.view(-1, BLOCK).copy_(integers).mul_(scales)

    @staticmethod
    def _parts(row: torch.Tensor, start: int, values: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the int8 values ``[blocks, BLOCK]`` and of the scales ``[blocks, 1]``."""
        in_row = row.numel() // (BLOCK + 4) * BLOCK
        integers = row[start : start + values].view(torch.int8).view(-1, BLOCK)
        scales = row[in_row:].view(torch.float32)[start // BLOCK : (start + values) // BLOCK]
        return integers, scales.unsqueeze(1)


ENCODINGS: dict[str, Encoding] = {"bf16": Bf16(), "int8": Int8()}
