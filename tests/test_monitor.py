"""Every documented chart is in the event file of a run on several ranks, and nothing is lost."""

from __future__ import annotations

import csv
import importlib.util
import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import command_lines
import pytest
from distributed import run_ranks
from pretraining import Run, command_line, pretrain
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from megatron_edit.config.arguments import parse_args
from megatron_edit.errors import ConfigurationError
from megatron_edit.platform import ds_compat
from megatron_edit.run.charts import chart_layout
from megatron_edit.run.interval import Interval
from megatron_edit.run.monitor import Monitor
from megatron_edit.run.nan_rows import NanRow
from megatron_edit.run.stop import Stop

UNITS = ["embedding", "layers.0", "layers.1", "head"]
MEGATRON_TAGS = [
    "lm loss", "lm loss validation", "lm loss validation ppl", "learning-rate", "grad-norm",
    "batch-size", "iteration-time", "throughput", "world-size", "loss-scale",
]  # fmt: skip
EDIT_TAGS = [
    "edit/pseudo-grad-norm", "edit/anomalies", "edit/rollbacks", "edit/clip-coef",
    "edit/outer-momentum-norm", "edit/drift", "edit/exposed-sync-ms", "edit/sync-bytes",
    "edit/computing-sync-ms",
    *[f"edit/pseudo-grad-norm/{unit}" for unit in UNITS],
    *[f"edit/{kind}/replica-{i}" for kind in ("weight", "steps-in-round", "loss") for i in (0, 1)],
]  # fmt: skip

# Warm-up 3, tau 4, 12 steps: rounds end after steps 7, 11 and at the end, in step 12.
ROUNDS = [7, 11, 12]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """A run of two ranks that writes everything."""
    folder = tmp_path_factory.mktemp("monitored")
    sections = {
        "csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "csv"},
        "comms_logger": {"enabled": True, "verbose": False},
    }
    (folder / "ds.json").write_text(json.dumps(sections))
    line = (
        "--untie-embeddings-and-output-weights --log-interval 2 --eval-interval 5 --eval-iters 1 "
        f"--tensorboard-dir {folder / 'tb'} --deepspeed --deepspeed_config {folder / 'ds.json'}"
    )
    results = run_ranks(_pretrain, 2, line)
    assert [result.code for result in results] == [0, 0]
    return results[0], folder


def _pretrain(line: str) -> Run:
    return pretrain(command_line(line))


@pytest.fixture(scope="module")
def events(run: tuple[Run, Path]) -> EventAccumulator:
    """What TensorBoard reads in the run's folder."""
    folder = run[1] / "tb"
    assert len(list(folder.rglob("events.out.tfevents.*"))) == 1
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator


def series(events: EventAccumulator, tag: str) -> dict[int, float]:
    return {event.step: event.value for event in events.Scalars(tag)}


def test_every_documented_tag_is_there_and_no_other(events: EventAccumulator) -> None:
    assert set(events.Tags()["scalars"]) == {*MEGATRON_TAGS, *EDIT_TAGS}


def test_points_stand_at_their_iteration(run: tuple[Run, Path], events: EventAccumulator) -> None:
    result = run[0]
    logged = [2, 4, 6, 8, 10, 12]
    for tag in ("lm loss", "learning-rate", "iteration-time", "edit/loss/replica-1"):
        assert list(series(events, tag)) == logged, tag
    for tag in ("edit/drift", "edit/weight/replica-0", "edit/pseudo-grad-norm/layers.1"):
        assert list(series(events, tag)) == ROUNDS, tag
    assert list(series(events, "lm loss validation")) == [5, 10, 12]
    means = [sum(losses) / 2 for losses in result.losses]
    assert list(series(events, "lm loss").values()) == pytest.approx(means)
    ones = [losses[1] for losses in result.losses]
    assert list(series(events, "edit/loss/replica-1").values()) == pytest.approx(ones)


def test_figures_of_a_round(events: EventAccumulator) -> None:
    at = {tag: series(events, tag) for tag in EDIT_TAGS}
    for step in ROUNDS:
        weights = [at[f"edit/weight/replica-{i}"][step] for i in (0, 1)]
        assert sum(weights) == pytest.approx(1) and min(weights) > 0.3
        squares = [at[f"edit/pseudo-grad-norm/{unit}"][step] ** 2 for unit in UNITS]
        assert at["edit/pseudo-grad-norm"][step] ** 2 == pytest.approx(sum(squares))
        assert 0 < at["edit/drift"][step] < 1
        assert at["edit/outer-momentum-norm"][step] > 0
        assert (at["edit/anomalies"][step], at["edit/rollbacks"][step]) == (0, 0)
        assert 0 < at["edit/clip-coef"][step] <= 1
    assert list(at["edit/steps-in-round/replica-1"].values()) == [4, 4, 1]


def test_charts_of_the_synchronisation_share_a_page(events: EventAccumulator) -> None:
    (event,) = events.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    (page,) = layout.category
    assert page.title == "EDiT"
    tags = {tag.removesuffix("$") for chart in page.chart for tag in chart.multiline.tag}
    assert tags <= {*EDIT_TAGS}
    assert {tag for tag in EDIT_TAGS if "replica" in tag or "norm/" in tag} <= tags


