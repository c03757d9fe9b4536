"""Simulates a training run event by event: jitter, stragglers, failures, one slow link.

    edit-simulate --method edit --replicas 4 --parameters 1e9 --gbps 10 \
        --step 0.8 --interval 64 --jitter 0.05 --slow 3:1.5 --plot timeline.png

    edit-simulate --method a_edit --sync-seconds 60 --slow 1:4.3
    edit-simulate --method delayed --delay 4          (edit with a delay)
    edit-simulate --method streaming --fragments 4 --delay 4
    edit-simulate --method sync

Where nothing is random the closed form of the planner is printed beside the result.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_edit.errors import ConfigurationError, exit_on_configuration_error
from megatron_edit.scaling.closed_forms import all_reduce_bytes, bytes_per_second
from megatron_edit.scaling.cluster import COMPRESSION_FACTORS, validated
from megatron_edit.scaling.command import Parser, write
from megatron_edit.scaling.json_text import json_text
from megatron_edit.scaling.scenario import KINDS, Outcome, Scenario
from megatron_edit.scaling.simulate import simulate
from megatron_edit.scaling.tables import number, percent, table
from megatron_edit.scaling.timeline import KIND_WORDS, timeline_figure

DIRECT = (
    "replicas",
    "steps",
    "step",
    "interval",
    "sync_seconds",
    "overlap",
    "delay",
    "fragments",
    "release",
    "buckets",
    "jitter",
    "speed_spread",
    "on_failure",
    "restart_timer",
    "seed",
)
"""Fields of a scenario that a flag sets as they are."""


def parse_arguments() -> argparse.Namespace:
    """Reads the command line; what is not given keeps the scenario's default."""
    parser = Parser(__doc__, argparse.SUPPRESS)
    parser.add_argument(
        "--method", default="edit", help="sync, edit, delayed, streaming, a_edit (default: edit)"
    )
    for name in DIRECT:
        info = Scenario.model_fields[name]
        text = " ".join((info.description or "").split()).replace("%", "%%")
        parser.add_argument(
            "--" + name.replace("_", "-"), metavar="X", help=f"{text} (default: {info.default})"
        )
    payload = parser.add_argument_group("payload and link")
    payload.add_argument("--parameters", metavar="N", help="parameters of the model (1e9)")
    payload.add_argument(
        "--compression", metavar="X", help="payload: none (fp32), bf16, int8; gradients are bf16"
    )
    payload.add_argument("--gbps", metavar="X", help="slow link in Gbit/s (10)")
    payload.add_argument("--latency-ms", metavar="X", help="latency of a collective in ms (0)")
    trouble = parser.add_argument_group("trouble")
    trouble.add_argument(
        "--slow",
        action="append",
        metavar="I:FACTOR",
        help="replica I (from 0) takes FACTOR times as long; may be repeated",
    )
    trouble.add_argument("--mtbf-hours", metavar="X", help="mean time between failures of one")
    trouble.add_argument("--repair-minutes", metavar="X", help="from a failure to training again")
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, default=None, metavar="FILE", help="- = stdout")
    output.add_argument("--plot", type=Path, default=None, metavar="FILE", help="timeline")
    output.add_argument(
        "--window",
        default=None,
        metavar="START:END",
        help="seconds shown in the timeline (default: the first three rounds)",
    )
    return parser.parse_args()


