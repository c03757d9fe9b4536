"""The one door between replicas.

Everything that crosses replicas goes through :class:`SyncGroup`; the engine knows nothing else of
the other replicas. A group whose members come and go, or another transport for a slow link, has
only this to implement.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist


class SyncError(RuntimeError):
    """A collective between replicas failed or ran into its time-out."""


class Pending(Protocol):
    """A collective in flight."""

    def wait(self) -> None:
        """Returns when the result may be used on the current stream.

        Raises:
            SyncError: The collective failed or timed out.
        """


# Told of each finished collective: its name, milliseconds from start to result, bytes of the tensor.
Observer = Callable[[str, float, int], None]


class SyncGroup:
    """The R ranks, one of each replica, that hold the same shard of the same layers.

    Args:
        group: Process group of these ranks, ordered by replica; None when there is one replica.
        ranks: Their global ranks, for messages.
        replica: Index of this rank's replica.
    """

    def __init__(self, group: dist.ProcessGroup | None, ranks: list[int], replica: int) -> None:
        self._group = group
        self.ranks = ranks
        self.size = len(ranks)
        self.rank = replica
        self.on_collective: Observer | None = None

    def all_reduce(self, flat: torch.Tensor, phase: str) -> Pending:
        """Starts summing ``flat`` (1-D, in place) over the replicas.

        Args:
            flat: Any shape and dtype; it holds the sum once the returned handle has been waited for
                and must not be touched before.
            phase: What this is part of, for the message when it fails.
        """
        if self._group is None:
            return _Done()
        started_s = time.perf_counter()
        with self._named(phase):
            work = dist.all_reduce(flat, group=self._group, async_op=True)
        return _Work(self, work, phase, flat, started_s)

    def all_gather(self, values: torch.Tensor, phase: str) -> torch.Tensor:
        """Gathers a few numbers of every replica.

        Args:
            values: ``[n]``, the same n on every replica.
            phase: What this is part of, for the message when it fails.

        Returns:
            ``[R, n]``, row i from replica i.
        """
        if self._group is None:
            return values.unsqueeze(0)
        gathered = values.new_empty(self.size * values.numel())
        started_s = time.perf_counter()
        with self._named(phase):
            dist.all_gather_into_tensor(gathered, values.contiguous(), group=self._group)
        self._observe("all_gather_into_tensor", started_s, gathered)
        return gathered.view(self.size, -1)

    def _observe(self, operation: str, started_s: float, tensor: torch.Tensor) -> None:
        if self.on_collective is None:
            return
        if tensor.is_cuda:
            # As DeepSpeed's comms logger does: without it only the launch would be timed.
            torch.cuda.synchronize()
        size = tensor.numel() * tensor.element_size()
        self.on_collective(operation, 1e3 * (time.perf_counter() - started_s), size)

    @contextmanager
    def _named(self, phase: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise SyncError(
                f"{phase} failed in the sync group of replica {self.rank} (ranks {self.ranks}): {error}"
            ) from error


class _Done:
    def wait(self) -> None:
        """There is one replica: its own value is the sum."""


class _Work:
    def __init__(
        self,
        group: SyncGroup,
        work: dist.Work,
        phase: str,
        tensor: torch.Tensor,
        started_s: float,
    ) -> None:
        self._group, self._work, self._phase = group, work, phase
        self._tensor, self._started_s = tensor, started_s

    def wait(self) -> None:
        with self._group._named(self._phase):
            self._work.wait()
        self._group._observe("all_reduce", self._started_s, self._tensor)
