"""What happened in a synchronisation, carried to the host without making the device wait."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial

import torch
import torch.distributed as dist

from megatron_edit.engine.fingerprint import outnumbered
from megatron_edit.engine.penalty import clip_coefficient
from megatron_edit.replicas.mesh import Mesh
from megatron_edit.replicas.peers import PeerError
from megatron_edit.replicas.stopwatch import Stopwatch

# Numbers of a round that travel with its norms: steps not skipped, all steps, a hash of the order
# in which units went, and two that make the fingerprint of the anchor.
COUNTS = 5


@dataclass(frozen=True)
class SyncRecord:
    """One synchronisation; identical on every rank but for the last three.

    Attributes:
        round: Counted from 0.
        step: Inner steps done before it.
        units: Names of the U units of the replica.
        norms: ``[R][U]``, norm of each replica's pseudo gradient.
        weights: ``[R][U]``, what each replica's pseudo gradient counted.
        accepted: ``[R][U]``, False where a replica was anomalous.
        steps: ``[R]``, inner steps of the round whose update was not skipped.
        averaged_norms: ``[U]``, norms of the averaged pseudo gradients before the clip.
        clip_coefficients: ``[U]``, the factors they were clipped by.
        momentum_norm: Norm of the outer momentum of all units.
        drift: ``[R]``, distance of each replica from the old anchor over the norm of the new one.
        consecutive_rollbacks: ``[U]``, synchronisations in a row that every replica failed.
        exposed_ms: Milliseconds this rank waited for other replicas.
        computing_ms: Milliseconds this rank's own arithmetic took. That of a compression runs
            behind the training; where a step waited for it, it is in ``exposed_ms``, too.
        sync_bytes: Bytes this rank sent to other replicas for the payload.
    """

    round: int
    step: int
    units: list[str]
    norms: list[list[float]]
    weights: list[list[float]]
    accepted: list[list[bool]]
    steps: list[float]
    averaged_norms: list[float]
    clip_coefficients: list[float]
    momentum_norm: float
    drift: list[float]
    consecutive_rollbacks: list[int]
    exposed_ms: float
    computing_ms: float
    sync_bytes: float

    @property
    def anomalies(self) -> int:
        """How many (replica, unit) pairs were excluded."""
        return sum(not ok for row in self.accepted for ok in row)

    @property
    def rolled_back(self) -> list[str]:
        """Units that every replica failed, and that went back to the anchor."""
        columns = zip(*self.accepted, strict=True)
        return [unit for unit, column in zip(self.units, columns, strict=True) if not any(column)]

    @property
    def pseudo_grad_norm(self) -> float:
        """Norm of the averaged pseudo gradient over all units."""
        return sum(norm**2 for norm in self.averaged_norms) ** 0.5


class _HostCopy:
    """A copy of device values on its way to the host."""

    def __init__(self, values: torch.Tensor) -> None:
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
        self._host.copy_(values, non_blocking=True)
        self._arrived = torch.cuda.Event() if values.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def read(self) -> torch.Tensor:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host


@dataclass(frozen=True)
class Decided:
    """What a synchronisation decided, on the device; the same on every replica, all fp32.

    Attributes:
        norms: ``[R, U]``, of each replica's pseudo gradient.
        weights: ``[R, U]``, what each replica counts.
        accepted: ``[R, U]``, 1 where a replica takes part, 0 where not.
        counts: ``[R, COUNTS]``.
        rollbacks: ``[U]``, synchronisations in a row that every replica failed.
    """

    norms: torch.Tensor
    weights: torch.Tensor
    accepted: torch.Tensor
    counts: torch.Tensor
    rollbacks: torch.Tensor

    @classmethod
    def zeros(cls, replicas: int, units: int, device: torch.device) -> Decided:
        """Tables to be filled."""
        empty = partial(torch.zeros, device=device)
        shape = (replicas, units)
        return cls(empty(shape), empty(shape), empty(shape), empty(replicas, COUNTS), empty(units))

    def tables(self) -> dict[str, torch.Tensor]:
        """The tensors by name, not copied."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


class OpenRecord:
    """The numbers of a synchronisation under way.

    Args:
        round_: Counted from 0.
        step: Inner steps done before it.
        units: U, units of the replica.
        device: Where the values are computed.

    Attributes:
        waiting: Runs while the step waits for other replicas.
        computing: Runs while the step computes for the synchronisation.
        behind: Runs while something is computed for it behind the training.
    """

    def __init__(self, round_: int, step: int, units: int, device: torch.device) -> None:
        self.round, self.step = round_, step
        self.waiting, self.computing, self.behind = (Stopwatch(device) for _ in range(3))
        self.bytes = 0.0
        self.decided: Decided | None = None
        # Rows: squared norms of the averaged pseudo gradient, of the anchor, of the momentum.
        self.squares = torch.zeros(3, units, device=device)

    def applied(self, unit: int, averaged: torch.Tensor, outer: torch.Tensor) -> None:
        """Notes this rank's squared norms of a unit: 0-dim of the average, ``[2]`` outer state."""
        self.squares[0, unit] = averaged
        self.squares[1:, unit] = outer


