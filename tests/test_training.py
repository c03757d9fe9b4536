"""The loop of pretrain_edit.py: what it prints, evaluates and counts, and why it ends."""

from __future__ import annotations

import json
import os
import re
import signal
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from distributed import run_ranks
from pretraining import Prepare, Run, command_line, newest, pretrain

import pretrain_edit
from megatron_edit.engine.trigger import TimeTrigger
from megatron_edit.run.failure import RankFailedError
from megatron_edit.run.interval import Totals
from megatron_edit.run.step_clock import StepClock
from megatron_edit.run.stop import StopConditions
from megatron_edit.run.trainer import Trainer

# Warm-up 3, tau 4: rounds end at the start of steps 7 and 11, counted from 0.
FIELDS = [
    ("iteration", r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration +\d+/ +\d+ "),
    ("consumed samples", r" consumed samples: +\d+ "),
    ("elapsed", r" elapsed time per iteration \(ms\): \d+\.\d "),
    ("throughput", r" throughput per GPU \(TFLOP/s/GPU\): \d+\.\d+ "),
    ("learning rate", r" learning rate: \d\.\d{6}E[-+]\d\d "),
    ("global batch size", r" global batch size: +\d+ "),
    ("lm loss", r" lm loss: \d\.\d{6}E[-+]\d\d "),
    ("loss scale", r" loss scale: 1\.0 "),
    ("grad norm", r" grad norm: \d+\.\d{3} "),
    ("skipped", r" number of skipped iterations: +\d+ "),
    ("nan", r" number of nan iterations: +\d+ "),
    ("sync round", r" sync round: +\d+ "),
    ("pseudo grad norm", r" pseudo grad norm: \d+\.\d{3} "),
    ("anomalies", r" anomalies: +\d+ "),
    ("exposed", r" exposed sync \(ms\): \d+\.\d "),
]


def log_lines(run: Run) -> list[list[str]]:
    """The log lines of a run, split at the bars."""
    return [line.split("|") for line in run.out.splitlines() if "] iteration " in line]


def values(run: Run, name: str) -> list[float]:
    """One figure of every log line."""
    position = [field for field, _ in FIELDS if field != "throughput"].index(name)
    return [float(line[position].split(":")[1]) for line in log_lines(run)]


# --- log lines and validation


def _noting_losses(line: str) -> tuple[Run, list[float]]:
    """Also notes every loss of this rank's own samples."""
    own: list[float] = []
    add = Totals.add

    def noting(totals: Totals, loss: torch.Tensor, norm: torch.Tensor) -> None:
        own.append(float(loss))
        add(totals, loss, norm)

    with patch.object(Totals, "add", noting):
        return pretrain(command_line(line)), own


def test_the_log_line_and_the_loss_in_it() -> None:
    line = "--log-interval 3 --log-throughput --lr-warmup-iters 5 --global-batch-size 16"
    results = run_ranks(_noting_losses, 4, line)
    runs = [run for run, _ in results]
    own = np.array([losses for _, losses in results])
    assert [run.out for run in runs[1:]] == ["", "", ""]
    lines = log_lines(runs[0])
    assert len(lines) == 4
    for number, fields in enumerate(lines, 1):
        assert len(fields) == len(FIELDS) + 1 and fields[-1] == ""
        for text, (name, pattern) in zip(fields, FIELDS, strict=False):
            assert re.fullmatch(pattern, text), f"{name}: {text!r}"
        assert f"{3 * number:8d}/      12" in fields[0]
        assert fields[1] == f" consumed samples: {48 * number:12d} "
    # The mean over all ranks and the three steps, the same whichever rank would print it.
    expected = own.reshape(4, 4, 3).mean(axis=(0, 2))
    printed = [float(fields[6].split(":")[1]) for fields in lines]
    assert printed == pytest.approx(expected, rel=1e-5)
    assert len(set(expected)) == 4 and own.std(axis=0).min() > 0
    for run in runs:
        assert run.losses == runs[0].losses
        assert np.mean(run.losses, axis=1) == pytest.approx(expected, rel=1e-6)
    assert [fields[11] for fields in lines] == [f" sync round: {n:4d} " for n in (0, 0, 1, 2)]


def _pretrain_all(lines: list[str], prepare: Prepare | None = None) -> list[Run]:
    return [pretrain(command_line(line), prepare) for line in lines]


VALIDATION = re.compile(
    r"-+\n validation loss at iteration (\d+)( on \w+ set)? \| lm loss value: (\d\.\d{6}E[-+]\d\d)"
    r" \| lm loss PPL: (\d\.\d{6}E[-+]\d\d) \| spread over replicas: (\d\.\d{3}E[-+]\d\d) \|\n-+\n"
)


def test_evaluations_are_seen_by_nobody_but_the_user() -> None:
    line = "--hidden-dropout 0.1 --eval-interval 3"
    lines = [f"{line} --eval-iters 1", f"{line} --eval-iters 1 --edit-eval-on anchor", line]
    local, anchor, none = run_ranks(_pretrain_all, 2, lines)[0]
    for run in (local, anchor):
        assert run.code == 0
        assert (run.losses, run.state) == (none.losses, none.state)
    found = VALIDATION.findall(local.out)
    assert [(int(step), where) for step, where, *_ in found] == [
        (3, ""),
        (6, ""),
        (9, ""),
        (12, ""),
        (12, " on validation set"),
        (12, " on test set"),
    ]
    for _, _, loss, perplexity, _ in found:
        assert float(perplexity) == pytest.approx(np.exp(float(loss)), rel=1e-5)
    # Replicas agree in warm-up and when they have been consolidated, and nowhere else.
    assert [float(spread) > 0 for *_, spread in found] == [False, True, True, True, False, False]
    anchors = VALIDATION.findall(anchor.out)
    assert all(float(spread) == 0 for *_, spread in anchors)
    # The anchor of step 6 is the model that warm-up left, at step 3.
    assert anchors[1][2] == anchors[0][2] == found[0][2] != found[1][2]
    assert VALIDATION.findall(none.out) == []


def test_workers_samples_and_an_interleaved_pipeline() -> None:
    pipeline = (
        "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
        "--global-batch-size 8 --eval-iters 1 --eval-interval 2"
    )
    lines = [
        f"{pipeline} --train-samples 39 --num-workers 2 --exit-signal-handler",
        f"{pipeline} --train-iters 4",
    ]
    samples, iters = run_ranks(_with_either_length, 4, lines)[0]
    assert (samples.code, samples.step) == (0, 4)
    assert samples.losses == iters.losses
    assert VALIDATION.findall(samples.out) == VALIDATION.findall(iters.out)
    assert len(VALIDATION.findall(samples.out)) == 4
    assert sorted(samples.ids) == sorted(iters.ids)


def _with_either_length(lines: list[str]) -> list[Run]:
    without = ["--train-iters" if "--train-samples" in line else "" for line in lines]
    return [pretrain(command_line(line, w)) for line, w in zip(lines, without, strict=True)]


# --- faults


def _spoil(trainer: Trainer, after_steps: set[int], replicas: set[int]) -> None:
    """Writes NaN into a layer after some steps."""
    step = trainer.step

    def spoilt_step() -> None:
        step()
        if trainer.engine.step in after_steps and trainer.mesh.replica in replicas:
            unit = next(unit for unit in trainer.engine.units if unit.name == "layers.1")
            with torch.no_grad():
                unit.locals[0].fill_(float("nan"))

    trainer.step = spoilt_step  # type: ignore[method-assign]


def _replica_1_spoilt(lines: list[str]) -> list[Run]:
    return _pretrain_all(lines, lambda trainer: _spoil(trainer, {4}, {1}))


def test_a_replica_with_nans_is_healed_by_the_synchronisation() -> None:
    # From step 5 on; after step 9 a synchronisation comes. The limit is long passed by then.
    line = "--edit-replicas 3 --edit-sync-interval 6 --max-nan-iterations 2"
    for rank, (run,) in enumerate(run_ranks(_replica_1_spoilt, 3, [line])):
        assert (run.code, run.step) == (0, 12)
        assert np.isfinite(run.losses[9:]).all() and np.isnan(run.losses[8][1])
        if rank == 0:
            assert values(run, "nan") == [0] * 4 + [1] * 5 + [0] * 3
            # The updates of those steps are skipped, and the synchronisation leaves it out.
            assert values(run, "skipped") == values(run, "nan")
            assert [n for n in values(run, "anomalies") if n] == [values(run, "anomalies")[9]]


def test_nans_in_lockstep_stop_the_run_and_save_nothing(tmp_path: Path) -> None:
    line = f"--max-nan-iterations 4 --log-interval 2 --edit-warmup-steps 20 --save {tmp_path}"
    run, _ = (runs[0] for runs in run_ranks(_gradient_spoilt, 2, [line]))
    # From step 3 on, in the gradients of one replica alone; noticed by the log line after step 8.
    assert (run.code, run.step) == (1, 8)
    assert values(run, "nan") == values(run, "skipped") == [0, 2, 4, 4]
    assert np.isfinite(run.losses).all()
    assert run.err == (
        "error: stopped at step 8: loss or gradient of replica 0 was not finite for 5 iterations "
        "in a row, --max-nan-iterations 4; nothing is saved\n"
    )
    assert not list(tmp_path.iterdir())


def _gradient_spoilt(lines: list[str]) -> list[Run]:
    """The first run has bad gradients from its step 3 on, in replica 0."""

    def spoil(trainer: Trainer) -> None:
        def poison(gradient: torch.Tensor) -> torch.Tensor:
            bad = trainer.engine.step >= 3 and trainer.mesh.replica == 0
            return gradient * float("nan") if bad else gradient

        next(iter(trainer.optimizer.named_parameters().values())).register_hook(poison)

    return [pretrain(command_line(lines[0]), spoil), *_pretrain_all(lines[1:])]


def test_a_replica_that_synchronisations_do_not_help_ends_the_run(tmp_path: Path) -> None:
    # They come after steps 6, 9 and 12. The first two find it failing, and it still is.
    line = (
        "--edit-replicas 3 --edit-sync-interval 3 --max-nan-iterations 3 "
        "--edit-max-consecutive-rollbacks 2"
    )
    longer = "--train-iters 14 --override-opt_param-scheduler"
    lines = [f"{line} --save {tmp_path}", f"{line} --load {tmp_path} {longer}"]
    results = run_ranks(_gradient_spoilt, 3, lines)
    stopped, resumed = results[0]
    assert (stopped.code, stopped.step) == (1, 10)
    assert stopped.err == (
        "error: stopped at step 10: loss or gradient of replica 0 was not finite for 7 iterations "
        "in a row, --max-nan-iterations 3, and 2 synchronisations in a row did not help, "
        "edit.max_consecutive_rollbacks 2; all go back to the anchor\n"
    )
    assert newest(tmp_path) == 10
    _all_go_on_from_the_anchor(results, steps=14)
    assert np.isfinite(resumed.losses).all()


def test_replicas_by_the_clock_go_back_where_they_meet(tmp_path: Path) -> None:
    line = "--edit-method a_edit --edit-sync-seconds 0.1"
    stops = "--max-nan-iterations 2 --edit-max-consecutive-rollbacks 1 --train-iters 4000"
    loads = f"--train-iters 1 --load {tmp_path} --use-checkpoint-opt_param-scheduler"
    lines = [f"{line} {stops} --save {tmp_path}", f"{line} {loads}"]
    results = run_ranks(_gradient_spoilt, 2, lines)
    assert [stopped.code for stopped, _ in results] == [1, 1]
    assert "1 synchronisations in a row did not help" in results[0][0].err
    assert newest(tmp_path) == sum(stopped.step for stopped, _ in results) // 2
    for stopped, resumed in results:
        assert resumed.loaded == stopped.state
        assert resumed.loaded["parameters"] == resumed.loaded["anchor"]
        assert resumed.loaded["anchor"] == results[0][0].state["anchor"]


def _all_spoilt(lines: list[str]) -> list[Run]:
    spoilt = pretrain(command_line(lines[0]), lambda trainer: _spoil(trainer, {6}, {0, 1}))
    return [spoilt, *_pretrain_all(lines[1:])]


@pytest.mark.parametrize("flags", ["", "--edit-delay-steps 2 --edit-offload-outer-state true"])
def test_the_run_ends_when_no_replica_learns(flags: str, tmp_path: Path) -> None:
    # The round of steps 2 to 5 has been synchronised, or with a delay is still under way.
    line = f"--edit-warmup-steps 1 --max-nan-iterations 1 {flags}"
    lines = [f"{line} --save {tmp_path}", f"{line} --load {tmp_path}"]
    results = run_ranks(_all_spoilt, 2, lines)
    stopped, resumed = results[0]
    assert (stopped.code, stopped.step) == (1, 7), stopped.err
    assert "of every replica was not finite for 1 iterations in a row" in stopped.err
    assert newest(tmp_path) == 7
    assert resumed.loaded["counters"] == "7 1 0"
    _all_go_on_from_the_anchor(results, steps=12)
    assert np.isfinite(resumed.losses).all()


def _spoilt_before_the_anchor(line: str) -> str:
    try:
        pretrain(command_line(line), lambda trainer: _spoil(trainer, {2}, {0, 1}))
    except RankFailedError as error:
        return str(error)
    return "no error"


def test_parameters_that_are_not_finite_become_no_anchor(tmp_path: Path) -> None:
    for message in run_ranks(_spoilt_before_the_anchor, 2, f"--save {tmp_path}"):
        assert message.endswith(
            "step 3, forward and backward: RuntimeError: the parameters are not finite at step 3, "
            "where they would become the first anchor"
        )
    assert not list(tmp_path.iterdir())


def _all_go_on_from_the_anchor(results: list[list[Run]], steps: int) -> None:
    for stopped, resumed in results:
        assert resumed.loaded == stopped.state
        assert resumed.loaded["parameters"] == results[0][0].state["parameters"]
        assert resumed.loaded["anchor"] == resumed.loaded["parameters"]
        assert resumed.loaded["counters"].endswith(" 0")
        assert (resumed.code, resumed.step) == (0, steps)


def _both_replicas_spoilt(lines: list[str]) -> list[Run]:
    # Synchronisations are due after steps 5, 7, 9 and 11.
    return _pretrain_all(lines, lambda trainer: _spoil(trainer, {5, 9, 11}, {0, 1}))


def test_rollbacks_in_a_row_end_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    line = f"--edit-sync-interval 2 --edit-max-consecutive-rollbacks 2 --save {tmp_path}"
    run, other = (runs[0] for runs in run_ranks(_both_replicas_spoilt, 2, [line]))
    assert (run.code, run.step) == (other.code, other.step) == (1, 12)
    assert run.err == (
        "error: stopped at step 12: round 3: every replica of unit layers.1 was anomalous (norms "
        "nan, nan) in 2 synchronisations in a row, edit.max_consecutive_rollbacks 2\n"
    )
    warnings = re.findall(r"warning: round (\d+): every replica of unit layers.1", run.out)
    assert warnings == ["0", "2", "3"]
    assert newest(tmp_path) == 12
    assert run.out.endswith(f"saved {tmp_path / 'iter_0000012'}\n")


def _by_the_clock(lines: list[str]) -> list[Run]:
    """Every replica is spoilt after each of its steps. A round is ten steps of replica 0 and one of
    replica 1; its record arrives a step after the meeting, as on a GPU."""

    def prepare(trainer: Trainer) -> None:
        clock, trigger = Namespace(now=0.0), trainer.engine.trigger
        assert isinstance(trigger, TimeTrigger)
        trigger.clock = lambda: clock.now
        trainer.engine._recorder._on_gpu = True
        _spoil(trainer, set(range(4, 1000)), {0, 1})
        step = trainer.step

        def step_on_clock() -> None:
            step()
            clock.now += (1.0, 10.0)[trainer.mesh.replica]

        trainer.step = step_on_clock  # type: ignore[method-assign]

    return [pretrain(command_line(lines[0]), prepare), *_pretrain_all(lines[1:])]


def test_replicas_by_the_clock_stop_where_they_are_together(tmp_path: Path) -> None:
    stops = "--edit-max-consecutive-rollbacks 2 --edit-sync-seconds 10 --train-iters 1000"
    goes_on = (
        "--edit-max-consecutive-rollbacks 4 --edit-sync-seconds 0.1 --train-iters 20 "
        "--use-checkpoint-opt_param-scheduler"
    )
    lines = [
        f"--edit-method a_edit --log-interval 1000 {stops} --save {tmp_path}",
        f"--edit-method a_edit --log-interval 1000 {goes_on} --load {tmp_path}",
    ]
    results = run_ranks(_by_the_clock, 2, lines, timeout_s=60)
    stopped, resumed = zip(*results, strict=True)
    # The second meeting: after 3 steps in lockstep, two rounds, and the step it begins.
    assert [(run.code, run.step) for run in stopped] == [(1, 24), (1, 6)]
    assert "error: stopped at step 15: round 1: every replica of unit" in stopped[0].err
    folder = tmp_path / "iter_0000015"
    assert newest(tmp_path) == 15 and list(tmp_path.glob("iter_*")) == [folder]
    assert json.loads((folder / "state.json").read_text())["replica_steps"] == [24, 6]
    assert [run.loaded for run in resumed] == [run.state for run in stopped]
    assert [run.code for run in resumed] == [0, 0]


# --- other ways to end


def _interrupted(line: str) -> Run:
    """SIGTERM reaches rank 1 in its sixth step."""

    def send(trainer: Trainer) -> None:
        step = trainer.step

        def step_with_signal() -> None:
            if trainer.engine.step == 5 and trainer.mesh.replica == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            step()

        trainer.step = step_with_signal  # type: ignore[method-assign]

    return pretrain(command_line(line), send)


def test_sigterm_to_one_rank_stops_all_with_a_checkpoint(tmp_path: Path) -> None:
    line = f"--exit-signal-handler --log-interval 20 --train-iters 100000 --save {tmp_path}"
    runs = run_ranks(_interrupted, 2, line)
    # Rank 0 may be some steps ahead: in the middle of a round nothing holds it.
    assert [run.code for run in runs] == [0, 0]
    assert runs[0].step == runs[1].step >= 7
    assert newest(tmp_path) == runs[0].step
    assert f"stopped at step {runs[0].step}: SIGTERM\nsaved {tmp_path}" in runs[0].out


def test_sigterm_calls_replicas_that_run_by_the_clock_together(tmp_path: Path) -> None:
    # Without the signal they would not meet for a minute.
    line = f"--edit-method a_edit --edit-sync-seconds 60 --log-interval 20 --save {tmp_path}"
    runs = run_ranks(_interrupted, 2, f"{line} --train-iters 100000 --exit-signal-handler")
    assert [run.code for run in runs] == [0, 0]
    # Saved where they met, which is half of what both have done.
    assert newest(tmp_path) == sum(run.step for run in runs) // 2
    assert f"stopped at step {newest(tmp_path)}: SIGTERM\nsaved {tmp_path}" in runs[0].out


def _out_of_time(line: str) -> Run:
    """A minute passes every second step of rank 1; no time does on rank 0."""
    slow = Namespace(now=0.0)

    def tell(trainer: Trainer) -> None:
        step = trainer.step

        def step_on_clock() -> None:
            step()
            slow.now += 30.0 * trainer.mesh.replica

        trainer.step = step_on_clock  # type: ignore[method-assign]

    def conditions(*args: Any) -> StopConditions:
        return StopConditions(args[0], args[1], args[2], clock=lambda: slow.now)

    with patch.object(pretrain_edit, "StopConditions", conditions):
        return pretrain(command_line(line), tell)


def test_the_clock_of_one_rank_stops_all(tmp_path: Path) -> None:
    # Synchronous, so that the ranks are together and the step is known.
    line = f"--exit-duration-in-mins 2 --edit-warmup-steps 10 --save {tmp_path}"
    runs = run_ranks(_out_of_time, 2, line)
    assert [run.code for run in runs] == [0, 0]
    # Two minutes are over after step 4; rank 0 has begun the fifth by then, or may have.
    assert [run.step for run in runs] == [5, 5]
    assert "stopped at step 5: --exit-duration-in-mins 2\n" in runs[0].out
    assert newest(tmp_path) == 5


def test_the_exit_interval_ends_and_a_resumed_run_gets_on(tmp_path: Path) -> None:
    line = f"--edit-replicas 1 --exit-interval 5 --save {tmp_path}"
    load = f"{line} --load {tmp_path}"
    (first, second, third), *_ = run_ranks(_pretrain_all, 1, [line, load, load])
    assert [(run.code, run.step) for run in (first, second, third)] == [(0, 5), (0, 10), (0, 12)]
    assert "stopped at step 5: --exit-interval 5\n" in first.out
    assert newest(tmp_path) == 12


# --- time


class FakeDevice:
    """Works behind the host: 30 ms for each step, which the host hands over in 1 ms."""

    def __init__(self) -> None:
        self.now_s = self._busy_until_s = 0.0

    def take_step(self) -> None:
        self.now_s += 0.001
        self._busy_until_s = max(self._busy_until_s, self.now_s) + 0.03

    def wait(self) -> None:
        self.now_s = max(self.now_s, self._busy_until_s)


def _train_on_a_slow_device(line: str) -> tuple[list[float], float]:
    """Times of a step at the log lines, and what the clock shows after an evaluation of 5 s."""
    device = FakeDevice()
    trainers = []

    def prepare(trainer: Trainer) -> None:
        trainers.append(trainer)
        trainer.clock = StepClock(device.wait, lambda: device.now_s)
        step, evaluate = trainer.step, trainer._evaluate

        def slow_step() -> None:
            step()
            device.take_step()

        def long_evaluation(dataset: Any) -> list[float]:
            device.now_s += 5
            return evaluate(dataset)

        trainer.step = slow_step  # type: ignore[method-assign]
        trainer._evaluate = long_evaluation  # type: ignore[method-assign]

    return values(pretrain(command_line(line), prepare), "elapsed"), trainers[0].clock.seconds()


def test_a_step_is_over_when_the_device_has_done_it() -> None:
    line = "--edit-replicas 1 --log-interval 4 --eval-interval 6 --eval-iters 1"
    ((elapsed, left_s),) = run_ranks(_train_on_a_slow_device, 1, line)
    # 4 steps of 30 ms and 1 ms before the first; the evaluation is nobody's time, and at its
    # beginning the device is waited for once more.
    assert elapsed == pytest.approx([30.25, 30.5, 30.25], abs=0.06)
    assert left_s == 0
