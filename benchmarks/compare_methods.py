"""Compares the methods of the family on real text, and the parts of EDiT's penalty.

Part 1, two replicas: every method trains the same small model on the same number of tokens. Its
learning rate is the best of a sweep with the first seed, which goes on by factors of 2 while the
best is at an end; that run counts as the first of the seeds.
Part 2, four replicas: replica 1 trains on random tokens for a stretch, with parts of the penalty
switched off and with each detector.

Results go to docs/results/methods.md and .png, and ablation.md; each run's own log stays in the
work folder, and a run that is there is not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from benchmarks.trainings import ARCHITECTURE, ROOT, Trainings
from megatron_edit.scaling.logs import last_start

LEARNING_RATES = (2e-3, 4e-3, 8e-3)
MOST_RATES = 5
SHAPE: dict[str, object] = {
    "--num-layers": 3,
    "--hidden-size": 96,
    "--ffn-hidden-size": 256,
    "--num-attention-heads": 4,
    "--seq-length": 64,
    "--max-position-embeddings": 64,
    **ARCHITECTURE,
}
GLOBAL_BATCH, SEQUENCE, VOCABULARY = 16, 64, 1024
TINY = {"weight-temperature-relative": 1.0, "outer-lr": 0.8, "outer-momentum": 0.6}
METHODS: dict[str, dict[str, object]] = {
    "sync": {"method": "sync"},
    "post_local_sgd": {"method": "post_local_sgd"},
    "diloco": {"method": "diloco", "outer-momentum": 0.6},
    "co2": {"method": "co2"},
    "edit": {"method": "edit", **TINY},
    "a_edit": {"method": "a_edit", "sync-seconds": 1, **TINY},
    "edit, delay 4": {"method": "edit", "delay-steps": 4, **TINY},
    "edit, int8": {"method": "edit", "compression": "int8", **TINY},
}
PENALTIES: dict[str, dict[str, object]] = {
    "robust (default)": {},
    "no anomaly elimination": {"detector": "none"},
    "no weighted averaging": {"weighting": "uniform", "weight-temperature-relative": "none"},
    "no clip": {"clip": "none"},
    "none of the three": {
        "detector": "none",
        "weighting": "uniform",
        "weight-temperature-relative": "none",
        "clip": "none",
    },
    "detector paper": {"detector": "paper"},
    "detector history": {"detector": "history"},
    "detector peer": {"detector": "peer"},
}


@dataclass(frozen=True)
class Length:
    """How long the runs are: steps, synchronous steps at their start, inner steps of a round."""

    steps: int
    warmup: int
    interval: int
    seeds: int

    @property
    def poisoned(self) -> str:
        """The stretch of steps in which a replica gets random tokens: after the detectors' own
        warm-up of ten rounds, where the run is long enough."""
        first = self.warmup + (self.steps - self.warmup) * 6 // 10
        return f"{first}-{first + (self.steps - self.warmup) // 5}"


@dataclass
class Result:
    """What a run's log says.

    Attributes:
        perplexity: On the validation set, after the last synchronisation.
        tokens_per_s: Over all steps but those of the first log line.
        sent_mb: Megabytes rank 0 sent to other replicas.
        samples: Consumed at each log line.
        seconds: Time since the last start's first step, at each log line.
        losses: Training loss at each log line.
        anomalies: Excluded (replica, unit) pairs.
    """

    perplexity: float
    tokens_per_s: float
    sent_mb: float
    samples: list[int]
    seconds: list[float]
    losses: list[float]
    anomalies: int


def parse_log(text: str) -> Result:
    """Reads the log of a finished run; of several starts in one log, the last.

    Raises:
        ValueError: It has not finished.
    """
    text = last_start(text)
    line = re.compile(
        r"\[([-\d]+ [:.\d]+)\] iteration +(\d+)/.*consumed samples: +(\d+).*iteration \(ms\): "
        r"([\d.]+).*lm loss: ([-+\dE.]+|nan|inf).*anomalies: +(\d+)"
    )
    rows = [match.groups() for match in line.finditer(text)]
    validation = re.search(r"on validation set \| .*lm loss PPL: ([-+\dE.]+|nan|inf)", text)
    sent = re.search(r"sent to other replicas by rank 0: ([\d.]+) MB", text)
    if validation is None or sent is None or len(rows) < 2:
        raise ValueError("the log has no final validation")
    begun = re.search(r"starts at step (\d+)", text)
    samples = [int(row[2]) for row in rows]
    # A replica that runs by the clock does other numbers of steps than the iterations say, so the
    # time between two lines is that of their stamps.
    stamps = [datetime.fromisoformat(row[0]) for row in rows]
    steps = int(rows[0][1]) - (int(begun[1]) if begun else 0)
    first = steps * float(rows[0][3]) / 1e3
    seconds = [first + (stamp - stamps[0]).total_seconds() for stamp in stamps]
    return Result(
        perplexity=float(validation[1]),
        tokens_per_s=(samples[-1] - samples[0]) * SEQUENCE / (seconds[-1] - seconds[0]),
        sent_mb=float(sent[1]),
        samples=samples,
        seconds=seconds,
        losses=[float(row[4]) for row in rows],
        anomalies=sum(int(row[5]) for row in rows),
    )


class Runs:
    """Trainings of this comparison, as results.

    Args:
        work: Folder of logs, tokenizer and data.
        length: Of the runs.
        total: Number of runs, for the progress.
    """

    def __init__(self, work: Path, length: Length, total: int) -> None:
        self._length = length
        self._trainings = Trainings(work, VOCABULARY, total)

    def result(
        self, name: str, edit: dict[str, object], replicas: int, lr: float, seed: int
    ) -> Result:
        """Trains once, unless that was done before, and reads the log."""
        words = re.sub(r"\W+", "-", name).strip("-")
        slug = f"{words}_r{replicas}_lr{lr:g}_seed{seed}_n{self._length.steps}"
        log = self._trainings.log(slug, replicas, self._flags(edit, replicas, lr, seed))
        result = parse_log(log.read_text())
        print(f"    perplexity {result.perplexity:.2f}", flush=True)
        return result

    def _flags(
        self, edit: dict[str, object], replicas: int, lr: float, seed: int
    ) -> dict[str, object]:
        length = self._length
        flags: dict[str, object] = {
            **SHAPE,
            "--micro-batch-size": GLOBAL_BATCH // replicas,
            "--global-batch-size": GLOBAL_BATCH,
            "--train-iters": length.steps,
            "--lr": lr,
            "--min-lr": lr / 10,
            "--lr-decay-style": "cosine",
            "--lr-warmup-iters": max(1, length.steps // 12),
            "--weight-decay": 0.1,
            "--adam-beta2": 0.95,
            "--seed": seed,
            "--eval-iters": 12,
            "--eval-interval": 10 * length.steps,
            "--log-interval": max(1, length.steps // 24),
            "--edit-replicas": replicas,
        }
        if edit["method"] != "sync":
            flags |= {"--edit-warmup-steps": length.warmup}
            if edit["method"] != "a_edit":
                flags |= {"--edit-sync-interval": length.interval}
        return flags | {f"--edit-{field}": value for field, value in edit.items()}


def compare(runs: Runs, seeds: int) -> dict[str, tuple[float, list[Result]]]:
    """Part 1. Returns for each method the chosen learning rate and the results of the seeds."""
    compared = {}
    for name, edit in METHODS.items():
        best, first = sweep(runs, name, edit)
        rest = [runs.result(name, edit, 2, best, seed) for seed in range(2, seeds + 1)]
        compared[name] = (best, [first, *rest])
    return compared


def sweep(runs: Runs, name: str, edit: dict[str, object]) -> tuple[float, Result]:
    """Finds the best learning rate with seed 1; goes on beyond the best while that is at an end."""
    results = {lr: runs.result(name, edit, 2, lr, seed=1) for lr in LEARNING_RATES}
    while True:
        best = min(results, key=lambda lr: results[lr].perplexity)
        lowest, highest = min(results), max(results)
        if best not in (lowest, highest) or len(results) == MOST_RATES:
            return best, results[best]
        further = best / 2 if best == lowest else best * 2
        results[further] = runs.result(name, edit, 2, further, seed=1)


def ablate(runs: Runs, length: Length, lr: float) -> dict[str, list[Result]]:
    """Part 2. Returns the results of each setting of the penalty; the first is without poison."""
    base = {"method": "edit", **TINY}
    spoiled = {"debug": "true", "debug-poison-replica": f"1:{length.poisoned}:tokens"}
    settings = {"nobody spoiled: robust (default)": base}
    for name, penalty in PENALTIES.items():
        settings[f"random tokens: {name}"] = {**base, **penalty, **spoiled}
    seeds = range(1, min(2, length.seeds) + 1)
    return {
        name: [runs.result(name, edit, 4, lr, seed) for seed in seeds]
        for name, edit in settings.items()
    }


def spread(values: list[float]) -> str:
    """Mean and standard deviation as text."""
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{deviation}"


def methods_table(compared: dict[str, tuple[float, list[Result]]]) -> str:
    """Markdown table of part 1."""
    lines = [
        "| method | validation perplexity | above `sync` | learning rate | tokens/s | MB sent |",
        "|---|---|---|---|---|---|",
    ]
    _, baseline = compared["sync"]
    for name, (lr, results) in compared.items():
        # The machine's other programs only ever make a run slower.
        speed = max(result.tokens_per_s for result in results)
        sent = statistics.fmean(result.sent_mb for result in results)
        perplexities = [result.perplexity for result in results]
        more = [ours - its.perplexity for ours, its in zip(perplexities, baseline, strict=True)]
        lines.append(
            f"| `{name}` | {spread(perplexities)} | {spread(more)} | {lr:g} | {speed:,.0f} | "
            f"{sent:.1f} |"
        )
    return "\n".join(lines)


def ablation_table(results: dict[str, list[Result]]) -> str:
    """Markdown table of part 2."""
    lines = [
        "| replica 1: penalty | validation perplexity | excluded (replica, unit) pairs |",
        "|---|---|---|",
    ]
    for name, runs in results.items():
        pairs = statistics.fmean(run.anomalies for run in runs)
        lines.append(f"| {name} | {spread([run.perplexity for run in runs])} | {pairs:.0f} |")
    return "\n".join(lines)


def plot(compared: dict[str, tuple[float, list[Result]]], path: Path) -> None:
    """Training loss: of the first seed against tokens, of the fastest against time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for name, (_, results) in compared.items():
        first, fastest = results[0], max(results, key=lambda result: result.tokens_per_s)
        tokens = [samples * SEQUENCE / 1e3 for samples in first.samples]
        axes[0].plot(tokens, first.losses, linewidth=1.3)
        axes[1].plot(fastest.seconds, fastest.losses, label=name, linewidth=1.3)
    axes[0].set(xlabel="thousand tokens", ylabel="training loss")
    axes[1].set(xlabel="seconds")
    axes[1].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "compare", help="logs, data")
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "results", help="tables")
    parser.add_argument("--steps", type=int, default=240, help="of each run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--smoke", action="store_true", help="24 steps, one seed, in the work folder"
    )
    args = parser.parse_args()
    length = Length(args.steps, args.steps // 3, 8, args.seeds)
    if args.smoke:
        length, args.results = Length(24, 6, 3, 1), args.work
    seeds = min(2, length.seeds)
    total = len(METHODS) * (MOST_RATES + length.seeds - 1) + (len(PENALTIES) + 1) * seeds
    runs = Runs(args.work, length, total)
    compared = compare(runs, length.seeds)
    ablation = ablate(runs, length, compared["edit"][0])
    args.results.mkdir(parents=True, exist_ok=True)
    plot(compared, args.results / "methods.png")
    command = "`./scripts/compare_methods.sh`"
    tokens = length.steps * GLOBAL_BATCH * SEQUENCE
    rates = ", ".join(f"{rate:g}" for rate in LEARNING_RATES)
    (args.results / "methods.md").write_text(
        f"# Methods compared\n\nMade by {command}: 2 replicas, {tokens:,} tokens each run, "
        f"{length.warmup} of {length.steps} steps synchronous, rounds of {length.interval} steps "
        f"(`a_edit`: of 1 s), learning rate the best of {rates} and further factors of 2 for seed "
        f"1; {length.seeds} seeds, mean ± standard deviation, and the same of the difference from "
        "`sync` with the same seed. Tokens/s are those of the fastest seed on one machine, without "
        "a slow link ([link.md](link.md) has one); MB are what a rank sent to the other replica, "
        "gradients of the synchronous steps among them.\n\n"
        f"{methods_table(compared)}\n\n![loss against tokens and time](methods.png)\n"
    )
    (args.results / "ablation.md").write_text(
        f"# What each part of the penalty does\n\nMade by {command}: method `edit`, 4 replicas. "
        f"Replica 1 trains on random tokens in steps {length.poisoned} of "
        f"{length.steps}.\n\n{ablation_table(ablation)}\n"
    )
    everything = {
        "methods": {n: [lr, [asdict(r) for r in rs]] for n, (lr, rs) in compared.items()},
        "ablation": {n: [asdict(r) for r in rs] for n, rs in ablation.items()},
    }
    (args.work / "results.json").write_text(json.dumps(everything))
    print(f"results: {args.results}", flush=True)


if __name__ == "__main__":
    os.chdir(ROOT)
    main()
