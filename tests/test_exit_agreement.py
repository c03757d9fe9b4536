"""Ranks at different steps agree on a last step, and nobody waits for a rank that waits for it."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from distributed import run_ranks

from megatron_edit.platform.ds_compat import default_store
from megatron_edit.run.exit_agreement import ExitAgreement

MEET_AFTER = 4
TIMEOUT = timedelta(seconds=30)


class Loop:
    """A training loop without the training: it meets the other ranks every few steps.

    Args:
        first_step: Steps done before.
    """

    def __init__(self, first_step: int = 0) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.store = default_store()
        self.agreement = ExitAgreement(self.store, self.rank, self.world, first_step, TIMEOUT)
        self.step = first_step

    def top(self, wish: str | None = None) -> str | None:
        return self.agreement.reason_to_stop(self.step, wish)

    def run(self, until: int) -> str | None:
        """Steps until a reason to stop or a step; the rank ahead waits in the meetings."""
        while self.step < until:
            if (reason := self.top()) is not None:
                return reason
            self.do_step()
        return None

    def do_step(self) -> None:
        self.step += 1
        if self.step % MEET_AFTER == 0:
            self.tell(f"meeting {self.step}")
            dist.barrier()

    def tell(self, what: str) -> None:
        self.store.set(f"{what} {self.rank}", "1")

    def await_(self, rank: int, what: str) -> None:
        self.store.wait([f"{what} {rank}"], TIMEOUT)


def _behind_asks() -> tuple[int, str | None]:
    """Rank 0 is about to wait in the meeting after step 4 when rank 2 asks after one step."""
    loop = Loop()
    reason = None
    if loop.rank == 2:
        loop.do_step()
        loop.await_(0, "meeting 4")
        reason = loop.top(wish="signal")
        loop.do_step()
    reason = reason or loop.run(until=100)
    return loop.step, reason


def test_a_rank_behind_asks_while_the_one_ahead_waits_for_it() -> None:
    # Without the meeting after step 4 rank 0 could not go on, so that is where all can stop first.
    assert run_ranks(_behind_asks, 3, timeout_s=60) == [(4, "signal")] * 3


def _ahead_asks() -> tuple[int, str | None]:
    """Rank 0 asks at the top of its third step; rank 1 has not begun its first."""
    loop = Loop()
    reason = None
    if loop.rank == 0:
        loop.run(until=2)
        reason = loop.top(wish="signal")
        loop.tell("asked")
    else:
        loop.await_(0, "asked")
    reason = reason or loop.run(until=100)
    return loop.step, reason


def test_a_rank_ahead_asks_and_the_others_catch_up() -> None:
    assert run_ranks(_ahead_asks, 2, timeout_s=60) == [(3, "signal")] * 2


def _asks_near_the_end() -> tuple[int, str | None]:
    """Rank 0 has done all three steps and waits for the others to end when rank 1 asks."""
    loop = Loop()
    reason = None
    if loop.rank == 0:
        reason = loop.run(until=3)
        loop.tell("done")
    else:
        loop.do_step()
        loop.await_(0, "done")
        reason = loop.top(wish="signal") or loop.run(until=3)
    dist.barrier()
    return loop.step, reason


def test_a_request_after_somebody_has_ended_lets_all_end() -> None:
    assert run_ranks(_asks_near_the_end, 2, timeout_s=60) == [(3, None)] * 2


def _all_ask() -> tuple[int, str | None]:
    loop = Loop(first_step=7)
    reason = loop.top(wish=f"signal on rank {loop.rank}")
    while reason is None:
        loop.step += 1
        reason = loop.top(wish=f"signal on rank {loop.rank}")
    return loop.step, reason


def test_of_several_requests_one_decides() -> None:
    results = run_ranks(_all_ask, 4, timeout_s=60)
    assert len(set(results)) == 1
    step, reason = results[0]
    assert step == 8
    assert reason in {f"signal on rank {rank}" for rank in range(4)}


def _nobody_asks() -> tuple[int, str | None]:
    loop = Loop()
    return loop.step, loop.run(until=9)


def test_nobody_stops_without_a_request() -> None:
    assert run_ranks(_nobody_asks, 3, timeout_s=60) == [(0, None)] * 3


def _decider_is_gone() -> str:
    loop = Loop()
    if loop.rank == 0:
        # As if it had died between its wish and its word.
        loop.agreement._store.add("wishes", 1)
        loop.tell("asked")
        loop.await_(1, "given up")
        return ""
    loop.await_(0, "asked")
    loop.agreement._timeout = timedelta(seconds=1)
    try:
        loop.top()
    except dist.DistStoreError as error:
        return str(error)
    finally:
        loop.tell("given up")
    return "no error"


def test_the_wait_for_the_decision_is_bounded() -> None:
    assert "timeout" in run_ranks(_decider_is_gone, 2, timeout_s=60)[1].lower()
