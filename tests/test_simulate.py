"""The simulation: published utilisations, closed forms, and what it adds to them."""

from itertools import pairwise

import literature
import pytest

from megatron_edit.errors import ConfigurationError
from megatron_edit.scaling.cluster import validated
from megatron_edit.scaling.scenario import Outcome, Scenario
from megatron_edit.scaling.simulate import simulate

PAYLOAD_10B = 10e9 * 2.0
"""Bytes of 10e9 bf16 gradients on the link of one of two replicas: factor 2 (1 - 1/2)."""


@pytest.mark.parametrize("interval", sorted(literature.BUCKET_SIMULATOR_UTILISATION))
def test_utilisations_of_the_published_bucket_simulator(interval: int) -> None:
    wanted = literature.BUCKET_SIMULATOR_UTILISATION[interval]
    for gbps, percent in zip(literature.BUCKET_SIMULATOR_GBPS, wanted, strict=True):
        scenario = Scenario(
            method="sync" if interval == 1 else "edit",
            release="backward",
            interval=interval,
            steps=400,
            payload=PAYLOAD_10B,
            bandwidth=gbps * 1e9 / 8,
        )
        found = simulate(scenario).utilisation
        assert found == pytest.approx(percent / 100, rel=0, abs=5.1e-5)
        assert scenario.closed_form() == pytest.approx(found, rel=1e-9)


@pytest.mark.parametrize("gbps", [1, 10, 100, 1000])
@pytest.mark.parametrize(("overlap", "delay"), [(0.0, 0), (1 / 3, 0), (0.0, 4), (0.0, 20)])
def test_agrees_with_the_closed_form(gbps: float, overlap: float, delay: int) -> None:
    scenario = Scenario(
        steps=6400,
        payload=1.25e10,
        latency=0.05,
        overlap=overlap,
        delay=delay,
        bandwidth=gbps * 1e9 / 8,
    )
    # The last of the hundred synchronisations has no later step to hide behind.
    hidden = (delay or overlap) * scenario.step
    assert simulate(scenario).elapsed == pytest.approx(
        6400 / scenario.closed_form()  # type: ignore[operator]
        + min(hidden, scenario.payload / scenario.bandwidth + scenario.latency),
        rel=1e-9,
    )


def test_time_is_accounted_for() -> None:
    outcome = simulate(
        Scenario(
            replicas=5,
            steps=300,
            interval=20,
            payload=3e9,
            jitter=0.2,
            slow={2: 1.7},
            mean_time_to_failure=400,
            repair=30,
        )
    )
    for seconds in outcome.seconds:
        assert sum(seconds.values()) == pytest.approx(outcome.elapsed)
    assert outcome.steps == [300] * 5
    assert outcome.synchronisations == 15
    for kind in ("compute", "wait", "link", "lost", "down"):
        assert outcome.share(kind) > 0, kind
    lanes = [s for s in outcome.spans if s.lane == 2]
    assert all(a.end <= b.start + 1e-9 for a, b in pairwise(lanes))


def uneven(**changes: object) -> Outcome:
    """Returns a run of A-EDiT in which one of two replicas is 4.3 times slower."""
    values = {
        "method": "a_edit",
        "slow": {1: 4.3},
        "sync_seconds": 600.0,
        "steps": round(100 * 600 / 2 * (1 + 1 / 4.3)),
        **changes,
    }
    return simulate(validated(Scenario, values, "test"))


def test_a_edit_waits_less_than_one_slow_step() -> None:
    outcome = uneven(sync_seconds=60.0, jitter=0.05, steps=1500)
    assert len(outcome.idle) > 30
    # Jitter of 5 % makes the slowest of some hundred steps about a sixth longer.
    assert max(outcome.idle_seconds()) <= 4.3 * 1.2
    assert outcome.utilisation > 0.97
    assert outcome.steps[0] == pytest.approx(4.3 * outcome.steps[1], rel=0.05)
    by_steps = simulate(Scenario(interval=60, steps=600, slow={1: 4.3}))
    assert by_steps.utilisation < 0.65


