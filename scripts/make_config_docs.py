#!/usr/bin/env python
"""Writes the tables of methods and settings into README.md and docs/configuration.md.

python scripts/make_config_docs.py [--check]

A table stands between ``<!-- NAME -->`` and ``<!-- end NAME -->``. With ``--check`` nothing is
written, and the exit code is 1 if a file would change.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_edit.config.edit_config import EditConfig, allowed_values, flag_name, show
from megatron_edit.config.flags import ATORCH_ALIASES
from megatron_edit.config.methods import PRESETS

ROOT = Path(__file__).resolve().parent.parent
FILES = ("README.md", "docs/configuration.md")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def methods_table() -> str:
    """One row a method: what its preset comes to."""
    head = ["method", "a round ends after", "weights", "detector", "clip", "outer lr, momentum"]
    rows = []
    for method, preset in PRESETS.items():
        config = EditConfig.model_validate({**preset, "method": method})
        rounds = {
            "never": "gradients are averaged at every step",
            "steps": f"{config.sync_interval} steps",
            "time": f"{config.sync_seconds:g} s",
        }[config.sync_trigger]
        if config.sync_trigger == "never":
            rows.append([f"`{method}`", rounds, *["-"] * 5])
            continue
        nesterov = ", Nesterov" if config.outer_nesterov else ""
        late = ", applied one round late" if config.delay_round else ""
        rows.append(
            [
                f"`{method}`",
                rounds + late,
                config.weighting,
                config.detector,
                "-" if config.clip is None else f"{config.clip:g}",
                f"{config.outer_lr:g}, {config.outer_momentum:g}{nesterov}",
                f"{config.warmup_steps}",
            ]
        )
    return table([*head, "warm-up steps"], rows)


def fields_table() -> str:
    """One row a field of EditConfig."""
    rows = []
    for name, info in EditConfig.model_fields.items():
        text = " ".join((info.description or "").split())
        allowed = allowed_values(info).replace("|", "\\|")
        rows.append([f"`{name}`", f"`{show(info.default)}`", allowed, text])
    return table(["key of `edit`", "default", "allowed", "meaning"], rows)


def aliases_table() -> str:
    """One row a flag of ATorch."""
    rows = []
    for name, alias in ATORCH_ALIASES.items():
        value = "" if alias.value is None else f" {show(alias.value)}"
        rows.append([f"`{name}`", f"`{flag_name(alias.field)}{value}`"])
    return table(["ATorch's flag", "same as"], rows)


TABLES = {"methods": methods_table, "fields": fields_table, "aliases": aliases_table}


def filled(text: str) -> str:
    """A document with its tables written anew."""
    for name, make in TABLES.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end {name} -->"
        if begin in text:
            before, rest = text.split(begin)
            text = before + begin + make() + "\n" + end + rest.split(end)[1]
    return text


def main() -> int:
    """Writes or checks all files; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if out of date")
    check = parser.parse_args().check
    stale = 0
    for name in FILES:
        path = ROOT / name
        before = path.read_text()
        after = filled(before)
        if after == before:
            continue
        stale += 1
        if check:
            print(f"{name} is out of date; run scripts/make_config_docs.py", file=sys.stderr)
        else:
            path.write_text(after)
    return int(check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
