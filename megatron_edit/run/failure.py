"""The end of a rank that fails: where it was, which ranks are gone, and exit code 1.

When a rank dies, the others fail in whatever collective they are in, with an error that names an
address. What a user needs is which rank died and what the others were doing.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_edit.errors import CheckpointError, ConfigurationError
from megatron_edit.replicas.peers import PeerError
from megatron_edit.replicas.watch import Watch

# A killed process closes its connections a moment before it counts as dead.
GONE_WITHIN_S = 0.5
# Ranks that fail because of another stay that long, so that the rest find that one alone gone and
# the launcher passes its exit code on.
STAYS_S = 2.0
# Between two looks at the collectives under way.
LOOKS_EVERY_S = 0.5
_COMMUNICATION = ("gloo/transport", "nccl", "connection", "broken pipe", "timed out", "socket")


class RankFailedError(RuntimeError):
    """Training failed on this rank; the message is one line that says where."""


class HostPeers:
    """The processes of the ranks on this host, so that a rank can tell which of them died.

    Collective: all ranks of the world make theirs at the same time.

    Args:
        device: Device of the collective.
    """

    def __init__(self, device: torch.device) -> None:
        host = zlib.crc32(socket.gethostname().encode())
        own = torch.tensor([host, os.getpid()], device=device)
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, own)
        processes = torch.stack(everyone).tolist()
        self._pids = {rank: pid for rank, (h, pid) in enumerate(processes) if h == host}

    def gone(self) -> list[int]:
        """Ranks of this host whose process has ended, after a short wait for there to be one."""
        deadline = time.monotonic() + GONE_WITHIN_S
        while True:
            gone = [rank for rank, pid in self._pids.items() if not _is_alive(pid)]
            if gone or time.monotonic() > deadline:
                return gone
            time.sleep(0.02)


def _is_alive(pid: int) -> bool:
    try:
        # The state follows the name, which stands in parentheses and may hold anything.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        # Without /proc nothing can be told; do not accuse.
        return not Path("/proc/self/stat").exists()
    return state not in ("Z", "X")


@contextmanager
def located(where: Callable[[], str], peers: HostPeers) -> Iterator[None]:
    """Turns an error of the block into a :class:`RankFailedError`, but for those that all ranks
    have: a user's mistake, and a checkpoint that cannot be written.

    Args:
        where: Says, at the time of the error, which rank this is and what it is doing.
        peers: The ranks of this host.
    """
    try:
        yield
    except (ConfigurationError, CheckpointError):
        raise
    except Exception as error:
        # gloo goes on with advice; the line is long enough without.
        text = str(error).partition(" This is typically caused by")[0]
        lines = text.strip().splitlines() or [type(error).__name__]
        # Group and phase are in the message of a PeerError, the type of another error helps.
        kind = "" if is_communication(error) else f"{type(error).__name__}: "
        message = f"{where()}: {kind}{lines[0]}"
        if is_communication(error):
            message += _gone(peers)
        raise RankFailedError(message) from error


@contextmanager
def watching(where: Callable[[], str], watch: Watch, peers: HostPeers) -> Iterator[None]:
    """Has a thread say, in the words of :func:`located`, which collective of the block has failed.

    With NCCL the failing rank itself never gets to say it: it is blocked until NCCL's watchdog ends
    the process. That is left to the watchdog, which first writes the flight recorder's file.

    Args:
        where: As for :func:`located`.
        watch: Over the collectives.
        peers: The ranks of this host.
    """
    over = threading.Event()

    def look() -> None:
        while not over.wait(LOOKS_EVERY_S):
            if (trouble := watch.trouble()) is not None:
                line = f"error: {where()}: {trouble}{_gone(peers)}"
                print(line, file=sys.stderr, flush=True)
                return

    thread = threading.Thread(target=look, name="edit-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _gone(peers: HostPeers) -> str:
    gone = peers.gone()
    return f"; gone on this host: rank {', '.join(map(str, gone))}" if gone else ""


@contextmanager
def exit_on_failure() -> Iterator[None]:
    """Ends the process with exit code 1 and one line on an error in the block.

    The error of a peer that is gone has no traceback: it would hide the line, and shows nothing.
    Of an error that all ranks have rank 0 tells.
    The process leaves without ending the process group, which could wait for others for ever.
    """
    try:
        yield
    except CheckpointError as error:
        if dist.get_rank() == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(STAYS_S)
        sys.stdout.flush()
        os._exit(1)
    except Exception as error:
        cause = error.__cause__ if isinstance(error, RankFailedError) else error
        lost_peer = cause is not None and is_communication(cause)
        if not lost_peer and cause is not None:
            traceback.print_exception(cause)
        line = str(error) if isinstance(error, RankFailedError) else repr(error)
        print(f"error: {line}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        if lost_peer:
            time.sleep(STAYS_S)
        os._exit(1)


def is_communication(error: BaseException) -> bool:
    """Whether an error, or what it was raised from, says that other ranks cannot be reached."""
    if isinstance(error, PeerError | dist.DistError | ConnectionError):
        return True
    # gloo and NCCL raise plain RuntimeErrors out of FSDP2's and the pipeline's collectives.
    text = str(error).lower()
    if isinstance(error, RuntimeError) and any(word in text for word in _COMMUNICATION):
        return True
    # megatron-core's dataset builder wraps whatever happens in it.
    return error.__cause__ is not None and is_communication(error.__cause__)
