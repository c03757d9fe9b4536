"""How long something takes on the device, without making it wait."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up stretches of the current stream, without waiting for them on a GPU.

    Args:
        device: Where the work is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._stretches: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._ms = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context of a stretch; of one thread at a time."""
        if self._on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._stretches.append((start, end))
        else:
            start_s = time.perf_counter()
            yield
            self._ms += 1e3 * (time.perf_counter() - start_s)

    def milliseconds(self) -> float:
        """The sum. On a GPU the recorded events must have passed."""
        return self._ms + sum(start.elapsed_time(end) for start, end in self._stretches)
