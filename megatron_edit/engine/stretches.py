"""Parts of a unit that arithmetic takes one after the other, see ``replicas/chunks.py``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_edit.engine.backend import Unit
from megatron_edit.replicas.chunks import chunks


@dataclass(frozen=True)
class Stretch:
    """Consecutive elements of a unit's flat buffers that are worked on together.

    Attributes:
        span: Their place in a flat buffer.
        masters: Parts of the unit's masters, ``[n]`` each, that the stretch consists of.
        counted: Whether this rank counts them in a norm over the replica.
    """

    span: slice
    masters: list[Tensor]
    counted: bool

    @property
    def numel(self) -> int:
        """Elements."""
        return self.span.stop - self.span.start

    def less_masters(self, values: Tensor, out: Tensor) -> Tensor:
        """Computes ``values - masters``, ``[numel]`` each, into ``out``; returns it."""
        start = 0
        for master in self.masters:
            end = start + master.numel()
            torch.sub(values[start:end], master, out=out[start:end])
            start = end
        return out


class Squares:
    """Sums up the squares of those elements of a unit that this rank counts; NaN if others are not
    finite.

    Args:
        device: Of the elements.
    """

    def __init__(self, device: torch.device) -> None:
        self._norms = [torch.zeros((), device=device)]

    def add(self, stretch: Stretch, values: Tensor) -> None:
        """Adds the elements of a stretch, ``[numel]`` fp32."""
        norm = torch.linalg.vector_norm(values)
        # Not left out: a copy that is not finite makes 0 x NaN or 0 x Inf, and the sum NaN.
        self._norms.append(norm if stretch.counted else norm * 0.0)

    def sum(self) -> Tensor:
        """The sum so far, 0-dim fp32."""
        return torch.stack(self._norms).square().sum()


def stretches_of(unit: Unit) -> list[Stretch]:
    """Cuts a unit where it is to be cut: masters that are counted and those that are not do not
    share a stretch."""
    device = unit.locals[0].device
    stretches, start = [], 0
    for counted, masters in _runs(unit):
        flat = [master.view(-1) for master in masters]
        end = start + sum(master.numel() for master in flat)
        for span in chunks(start, end, device):
            parts = _parts(flat, span.start - start, span.stop - start)
            stretches.append(Stretch(span, parts, counted))
        start = end
    return stretches


def _runs(unit: Unit) -> list[tuple[bool, list[Tensor]]]:
    """Consecutive masters that are all counted, or all not."""
    runs: list[tuple[bool, list[Tensor]]] = []
    for counted, master in zip(unit.counted, unit.locals, strict=True):
        if not runs or runs[-1][0] != counted:
            runs.append((counted, []))
        runs[-1][1].append(master)
    return runs


def _parts(masters: list[Tensor], start: int, end: int) -> list[Tensor]:
    """What lies between two places of some masters, put one after the other."""
    parts, before = [], 0
    for master in masters:
        first, last = max(start - before, 0), min(end - before, master.numel())
        if first < last:
            parts.append(master[first:last])
        before += master.numel()
    return parts
