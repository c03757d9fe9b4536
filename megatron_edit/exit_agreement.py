"""How ranks that run apart agree on the step after which they stop.

A signal reaches one rank, or one host's clock runs out. The others learn of it from the key-value
store of the process group, without a collective: replicas in their local phase are at different
steps and must not be made to wait for one another at every step.

    one rank:    sets ``requested``
    every rank:  at the top of its next step p sees it, publishes p, and goes on
                 at the top of step p + 1 waits until all ranks have published
                 stops once max(published) + 1 steps are done

Ranks of a replica are in lockstep (every step ends with a collective), so the one that published
last is at most one step behind; replicas behind catch up before they stop.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist


class ExitAgreement:
    """Agrees on a common last step.

    Args:
        store: Shared by all ranks.
        rank: This rank.
        world_size: All ranks.
        timeout: How long to wait for the other ranks to reach their next step.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        # Keys of a rank that is restarted within the job must not meet those of its first life.
        self._store = dist.PrefixStore("megatron_edit/exit", store)
        self._rank, self._world_size, self._timeout = rank, world_size, timeout
        self._published = False
        self._last_step: int | None = None

    def request(self, reason: str) -> None:
        """Asks all ranks to stop soon; the first reason is kept."""
        self._store.compare_set("requested", "", reason)

    @property
    def reason(self) -> str:
        """Why the run stops."""
        return self._store.get("requested").decode()

    def stops_at(self, step: int) -> bool:
        """Whether the run stops now; called by every rank at the top of every step.

        Args:
            step: Steps this rank has done.
        """
        if not self._published:
            if self._store.check(["requested"]):
                self._publish(step)
            return False
        if self._last_step is None:
            self._store.set_timeout(self._timeout)
            self._store.wait(["agreed"], self._timeout)
            self._last_step = max(
                int(self._store.get(f"step/{rank}")) for rank in range(self._world_size)
            )
        return step > self._last_step

    def _publish(self, step: int) -> None:
        self._published = True
        self._store.set(f"step/{self._rank}", str(step))
        if self._store.add("arrived", 1) == self._world_size:
            self._store.set("agreed", "yes")
