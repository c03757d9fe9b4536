"""Fits scaling laws to training runs and asks whether local SGD differs from synchronous training.

    edit-fit examples/scaling/diloco_losses.csv \
        --predict 4e9 80e9 4 --compute 1e22 --plot fit.png --json fit.json

The CSV has the columns method, replicas, parameters, tokens, loss (nats); `--logs` reads logs of
pretrain_edit.py instead. Runs of method `sync` are the baseline. Each method and number of
replicas gets a law of its own; a method with several numbers of replicas also gets the joint law
A x^a M^b. Forms: power (A x^a), offset (A x^a + C), replicas (the joint law only), hoffmann
(E + A/N^alpha + B/D^beta); auto takes hoffmann where N and D vary independently.
"""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

# A fit of five parameters is many tiny steps; threads of BLAS would only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from megatron_edit.errors import ConfigurationError, exit_on_configuration_error
from megatron_edit.scaling.command import Parser, write
from megatron_edit.scaling.compare import Comparison, compare
from megatron_edit.scaling.fit import FORMS, Fit, Prediction, choose_form, curvature_note, fit_runs
from megatron_edit.scaling.forms import VARIABLES, Points, PowerForm, ReplicaForm
from megatron_edit.scaling.hoffmann import HoffmannForm, Split, optimal_split
from megatron_edit.scaling.json_text import json_text
from megatron_edit.scaling.logs import read_logs
from megatron_edit.scaling.runs import SYNC, Run, Table, groups, read_csv, write_csv
from megatron_edit.scaling.tables import interval, number, percent, table


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="?", type=Path, help="CSV of runs")
    parser.add_argument(
        "--logs", nargs="+", type=Path, default=[], metavar="LOG", help="logs of pretrain_edit.py"
    )
    parser.add_argument("--save-csv", type=Path, metavar="FILE", help="write the runs as a CSV")
    parser.add_argument("--form", default="auto", help=f"{', '.join(FORMS)} (default: auto)")
    parser.add_argument(
        "--variable",
        default="parameters",
        help=f"x of a law of one variable: {', '.join(VARIABLES)} (default: parameters)",
    )
    parser.add_argument(
        "--predict",
        nargs="+",
        action="append",
        default=[],
        metavar="X",
        help="parameters, tokens and, if not 1, replicas of a run to predict; may be repeated",
    )
    parser.add_argument(
        "--compute",
        action="append",
        default=[],
        metavar="FLOP",
        help="budget 6 N D to split into N and D (form hoffmann); may be repeated",
    )
    parser.add_argument("--resamples", type=int, default=1000, help="of the bootstrap (1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap (0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result; - = stdout")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture (png, svg, pdf)")
    return parser.parse_args()


def read_runs(args: argparse.Namespace) -> list[Run]:
    """Returns the runs of the CSV and the logs.

    Raises:
        ConfigurationError: Neither is given, or one cannot be used.
    """
    if args.runs is None and not args.logs:
        raise ConfigurationError("no runs: give a CSV, or --logs LOG ...")
    if args.resamples < 10:
        raise ConfigurationError(f"--resamples: got {args.resamples}; allowed: at least 10")
    runs = (read_csv(args.runs) if args.runs else []) + read_logs(args.logs)
    if args.save_csv:
        write_csv(args.save_csv, runs)
    return runs