def test_csv_files_hold_the_same(run: tuple[Run, Path], events: EventAccumulator) -> None:
    with (run[1] / "csv" / "edit_drift.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["step", "drift"]
    assert {int(step): float(value) for step, value in rows[1:]} == pytest.approx(
        series(events, "edit/drift")
    )
    assert (run[1] / "csv" / "lm_loss.csv").exists()


def test_the_table_of_collectives_comes_last(run: tuple[Run, Path]) -> None:
    table = run[0].out[run[0].out.rindex("validation loss") :]
    assert "all_reduce" in table and "all_gather_into_tensor" in table


# --- without a run


class Recorder:
    """Stands in for DeepSpeed's MonitorMaster."""

    tb_monitor = None

    def __init__(self) -> None:
        self.events: list[tuple[str, float, int]] = []

    def write_events(self, events: list[tuple[str, float, int]]) -> None:
        self.events += events


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(ds_compat, "monitor_master", lambda *_: recorder)
    return recorder


def arguments(**changes: Any) -> Namespace:
    values = {
        "rank": 0,
        "world_size": 2,
        "replicas": 2,
        "train_iters": 100,
        "global_batch_size": 8,
        "log_throughput": False,
        "tensorboard_log_interval": 1,
        "wandb_exp_name": "",
        "ds_config": {},
    }
    return Namespace(**(values | changes))


INTERVAL = Interval(
    iteration=5,
    consumed_samples=40,
    step_ms=12.34,
    learning_rate=3e-4,
    losses=[2.0, 3.0],
    grad_norm=0.8125,
    skipped=1,
    nan_iterations=2,
    nan_rows=[NanRow(1, 0, 0)] * 2,
    sync_round=3,
    exposed_ms=0.25,
    tflops=1.5,
)


def test_a_log_line_to_the_letter(recorder: Recorder) -> None:
    line = Monitor(arguments(), 0).log_line(INTERVAL)
    assert line[29:] == (
        " iteration        5/     100 | consumed samples:           40 | elapsed time per "
        "iteration (ms): 12.3 | learning rate: 3.000000E-04 | global batch size:     8 | lm loss: "
        "2.500000E+00 | loss scale: 1.0 | grad norm: 0.812 | number of skipped iterations:   1 | "
        "number of nan iterations:   2 | sync round:    3 | pseudo grad norm: 0.000 | anomalies:   "
        "0 | exposed sync (ms): 0.2 |"
    )


@pytest.mark.parametrize(
    ("every", "first_step", "charted"),
    [
        (1, 0, [10, 20, 30, 40, 50, 60]),
        (10, 0, [10, 20, 30, 40, 50, 60]),
        (15, 0, [20, 30, 50, 60]),
        (25, 0, [30, 50]),
        (25, 20, [30, 50]),
        (100, 0, []),
    ],
)
def test_charts_at_the_interval_asked_for(
    every: int, first_step: int, charted: list[int], recorder: Recorder
) -> None:
    writer = Monitor(arguments(tensorboard_log_interval=every), first_step)
    for step in range(first_step + 10, 61, 10):
        writer.interval(replace(INTERVAL, iteration=step))
    assert [step for tag, _, step in recorder.events if tag == "lm loss"] == charted


def test_only_rank_0_speaks(recorder: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        writer = Monitor(arguments(rank=rank), 0)
        writer.interval(INTERVAL)
        writer.validation(5, [1.0])
        writer.stopped(5, Stop("bad", failed=True))
        writer.stopped(5, Stop("--exit-interval 5"))
        out, err = capsys.readouterr()
        assert (out != "", err) == (rank == 0, "error: stopped at step 5: bad\n" * (rank == 0))
        assert ("stopped at step 5: --exit-interval 5\n" in out) == (rank == 0)


def test_one_replica_has_no_spread(recorder: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    Monitor(arguments(), 0).validation(40, [0.5], "on test set", chart=False)
    assert capsys.readouterr().out.splitlines()[1] == (
        " validation loss at iteration 40 on test set | lm loss value: 5.000000E-01 | lm loss PPL: "
        "1.648721E+00 |"
    )
    assert recorder.events == []


def test_a_folder_that_cannot_be_written_is_a_users_mistake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "/elsewhere")

    monkeypatch.setattr(ds_compat, "monitor_master", refuse)
    with pytest.raises(ConfigurationError, match="cannot write to /elsewhere: Permission denied"):
        Monitor(arguments(), 0)


def test_the_layout_names_replicas_and_units() -> None:
    charts = chart_layout(3, ["embedding", "head"])["EDiT"]
    assert charts["weight of each replica"][1] == [f"edit/weight/replica-{i}$" for i in range(3)]
    assert charts["pseudo-gradient norm of each unit"][1][1] == "edit/pseudo-grad-norm/head$"


def test_wandb_flags_are_honoured_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    base = command_lines.command_line("--mock-data --edit-method sync")
    alone = command_lines.refusal([*base, "--wandb-exp-name", "first"], capsys)
    assert "--wandb-exp-name first: nothing is sent to Weights & Biases" in alone
    wandb = ["--wandb-project", "edit", "--wandb-exp-name", "first"]
    if importlib.util.find_spec("wandb") is None:
        assert "package wandb is not installed" in command_lines.refusal([*base, *wandb], capsys)
    else:
        assert parse_args([*base, *wandb], world_size=4).ds_config["wandb"]["project"] == "edit"
