"""How ranks that run apart agree on the step after which they stop.

A signal reaches one rank, or one host's clock runs out. The others learn of it from the key-value
store of the process group, without a collective: replicas in their local phase are at different
steps, and nobody may wait for a rank that may itself be waiting in a collective (a log line, a
synchronisation, the end of training) for a replica behind it. So nobody waits for anybody's steps:

    every rank    at the top of every step writes its step, then looks for a wish to stop
    one rank      on a signal registers the wish, then reads every rank's step and publishes
                  the last step of the run: the largest of them
    every rank    goes on to that step, through every collective on the way, and stops after it

The store serves one request after the other. A rank whose look came before the wish wrote its step
before that, so the reader knows it; a rank whose look came after it waits for the reader's word
before it begins another step. Hence nobody is ever beyond the last step.
"""

from __future__ import annotations

import json
from argparse import Namespace
from datetime import timedelta

import torch.distributed as dist

from megatron_edit.platform import ds_compat


class ExitAgreement:
    """Agrees on a common last step.

    Args:
        store: Shared by all ranks; of this job and this start of it alone.
        rank: This rank.
        world_size: All ranks.
        first_step: Steps done before this run, the same on all ranks.
        timeout: How long to wait for the word of the rank that decides.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, first_step: int, timeout: timedelta
    ) -> None:
        self._store = dist.PrefixStore("megatron_edit/exit", store)
        self._rank, self._world_size, self._timeout = rank, world_size, timeout
        self._last_step: int | None = None
        self._reason = ""
        # Whoever decides finds a step of every rank, also of one that has not begun its first.
        self._write(first_step)

    def reason_to_stop(self, step: int, wish: str | None) -> str | None:
        """Called by every rank at the top of every step.

        Args:
            step: Steps this rank has done.
            wish: Why this rank would like all ranks to stop, or None.

        Returns:
            Why the run stops now, before this rank begins another step; None to go on.
        """
        if self._last_step is None:
            self._write(step)
            # The first of several wishes decides.
            if wish is not None and self._store.add("wishes", 1) == 1:
                self._decide(wish)
            if self._store.check(["wishes"]):
                self._read()
        stops = self._last_step is not None and step > self._last_step
        return self._reason if stops else None

    def wish(self, wish: str | None) -> str | None:
        """Registers and hears of wishes alone, for replicas that stop where they next meet.

        Args:
            wish: Why this rank would like all ranks to stop, or None.

        Returns:
            The first wish of any rank, or None.
        """
        if wish is not None and self._store.add("wishes", 1) == 1:
            self._store.set("decision", json.dumps([0, wish]))
        if not self._reason and self._store.check(["wishes"]):
            self._read()
        return self._reason or None

    def _write(self, step: int) -> None:
        self._store.set(f"step/{self._rank}", str(step))

    def _decide(self, reason: str) -> None:
        keys = [f"step/{rank}" for rank in range(self._world_size)]
        self._store.wait(keys, self._timeout)
        last_step = max(int(value) for value in self._store.multi_get(keys))
        self._store.set("decision", json.dumps([last_step, reason]))

    def _read(self) -> None:
        self._store.wait(["decision"], self._timeout)
        self._last_step, self._reason = json.loads(self._store.get("decision"))


def build_agreement(args: Namespace, first_step: int) -> ExitAgreement | None:
    """How the ranks of a run agree to stop, where something may stop them.

    Args:
        args: The arguments of the run.
        first_step: Steps done before it.
    """
    if not args.exit_signal_handler and args.exit_duration_in_mins is None:
        return None
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    store = ds_compat.default_store()
    return ExitAgreement(store, args.rank, args.world_size, first_step, timeout)