class Study:
    """All fits and comparisons of one set of runs.

    Attributes:
        fits: Law of each method and number of replicas.
        joint: Law A x^a M^b of each method with several numbers of replicas.
        comparisons: Each group of local SGD against the synchronous runs.
        notes: What a reader must know.
    """

    def __init__(self, runs: list[Run], args: argparse.Namespace) -> None:
        self.fits: dict[str, Fit] = {}
        self.joint: dict[str, Fit] = {}
        self.comparisons: dict[str, Comparison] = {}
        self.notes: list[str] = []
        if args.form != "replicas":
            self._fit_groups(runs, args)
        self._fit_joint(runs, args)
        if not self.fits and not any(name != SYNC for name in self.joint):
            raise ConfigurationError(
                "--form replicas: no method has runs with two or more numbers of replicas"
            )
        if self.fits:
            self._compare(runs, args)

    def _fit_groups(self, runs: list[Run], args: argparse.Namespace) -> None:
        groups_by_note: dict[str, list[str]] = {}
        for name, members in groups(runs, by_replicas=True).items():
            form, notes = choose_form(args.form, args.variable, Table.of(members).points)
            fit = fit_runs(members, form, args.resamples, args.seed)
            bend = curvature_note(fit)
            for note in notes + ([bend] if bend else []):
                groups_by_note.setdefault(note, []).append(name)
            self.fits[name] = fit
        self.notes += [f"{', '.join(names)}: {note}" for note, names in groups_by_note.items()]

    def _fit_joint(self, runs: list[Run], args: argparse.Namespace) -> None:
        for name, members in groups(runs, by_replicas=False).items():
            if name == SYNC:
                # The planner needs the baseline in the same variable as the joint law.
                if args.form == "replicas":
                    self.joint[name] = fit_runs(
                        members, PowerForm(args.variable), args.resamples, args.seed
                    )
            elif len({run.replicas for run in members}) > 1:
                self.joint[f"{name} joint"] = fit_runs(
                    members, ReplicaForm(args.variable), args.resamples, args.seed
                )

    def _compare(self, runs: list[Run], args: argparse.Namespace) -> None:
        parts = groups(runs, by_replicas=True)
        if SYNC not in parts:
            self.notes.append(f"no runs of method {SYNC!r}: nothing to compare with")
            return
        for name, members in parts.items():
            if name == SYNC:
                continue
            form = self.fits[name].law.form
            try:
                found = compare(members, parts[SYNC], form, args.resamples, args.seed)
            except ConfigurationError as error:
                self.notes.append(f"{name}: not compared: {error}")
                continue
            self.comparisons[name] = found


def predictions(study: Study, wanted: list[list[str]]) -> dict[str, dict[str, Prediction]]:
    """Returns the predictions of every law that covers the wanted number of replicas.

    Raises:
        ConfigurationError: A wanted point is not two or three positive numbers.
    """
    found: dict[str, dict[str, Prediction]] = {}
    for words in wanted:
        if len(words) not in (2, 3):
            raise ConfigurationError(f"--predict {' '.join(words)}: give parameters tokens [M]")
        n, d, *m = (positive_number(word, "--predict") for word in words)
        replicas = m[0] if m else 1.0
        label = f"N={n:.4g} D={d:.4g} M={replicas:.4g}"
        point = Points.of(n, d, replicas)
        for name, fit in {**study.fits, **study.joint}.items():
            seen = set(fit.table.points.replicas)
            if len(seen) > 1 or name == SYNC or replicas in seen:
                # A law of one group does not know replicas: no warning about them.
                own = point if len(seen) > 1 else Points.of(n, d, seen.pop())
                found.setdefault(label, {})[name] = fit.predict(own)
        if label not in found:
            raise ConfigurationError(
                f"--predict {' '.join(words)}: no runs with {replicas:g} replicas"
            )
    return found


def splits(study: Study, budgets: list[str]) -> dict[str, list[Split]]:
    """Returns the compute-optimal split of each budget for each law that has one.

    Raises:
        ConfigurationError: No law depends on both N and D.
    """
    values = [positive_number(text, "--compute") for text in budgets]
    both = {n: f for n, f in study.fits.items() if isinstance(f.law.form, HoffmannForm)}
    if values and not both:
        raise ConfigurationError(
            "--compute: no law depends on both N and D; runs with independent N and D and "
            "--form hoffmann are needed to split a budget"
        )
    return {n: [optimal_split(f.law, c) for c in values] for n, f in both.items() if values}


