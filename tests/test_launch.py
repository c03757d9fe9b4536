"""The documented launch forms, each with another end: signals, a kill, a user's mistake."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest
from distributed import free_port
from launching import Job, deepspeed, job, torchrun
from pretraining import command_line, newest

# The length of the run decides the order of its samples, so it is the same for all.
LONG = "--train-iters 20000 --edit-warmup-steps 3 --edit-sync-interval 4 --exit-signal-handler"
STEPS = 12


@pytest.fixture(scope="module")
def losses() -> dict[str, dict[int, str]]:
    """Launch form -> step -> printed loss of the same job."""
    return {}


def first_losses(running: Job) -> dict[int, str]:
    running.await_step(STEPS)
    return {step: loss for step, loss in running.losses().items() if step <= STEPS}


def saved_on_sigterm(running: Job, save: Path) -> int:
    """The step of the checkpoint that a signalled job has left."""
    step = newest(save)
    assert f"stopped at step {step}: SIGTERM\nsaved {save / f'iter_{step:07d}'}\n" in running.output
    assert "error" not in running.output.lower()
    return step


def test_torchrun_and_sigterm_to_one_rank(
    tmp_path: Path, losses: dict[str, dict[int, str]]
) -> None:
    argv = command_line(f"{LONG} --save {tmp_path / 'save'} --num-workers 1")
    with job(torchrun(2, free_port(), argv), tmp_path / "log") as running:
        losses["torchrun"] = first_losses(running)
        running.rank(1).send_signal(signal.SIGTERM)
        assert running.await_end() == 0
        assert running.own_lines[0] == (
            "mesh: 1 host(s), 2 rank(s) = 2 replica(s) x PP 1 x S 1 x TP 1; replica r is ranks r*1 "
            "to r*1+0"
        )
        assert saved_on_sigterm(running, tmp_path / "save") > STEPS


def test_deepspeed_and_sigterm_to_its_launcher(
    tmp_path: Path, losses: dict[str, dict[int, str]]
) -> None:
    # The launcher sends SIGTERM to the workers of the data loader, too.
    argv = command_line(f"{LONG} --save {tmp_path / 'save'} --num-workers 1")
    with job(deepspeed(2, free_port(), argv), tmp_path / "log") as running:
        losses["deepspeed"] = first_losses(running)
        running.node_launcher().send_signal(signal.SIGTERM)
        # DeepSpeed's own code after a signal, whatever those of the ranks.
        assert running.await_end() == 1
        assert running.own_lines[0].startswith("mesh: 1 host(s), 2 rank(s) = 2 replica(s)")
        assert saved_on_sigterm(running, tmp_path / "save") > STEPS


def test_sigterm_to_the_process_group(tmp_path: Path) -> None:
    argv = command_line(f"{LONG} --edit-replicas 1 --save {tmp_path / 'save'} --num-workers 1")
    with job(deepspeed(1, free_port(), argv), tmp_path / "log") as running:
        running.await_step(STEPS)
        os.killpg(running.process.pid, signal.SIGTERM)
        # The outermost launcher has no handler and does not wait for the inner one.
        assert running.await_end() == -signal.SIGTERM
        assert saved_on_sigterm(running, tmp_path / "save") > STEPS


def test_two_nodes_without_ssh_and_a_killed_rank(
    tmp_path: Path, losses: dict[str, dict[int, str]]
) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("first slots=1\nsecond slots=1\n")
    argv, port = command_line(LONG), free_port()
    form = [f"--hostfile={hostfile}", "--no_ssh", "--master_addr=127.0.0.1"]
    commands = [deepspeed(0, port, argv, *form, f"--node_rank={node}") for node in (0, 1)]
    with (
        job(commands[0], tmp_path / "log0") as first,
        job(commands[1], tmp_path / "log1") as second,
    ):
        losses["two nodes"] = first_losses(first)
        assert first.own_lines[0].startswith("mesh: 2 host(s), 2 rank(s) = 2 replica(s)")
        second.rank(1).kill()
        killed_s = time.monotonic()
        assert first.await_end() == 1
        assert second.await_end() != 0
        assert time.monotonic() - killed_s < 30
        (line,) = [line for line in first.output.splitlines() if line.startswith("error: ")]
        assert line.startswith("error: rank 0 (replica 0), step ")
        assert " in the peer group of replica 0 (ranks [0, 1]): " in line
        assert line.endswith("; gone on this host: rank 1")
        assert "Traceback" not in first.output


def test_the_forms_train_alike(losses: dict[str, dict[int, str]]) -> None:
    if len(losses) < 3:
        pytest.skip("needs the runs above")
    assert losses["deepspeed"] == losses["torchrun"] == losses["two nodes"]
    assert list(losses["deepspeed"]) == list(range(1, STEPS + 1))
    assert len(set(losses["deepspeed"].values())) == STEPS


# --- a user's mistake


def refusal(running: Job) -> str:
    """The one line of a job that ends with exit code 2."""
    assert running.await_end() == 2, running.output
    assert "Traceback" not in running.output
    (line,) = [line for line in running.output.splitlines() if line.startswith("error: ")]
    return line


def test_a_mistyped_key_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"edit": {"sync_intervall": 8}}))
    argv = command_line(f"--deepspeed --deepspeed_config {path}")
    with job(deepspeed(2, free_port(), argv), tmp_path / "log") as running:
        line = refusal(running)
    assert line.startswith(f"error: {path}: edit.sync_intervall: unknown name")
    assert "did you mean 'sync_interval'" in line
    assert "mesh:" not in running.output


def test_a_port_in_use_is_told_once(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        command = deepspeed(2, listener.getsockname()[1], command_line())
        with job(command, tmp_path / "log") as running:
            line = refusal(running)
    assert line.startswith("error: MASTER_PORT is in use on this host")
