"""Chains of collectives and arithmetic behind the training, several of them under way at once.

A chain's next collective needs the result of the one before. Run to its end it would leave a link
with a delay idle between the two; so its stages take turns with those of the chains that start
after it. The turns follow from the order in which chains are started alone, which all replicas
share, and so the collectives have one order, too; chains may be waited for in any.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from megatron_edit.replicas.peers import Pending

Stage = Callable[[], None]


class Chains:
    """Where chains run: on a GPU in a stream of their own, on a CPU in one thread.

    Args:
        device: Where the tensors are.
        ahead: Chains that start before the result of one is waited for, unless there are no more
            (:meth:`flush`). The first stage of a chain begins at once, its last when so many more
            have started, the others evenly between them.
    """

    def __init__(self, device: torch.device, ahead: int = 0) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = None if self._stream else ThreadPoolExecutor(1, "edit-compression")
        # The newest first; None for a turn in which no chain started.
        self._recent: deque[_Chain | None] = deque(maxlen=ahead + 1)
        self._ahead = ahead

    def run(self, stages: Sequence[Stage]) -> Pending:
        """Starts a chain, behind what the current stream has been given."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        chain = _Chain(self, stages)
        self._turn(chain)
        return chain

    def flush(self) -> None:
        """Says that no more chains start for a while: those under way need not wait for more."""
        for _ in range(self._ahead):
            self._turn(None)

    def _turn(self, newest: _Chain | None) -> None:
        self._recent.appendleft(newest)
        for turns, chain in enumerate(self._recent):
            if chain is not None:
                chain.begin_stages_of(turns, self._ahead)

    def begin(self, stage: Stage) -> Future[None] | None:
        """Queues a stage behind all earlier ones; returns how it ends where that is on a CPU."""
        if self._thread is not None:
            return self._thread.submit(stage)
        with torch.cuda.stream(self._stream):
            stage()
        return None

    def mark(self) -> torch.cuda.Event | None:
        """Returns an event behind all that was queued on a GPU."""
        return None if self._stream is None else self._stream.record_event()


class _Chain:
    """A chain whose stages begin one by one."""

    def __init__(self, chains: Chains, stages: Sequence[Stage]) -> None:
        self._chains = chains
        # Kept until they are waited for. Given back earlier, the memory of what they were given
        # would be used again while their stream still reads it.
        self._stages = list(stages)
        self._begun: list[Future[None] | None] = []
        self._finished: torch.cuda.Event | None = None

    def begin_stages_of(self, turns: int, ahead: int) -> None:
        """Begins the stages that are due when so many more chains have started."""
        gaps = max(len(self._stages) - 1, 1)
        for stage in range(len(self._begun), len(self._stages)):
            if -(-stage * ahead // gaps) <= turns:
                self._begin_next()

    def _begin_next(self) -> None:
        self._begun.append(self._chains.begin(self._stages[len(self._begun)]))
        if len(self._begun) == len(self._stages):
            self._finished = self._chains.mark()

    def wait(self) -> None:
        """Returns when the result may be used on the current stream."""
        assert len(self._begun) == len(self._stages), "waited for before its turns have come"
        for ended in self._begun:
            if ended is not None:
                ended.result()
        if self._finished is not None:
            torch.cuda.current_stream().wait_event(self._finished)
        self._stages, self._begun = [], []
