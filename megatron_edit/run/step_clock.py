"""How long steps take on a device that works behind the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StepClock:
    """Measures from one moment at which the device has done all it was given to another.

    In between the host runs ahead: read without a wait, the clock would show how long it takes to
    give the device its work.

    Args:
        wait_for_device: Returns when the device has nothing left to do.
        clock: Seconds.
    """

    def __init__(
        self, wait_for_device: Callable[[], None], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._wait_for_device, self._clock = wait_for_device, clock
        self._started_s = clock()

    def restart(self) -> None:
        """Begins a stretch."""
        self._started_s = self._now()

    def seconds(self) -> float:
        """The length of the stretch so far, without its pauses."""
        return self._now() - self._started_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context whose time does not count."""
        paused_s = self._now()
        yield
        self._started_s += self._now() - paused_s

    def _now(self) -> float:
        self._wait_for_device()
        return self._clock()