def scenario_of(args: argparse.Namespace) -> Scenario:
    """Returns the scenario that the flags describe.

    Raises:
        ConfigurationError: Names the flag that is wrong.
    """
    given = vars(args)
    values: dict[str, Any] = {name: given[name] for name in DIRECT if name in given}
    method = given["method"]
    if method == "delayed":
        method = "edit"
        values.setdefault("delay", 1)
    values["method"] = method
    replicas = _number(given, "replicas", 2)
    compression = given.get("compression", "none")
    if compression not in COMPRESSION_FACTORS:
        raise ConfigurationError(
            f"--compression: got {compression!r}; allowed: {', '.join(COMPRESSION_FACTORS)}"
        )
    if method == "sync" and compression != "none":
        raise ConfigurationError("--compression: gradients of sync are not compressed")
    each = 2.0 if method == "sync" else 4.0 / COMPRESSION_FACTORS[compression]
    values["payload"] = all_reduce_bytes(_number(given, "parameters", 1e9), each, max(replicas, 1))
    values["bandwidth"] = bytes_per_second(_number(given, "gbps", 10.0))
    values["latency"] = _number(given, "latency_ms", 0.0) / 1e3
    if "mtbf_hours" in given:
        values["mean_time_to_failure"] = 3600.0 * _number(given, "mtbf_hours", 0.0)
    values["repair"] = 60.0 * _number(given, "repair_minutes", 0.0)
    values["slow"] = dict(_slow(text) for text in given.get("slow", []))
    return validated(Scenario, values, "scenario")


def _number(given: dict[str, Any], name: str, default: float) -> float:
    try:
        return float(given.get(name, default))
    except ValueError:
        flag = "--" + name.replace("_", "-")
        raise ConfigurationError(f"{flag}: got {given[name]!r}; allowed: a number") from None


def _slow(text: str) -> tuple[int, float]:
    index, _, factor = text.partition(":")
    try:
        return int(index), float(factor)
    except ValueError:
        raise ConfigurationError(f"--slow: got {text!r}; allowed: I:FACTOR, as 1:4.3") from None


def window(text: str | None, outcome: Outcome) -> tuple[float, float]:
    """Returns the part of the run that the timeline shows.

    Raises:
        ConfigurationError: The text is no START:END.
    """
    scenario = outcome.scenario
    if text is None:
        lengths = {"sync": 8 * scenario.step, "a_edit": 3 * scenario.sync_seconds}
        rounds = 3 * scenario.interval * scenario.step
        return 0.0, min(outcome.elapsed, 1.2 * lengths.get(scenario.method, rounds))
    start, _, end = text.partition(":")
    try:
        shown = float(start or 0), float(end or outcome.elapsed)
    except ValueError:
        shown = (0.0, 0.0)
    if not 0 <= shown[0] < shown[1]:
        raise ConfigurationError(f"--window: got {text!r}; allowed: START:END in seconds")
    return shown


def report(outcome: Outcome) -> str:
    """Returns the result as text."""
    summary: dict[str, Any] = outcome.summary()
    closed = summary["closed_form_utilisation"]
    rows = [
        ["elapsed, s", number(outcome.elapsed, 6)],
        ["utilisation, %", percent(outcome.utilisation, 2)],
        ["closed form, %", percent(closed, 2) if closed is not None else "does not hold here"],
        ["steps of a replica, mean", number(summary["steps"]["mean"], 6)],
        ["steps per s, all replicas", number(summary["steps_per_s"], 4)],
        ["synchronisations", str(outcome.synchronisations)],
        ["GB on a replica's link", number(outcome.transferred / 1e9, 4)],
        ["link busy, %", percent(summary["link_busy_share"], 2)],
    ]
    idle = summary["idle_per_rendezvous_s"]
    if outcome.idle:
        rows.append(["longest wait of a meeting, mean s", number(idle["mean"])])
        rows.append(["longest wait of a meeting, max s", number(idle["max"])])
    shares = [[KIND_WORDS[kind], percent(outcome.share(kind), 2)] for kind in KINDS]
    return f"{table(['run', ''], rows)}\n\n{table(['time of the replicas', '%'], shares)}"


@exit_on_configuration_error()
def main() -> None:
    """Simulates, prints and writes."""
    args = parse_arguments()
    outcome = simulate(scenario_of(args))
    shown = window(args.window, outcome)
    result = {"scenario": outcome.scenario.model_dump(), "outcome": outcome.summary()}
    if str(args.json) != "-":
        print(report(outcome))
    if args.json:
        write(args.json, json_text(result), "--json")
    if args.plot:
        from megatron_edit.scaling.plots import save

        save(timeline_figure(outcome, *shown), args.plot)
