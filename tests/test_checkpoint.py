"""Resuming is bitwise, a killed save costs nothing, and what cannot be resumed is refused."""

from __future__ import annotations

import json
import os
import signal
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from distributed import run_ranks
from dying_ranks import run_dying_ranks
from pretraining import Run, command_line, newest, pretrain

from megatron_edit.backends.megatron.optimizer import EDiTDistributedOptimizer
from megatron_edit.checkpoint import files
from megatron_edit.engine import rendezvous
from megatron_edit.engine.trigger import TimeTrigger
from megatron_edit.run.failure import RankFailedError
from megatron_edit.run.trainer import Trainer

# Warm-up 4, tau 4: synchronisations are due at the start of steps 8 and 12, and at the end. The
# learning rate warms up over 5 steps, so that a stop in it shows a wrong schedule.
RESUMABLE = (
    "--train-iters 13 --lr-warmup-iters 5 --lr-decay-style cosine --edit-warmup-steps 4 "
    "--hidden-dropout 0.1 --attention-dropout 0.1"
)
STOPS = {2: "in warm-up", 4: "anchor due", 6: "mid-round", 8: "synchronisation due", 10: "round 1"}
LAYOUTS = {
    "R2, delay, compression": (
        2,
        "--edit-delay-steps 3 --edit-compression int8",
        [10],
    ),
    "R2, offload": (2, "--edit-offload-outer-state true", list(STOPS)),
    "R2 S2": (4, "--untie-embeddings-and-output-weights", [2, 6, 8]),
    "R2 TP2 SP": (4, "--tensor-model-parallel-size 2 --sequence-parallel", [2, 6, 8]),
    "R2 PP2 tied": (4, "--pipeline-model-parallel-size 2", [2, 6, 8]),
}


def link(save: Path, step: int, folder: Path) -> Path:
    """A folder whose tracker names one of the checkpoints in another."""
    folder.mkdir()
    source = files.checkpoint_folder(save, step)
    (folder / source.name).symlink_to(source)
    (folder / files.TRACKER).write_text(str(step))
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_is_the_uninterrupted_one(layout: str, tmp_path: Path) -> None:
    world, flags, stops = LAYOUTS[layout]
    argv = f"{RESUMABLE} {flags}"
    whole = run_ranks(_pretrain_all, world, [f"{argv} --save {tmp_path} --save-interval 2"])
    folders = [link(tmp_path, stop, tmp_path / f"from{stop}") for stop in stops]
    resumed = run_ranks(_pretrain_all, world, [f"{argv} --load {f}" for f in folders])
    for rank in range(world):
        (saving,) = whole[rank]
        assert saving.code == 0 and saving.step == 13
        # Whichever rank would print the line.
        assert saving.losses == whole[0][0].losses
        micro_batches = len(saving.ids) // 13
        for stop, run in zip(stops, resumed[rank], strict=True):
            where = f"rank {rank}, stopped at {stop} ({STOPS[stop]})"
            assert run.code == 0, where
            assert run.loaded == saving.saved[stop], where
            assert run.losses == saving.losses[stop:], where
            assert run.rates == saving.rates[stop:], where
            assert run.ids == saving.ids[stop * micro_batches :], where
            assert run.state == saving.state, where
    # The comparison would notice: the replicas have different losses, the steps different ids.
    first = whole[0][0]
    assert len({tuple(row) for row in first.losses}) == 13 and len(set(first.losses[5])) == 2
    assert len({tuple(ids) for ids in first.ids}) == len(first.ids)
    assert len({state["detector"] for state in first.saved.values()}) == 3


def _pretrain_all(lines: list[str]) -> list[Run]:
    return [pretrain(command_line(line)) for line in lines]


def _pretrain_with_skipped_steps(line: str) -> Run:
    """Replica 1 has no finite gradients in steps 4 and 5."""
    prepare_grads = EDiTDistributedOptimizer.prepare_grads

    def spoiled(optimizer: EDiTDistributedOptimizer) -> bool:
        result = prepare_grads(optimizer)
        if optimizer.mesh.replica == 1 and optimizer.engine.step in (4, 5):
            next(iter(optimizer._shards.values())).grad.fill_(float("nan"))
        return result

    with patch.object(EDiTDistributedOptimizer, "prepare_grads", spoiled):
        return pretrain(command_line(line))


