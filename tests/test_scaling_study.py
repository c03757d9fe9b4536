"""The scaling study: what it trains, what it writes, and a tiny one through the real launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.scaling_study import METHODS, SMOKE, Plan, flags, loss_table
from megatron_edit.scaling.runs import Run, read_csv

ROOT = Path(__file__).resolve().parent.parent


def test_the_plan() -> None:
    assert len({hidden for hidden, _ in Plan().sizes}) >= 4
    assert len(set(Plan().steps)) >= 3
    assert Plan().total == 48
    assert all(hidden % 16 == 0 for hidden, _ in Plan().sizes + SMOKE.sizes)
    for method, replicas in METHODS:
        given = flags(method, replicas, 32, 2, 80)
        assert given["--micro-batch-size"] == 16 // replicas
        assert ("--edit-sync-interval" in given) == (method == "edit")


def test_table_has_a_column_per_method() -> None:
    runs = [
        Run(method, replicas, 1000.0, tokens, loss)
        for method, replicas, tokens, loss in (
            ("sync", 1, 2e4, 5.0),
            ("edit", 2, 2e4, 5.25),
            ("sync", 1, 1e4, 6.0),
            ("edit", 2, 1e4, 6.5),
        )
    ]
    lines = loss_table(runs).splitlines()
    assert lines[0] == "| parameters | tokens | `sync`, R = 1 | `edit`, R = 2 |"
    assert lines[2:] == ["| 1,000 | 10,000 | 6.000 | 6.500 |", "| 1,000 | 20,000 | 5.000 | 5.250 |"]


def run_script(work: Path) -> str:
    done = subprocess.run(
        ["scripts/scaling_study.sh", "--smoke", "--work", str(work)],
        cwd=ROOT,
        env={**os.environ, "VENV": sys.prefix},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(600)
def test_a_smoke_study(tmp_path: Path) -> None:
    printed = run_script(tmp_path)
    assert f"[{SMOKE.total}/{SMOKE.total}]" in printed
    runs = read_csv(tmp_path / "study.csv")
    assert len(runs) == SMOKE.total
    assert len({run.parameters for run in runs}) == 3
    assert all(0 < run.loss < 8 for run in runs)
    assert (tmp_path / "study.png").stat().st_size > 10_000
    page = (tmp_path / "study.md").read_text()
    assert "`sync`, R = 1 | `edit`, R = 2" in page
    # What is done is not repeated.
    again = run_script(tmp_path)
    assert again.count("there already") == SMOKE.total
    assert (tmp_path / "study.csv").read_text().count("\n") == len(runs) + 1