def positive_number(text: str, flag: str) -> float:
    """Returns a number above 0 from the command line.

    Raises:
        ConfigurationError: It is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value <= 0:
        raise ConfigurationError(f"{flag}: got {text!r}; allowed: a finite number > 0")
    return value


def report(
    study: Study,
    predicted: dict[str, dict[str, Prediction]],
    split: dict[str, list[Split]],
    resamples: int,
) -> str:
    """Returns the result as text."""
    parts = [f"Laws (fitted here; 95 % intervals of {resamples} bootstrap resamples over the runs)"]
    for name, fit in {**study.fits, **study.joint}.items():
        values = ", ".join(f"{k} {interval(v)}" for k, v in fit.values().items())
        spread = 100 * float((fit.residuals**2).mean() ** 0.5)
        failed = f"; {fit.failures} resamples could not be fitted" if fit.failures else ""
        parts.append(f"  {name}: {len(fit.table)} runs, {fit.law.form.formula}: {values}")
        parts.append(f"    residuals {spread:.2g} % rms{failed}")
    if study.comparisons:
        parts.append(_comparison_text(study.comparisons))
    for label, by_law in predicted.items():
        rows = [
            [name, interval(p.law), f"[{p.run.low:.5g}, {p.run.high:.5g}]"]
            for name, p in by_law.items()
        ]
        parts.append(f"\nPrediction at {label}\n" + table(["law", "loss", "one run"], rows))
        warned = {w for p in by_law.values() for w in p.warnings}
        parts += [f"  warning: {text}" for text in sorted(warned)]
    if split:
        rows = [
            [
                name,
                f"{s.compute:.3g}",
                f"{s.parameters:.4g}",
                f"{s.tokens:.4g}",
                f"{s.tokens / s.parameters:.4g}",
                f"{s.loss:.5g}",
            ]
            for name, values in split.items()
            for s in values
        ]
        header = ["law", "FLOP", "N*", "D*", "D*/N*", "loss"]
        parts.append("\nCompute-optimal split\n" + table(header, rows))
    parts += [f"note: {note}" for note in study.notes]
    return "\n".join(parts)


def _comparison_text(comparisons: dict[str, Comparison]) -> str:
    rows = []
    for name, found in comparisons.items():
        change = found.change
        rows.append(
            [
                name,
                str(found.pairs),
                f"{percent(change.value, 3)} [{percent(change.low, 3)}, {percent(change.high, 3)}]",
                number(found.p_value),
                number(found.p_sign_flip),
                found.verdict(),
            ]
        )
    header = ["against sync", "pairs", "loss change, %", "p bootstrap", "p sign flip", "verdict"]
    text = "\nPaired comparison at equal N and D\n" + table(header, rows)
    for name, found in comparisons.items():
        if found.parameters:
            values = ", ".join(f"{k} {interval(v, 4)}" for k, v in found.parameters.items())
            text += f"\n  {name} minus sync: {values}"
    return text


def as_json(
    study: Study, predicted: dict[str, dict[str, Prediction]], split: dict[str, list[Split]]
) -> dict[str, Any]:
    """Returns the result for JSON."""
    return {
        "laws": {
            name: {
                "form": fit.law.form.name,
                "variable": getattr(fit.law.form, "over", None),
                "formula": fit.law.form.formula,
                "theta": list(map(float, fit.law.theta)),
                "values": {k: asdict(v) for k, v in fit.values().items()},
                "runs": len(fit.table),
                "failed_resamples": fit.failures,
                "provenance": "fitted",
            }
            for name, fit in {**study.fits, **study.joint}.items()
        },
        "comparisons": {
            name: {**asdict(found), "differs": found.differs, "verdict": found.verdict()}
            for name, found in study.comparisons.items()
        },
        "predictions": {
            label: {name: asdict(p) for name, p in by_law.items()}
            for label, by_law in predicted.items()
        },
        "splits": {name: [asdict(s) for s in values] for name, values in split.items()},
        "notes": study.notes,
    }


@exit_on_configuration_error()
def main() -> None:
    """Fits, prints and writes."""
    args = parse_arguments()
    runs = read_runs(args)
    study = Study(runs, args)
    predicted = predictions(study, args.predict)
    split = splits(study, args.compute)
    if args.json is None or str(args.json) != "-":
        print(report(study, predicted, split, args.resamples))
    if args.json is not None:
        write(args.json, json_text(as_json(study, predicted, split)), "--json")
    if args.plot:
        from megatron_edit.scaling.law_plots import law_figure
        from megatron_edit.scaling.plots import save

        save(law_figure(study.fits or study.joint, study.comparisons, args.variable), args.plot)
