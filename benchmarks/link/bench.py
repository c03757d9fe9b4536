"""Trains by several methods in turns on two hosts that a slow link joins; writes what each took.

lab.sh run --rate-mbit 100 -- python -m benchmarks.link.bench --data-path ... --output FILE
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.link.gate import METHOD_VARIABLE, SOCKET_VARIABLE, Block, Controller

CONFIG = Path(__file__).with_name("deepspeed.json")
HOSTS = 2
TAU = 16
FIRST_PORT = 29500
GATED, TORCH = "benchmarks.link.pretrain", "benchmarks.torch_post_local_sgd"
STARTUP_S, BLOCK_S, END_S = 600.0, 600.0, 120.0


@dataclass(frozen=True)
class Method:
    """A way to train.

    Attributes:
        title: For people.
        flags: Beside those that all methods have.
        module: What the launcher starts.
        steps: Of a block. Each block of TAU steps holds one synchronisation.
    """

    title: str
    flags: tuple[str, ...] = ()
    module: str = GATED
    steps: int = TAU


DELAY, INT8 = ("--edit-delay-steps", "8"), ("--edit-compression", "int8")
METHODS = {
    "none": Method("no communication", ("--edit-sync-interval", "1000000")),
    "sync": Method("`sync`", ("--edit-method", "sync"), steps=2),
    "torch": Method("torch's PostLocalSGDOptimizer", module=TORCH),
    "edit": Method("`edit`"),
    "edit_delay": Method("`edit`, delay 8", DELAY),
    "edit_int8": Method("`edit`, int8", INT8),
    "edit_delay_int8": Method("`edit`, delay 8, int8", DELAY + INT8),
}


@dataclass(frozen=True)
class Model:
    """Shape of the model and of a step."""

    layers: int = 7
    hidden: int = 256
    ffn: int = 768
    heads: int = 4
    sequence: int = 128
    micro_batch: int = 8

    @property
    def flags(self) -> list[str]:
        """Megatron's flags."""
        return [
            *("--num-layers", str(self.layers), "--hidden-size", str(self.hidden)),
            *("--ffn-hidden-size", str(self.ffn), "--num-attention-heads", str(self.heads)),
            *("--seq-length", str(self.sequence), "--max-position-embeddings", str(self.sequence)),
            *("--micro-batch-size", str(self.micro_batch)),
            *("--global-batch-size", str(HOSTS * self.micro_batch)),
            *("--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear"),
            *("--untie-embeddings-and-output-weights", "--attention-dropout", "0"),
            *("--hidden-dropout", "0"),
        ]

    def parameters(self, vocabulary: int) -> int:
        """How many it has."""
        layer = 4 * self.hidden**2 + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.layers * layer + 2 * vocabulary * self.hidden + self.hidden


QUICK = Model(layers=2, hidden=64, ffn=128, sequence=64, micro_batch=2)


def command(
    method: Method, model: Model, host: int, port: int, blocks: int, args: argparse.Namespace
) -> list[str]:
    """The launcher's command line on one host."""
    edit = ["--edit-sync-prefetch", str(args.prefetch)] if args.prefetch else []
    return [
        *("host", str(host), "deepspeed", "--log_level", "error"),
        *("-H", args.hostfile, "--no_ssh", "--node_rank", str(host)),
        *("--master_addr", "10.77.0.1", "--master_port", str(port), "--module", method.module),
        *model.flags,
        *("--train-iters", str(blocks * method.steps), "--lr", "1e-3", "--lr-decay-style"),
        *("constant", "--weight-decay", "0.1", "--data-path", args.data_path, "--split", "95,5,0"),
        *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", args.tokenizer_model),
        *("--num-workers", "0", "--eval-iters", "0", "--log-interval", "1000000"),
        *("--deepspeed", "--deepspeed_config", str(CONFIG), *edit, *method.flags),
    ]


