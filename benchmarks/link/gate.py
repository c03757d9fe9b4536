"""Lets runs that wait beside one another train in turns, a block of steps at a time.

The controller and each rank talk over a Unix socket, a JSON object a line. Such sockets lie in the
file system, so they join processes of different network namespaces and put nothing on the link:

    rank        {"method": "edit", "rank": 0, "pid": 42}
    controller  {"steps": 16}                      the same to the other rank, at the same time
    rank        a Block
    controller  {"steps": null}                    train to the end

Ranks that wait are stopped: each of gloo's many connections has a thread that wakes up a hundred
times a second.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SOCKET_VARIABLE, METHOD_VARIABLE = "LINK_BENCH_SOCKET", "LINK_BENCH_METHOD"
INTERFACE = "eth0"
# For the last bytes of a block to leave the queue of a slow link.
SETTLE_S = 0.25


@dataclass
class Block:
    """What some steps in a row took one rank.

    Attributes:
        method: Its method.
        rank: Its rank.
        cycle: How many blocks of the method came before; 0 is for getting started.
        step_s: Seconds of each step.
        block_s: Seconds from the first step's begin to the last one's end.
        exposed_s: Seconds in which it waited for other ranks.
        sent_bytes: Bytes it put on the link.
        peak_bytes: Peak of its resident memory.
        cpu_s: Processor seconds of all its threads.
    """

    method: str
    rank: int
    cycle: int = 0
    step_s: list[float] = field(default_factory=list)
    block_s: float = 0.0
    exposed_s: float = 0.0
    sent_bytes: int = 0
    peak_bytes: int = 0
    cpu_s: float = 0.0


def sent_bytes(interface: str = INTERFACE) -> int:
    """Bytes that this host has put on an interface; 0 if there is none of that name."""
    return parse_sent_bytes(Path("/proc/self/net/dev").read_text(), interface)


def parse_sent_bytes(table: str, interface: str) -> int:
    """The bytes transmitted in the text of ``/proc/net/dev``."""
    for line in table.splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    return 0


def parse_peak_bytes(status: str) -> int:
    """The peak of the resident memory in the text of ``/proc/self/status``."""
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


class Gate:
    """A rank's side. Outside of the benchmark it lets every step pass.

    Args:
        method: Name of this run.
        rank: Of this rank.
        path: The controller's socket, or None for a gate that is always open.
    """

    def __init__(self, method: str, rank: int, path: str | None) -> None:
        self._method, self._rank = method, rank
        self._controller: Any = None
        self._left: float = 0
        self._block = Block(method, rank, cycle=-1)
        self._block_started_s = self._step_started_s = self._cpu_started_s = 0.0
        self._sent_before = 0
        if path is None:
            self._left = float("inf")
            return
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(path)
        self._controller = connection.makefile("rw")
        self._say({"method": method, "rank": rank, "pid": os.getpid()})

    @classmethod
    def from_environment(cls, rank: int) -> Gate:
        """The gate that the benchmark has named."""
        return cls(os.environ.get(METHOD_VARIABLE, ""), rank, os.environ.get(SOCKET_VARIABLE))

    def before_step(self) -> None:
        """Reports a block that is complete, and waits for leave to begin the next one."""
        if self._left == 0:
            self.wait()
        self._step_started_s = time.perf_counter()

    def wait(self) -> None:
        """Reports the block so far, if any, and waits for the controller."""
        if self._controller is None:
            return
        if self._block.step_s:
            time.sleep(SETTLE_S)
            self._block.sent_bytes = sent_bytes() - self._sent_before
            self._say(asdict(self._block))
        line = self._controller.readline()
        if not line:
            sys.exit("the benchmark has ended")
        steps = json.loads(line)["steps"]
        self._left = float("inf") if steps is None else steps
        self._block = Block(self._method, self._rank, self._block.cycle + 1)
        self._sent_before = sent_bytes()
        # Resets the peak of the resident memory.
        Path("/proc/self/clear_refs").write_text("5")
        self._cpu_started_s = time.process_time()
        self._block_started_s = time.perf_counter()

    def after_step(self) -> None:
        """Counts a step."""
        self._left -= 1
        now = time.perf_counter()
        self._block.step_s.append(now - self._step_started_s)
        if self._left == 0:
            self._block.block_s = now - self._block_started_s
            self._block.cpu_s = time.process_time() - self._cpu_started_s
            self._block.peak_bytes = parse_peak_bytes(Path("/proc/self/status").read_text())

    def exposed(self, seconds: float) -> None:
        """Adds to the time that this rank has waited for others."""
        self._block.exposed_s += seconds

    def _say(self, message: dict[str, Any]) -> None:
        self._controller.write(json.dumps(message) + "\n")
        self._controller.flush()


class RankLostError(RuntimeError):
    """A rank ended, or did not come, before its turn."""


@dataclass
class _Rank:
    connection: socket.socket
    lines: Any
    pid: int


class Controller:
    """The side that gives leave.

    Args:
        path: Where to put the socket.
        stops: Whether ranks that wait are stopped. They must be processes of their own.
    """

    def __init__(self, path: str, stops: bool = True) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(64)
        self._stops = stops
        self._ranks: dict[tuple[str, int], _Rank] = {}

    def meet(
        self, expected: Iterable[tuple[str, int]], timeout_s: float, check: Callable[[], None]
    ) -> None:
        """Waits for ranks to reach their first step.

        Args:
            expected: Method and rank of each.
            timeout_s: Bound of the wait.
            check: Called every second; raises to end the wait.
        """
        missing, deadline = set(expected), time.monotonic() + timeout_s
        self._listener.settimeout(1.0)
        while missing:
            check()
            if time.monotonic() > deadline:
                raise RankLostError(f"not there after {timeout_s:.0f} s: {sorted(missing)}")
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            connection.settimeout(None)
            lines = connection.makefile("rw")
            hello = json.loads(lines.readline())
            key = hello["method"], hello["rank"]
            self._ranks[key] = _Rank(connection, lines, hello["pid"])
            missing.discard(key)
        self._signal(self._ranks, signal.SIGSTOP)

    def run(self, method: str, steps: int, timeout_s: float) -> list[Block]:
        """Has the ranks of a method train some steps; returns what each reports."""
        keys = [key for key in sorted(self._ranks) if key[0] == method]
        self._signal(keys, signal.SIGCONT)
        for key in keys:
            self._tell(key, steps)
        blocks = [Block(**self._answer(key, timeout_s)) for key in keys]
        self._signal(keys, signal.SIGSTOP)
        return blocks

    def release(self) -> None:
        """Lets all ranks train to their end."""
        self._signal(self._ranks, signal.SIGCONT)
        for key in self._ranks:
            self._tell(key, None)

    def _signal(self, keys: Iterable[tuple[str, int]], number: signal.Signals) -> None:
        if not self._stops:
            return
        for key in keys:
            try:
                os.kill(self._ranks[key].pid, number)
            except ProcessLookupError:
                raise RankLostError(f"{key[0]}: rank {key[1]} ended") from None

    def _tell(self, key: tuple[str, int], steps: int | None) -> None:
        lines = self._ranks[key].lines
        try:
            lines.write(json.dumps({"steps": steps}) + "\n")
            lines.flush()
        except BrokenPipeError:
            raise RankLostError(f"{key[0]}: rank {key[1]} ended") from None

    def _answer(self, key: tuple[str, int], timeout_s: float) -> dict[str, Any]:
        rank = self._ranks[key]
        rank.connection.settimeout(timeout_s)
        line = rank.lines.readline()
        if not line:
            raise RankLostError(f"{key[0]}: rank {key[1]} ended")
        answer: dict[str, Any] = json.loads(line)
        return answer
