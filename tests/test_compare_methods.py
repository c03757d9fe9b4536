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
    " [2026-01-31 12:00:00.123456] iteration {iteration:8d}/      40 | consumed samples: "
    "{samples:12d} | elapsed time per iteration (ms): {ms} | learning rate: 3.0E-04 | global batch "
    "size:    16 | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: 0.812 | number of skipped "
    "iterations:   0 | number of nan iterations:   0 | sync round:    3 | pseudo grad norm: 0.120 "
    "| anomalies: {anomalies:3d} | exposed sync (ms): 12.3 |"
)
END = """
 validation loss at iteration 40 on validation set | lm loss value: 3.5E+00 | lm loss PPL: 3.3E+01 |
sent to other replicas by rank 0: 12.5 MB
"""


def log() -> str:
    rows = [(10, 100.0, 6.0, 0), (20, 200.0, 5.0, 2), (40, 100.0, 4.0, 1)]
    return (
        "\n".join(
            LINE.format(iteration=i, samples=16 * i, ms=ms, loss=loss, anomalies=a)
            for i, ms, loss, a in rows
        )
        + END
    )


def test_a_log_is_read() -> None:
    result = parse_log(log())
    assert result.perplexity == 33.0
    assert result.sent_mb == 12.5
    assert result.samples == [160, 320, 640]
    assert result.seconds == pytest.approx([1.0, 3.0, 5.0])
    assert result.losses == [6.0, 5.0, 4.0]
    assert result.anomalies == 3
    assert result.tokens_per_s == pytest.approx(480 * 64 / 4)


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
