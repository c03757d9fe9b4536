"""A-EDiT: rounds by the clock, replicas of unequal speed. The clocks are simulated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from distributed import run_ranks
from harness import Case, Training, digest, run_reference, start

from megatron_edit.engine.trigger import TimeTrigger

# Seconds a step takes on each replica.
SPEEDS = (1.0, 4.3)
TIMED = {"sync_trigger": "time", "sync_seconds": 10.0, "warmup_steps": 2}


@dataclass
class Clock:
    """A replica's clock: it moves by steps, and a meeting puts all replicas at the latest one's."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def simulate_clock(training: Training, rank_clock: Clock) -> list[float]:
    """Gives the engine a simulated clock; returns the list of waits at meetings, to be filled."""
    sync, trigger = training.mesh.peers, training.engine.trigger
    trigger.clock = rank_clock
    waits: list[float] = []
    real = sync.all_gather_on_host

    def meet(values: list[float], phase: str) -> list[list[float]]:
        if phase != "meeting the other replicas":
            return real(values, phase)
        latest = max(row[0] for row in real([rank_clock.now], phase))
        waits.append(latest - rank_clock.now)
        rank_clock.now = latest
        return real(values, phase)

    sync.all_gather_on_host = meet  # type: ignore[method-assign]
    return waits


def run(case: Case, weights: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Trains until the replicas have met ``rounds`` times."""
    training = start(case, weights)
    clock = Clock()
    waits = simulate_clock(training, clock)
    steps_in_round = []
    while len(waits) < rounds:
        training.step()
        lockstep = training.engine.step <= case.config.warmup_steps
        clock.now += max(SPEEDS) if lockstep else SPEEDS[training.mesh.replica]
        steps_in_round.append(training.engine.steps_in_round)
    training.engine.synchronize()
    return {
        "waits": waits,
        "clock": clock.now,
        "steps": training.engine.step,
        "met": training.engine.rendezvous.steps,
        "consumed": training.engine.consumed_samples,
        "records": training.engine.records(),
        "theta": digest(local for unit in training.engine.units for local in unit.locals),
    }


@pytest.fixture(scope="module")
def weights() -> dict[str, Any]:
    start_weights: dict[str, Any] = run_ranks(run_reference, 1, Case())[0][0]
    return start_weights


def test_idle_time_is_at_most_one_step_of_the_slowest(weights: dict[str, Any]) -> None:
    fast, slow = run_ranks(run, 2, Case(edit=TIMED, layers=1, micro_batches=1), weights, 40)
    assert max(fast["waits"]) <= SPEEDS[1]
    assert max(slow["waits"]) <= SPEEDS[1]
    # No drift: the late rounds wait no longer than the early ones.
    assert np.mean(fast["waits"][20:]) <= np.mean(fast["waits"][:20]) + 0.5
    assert fast["met"] == slow["met"]
    assert fast["theta"] == slow["theta"]


def test_rounds_of_many_steps_cost_little(weights: dict[str, Any]) -> None:
    case = Case(edit={**TIMED, "sync_seconds": 200.0}, layers=1, micro_batches=1)
    fast, slow = run_ranks(run, 2, case, weights, 2)
    warmup = case.config.warmup_steps
    local_seconds = fast["clock"] - warmup * max(SPEEDS)
    alone = sum(local_seconds / speed for speed in SPEEDS)
    assert (fast["steps"] + slow["steps"] - 2 * warmup) / alone > 0.97


def test_ranks_of_a_replica_follow_their_first_rank(weights: dict[str, Any]) -> None:
    results = run_ranks(run, 4, Case(shard=2, edit=TIMED), weights, 4)
    for one, other in ((0, 1), (2, 3)):
        assert results[one]["steps"] == results[other]["steps"]
    assert results[0]["theta"] == results[2]["theta"]
    assert results[1]["theta"] == results[3]["theta"]


@pytest.mark.parametrize("weighting", ["norm", "norm_per_step", "tokens", "uniform"])
def test_weights_of_unequal_rounds(weights: dict[str, Any], weighting: str) -> None:
    case = Case(edit={**TIMED, "weighting": weighting, "weight_temperature_relative": None})
    record = run_ranks(run, 2, case, weights, 2)[0]["records"][1]
    steps = record.steps
    assert steps[0] > 2 * steps[1]
    for unit in range(len(record.units)):
        norms = [record.norms[replica][unit] for replica in range(2)]
        score = {
            "norm": [math.exp(-norm) for norm in norms],
            "norm_per_step": [math.exp(-n / s) for n, s in zip(norms, steps, strict=True)],
            "tokens": steps,
            "uniform": [1.0, 1.0],
        }[weighting]
        expected = [value / sum(score) for value in score]
        found = [record.weights[replica][unit] for replica in range(2)]
        assert found == pytest.approx(expected, rel=1e-5)


def test_a_round_that_is_too_short_is_skipped_by_everybody(weights: dict[str, Any]) -> None:
    case = Case(edit={**TIMED, "sync_seconds": 1.0, "min_round_steps": 5})
    fast, slow = run_ranks(run, 2, case, weights, 6)
    # A second is one step of each at most: several meetings pass until five steps have come
    # together, and the last synchronisation, at the end of training, is made in any case.
    assert 1 < len(fast["records"]) == len(slow["records"]) < 6
    assert all(sum(record.steps) >= 5 for record in fast["records"][:-1])
    assert fast["theta"] == slow["theta"]


def test_samples_of_all_replicas_are_known_after_a_meeting(weights: dict[str, Any]) -> None:
    case = Case(edit=TIMED)
    fast, slow = run_ranks(run, 2, case, weights, 3)
    per_step = case.samples_per_replica
    assert fast["met"] == slow["met"]
    assert fast["met"][0] > 2 * fast["met"][1]
    assert fast["consumed"] == slow["consumed"] == per_step * sum(fast["met"])


def test_the_timer_restarts_after_the_meeting() -> None:
    clock = Clock()
    trigger = TimeTrigger(warmup_steps=0, sync_seconds=10.0, clock=clock)
    assert not trigger.due(5)
    trigger.restart()
    clock.now = 9.9
    assert not trigger.due(1)
    clock.now = 10.0
    assert trigger.due(1)
    clock.now = 14.0
    trigger.restart()
    clock.now = 20.5
    assert not trigger.due(2)
    trigger.hurry()
    assert trigger.due(2)
    trigger.restart()
    assert not trigger.due(2)
    trigger.restart(lasted_s=4.0)
    clock.now += 5.5
    assert trigger.lasted_s == 9.5 and not trigger.due(2)
    clock.now += 0.5
    assert trigger.due(2)


def test_all_ranks_hear_of_one_that_wants_to_stop(weights: dict[str, Any]) -> None:
    results = run_ranks(_stop_from_one_rank, 4, Case(shard=2, edit=TIMED), weights)
    assert all(result == results[0] for result in results)
    steps = results[0]
    # Replica 0 sets out at once, and waits until replica 1's round is over.
    assert steps[0] == 4 and steps[1] == 2 + 10


def _stop_from_one_rank(case: Case, weights: dict[str, Any]) -> list[int]:
    training = start(case, weights)
    clock = Clock()
    simulate_clock(training, clock)
    meetings = training.engine.rendezvous
    while not meetings.stop:
        if training.engine.step == 4 and training.mesh.replica == 0:
            # One rank of the replica suffices, if it is the one whose clock decides.
            meetings.wants_stop = training.mesh.shard_rank == 0
        training.step()
        clock.now += float(training.engine.step > case.config.warmup_steps)
    return list(meetings.steps)
