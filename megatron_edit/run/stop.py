"""Reasons to end a run before its last step."""

from __future__ import annotations

import signal
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from megatron_edit.run.exit_agreement import ExitAgreement
from megatron_edit.run.nan_rows import NanRow

if TYPE_CHECKING:
    from megatron_edit.engine.record import SyncRecord
    from megatron_edit.engine.rendezvous import Rendezvous
    from megatron_edit.engine.sync_engine import SyncEngine


@dataclass(frozen=True)
class Stop:
    """The run ends early; every rank has the same.

    Attributes:
        reason: Why, for the user.
        failed: Whether something is wrong, which is exit code 1.
        save: Whether the parameters are worth a checkpoint.
        rolls_back: Whether all replicas go back to the anchor before it.
    """

    reason: str
    failed: bool = False
    save: bool = True
    rolls_back: bool = False


class Progress(Protocol):
    """How far a run is, as the trainer tells it."""

    iteration: int
    engine: SyncEngine

    def passed(self, interval: int) -> bool:
        """Whether the last step that all replicas know of passed a multiple of ``interval``."""


class StopConditions:
    """What may end a run from outside: SIGTERM, ``--exit-interval`` and the clock.

    Args:
        args: The arguments of the run.
        agreement: Makes all ranks stop after the same step; None where nothing else asks for it.
        first_step: Steps done before this run.
        clock: Seconds that pass.
    """

    def __init__(
        self,
        args: Namespace,
        agreement: ExitAgreement | None,
        first_step: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._args, self._agreement, self._first_step = args, agreement, first_step
        self._clock = clock
        self._started_s = clock()
        self._signalled = False
        if args.exit_signal_handler:
            signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        self._signalled = True

    def check(self, progress: Progress) -> Stop | None:
        """Why the run stops now, at the top of a step; None to go on."""
        interval, engine = self._args.exit_interval, progress.engine
        # A run that resumes where the last one stopped has to get on.
        gets_on = engine.together and progress.iteration > self._first_step
        if interval and gets_on and progress.passed(interval):
            return Stop(f"--exit-interval {interval}")
        if self._agreement is None:
            return None
        if not engine.rendezvous.by_clock or engine.lockstep:
            reason = self._agreement.reason_to_stop(engine.step, self._wish())
        else:
            reason = self._reason_at_meeting(engine.rendezvous, engine.together, self._agreement)
        return None if reason is None else Stop(reason)

    def _reason_at_meeting(
        self, meetings: Rendezvous, together: bool, agreement: ExitAgreement
    ) -> str | None:
        """Replicas that run by the clock are called to a meeting and stop after it."""
        wish = agreement.wish(self._wish())
        meetings.wants_stop = wish is not None
        return wish if together and meetings.stop else None

    def _wish(self) -> str | None:
        if self._signalled:
            return "SIGTERM"
        minutes = self._args.exit_duration_in_mins
        if minutes is not None and self._clock() - self._started_s >= 60 * minutes:
            return f"--exit-duration-in-mins {minutes}"
        return None


def nan_limit(rows: Sequence[NanRow], args: Namespace) -> Stop | None:
    """Stops a run in which a replica has been unable to learn for too long.

    In lockstep one replica's failure is everybody's. A replica that trains apart goes on until
    synchronisations did not help it, unless nobody else learns either.

    Args:
        rows: Of each replica, as of the last log line.
        args: The arguments of the run.
    """
    limit, synchronisations = args.max_nan_iterations, args.edit.max_consecutive_rollbacks
    limits = f"--max-nan-iterations {limit}"
    worst = max(row.lockstep_steps for row in rows)
    if worst >= limit:
        replica = [row.lockstep_steps for row in rows].index(worst)
        return Stop(
            f"loss or gradient of replica {replica} was not finite for {worst} iterations in a "
            f"row, {limits}; nothing is saved",
            failed=True,
            save=False,
        )
    failing = [replica for replica, row in enumerate(rows) if row.steps >= limit]
    if len(failing) == len(rows):
        least = min(row.steps for row in rows)
        return Stop(
            f"loss or gradient of every replica was not finite for {least} iterations in a row, "
            f"{limits}; all go back to the anchor",
            failed=True,
            rolls_back=True,
        )
    for replica in failing:
        if rows[replica].synchronisations >= synchronisations:
            return Stop(
                f"loss or gradient of replica {replica} was not finite for {rows[replica].steps} "
                f"iterations in a row, {limits}, and {rows[replica].synchronisations} "
                f"synchronisations in a row did not help, edit.max_consecutive_rollbacks "
                f"{synchronisations}; all go back to the anchor",
                failed=True,
                rolls_back=True,
            )
    return None


def rollback_limit(records: Sequence[SyncRecord], limit: int) -> Stop | None:
    """Stops a run whose replicas cannot get away from the anchor.

    Args:
        records: The synchronisations since the last call.
        limit: ``edit.max_consecutive_rollbacks``.
    """
    for record in records:
        worst = max(record.consecutive_rollbacks)
        if worst >= limit:
            unit = record.consecutive_rollbacks.index(worst)
            norms = ", ".join(f"{row[unit]:.4g}" for row in record.norms)
            return Stop(
                f"round {record.round}: every replica of unit {record.units[unit]} was anomalous "
                f"(norms {norms}) in {worst} synchronisations in a row, "
                f"edit.max_consecutive_rollbacks {limit}",
                failed=True,
            )
    return None