@dataclass
class _Sent:
    """A closed record whose values are on their way to the host."""

    record: OpenRecord
    values: _HostCopy
    aged: bool = False


class Recorder:
    """Closes records and hands them out once their values have reached the host.

    On a GPU a record is read one step after its synchronisation, when its values have long arrived;
    always at the same step, so that all ranks see it together. Where they meet by the clock it is
    read at once.

    Args:
        units: Names of the units of the replica.
        mesh: The mesh.
        device: Where the values are computed.
    """

    def __init__(self, units: list[str], mesh: Mesh, device: torch.device) -> None:
        self._units, self._mesh = units, mesh
        self._on_gpu = device.type == "cuda"
        self._finished: list[SyncRecord] = []
        self._sent: list[_Sent] = []

    def close(self, record: OpenRecord, clip: float | None) -> None:
        """Sums a record over the replica and sends it off; all ranks of the replica together."""
        assert record.decided is not None, "closed before it was decided"
        # All ranks must learn of it. Those whose own shards agree would go on alone.
        parted = outnumbered(record.decided.counts[:, 3:])
        if self._mesh.replica_size > 1:
            sums = torch.cat([record.squares.flatten(), parted])
            dist.all_reduce(sums, group=self._mesh.worker_group)
            record.squares.copy_(sums[: -len(parted)].view_as(record.squares))
            parted = sums[-len(parted) :]
        averaged = record.squares[0].sqrt()
        decided = record.decided.tables().values()
        values = [*decided, averaged, clip_coefficient(averaged, clip), record.squares[1:], parted]
        flat = torch.cat([value.reshape(-1) for value in values])
        self._sent.append(_Sent(record, _HostCopy(flat)))

    def poll(self) -> None:
        """Called once at the end of every step: reads the values sent off at the step before."""
        if not self._on_gpu or (self._sent and self._sent[0].aged):
            self.drain()
        for sent in self._sent:
            sent.aged = True

    def drain(self) -> None:
        """Reads everything sent off so far, waiting for it on a GPU."""
        self._finished += [self._read(sent) for sent in self._sent]
        self._sent.clear()

    def take(self) -> list[SyncRecord]:
        """Returns the finished records not taken before."""
        taken, self._finished = self._finished, []
        return taken

    def _read(self, sent: _Sent) -> SyncRecord:
        replicas, units = self._mesh.replicas, len(self._units)
        matrix, row = replicas * units, units
        sizes = [matrix, matrix, matrix, COUNTS * replicas, row, row, row, 2 * row, replicas]
        parts = sent.values.read().split(sizes)
        norms, weights, accepted = (part.view(replicas, units) for part in parts[:3])
        steps, _, orders, *_ = parts[3].view(replicas, COUNTS).unbind(dim=1)
        record = sent.record
        if not bool((orders == orders[0]).all()):
            raise PeerError(
                f"round {record.round}: the replicas synchronised their units in different orders "
                f"(ranks {self._mesh.peers.ranks})"
            )
        if parted := parts[8].nonzero().flatten().tolist():
            raise PeerError(
                f"round {record.round}: the anchor, which all replicas share, has become another "
                f"one in replica {', '.join(map(str, parted))}: a fault of memory or link, or a "
                "sum that is not the same everywhere; the last checkpoint is older"
            )
        anchor, momentum = parts[7].view(2, units).sum(dim=1).sqrt().tolist()
        moved = norms.square().sum(dim=1).sqrt()
        return SyncRecord(
            round=record.round,
            step=record.step,
            units=self._units,
            norms=norms.tolist(),
            weights=weights.tolist(),
            accepted=accepted.bool().tolist(),
            steps=steps.tolist(),
            averaged_norms=parts[5].tolist(),
            clip_coefficients=parts[6].tolist(),
            momentum_norm=momentum,
            drift=(moved / max(anchor, 1e-30)).tolist(),
            consecutive_rollbacks=[int(value) for value in parts[4].tolist()],
            exposed_ms=record.waiting.milliseconds(),
            computing_ms=record.computing.milliseconds() + record.behind.milliseconds(),
            sync_bytes=record.bytes,
        )