def test_skipped_steps_of_an_open_round_outlive_a_stop(tmp_path: Path) -> None:
    argv = f"{RESUMABLE} --edit-weight-temperature-relative 0.1"
    saving = f"{argv} --save {tmp_path} --save-interval 6"
    whole = run_ranks(_pretrain_with_skipped_steps, 2, saving)
    load = link(tmp_path, 6, tmp_path / "load")
    resumed = run_ranks(_pretrain_with_skipped_steps, 2, f"{argv} --load {load}")
    for before, after in zip(whole, resumed, strict=True):
        assert after.loaded == before.saved[6]
        assert after.losses == before.losses[6:]
        assert after.state == before.state
    assert whole[0].saved[6]["skipped"] != whole[1].saved[6]["skipped"]


def test_replicas_that_run_by_the_clock_resume_where_each_was(tmp_path: Path) -> None:
    line = (
        f"{RESUMABLE} --train-iters 30 --edit-method a_edit --edit-sync-seconds 0.1 "
        "--edit-debug true --edit-debug-slow-replica 1:4"
    )
    # The last state saved on the way is not the end, and not the first meeting.
    whole = run_ranks(_pretrain_all, 2, [f"{line} --save {tmp_path} --save-interval 1"])
    step = sorted(whole[0][0].saved)[-2]
    assert step > 6
    load = link(tmp_path, step, tmp_path / "load")
    resumed = run_ranks(_pretrain_all, 2, [f"{line} --load {load}"])
    for (before,), (after,) in zip(whole, resumed, strict=True):
        assert (before.code, after.code) == (0, 0)
        assert after.loaded == before.saved[step]
        steps = int(after.loaded["counters"].split()[0])
        assert after.ids[0] == before.ids[steps]
    own = [resumed[rank][0].loaded["counters"] for rank in (0, 1)]
    assert own[0] != own[1]


def _on_simulated_clocks(lines: list[str]) -> list[Run]:
    """A step takes a second on replica 0 and two and a half on replica 1."""

    def run(line: str) -> Run:
        clock = Namespace(now=0.0)

        def prepare(trainer: Trainer) -> None:
            step = trainer.step

            def step_on_clock() -> None:
                step()
                clock.now += (1.0, 2.5)[trainer.mesh.replica]

            trainer.step = step_on_clock  # type: ignore[method-assign]

        trigger = partial(TimeTrigger, clock=lambda: clock.now)
        with patch.object(rendezvous, "TimeTrigger", trigger):
            return pretrain(command_line(line), prepare)

    return [run(line) for line in lines]


def test_an_open_round_by_the_clock_goes_on(tmp_path: Path) -> None:
    # A meeting after ten steps of replica 0 and four of replica 1, every second one with the steps
    # that make a round. The run is resumed from the first meeting, in the open round.
    line = (
        f"{RESUMABLE} --train-iters 30 --edit-method a_edit --edit-sync-seconds 10 "
        "--edit-min-round-steps 20 --log-interval 1000"
    )
    whole = run_ranks(_on_simulated_clocks, 2, [f"{line} --save {tmp_path} --save-interval 1"])
    step = min(step for step in whole[0][0].saved if step > 4)
    load = link(tmp_path, step, tmp_path / "load")
    resumed = run_ranks(_on_simulated_clocks, 2, [f"{line} --load {load}"])
    for (before,), (after,) in zip(whole, resumed, strict=True):
        assert after.loaded == before.saved[step]
        # No round has ended, and every step since the first four is one of the open round's.
        steps, rounds, in_round = map(int, after.loaded["counters"].split())
        assert rounds == 0 and in_round == steps - 4
        assert after.state == before.state
        assert after.state["counters"].endswith(" 3 0")


def test_saving_changes_nothing_that_training_sees(saved: Path, tmp_path: Path) -> None:
    saving = f"{RESUMABLE} --save {tmp_path} --save-interval 3"
    for often, never in run_ranks(_pretrain_all, 2, [saving, RESUMABLE]):
        assert sorted(often.saved) == [3, 6, 9, 12, 13]
        assert (often.losses, often.ids, often.state) == (never.losses, never.ids, never.state)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of two replicas at steps 2, 4, ... 13 of a run."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(_pretrain_all, 2, [f"{RESUMABLE} --save {folder} --save-interval 2"])
    return folder