class Runs:
    """The launchers of all methods, each on both hosts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._launchers: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, host: int, words: list[str], socket: str) -> None:
        """Starts a launcher; what it prints goes to a file in the folder."""
        variables = {METHOD_VARIABLE: name, SOCKET_VARIABLE: socket, "OMP_NUM_THREADS": "1"}
        quiet = {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
        label = f"{name}.host{host}"
        with (self._folder / f"{label}.log").open("wb") as log:
            self._launchers[label] = subprocess.Popen(
                words,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **quiet, **variables},
            )

    def check(self) -> None:
        """Raises if a launcher has ended."""
        for label, launcher in self._launchers.items():
            if launcher.poll() is not None:
                raise RuntimeError(self._obituary(label))

    def end(self) -> None:
        """Waits for all launchers to end; raises if one fails."""
        deadline = time.monotonic() + END_S
        for label, launcher in self._launchers.items():
            if launcher.wait(max(1.0, deadline - time.monotonic())):
                raise RuntimeError(self._obituary(label))

    def _obituary(self, label: str) -> str:
        tail = (self._folder / f"{label}.log").read_text(errors="replace").splitlines()[-15:]
        code = self._launchers[label].returncode
        return "\n".join([f"{label} ended with code {code}; the end of its log:", *tail])


def measure(args: argparse.Namespace) -> None:
    """Runs the benchmark and writes what it measures."""
    model = QUICK if args.quick else Model()
    links: list[dict[str, Any]] = [{"delay_ms": ms, "blocks": []} for ms in args.delays_ms]
    # From the longest delay to the shortest: TCP takes a while to learn that a path has got longer.
    links.sort(key=lambda link: -float(link["delay_ms"]))
    result = {
        "rate_mbit": float(os.environ["LAB_RATE_MBIT"]),
        "tau": TAU,
        "parameters": model.parameters(args.vocab_size),
        "tokens_per_step": HOSTS * model.micro_batch * model.sequence,
        "prefetch": args.prefetch,
        "cores": len(os.sched_getaffinity(0)),
        "congestion_control": Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
        "links": links,
    }
    controller, runs = start(model, args)
    for number, link in enumerate(links):
        subprocess.run(["delay", f"{link['delay_ms']:g}"], check=True)
        if number == 0:
            with said("first steps"):
                turn(controller, args.methods)
        for cycle in range(1, args.cycles + 1):
            with said(f"delay {link['delay_ms']:g} ms, cycle {cycle} of {args.cycles}"):
                link["blocks"] += [asdict(block) for block in turn(controller, args.methods)]
            # What there is so far is a result, too.
            args.output.write_text(json.dumps(result, indent=1) + "\n")
    with said("ending"):
        controller.release()
        runs.end()


def start(model: Model, args: argparse.Namespace) -> tuple[Controller, Runs]:
    """Starts all runs and waits for them to be ready."""
    folder = Path(args.log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    args.hostfile = str(folder / "hostfile")
    Path(args.hostfile).write_text("".join(f"h{host} slots=1\n" for host in range(HOSTS)))
    blocks = 2 * (1 + args.cycles * len(args.delays_ms))
    socket = os.environ["LAB_DIR"] + "/gate"
    controller, runs = Controller(socket), Runs(folder)
    with said(f"starting {len(args.methods)} runs of {HOSTS} ranks"):
        for port, name in enumerate(args.methods, FIRST_PORT):
            for host in range(HOSTS):
                words = command(METHODS[name], model, host, port, blocks, args)
                runs.start(name, host, words, socket)
        expected = [(name, rank) for name in args.methods for rank in range(HOSTS)]
        controller.meet(expected, STARTUP_S, runs.check)
    return controller, runs


def turn(controller: Controller, methods: list[str]) -> list[Block]:
    """One block of each method, after one that does not count: while a run waits for its turn, TCP
    forgets what the link carries."""
    blocks: list[Block] = []
    for name in methods:
        controller.run(name, METHODS[name].steps, BLOCK_S)
        blocks += controller.run(name, METHODS[name].steps, BLOCK_S)
    return blocks


@contextmanager
def said(what: str) -> Iterator[None]:
    """Says what is being done, and how long it took."""
    print(f"  {what} ...", end=" ", flush=True)
    started_s = time.monotonic()
    yield
    load = os.getloadavg()[0]
    print(f"{time.monotonic() - started_s:.0f} s, load average {load:.1f}", flush=True)


def main() -> None:
    """Measures as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-path", required=True)
    parser.add_argument("--tokenizer-model", required=True)
    parser.add_argument("--vocab-size", type=int, default=1024)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--log-dir", required=True, help="folder for what the runs print")
    parser.add_argument("--delays-ms", type=float, nargs="+", default=[0.0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--cycles", type=int, default=3, help="measured blocks of each")
    parser.add_argument("--prefetch", type=int, help="--edit-sync-prefetch, if not its default")
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    args = parser.parse_args()
    try:
        measure(args)
    except (RuntimeError, TimeoutError, subprocess.TimeoutExpired) as error:
        sys.exit(f"\nerror: {error}")


if __name__ == "__main__":
    main()
