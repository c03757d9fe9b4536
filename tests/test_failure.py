"""A rank that fails says where it was and who is gone, and ends."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from dying_ranks import run_dying_ranks
from pretraining import command_line, pretrain

from megatron_edit import errors
from megatron_edit.backends.megatron.mesh import build_mesh
from megatron_edit.errors import ConfigurationError
from megatron_edit.platform.ds_compat import default_store
from megatron_edit.replicas.peers import PeerError
from megatron_edit.run import failure
from megatron_edit.run.failure import HostPeers, RankFailedError, exit_on_failure, located
from megatron_edit.run.trainer import Trainer

FORK = mp.get_context("fork")


def in_child(target: Callable[..., Any], *args: Any) -> tuple[int | None, str]:
    """Exit code of a forked process, and what it printed on stderr."""
    read, write = os.pipe()

    def main() -> None:
        sys.stderr = os.fdopen(write, "w")
        target(*args)

    process = FORK.Process(target=main)
    process.start()
    os.close(write)
    with os.fdopen(read) as stream:
        text = stream.read()
    process.join(30)
    return process.exitcode, text


class Nobody:
    """No rank is gone."""

    def gone(self) -> list[int]:
        return []


def _fail(error: Exception) -> None:
    failure.STAYS_S = 0.0
    with exit_on_failure(), located(lambda: "rank 3 (replica 1), step 7, saving", Nobody()):  # type: ignore[arg-type]
        raise error


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


CLOSED = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"


@pytest.mark.parametrize(
    ("error", "line", "has_traceback"),
    [
        (RuntimeError(f"{CLOSED} [127.0.0.1]:1234"), f"{CLOSED} [127.0.0.1]:1234", False),
        (PeerError("round 3 failed\nmore"), "round 3 failed", False),
        (PeerError("Closed. This is typically caused by a crash."), "Closed.", False),
        (caused(Exception("no data"), RuntimeError(CLOSED)), "no data", False),
        (dist.DistBackendError("NCCL error"), "NCCL error", False),
        (RuntimeError("shapes differ\nhere"), "RuntimeError: shapes differ", True),
        (ZeroDivisionError(), "ZeroDivisionError: ZeroDivisionError", True),
    ],
)
def test_the_last_line_says_where_and_what(
    error: Exception, line: str, has_traceback: bool
) -> None:
    code, text = in_child(_fail, error)
    assert code == 1
    assert text.splitlines()[-1] == f"error: rank 3 (replica 1), step 7, saving: {line}"
    assert ("Traceback" in text) == has_traceback
    if not has_traceback:
        assert text.count("\n") == 1


def test_other_errors_and_exits() -> None:
    def raise_outside() -> None:
        with exit_on_failure():
            raise KeyError("x")

    code, text = in_child(raise_outside)
    assert code == 1 and text.endswith("error: KeyError('x')\n")
    with pytest.raises(SystemExit), exit_on_failure():
        raise SystemExit(2)
    with pytest.raises(ConfigurationError), located(lambda: "", Nobody()):  # type: ignore[arg-type]
        raise ConfigurationError("a user's mistake")


@pytest.mark.parametrize(
    ("rank", "local_rank", "per_host", "reports"),
    [(0, 0, False, True), (8, 0, False, False), (8, 0, True, True), (9, 1, True, False)],
)
def test_ranks_that_keep_silent_wait_for_the_one_that_reports(
    rank: int,
    local_rank: int,
    per_host: bool,
    reports: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # A launcher ends every rank as soon as the first has ended.
    waits: list[float] = []
    monkeypatch.setattr(errors.time, "sleep", waits.append)
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    with pytest.raises(SystemExit) as caught, errors.exit_on_configuration_error():
        raise ConfigurationError("--lr: got 0", per_host=per_host)
    assert caught.value.code == 2
    assert capsys.readouterr().err == ("error: --lr: got 0\n" if reports else "")
    assert waits == ([] if reports else [errors.REPORT_WITHIN_S])


# --- a rank that is gone


def _lose_rank_1(phase: str) -> str:
    """Rank 1 of 3 is killed while the others wait for it."""
    peers = HostPeers(torch.device("cpu"))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    store = default_store()
    try:
        with located(lambda: phase, peers):
            dist.barrier()
    except RankFailedError as error:
        # Neither ends before the other has looked.
        store.set(f"looked {dist.get_rank()}", "1")
        store.wait(["looked 0", "looked 2"], timedelta(seconds=30))
        return str(error)
    return "no error"


def test_the_rank_that_is_gone_is_named() -> None:
    started_s = time.monotonic()
    messages, codes = run_dying_ranks(_lose_rank_1, 3, {1}, "step 4, log line")
    assert time.monotonic() - started_s < 30
    assert codes == {1: -signal.SIGKILL}
    for message in messages.values():
        assert message.startswith("step 4, log line: ")
        assert message.endswith("; gone on this host: rank 1")


def _nobody_gone() -> list[int]:
    peers = HostPeers(torch.device("cpu"))
    gone = peers.gone()
    dist.barrier()
    return gone


def test_nobody_is_gone_while_all_are_there() -> None:
    assert run_ranks(_nobody_gone, 2) == [[], []]


def _stuck_rank() -> str:
    mesh = build_mesh(2, timeout_minutes=2 / 60)
    if mesh.replica == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        mesh.peers.all_gather(torch.zeros(3), "exchanging norms in round 3")
    except PeerError as error:
        return str(error)
    return "no error"


def test_a_stuck_rank_is_waited_for_until_the_time_out() -> None:
    started_s = time.monotonic()
    messages, codes = run_dying_ranks(_stuck_rank, 2, {1})
    assert 1.5 < time.monotonic() - started_s < 30
    assert codes == {1: None}
    assert messages[0].startswith(
        "exchanging norms in round 3 failed in the peer group of replica 0 (ranks [0, 1]): "
    )
    assert "2000ms" in messages[0]


def _killed_in_training(line: str) -> tuple[str, float]:
    """Replica 1 is killed in its seventh step; replica 0 finds out at the next synchronisation."""
    killed_s = 0.0

    def kill(trainer: Trainer) -> None:
        step = trainer.step

        def step_or_die() -> None:
            nonlocal killed_s
            if trainer.engine.step == 6:
                killed_s = time.monotonic()
                if trainer.mesh.replica == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            step()

        trainer.step = step_or_die  # type: ignore[method-assign]

    try:
        pretrain(command_line(line), kill)
    except RankFailedError as error:
        return str(error), time.monotonic() - killed_s
    return "no error", 0.0


@pytest.mark.parametrize(
    ("flags", "where", "phase"),
    [
        (
            "--edit-sync-interval 4",
            "step 7, forward and backward: ",
            "exchanging norms in round 0 failed in the peer group of replica 0 (ranks [0, 1])",
        ),
        (
            "--edit-sync-interval 40",
            "step 8, log line: ",
            "gathering the log line failed in the peer group of replica 0 (ranks [0, 1])",
        ),
        ("--edit-warmup-steps 40", "step 6, ", "pair.cc"),
    ],
)
def test_a_killed_replica_ends_the_other(flags: str, where: str, phase: str) -> None:
    line = f"--log-interval 8 {flags}"
    results, codes = run_dying_ranks(_killed_in_training, 2, {1}, line)
    message, seconds = results[0]
    assert codes == {1: -signal.SIGKILL}
    assert message.startswith(f"rank 0 (replica 0), {where}")
    assert phase in message
    assert message.endswith("; gone on this host: rank 1")
    assert seconds < 30
