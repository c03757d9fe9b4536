"""A small kernel for discrete-event simulation: processes are generators on one clock.

A process yields a number of seconds to let them pass, or an `Event` to wait for it.
"""

import heapq
from collections.abc import Callable, Generator
from itertools import count

Process = Generator["float | Event", None, None]


class Event:
    """Something that happens once; processes may wait for it."""

    def __init__(self) -> None:
        self.happened = False
        self._waiting: list[Callable[[], None]] = []

    def when(self, resume: Callable[[], None]) -> None:
        """Calls back when the event happens; at once if it has."""
        if self.happened:
            resume()
        else:
            self._waiting.append(resume)

    def happen(self) -> None:
        """Lets every waiting process go on."""
        self.happened = True
        waiting, self._waiting = self._waiting, []
        for resume in waiting:
            resume()


class Clock:
    """Simulated time in seconds and the queue of what is to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Runs an action at a time that has not passed; equal times keep their order."""
        heapq.heappush(self._queue, (max(time, self.now), next(self._order), action))

    def start(self, process: Process) -> None:
        """Starts a process at the present time."""
        self.at(self.now, lambda: self._advance(process))

    def _advance(self, process: Process) -> None:
        try:
            awaited = next(process)
        except StopIteration:
            return
        if isinstance(awaited, Event):
            # Through the queue, so that a chain of events never becomes a chain of calls.
            awaited.when(lambda: self.at(self.now, lambda: self._advance(process)))
        else:
            self.at(self.now + awaited, lambda: self._advance(process))

    def run(self) -> None:
        """Runs until nothing is left to happen."""
        while self._queue:
            self.now, _, action = heapq.heappop(self._queue)
            action()