def test_saving_keeps_every_step_and_the_tracker_names_the_last(saved: Path) -> None:
    folders = sorted(path.name for path in saved.iterdir() if path.is_dir())
    assert folders == [f"iter_{step:07d}" for step in (2, 4, 6, 8, 10, 12, 13)]
    assert newest(saved) == 13
    state = json.loads((saved / "iter_0000006" / "state.json").read_text())
    assert (state["step"], state["round"], state["consumed_samples"]) == (6, 0, 24)
    config = json.loads((saved / "iter_0000006" / "effective_config.json").read_text())
    assert config["values"]["train_iters"] == 13
    assert config["sources"]["edit.warmup_steps"] == "flag"


def test_what_a_checkpoint_leaves_out_on_request(saved: Path, tmp_path: Path) -> None:
    load = link(saved, 6, tmp_path / "load")
    argv = f"{RESUMABLE} --load {load}"
    flags = ["", "--no-load-rng", "--no-load-optim", "--finetune"]
    results = run_ranks(_pretrain_all, 2, [f"{argv} {flag}" for flag in flags])
    anchor = results[0][0].loaded["anchor"]
    for full, no_rng, no_optim, finetune in results:
        assert all(run.code == 0 for run in (full, no_rng, no_optim, finetune))
        differing = {key for key, value in full.loaded.items() if no_rng.loaded[key] != value}
        assert differing == {"rng"}

        # Both start from the consolidated parameters, which no replica has mid-round.
        assert full.loaded["parameters"] != anchor
        assert no_optim.loaded["parameters"] == finetune.loaded["parameters"] == anchor
        assert no_optim.loaded["moments"] == finetune.loaded["moments"] != full.loaded["moments"]

        assert no_optim.loaded["counters"] == "6 0 0"
        assert (no_optim.ids, no_optim.rates) == (full.ids, full.rates)
        assert len(full.ids) == 7

        assert finetune.loaded["counters"] == "0 0 0"
        assert len(finetune.ids) == 13 and finetune.rates[6:] == full.rates
    assert results[0][0].loaded["parameters"] != results[1][0].loaded["parameters"]


def test_momentum_may_be_switched_on_and_off(saved: Path, tmp_path: Path) -> None:
    load, between = link(saved, 10, tmp_path / "load"), tmp_path / "between"
    off = f"{RESUMABLE} --load {load} --edit-outer-momentum 0"
    runs, _ = run_ranks(
        _pretrain_all,
        2,
        [
            f"{off} --exit-interval 11 --save {between}",
            f"{RESUMABLE} --load {between}",
            f"{RESUMABLE} --load {load}",
        ],
    )
    assert [run.code for run in runs] == [0, 0, 0]
    zeros = runs[1].loaded["momentum"]
    assert zeros != runs[2].loaded["momentum"]
    assert len(runs[1].ids) == 2


def test_a_longer_run_goes_on_from_the_end_of_a_shorter_one(tmp_path: Path) -> None:
    # The shorter run ends after step 12 with a synchronisation, and a round would end there too.
    short = f"{RESUMABLE} --train-iters 12 --lr-decay-iters 20 --save {tmp_path}"
    longer = f"{RESUMABLE} --train-iters 20 --lr-decay-iters 20 --load {tmp_path}"
    results = run_ranks(_pretrain_all, 2, [short, longer])
    assert "warning: the checkpoint's run has 48 samples, this one 80" in results[0][1].out
    assert "warning" not in results[0][0].out + results[1][1].out
    for first, second in results:
        assert second.code == 0 and second.step == 20
        assert second.loaded == first.state
        # One more after step 16 and the one at the end: nothing is synchronised twice.
        assert first.state["counters"] == "12 2 0"
        assert second.state["counters"] == "20 4 0"


# --- kills


class Kill:
    """SIGKILLs this process at the n-th call of a function."""

    def __init__(self, owner: Any, name: str, call: int = 1, after: bool = False) -> None:
        self._original = getattr(owner, name)
        self._left, self._after = call, after
        # torch renames files inside the folder; those are not counted.
        self._of = "iter_" if owner is Path else ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._left -= not self._of or args[0].name.startswith(self._of)
        if self._left == 0 and not self._after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = self._original(*args, **kwargs)
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result


def _killed(line: str, owner: Any, name: str, call: int, after: bool) -> None:
    kill = Kill(owner, name, call, after)
    with patch.object(owner, name, lambda *args, **kwargs: kill(*args, **kwargs)):
        pretrain(command_line(line))


