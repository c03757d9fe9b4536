"""The one door between replicas.

Everything that crosses replicas goes through :class:`PeerGroup`; the engine knows nothing else of
the other replicas. A group whose members come and go, or another transport for a slow link, has
only this to implement.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_edit.replicas.groups import host_group
from megatron_edit.replicas.watch import Watch

# Told of each collective that has been waited for: its name, milliseconds since its start, bytes.
Observer = Callable[[str, float, int], None]


# 100 Mbit/s a rank: a link below it is not one to synchronise a model of any size over.
SLOWEST_BYTES_PER_S = 12.5e6


class PeerError(RuntimeError):
    """A collective between replicas failed or ran into its time-out."""


class Pending(Protocol):
    """A collective in flight."""

    def wait(self) -> None:
        """Returns when the result may be used on the current stream.

        Raises:
            PeerError: The collective failed or timed out.
        """


@dataclass(frozen=True)
class Gathering:
    """Numbers of every replica on their way here.

    Attributes:
        pending: The collective.
        gathered: ``[R, n]``, once ``pending`` has been waited for.
    """

    pending: Pending
    gathered: torch.Tensor

    def wait(self) -> torch.Tensor:
        """Returns the numbers when they may be used on the current stream.

        Raises:
            PeerError: The collective failed or timed out.
        """
        self.pending.wait()
        return self.gathered


@dataclass(frozen=True)
class PeerChannels:
    """Process groups over the same ranks, so that no traffic queues behind another kind's.

    Attributes:
        payload: Pseudo gradients and averaged gradients: large, slow, in flight for long.
        scalars: A few numbers on the device.
        partition: The ranks of these groups, on all ranks of the world.
        timeout: Bound of every wait.
    """

    payload: dist.ProcessGroup
    scalars: dist.ProcessGroup
    partition: list[list[int]]
    timeout: timedelta

    @cached_property
    def host(self) -> dist.ProcessGroup:
        """For a few numbers on the host; first asked for by all ranks of the world together, who
        make it then."""
        return host_group(self.partition, self.timeout, "between replicas", like=self.scalars)


class PeerGroup:
    """The R ranks, one of each replica, that hold the same shard of the same layers.

    Args:
        channels: Process groups of these ranks, by replica; None when there is one replica.
        ranks: Their global ranks, for messages.
        replica: Index of this rank's replica.

    Attributes:
        sent_bytes: What this rank has sent to other replicas so far, as a ring sends it.
        on_collective: Told of each collective that has been waited for.
        watch: Over collectives whose failure a wait for them does not show.
    """

    def __init__(self, channels: PeerChannels | None, ranks: list[int], replica: int) -> None:
        self._channels = channels
        self.ranks = ranks
        self.size = len(ranks)
        self.rank = replica
        self.sent_bytes = 0.0
        self.on_collective: Observer | None = None
        self.watch = Watch()
        self._payload_timeout = timedelta() if channels is None else channels.timeout

    def allow_for(self, size: int) -> None:
        """Lengthens the time-out of payloads by the time that so many bytes take on a slow link.

        All payloads of a synchronisation may start at once. They go one after another, and the
        time-out of the last counts from when it was started, not from when its turn has come.

        Args:
            size: Bytes of all tensors that may be under way together.
        """
        if self._channels is not None:
            sent = size * 2 * (self.size - 1) / self.size
            queue = timedelta(seconds=sent / SLOWEST_BYTES_PER_S)
            self._payload_timeout = self._channels.timeout + queue
            self._channels.payload.set_timeout(self._payload_timeout)

    def all_reduce(self, flat: torch.Tensor, phase: str) -> Pending:
        """Starts summing ``flat`` (1-D, in place) over the replicas.

        Args:
            flat: Any shape and dtype; it holds the sum once the returned handle has been waited for
                and must not be touched before.
            phase: What this is part of, for the message when it fails.
        """
        if self._channels is None:
            return DONE
        self.sent_bytes += flat.nbytes * 2 * (self.size - 1) / self.size
        started_s = time.perf_counter()
        with self._named(phase):
            work = dist.all_reduce(flat, group=self._channels.payload, async_op=True)
        return self._started(work, self._channels.payload, phase, "all_reduce", flat, started_s)

    def start_all_to_all(self, flat: torch.Tensor, phase: str) -> Gathering:
        """Starts sending the i-th of R equal parts of ``flat`` to replica i.

        Args:
            flat: ``[R * n]``; must not be changed before the result has been waited for.
            phase: What this is part of, for the message when it fails.

        Returns:
            ``[R, n]`` on their way, row i from replica i.
        """
        if self._channels is None:
            return Gathering(DONE, flat.unsqueeze(0))
        received = torch.empty_like(flat)
        self.sent_bytes += flat.nbytes * (self.size - 1) / self.size
        started_s = time.perf_counter()
        with self._named(phase):
            work = dist.all_to_all_single(
                received, flat, group=self._channels.payload, async_op=True
            )
        pending = self._started(
            work, self._channels.payload, phase, "all_to_all_single", received, started_s
        )
        return Gathering(pending, received.view(self.size, -1))

    def all_gather(self, values: torch.Tensor, phase: str) -> torch.Tensor:
        """Gathers a few numbers of every replica.

        Args:
            values: ``[n]``, the same n on every replica; on the device.
            phase: What this is part of, for the message when it fails.

        Returns:
            ``[R, n]``, row i from replica i.
        """
        return self.start_all_gather(values, phase).wait()

    def start_all_gather(
        self, values: torch.Tensor, phase: str, payload: bool = False
    ) -> Gathering:
        """Starts gathering values of every replica.

        Args:
            values: ``[n]``, the same n on every replica; on the device. They must not be changed
                before the result has been waited for.
            phase: What this is part of, for the message when it fails.
            payload: The values are a part of a payload, not a few scalars.

        Returns:
            ``[R, n]`` on their way, row i from replica i.
        """
        if self._channels is None:
            return Gathering(DONE, values.unsqueeze(0))
        group = self._channels.payload if payload else self._channels.scalars
        return self._gather(values, group, phase)

    def open_host_group(self) -> None:
        """Makes the group of :meth:`all_gather_on_host`; all ranks of the world together."""
        if self._channels is not None:
            _ = self._channels.host

    def all_gather_on_host(self, values: list[float], phase: str) -> list[list[float]]:
        """Gathers a few numbers of every replica on the host: a rendezvous of the replicas.

        Args:
            values: n numbers.
            phase: What this is part of, for the message when it fails.

        Returns:
            The numbers of each replica.
        """
        if self._channels is None:
            return [values]
        own = torch.tensor(values, dtype=torch.float64)
        gathered: list[list[float]] = self._gather(own, self._channels.host, phase).wait().tolist()
        return gathered

    def _gather(self, values: torch.Tensor, group: dist.ProcessGroup, phase: str) -> Gathering:
        gathered = values.new_empty(self.size * values.numel())
        self.sent_bytes += values.nbytes * (self.size - 1)
        started_s = time.perf_counter()
        with self._named(phase):
            work = dist.all_gather_single(gathered, values.contiguous(), group=group, async_op=True)
        pending = self._started(work, group, phase, "all_gather_into_tensor", gathered, started_s)
        return Gathering(pending, gathered.view(self.size, -1))

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
            raise PeerError(f"{self._failed(phase)}: {error}") from error

    def _failed(self, phase: str) -> str:
        return f"{phase} failed in the peer group of replica {self.rank} (ranks {self.ranks})"

    def _started(
        self,
        work: dist.Work,
        channel: dist.ProcessGroup,
        phase: str,
        operation: str,
        tensor: torch.Tensor,
        started_s: float,
    ) -> Pending:
        """The handle of a collective that was just started, which is watched where need be."""
        if dist.get_backend(channel) == dist.Backend.NCCL:
            assert self._channels is not None
            payload = channel is self._channels.payload
            timeout = self._payload_timeout if payload else self._channels.timeout
            self.watch.add(work.get_future_result(), self._failed(phase), timeout)
        return _Work(self, work, phase, operation, tensor, started_s)


class _Done:
    def wait(self) -> None:
        """The result is there."""


DONE = _Done()


class _Work:
    def __init__(
        self,
        group: PeerGroup,
        work: dist.Work,
        phase: str,
        operation: str,
        tensor: torch.Tensor,
        started_s: float,
    ) -> None:
        self._group, self._work, self._phase = group, work, phase
        self._operation, self._tensor, self._started_s = operation, tensor, started_s

    def wait(self) -> None:
        with self._group._named(self._phase):
            self._work.wait()
        self._group._observe(self._operation, self._started_s, self._tensor)
