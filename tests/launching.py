"""Runs pretrain_edit.py under the real launchers, as a user does, and watches it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
# The machine may be shared: a launch alone is ten seconds of imports.
DEADLINE_S = 200.0
LOSS = re.compile(r"iteration +(\d+)/.*? lm loss: (\S+) \|")
NOISE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Job:
    """A launcher and its ranks, in a process group of their own.

    Args:
        command: The launcher's command line.
        log: File for everything that they print.
        folder: They are started in it.
        variables: Added to their environment.
    """

    def __init__(
        self, command: list[str], log: Path, folder: Path = ROOT, **variables: str
    ) -> None:
        env = {name: value for name, value in os.environ.items() if name not in NOISE}
        env |= {
            "PATH": f"{BIN}:{env['PATH']}",
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "PYTHONWARNINGS": "ignore",
            **variables,
        }
        self._log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, cwd=folder, env=env, stdout=file, stderr=file, start_new_session=True
            )

    @property
    def output(self) -> str:
        """What they have printed so far."""
        return self._log.read_text()

    @property
    def own_lines(self) -> list[str]:
        """The lines that are not the launcher's log."""
        return [line for line in self.output.splitlines() if not re.match(r"\[20|[WIE]\d{4}", line)]

    def losses(self) -> dict[int, str]:
        """Iteration -> loss, as printed."""
        return {int(step): loss for step, loss in LOSS.findall(self.output)}

    def await_step(self, step: int) -> None:
        """Waits for the log line of a step."""
        self._await(lambda: step in self.losses(), f"step {step}")

    def await_end(self) -> int:
        """Waits for the launcher to end, and all its children with it; returns its exit code."""
        children = self.children()
        self._await(lambda: self.process.poll() is not None, "the end")
        _, alive = psutil.wait_procs(children, timeout=DEADLINE_S)
        assert not alive, f"{alive} outlive the launcher:\n{self.output}"
        return int(self.process.returncode)

    def _await(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            ended = self.process.poll() is not None and what != "the end"
            assert not ended, f"ended before {what}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {what}:\n{self.output}"
            time.sleep(0.1)

    def children(self) -> list[psutil.Process]:
        """Every process that the launcher has started."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def rank(self, rank: int) -> psutil.Process:
        """The process of a rank."""
        for child in self.children():
            if child.environ().get("RANK") == str(rank) and "pretrain_edit.py" in child.cmdline():
                return child
        raise AssertionError(f"no rank {rank}:\n{self.output}")

    def node_launcher(self) -> psutil.Process:
        """DeepSpeed's launcher of the ranks of this host."""
        return next(c for c in self.children() if "deepspeed.launcher.launch" in c.cmdline())

    def kill(self) -> None:
        """Kills whatever is left."""
        for process in self.children():
            process.kill()
        self.process.kill()
        self.process.wait()


@contextmanager
def job(command: list[str], log: Path, folder: Path = ROOT, **variables: str) -> Iterator[Job]:
    """A job that does not outlive the block."""
    started = Job(command, log, folder, **variables)
    try:
        yield started
    finally:
        started.kill()


def deepspeed(ranks: int, port: int, argv: list[str], *more: str) -> list[str]:
    """The command line of DeepSpeed's launcher."""
    form = [f"--num_accelerators={ranks}"] if ranks else []
    return [
        str(BIN / "deepspeed"),
        *form,
        f"--master_port={port}",
        *more,
        "pretrain_edit.py",
        *argv,
    ]


def torchrun(ranks: int, port: int, argv: list[str]) -> list[str]:
    """The command line of torchrun."""
    return [
        str(BIN / "torchrun"), f"--nproc-per-node={ranks}", f"--master-port={port}",
        "pretrain_edit.py", *argv,
    ]  # fmt: skip