# Saves at steps 4 and 8; what is killed in the save of step 8: function, its call, before or after.
KILLS = {
    "before anything is written": (dcp, "save", 2, False),
    "tensors written, no state.json": (dcp, "save", 2, True),
    "all written, not renamed": (Path, "rename", 2, False),
    "renamed, tracker old": (Path, "rename", 2, True),
    "tracker written, not renamed": (os, "replace", 2, False),
}


@pytest.mark.parametrize("kill", KILLS)
def test_a_killed_save_leaves_the_checkpoint_before(kill: str, tmp_path: Path) -> None:
    line = f"{RESUMABLE} --edit-replicas 1 --save {tmp_path} --save-interval 4"
    assert _run_killed(line, *KILLS[kill]) == -signal.SIGKILL
    assert newest(tmp_path) == 4
    _goes_on(tmp_path, line, first=5)
    assert newest(tmp_path) == 13
    assert not list(tmp_path.glob("*.tmp")) and not list(tmp_path.glob("*.old"))


# A second run saves the same steps in the same folder.
OVERWRITING_KILLS = {
    "not yet renamed": (Path, "rename", 1, False),
    "old one renamed": (Path, "rename", 1, True),
    "new one renamed": (Path, "rename", 2, True),
}


@pytest.mark.parametrize("kill", OVERWRITING_KILLS)
def test_a_killed_save_of_the_same_step_leaves_one(kill: str, tmp_path: Path) -> None:
    line = f"{RESUMABLE} --edit-replicas 1 --save {tmp_path}"
    run_ranks(_pretrain_all, 1, [f"{line} --exit-interval 4"])
    again = f"{line} --save-interval 4"
    assert _run_killed(again, *OVERWRITING_KILLS[kill]) == -signal.SIGKILL
    assert newest(tmp_path) == 4
    _goes_on(tmp_path, again, first=5)


def _run_killed(line: str, owner: Any, name: str, call: int, after: bool) -> int | None:
    """Runs one rank that is to die; returns its exit code."""
    _, codes = run_dying_ranks(_killed, 1, {0}, line, owner, name, call, after)
    return codes[0]


def _goes_on(folder: Path, line: str, first: int) -> None:
    ((run,),) = run_ranks(_pretrain_all, 1, [f"{line} --load {folder}"])
    assert run.code == 0 and run.step == 13
    assert len(run.losses) == 13 - first + 1


def test_a_state_is_saved_once(tmp_path: Path) -> None:
    line = f"{RESUMABLE} --edit-replicas 1 --save {tmp_path} --save-interval 3 --exit-interval 6"
    ((run,),) = run_ranks(_pretrain_all, 1, [line])
    assert run.out.count(f"saved {tmp_path / 'iter_0000006'}\n") == 1


def _apart(line: str) -> str:
    """Replica 1 believes to be a step ahead when the checkpoint of step 5 is due."""

    def prepare(trainer: Trainer) -> None:
        step = trainer.step

        def step_and_skip() -> None:
            step()
            if trainer.iteration == 5:
                trainer.engine.step += trainer.mesh.replica

        trainer.step = step_and_skip  # type: ignore[method-assign]

    try:
        pretrain(command_line(line), prepare)
    except RankFailedError as error:
        return str(error)
    return "saved"


def test_ranks_that_would_save_different_steps_write_nothing(tmp_path: Path) -> None:
    messages = run_ranks(_apart, 2, f"{RESUMABLE} --save {tmp_path} --save-interval 5")
    for rank, message in enumerate(messages):
        assert message == (
            f"rank {rank} (replica {rank}), step {5 + rank}, saving a checkpoint: RuntimeError: "
            "rank 0 would save iteration 5, round 0, and rank 1 iteration 6, round 0; nothing is "
            "written"
        )
    assert not list(tmp_path.iterdir())


def test_tensors_are_sharded_and_named_as_in_the_whole_model(saved: Path) -> None:
    metadata = dcp.FileSystemReader(saved / "iter_0000006").read_metadata().state_dict_metadata
    names = set(metadata)
    weight = "decoder.layers.1.mlp.linear_fc2.weight"
    for prefix in ("anchor", "outer_momentum", "replica0.model", "replica1.model"):
        assert metadata[f"{prefix}.{weight}"].size == torch.Size([32, 32])
    assert f"replica1.optimizer.exp_avg_sq.{weight}" in names
    assert {f"detector.{name}" for name in ("count", "mean", "consecutive_rollbacks")} <= names
    assert {"rng.rank0.cpu", "rng.rank1.cpu"} <= names
