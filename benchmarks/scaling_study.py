"""A small scaling study with our own trainer: `sync`, and `edit` with 1, 2 and 4 replicas.

Every model size is trained on every number of tokens by every method, at the same global batch.
`sync` is run on one rank: its arithmetic is the same on more. The validation losses go through
scripts/fit_scaling_law.py. Results are study.csv, .md, .txt, .png and .json in
docs/results/scaling; each training's log stays in the work folder, and one that is there is not
repeated.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.trainings import ARCHITECTURE, ROOT, Trainings
from megatron_edit.scaling.runs import Run, read_csv

SEQUENCE, GLOBAL_BATCH, VOCABULARY, INTERVAL = 64, 16, 512, 8
# The best learning rate falls about as the width grows.
LR_TIMES_HIDDEN = 0.256
METHODS = (("sync", 1), ("edit", 1), ("edit", 2), ("edit", 4))
OUTER = {"outer-lr": 0.8, "outer-momentum": 0.6, "weight-temperature-relative": 1.0}


@dataclass(frozen=True)
class Plan:
    """What is trained.

    Attributes:
        sizes: Hidden size and number of layers of each model.
        steps: Lengths of the trainings, in steps of 1024 tokens.
        methods: Method and number of replicas.
        form: Of the law; see fit_scaling_law.py.
    """

    sizes: tuple[tuple[int, int], ...] = ((32, 2), (48, 3), (64, 4), (96, 4))
    steps: tuple[int, ...] = (80, 160, 320)
    methods: tuple[tuple[str, int], ...] = METHODS
    form: str = "auto"

    @property
    def total(self) -> int:
        """Number of trainings."""
        return len(self.sizes) * len(self.steps) * len(self.methods)


SMOKE = Plan(((16, 1), (32, 1), (48, 1)), (4,), (("sync", 1), ("edit", 2)), "power")


def flags(method: str, replicas: int, hidden: int, layers: int, steps: int) -> dict[str, object]:
    """Flags of one training."""
    lr = LR_TIMES_HIDDEN / hidden
    common: dict[str, object] = {
        "--num-layers": layers,
        "--hidden-size": hidden,
        "--ffn-hidden-size": 8 * hidden // 3,
        "--num-attention-heads": hidden // 16,
        "--seq-length": SEQUENCE,
        "--max-position-embeddings": SEQUENCE,
        **ARCHITECTURE,
        "--micro-batch-size": GLOBAL_BATCH // replicas,
        "--global-batch-size": GLOBAL_BATCH,
        "--train-iters": steps,
        "--lr": lr,
        "--min-lr": lr / 10,
        "--lr-decay-style": "cosine",
        "--lr-warmup-iters": max(1, steps // 12),
        "--weight-decay": 0.1,
        "--adam-beta2": 0.95,
        "--eval-iters": 18,
        "--eval-interval": 10 * steps,
        "--log-interval": max(1, steps // 16),
        "--edit-method": method,
        "--edit-replicas": replicas,
    }
    if method == "sync":
        return common
    edit = {"warmup-steps": steps // 4, "sync-interval": min(INTERVAL, steps // 2), **OUTER}
    return common | {f"--edit-{name}": value for name, value in edit.items()}


def train(plan: Plan, trainings: Trainings, cores: int) -> list[Path]:
    """Does all trainings, as many beside one another as there are cores; returns their logs."""
    logs: list[Path] = []
    for method, replicas in plan.methods:
        grid = [(hidden, layers, steps) for hidden, layers in plan.sizes for steps in plan.steps]
        with ThreadPoolExecutor(max(1, cores // replicas)) as workers:
            waiting = [
                workers.submit(
                    trainings.log,
                    f"{method}_r{replicas}_h{hidden}_l{layers}_s{steps}",
                    replicas,
                    flags(method, replicas, hidden, layers, steps),
                )
                for hidden, layers, steps in grid
            ]
        logs += [future.result() for future in waiting]
    return logs


def fit(logs: Iterable[Path], form: str, results: Path) -> str:
    """Fits the laws; writes CSV, picture and JSON, and returns what the command printed."""
    command = [sys.executable, ROOT / "scripts" / "fit_scaling_law.py", "--logs", *logs]
    command += ["--form", form, "--save-csv", results / "study.csv"]
    command += ["--plot", results / "study.png", "--json", results / "study.json"]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done.stdout


def loss_table(runs: list[Run]) -> str:
    """Markdown table of the validation losses: a row per size and length, a column per method."""
    columns = list(dict.fromkeys((run.method, run.replicas) for run in runs))
    losses = {((r.parameters, r.tokens), (r.method, r.replicas)): r.loss for r in runs}
    lines = [
        "| parameters | tokens | "
        + " | ".join(f"`{method}`, R = {replicas}" for method, replicas in columns)
        + " |",
        "|---|---|" + "---|" * len(columns),
    ]
    for size in sorted({(run.parameters, run.tokens) for run in runs}):
        cells = [f"{losses[size, column]:.3f}" for column in columns]
        lines.append(f"| {size[0]:,.0f} | {size[1]:,.0f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "scaling", help="logs, data")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "docs" / "results" / "scaling", help="tables"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="tiny models, 4 steps, results in the work folder"
    )
    args = parser.parse_args()
    plan = SMOKE if args.smoke else Plan()
    if args.smoke:
        args.results = args.work
    args.results.mkdir(parents=True, exist_ok=True)
    trainings = Trainings(args.work, VOCABULARY, plan.total)
    logs = train(plan, trainings, cores=len(os.sched_getaffinity(0)))
    text = fit(logs, plan.form, args.results)
    (args.results / "study.txt").write_text(text)
    command = "./scripts/scaling_study.sh" + (" --smoke" if args.smoke else "")
    (args.results / "study.md").write_text(
        f"# Scaling study\n\nMade by `{command}`: validation loss in nats per token, one seed, "
        f"{GLOBAL_BATCH * SEQUENCE} tokens a step, a quarter of the steps synchronous, rounds of "
        f"{INTERVAL} steps, learning rate {LR_TIMES_HIDDEN:g} / hidden size. `sync` does the same "
        f"arithmetic for every R.\n\n{loss_table(read_csv(args.results / 'study.csv'))}\n\n"
        f"The laws fitted to it, with intervals:\n\n```\n{text.rstrip()}\n```\n\n"
        "![data, laws, residuals](study.png)\n"
    )
    print(f"{text}\nresults: {args.results}", flush=True)


if __name__ == "__main__":
    os.chdir(ROOT)
    main()
