"""A collective that fails behind the host's back is named: its phase, its group and the rank."""

from __future__ import annotations

import os
import signal
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from dying_ranks import run_dying_ranks

from megatron_edit.replicas.mesh import build_mesh
from megatron_edit.replicas.peers import SLOWEST_BYTES_PER_S, PeerError
from megatron_edit.replicas.watch import LEAD_S, Watch
from megatron_edit.run import failure
from megatron_edit.run.failure import watching


class FakeWork:
    """A collective as NCCL's: waiting for it returns at once, whatever comes of it."""

    def __init__(self) -> None:
        self.result: int | None = None

    def wait(self) -> None:
        """Only a stream waits."""

    def get_future_result(self) -> FakeWork:
        return self

    def done(self) -> bool:
        return self.result is not None

    def value(self) -> int:
        assert self.result is not None
        return self.result


class Clock:
    """Seconds that pass when told."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_the_one_that_failed_is_named_and_what_succeeded_is_forgotten() -> None:
    clock, works = Clock(), [FakeWork() for _ in range(3)]
    watch = Watch(clock)
    for number, work in enumerate(works):
        watch.add(work, f"unit {number} failed", timedelta(seconds=60))
    assert watch.trouble() is None
    works[0].result = 0
    works[2].result = 2
    assert watch.trouble() == "unit 2 failed: its connections failed"
    works[1].result = 1
    assert watch.trouble() == "unit 1 failed: timed out"
    works[1].result = works[2].result = 0
    clock.now_s = 1000
    assert watch.trouble() is None


def test_what_succeeded_is_forgotten_though_nobody_asks() -> None:
    # A loop of one's own has no thread that looks.
    watch, work = Watch(), FakeWork()
    kept = weakref.ref(work)
    watch.add(work, "unit 0 failed", timedelta(seconds=60))
    work.result = 0
    del work
    assert kept() is not None
    watch.add(FakeWork(), "unit 1 failed", timedelta(seconds=60))
    assert kept() is None


def test_what_is_overdue_is_named_before_the_watchdog_ends_the_process() -> None:
    clock = Clock()
    watch = Watch(clock)
    watch.add(FakeWork(), "unit 0 failed", timedelta(seconds=60))
    clock.now_s = 10
    watch.add(FakeWork(), "unit 1 failed", timedelta(seconds=30))
    assert watch.trouble() is None
    clock.now_s = 40 - LEAD_S
    assert watch.trouble() == "unit 1 failed: not done after 28 of 30 s"
    clock.now_s = 60
    assert watch.trouble() == "unit 0 failed: not done after 60 of 60 s"


class Nobody:
    """No rank is gone."""

    def gone(self) -> list[int]:
        return []


def _fails_behind_the_host(operation: str) -> tuple[list[str], str]:
    """What a rank says whose collective fails after it has been waited for."""
    mesh = build_mesh(2, timeout_minutes=1)
    works: list[FakeWork] = []

    def start(*_: Any, **__: Any) -> FakeWork:
        works.append(FakeWork())
        return works[-1]

    dist.all_reduce = dist.all_to_all_single = dist.all_gather_single = start
    dist.get_backend = lambda group=None: "nccl"
    mesh.peers.all_reduce(torch.zeros(4), "summing").wait()
    works[0].result = 0
    if operation == "all_to_all":
        mesh.peers.start_all_to_all(torch.zeros(4), "synchronising head in round 3").wait()
    elif operation == "all_gather":
        mesh.peers.all_gather(torch.zeros(4), "synchronising head in round 3")
    else:
        mesh.peers.all_reduce(torch.zeros(4), "synchronising head in round 3").wait()
    before = [str(mesh.peers.watch.trouble())]
    works[1].result = 1
    return before, str(mesh.peers.watch.trouble())


@pytest.mark.parametrize("operation", ["all_reduce", "all_to_all", "all_gather"])
def test_every_collective_between_replicas_is_watched(operation: str) -> None:
    for rank, (before, after) in enumerate(run_ranks(_fails_behind_the_host, 2, operation)):
        assert before == ["None"]
        assert after == (
            f"synchronising head in round 3 failed in the peer group of replica {rank} "
            "(ranks [0, 1]): timed out"
        )


def test_the_line_of_a_failure_that_no_wait_shows(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(failure, "LOOKS_EVERY_S", 0.001)
    work, said = FakeWork(), ""
    watch = Watch()
    watch.add(work, "exchanging norms in round 2 failed", timedelta(minutes=1))
    with watching(lambda: "rank 3 (replica 1), step 7, log line", watch, Nobody()):  # type: ignore[arg-type]
        work.result = 2
        while not said:
            said = capfd.readouterr().err
    assert said == (
        "error: rank 3 (replica 1), step 7, log line: exchanging norms in round 2 failed: "
        "its connections failed\n"
    )
    assert capfd.readouterr().err == ""


def _stuck_with_a_long_queue() -> tuple[str, str]:
    mesh = build_mesh(2, timeout_minutes=1 / 60)
    # A ring of two sends as many bytes as there are: two seconds on the slowest link.
    mesh.peers.allow_for(int(2 * SLOWEST_BYTES_PER_S))
    mesh.peers.all_gather(torch.zeros(1), "all are here")
    if mesh.replica == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    messages = []
    for wait in (
        lambda: mesh.peers.all_reduce(torch.zeros(3), "the last unit").wait(),
        lambda: mesh.peers.all_gather(torch.zeros(3), "norms"),
    ):
        try:
            wait()
        except PeerError as error:
            messages.append(str(error))
    return messages[0], messages[1]


def test_the_time_out_of_payloads_counts_for_all_of_them() -> None:
    results, _ = run_dying_ranks(_stuck_with_a_long_queue, 2, {1})
    payload, scalars = results[0]
    assert payload.startswith("the last unit failed") and "3000ms" in payload
    assert scalars.startswith("norms failed") and "1000ms" in scalars
