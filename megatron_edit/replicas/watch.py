"""Collectives whose end the host does not see for itself.

With gloo, waiting for a collective blocks and raises what went wrong. With NCCL it only has a
stream wait: the host goes on, and blocks for ever in whatever next needs a result. NCCL's own
watchdog notices, but knows no more than a number of the collective and the name of its group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

# torch's ``WorkResult``, which has no public name.
_SUCCESS, _TIMED_OUT = 0, 1
# So long before NCCL's watchdog ends the process is a collective said to be overdue.
LEAD_S = 2.0


class Outcome(Protocol):
    """How a collective ends, as torch's ``Work.get_future_result()`` tells."""

    def done(self) -> bool: ...
    def value(self) -> int: ...


@dataclass(frozen=True)
class _Watched:
    outcome: Outcome
    name: str
    started_s: float
    limit_s: float


class Watch:
    """Knows the collectives under way, and which of them has failed.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way: list[_Watched] = []

    def add(self, outcome: Outcome, name: str, timeout: timedelta) -> None:
        """Has a collective watched that starts now.

        Args:
            outcome: How it ends.
            name: What it is part of, and its group.
            timeout: After which it is given up.
        """
        watched = _Watched(outcome, name, self._clock(), timeout.total_seconds())
        with self._lock:
            self._under_way = [*self._not_succeeded(), watched]

    def trouble(self) -> str | None:
        """Says which collective, the oldest if several, has failed or is about to be given up; None
        while all is well."""
        with self._lock:
            self._under_way = under_way = self._not_succeeded()
        for one in under_way:
            if (text := self._trouble_of(one)) is not None:
                return text
        return None

    def _not_succeeded(self) -> list[_Watched]:
        return [one for one in self._under_way if not _succeeded(one.outcome)]

    def _trouble_of(self, one: _Watched) -> str | None:
        if one.outcome.done():
            how = "timed out" if one.outcome.value() == _TIMED_OUT else "its connections failed"
            return f"{one.name}: {how}"
        seconds = self._clock() - one.started_s
        if seconds < one.limit_s - LEAD_S:
            return None
        return f"{one.name}: not done after {seconds:.0f} of {one.limit_s:.0f} s"


def _succeeded(outcome: Outcome) -> bool:
    return outcome.done() and outcome.value() == _SUCCESS