def test_timer_restarted_before_the_rendezvous_drifts() -> None:
    right, wrong = uneven(), uneven(restart_timer="before")
    rounds = 100
    drift = sum(wrong.idle[i][0] for i in range(rounds)) / (rounds * 602)
    assert drift == pytest.approx(0.13, abs=0.02)
    assert right.seconds[0]["wait"] / right.elapsed == pytest.approx(0.003, abs=1e-3)


def test_delay_and_fragments_hide_the_link() -> None:
    link = {"payload": 5e9, "steps": 960, "interval": 32}
    blocking = simulate(Scenario(**link, overlap=0.0))  # type: ignore[arg-type]
    delayed = simulate(Scenario(**link, delay=5))  # type: ignore[arg-type]
    streaming = simulate(
        Scenario(method="streaming", fragments=4, delay=2, **link)  # type: ignore[arg-type]
    )
    assert blocking.utilisation == pytest.approx(960 / (960 + 30 * 4))
    # Only the end of training waits.
    assert delayed.share("link") * delayed.elapsed == pytest.approx(4.0, abs=0.01)
    assert streaming.utilisation > 0.99
    assert streaming.transferred == pytest.approx(delayed.transferred, rel=0.05)


def test_fifo_link_queues_fragments() -> None:
    slow = Scenario(method="streaming", fragments=4, delay=24, payload=80e9, steps=640, interval=32)
    outcome = simulate(slow)
    # The link is the bottleneck: 64 s of transfer against 32 s of compute in each round.
    assert outcome.link_busy / outcome.elapsed > 0.95
    assert outcome.utilisation == pytest.approx(0.5, abs=0.06)


@pytest.mark.parametrize("method", ["sync", "edit", "a_edit", "streaming"])
@pytest.mark.parametrize("on_failure", ["wait", "drop"])
def test_failures(method: str, on_failure: str) -> None:
    values = {
        "method": method, "replicas": 8, "steps": 600, "interval": 50, "sync_seconds": 50,
        "payload": 5e9, "jitter": 0.05, "mean_time_to_failure": 900, "repair": 60,
        "on_failure": on_failure, "seed": 1,
        **({"fragments": 5, "delay": 2} if method == "streaming" else {}),
    }  # fmt: skip
    outcome = simulate(validated(Scenario, values, "test"))
    assert outcome.share("down") > 0
    assert outcome.elapsed < 600 * 9
    if method != "a_edit" and on_failure == "wait":
        assert outcome.steps == [600] * 8


def test_going_on_without_the_failed_is_faster() -> None:
    def run(on_failure: str) -> Outcome:
        values = {
            "replicas": 8, "steps": 1000, "interval": 50, "mean_time_to_failure": 1500,
            "repair": 120, "on_failure": on_failure,
        }  # fmt: skip
        return simulate(validated(Scenario, values, "test"))

    assert run("drop").elapsed < 0.95 * run("wait").elapsed


def test_the_same_seed_gives_the_same_run() -> None:
    scenario = Scenario(replicas=3, jitter=0.3, steps=100, interval=10, payload=1e9)
    assert simulate(scenario).elapsed == simulate(scenario).elapsed
    other = scenario.model_copy(update={"seed": 1})
    assert simulate(scenario).elapsed != simulate(other).elapsed


def test_many_devices() -> None:
    outcome = simulate(
        Scenario(replicas=500, steps=64, interval=32, speed_spread=0.3, payload=1e8, bandwidth=1e6)
    )
    assert outcome.steps == [64] * 500
    assert outcome.share("wait") > outcome.share("compute") * 0.5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"replicas": 0}, "replicas: got 0"),
        ({"step": -1}, "step: got -1"),
        ({"delay": 64}, "delay 64 must be below interval 64"),
        ({"method": "sync", "delay": 1}, "method sync knows no delay"),
        ({"fragments": 4}, "needs method streaming"),
        ({"slow": {7: 2.0}}, "slow replica 7 is not one of 0..1"),
        ({"intervall": 3}, "did you mean 'interval'"),
        ({"method": "edti"}, "method: got 'edti'"),
    ],
)
def test_bad_scenarios(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        validated(Scenario, values, "scenario")
