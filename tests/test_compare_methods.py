"""The comparison of methods reads a run's log and makes its tables; one tiny run through it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.compare_methods import (
    METHODS,
    PENALTIES,
    Length,
    Result,
    Runs,
    ablation_table,
    methods_table,
    parse_log,
)
from benchmarks.trainings import ROOT
from megatron_edit.config.methods import PRESETS

LINE = (
    " [2026-01-31 12:00:{second:09.6f}] iteration {iteration:8d}/      40 | consumed samples: "
    "{samples:12d} | elapsed time per iteration (ms): {ms} | learning rate: 3.0E-04 | global batch "
    "size:    16 | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: 0.812 | number of skipped "
    "iterations:   0 | number of nan iterations:   0 | sync round:    3 | pseudo grad norm: 0.120 "
    "| anomalies: {anomalies:3d} | exposed sync (ms): 12.3 |"
)
END = """
 validation loss at iteration 40 on validation set | lm loss value: 3.5E+00 | lm loss PPL: 3.3E+01 |
sent to other replicas by rank 0: 12.5 MB
"""


ROWS = [(10, 1.5, 100.0, 6.0, 0), (20, 3.5, 200.0, 5.0, 2), (40, 5.5, 100.0, 4.0, 1)]


def log(rows: list[tuple[int, float, float, float, int]] = ROWS, started: int = 0) -> str:
    """A start's table and its rows: iteration, second of the stamp, ms a step, loss, anomalies."""
    head = f"effective configuration (world 2)\nparameters: 10; starts at step {started}\n"
    lines = [
        LINE.format(iteration=i, samples=16 * i, second=second, ms=ms, loss=loss, anomalies=a)
        for i, second, ms, loss, a in rows
    ]
    return head + "\n".join(lines) + END


def test_a_log_is_read() -> None:
    result = parse_log(log())
    assert result.perplexity == 33.0
    assert result.sent_mb == 12.5
    assert result.samples == [160, 320, 640]
    assert result.seconds == pytest.approx([1.0, 3.0, 5.0])
    assert result.losses == [6.0, 5.0, 4.0]
    assert result.anomalies == 3
    assert result.tokens_per_s == pytest.approx(480 * 64 / 4)


def test_of_a_resumed_run_the_last_start_is_read() -> None:
    resumed = log([(50, 31.0, 100.0, 3.0, 4), (60, 32.5, 100.0, 2.5, 0)], started=40)
    result = parse_log(log() + resumed.replace("3.3E+01", "2.2E+01").replace("12.5 MB", "5.0 MB"))
    assert (result.perplexity, result.sent_mb, result.anomalies) == (22.0, 5.0, 4)
    assert result.losses == [3.0, 2.5]
    assert result.seconds == pytest.approx([1.0, 2.5])
    assert result.tokens_per_s == pytest.approx(160 * 64 / 1.5)


def test_of_a_run_by_the_clock_the_time_is_that_of_the_stamps() -> None:
    # Replica 0 does a third of the steps: 30 of 90 iterations' worth, 100 ms each.
    result = parse_log(log([(10, 2.0, 100.0, 6.0, 0), (100, 5.0, 100.0, 5.0, 0)]))
    assert result.tokens_per_s == pytest.approx(90 * 16 * 64 / 3.0)


def test_a_log_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="no final validation"):
        parse_log(log().replace("PPL", ""))


def test_tables_have_a_row_per_setting() -> None:
    result = parse_log(log())
    table = methods_table({"edit": (4e-3, [result, result]), "sync": (2e-3, [result, result])})
    assert "| `edit` | 33.00 ± 0.00 | 0.00 ± 0.00 | 0.004 | 7,680 | 12.5 |" in table
    assert "| `sync` | 33.00 ± 0.00 |" in table
    assert "| no clip | 33.00 | 3 |" in ablation_table({"no clip": [result]})


def test_settings_are_the_packages() -> None:
    assert {edit["method"] for edit in METHODS.values()} <= set(PRESETS)
    assert "robust (default)" in PENALTIES
    assert Length(240, 80, 8, 3).poisoned == "176-208"


def test_a_run_is_made_once(tmp_path: Path) -> None:
    runs = Runs(tmp_path, Length(4, 1, 2, 1), total=2)
    first, second = (runs.result("edit", METHODS["edit"], 2, 2e-3, seed=1) for _ in range(2))
    assert isinstance(first, Result) and first == second
    assert math.isfinite(first.perplexity) and first.sent_mb > 0
    assert len(list(tmp_path.glob("*.log"))) == 1


def test_the_script_starts() -> None:
    done = subprocess.run(
        ["scripts/compare_methods.sh", "--help"],
        cwd=ROOT,
        env={**os.environ, "VENV": sys.prefix},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "--smoke" in done.stdout
