"""A run on DeepSpeed's engine: checkpoints, bad replicas, lost ranks, what moves in DeepSpeed."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from dying_ranks import run_dying_ranks
from harness import digest
from zero_training import ZeroCase, ZeroTraining, deepspeed, reference, train

from megatron_edit.errors import ConfigurationError
from megatron_edit.platform import ds_zero
from megatron_edit.replicas.peers import PeerError

SAVED_AT = {"in a round": 9, "in lockstep": 2}


def _interrupted(case: ZeroCase, folder: str, saved_at: int) -> tuple[Any, ...]:
    whole = ZeroTraining(case)
    for _ in range(saved_at):
        whole.step()
    whole.engine.save_checkpoint(folder, client_state={"saved at": saved_at})
    after = [whole.step() for _ in range(saved_at, case.steps)]
    whole.edit.synchronize()
    resumed = ZeroTraining(case)
    _, client_state = resumed.engine.load_checkpoint(folder)
    again = [resumed.step() for _ in range(saved_at, case.steps)]
    resumed.edit.synchronize()
    return after, again, whole.digests(), resumed.digests(), client_state["saved at"]


@pytest.mark.parametrize("when", SAVED_AT)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_resumed_run_is_the_uninterrupted_one(stage: int, when: str, tmp_path: Path) -> None:
    case = ZeroCase(stage, bf16=stage == 3, edit={"delay_steps": 3})
    results = run_ranks(_interrupted, case.world, case, str(tmp_path), SAVED_AT[when])
    for after, again, whole, resumed, saved_at in results:
        assert after == again
        assert whole == resumed
        assert saved_at == SAVED_AT[when]
    assert not list(tmp_path.glob("**/*.tmp"))


def _more_replicas(case: ZeroCase, folder: str) -> dict[str, Any]:
    training = ZeroTraining(case)
    training.engine.load_checkpoint(folder)
    begin = training.digests()
    losses = [training.step() for _ in range(6)]
    training.edit.synchronize()
    return {"begin": begin, "losses": losses, "end": training.digests()}


def _save_after(case: ZeroCase, folder: str, steps: int) -> str:
    training = ZeroTraining(case)
    for _ in range(steps):
        training.step()
    training.engine.save_checkpoint(folder)
    return training.digests()["anchor"]


def test_another_number_of_replicas_starts_from_the_anchor(tmp_path: Path) -> None:
    case = ZeroCase(2, replicas=2, shard=1)
    anchors = run_ranks(_save_after, 2, case, str(tmp_path), 9)
    results = run_ranks(_more_replicas, 3, replace(case, replicas=3), str(tmp_path))
    for result in results:
        assert result["begin"]["anchor"] == anchors[0] == result["begin"]["masters"]
        assert result["end"] == results[0]["end"]
        assert np.isfinite(result["losses"]).all()


def _damaged(case: ZeroCase, folder: str) -> str:
    training = ZeroTraining(case)
    try:
        training.engine.load_checkpoint(folder)
    except ConfigurationError as error:
        return str(error)
    return ""


def test_a_checkpoint_that_is_not_there_or_cut_is_named(tmp_path: Path) -> None:
    case = ZeroCase(2, replicas=1, shard=1, edit={"replicas": 1})
    (message,) = run_ranks(_damaged, 1, case, str(tmp_path))
    assert "no checkpoint there (latest: No such file" in message
    run_ranks(_save_after, 1, case, str(tmp_path), 4)
    shard = tmp_path / "global_step4" / "edit_shard0.pt"
    shard.write_bytes(shard.read_bytes()[:100])
    (message,) = run_ranks(_damaged, 1, case, str(tmp_path))
    assert message.startswith(f"{shard}: no readable part of a checkpoint (")


def _bad_step(case: ZeroCase, at: int) -> dict[str, Any]:
    """Replica 1 finds a NaN in its parameters before a step."""
    training = ZeroTraining(case)
    digests = []
    for step in range(case.steps):
        if step == at and training.mesh.replica == 1:
            unit = training.edit.sync.units[1]
            flat = torch.full((unit.numel,), float("nan"))
            unit.copy_from(flat)
        training.step()
        digests.append(training.digests()["masters"])
    training.edit.synchronize()
    masters = [piece.master for piece in ds_zero.pieces(training.engine)]
    return {
        "finite": all(bool(torch.isfinite(master).all()) for master in masters),
        "accepted": [r.accepted for r in training.edit.records()],
        "anchor": training.digests()["anchor"],
    }


@pytest.mark.parametrize("at", [5, 12], ids=["first round", "later round"])
def test_a_replica_of_nans_is_left_out(at: int) -> None:
    case = ZeroCase(3, edit={"detector": "robust"})
    results = run_ranks(_bad_step, case.world, case, at)
    for result in results:
        assert result["finite"]
        flat = [ok for rounds in result["accepted"] for row in rounds for ok in row]
        assert not all(flat)
    anchors = [result["anchor"] for result in results]
    assert anchors[:2] == anchors[2:]


def _bad_gradient(case: ZeroCase, at: int) -> dict[str, Any]:
    """One rank of replica 1 makes a NaN gradient in a lockstep step."""
    training = ZeroTraining(case)
    parameter = next(p for p in training.engine.module.parameters() if p.dim() == 1)
    training.engine.module.get_input_embeddings().register_forward_hook(
        lambda *args: args[-1] * (float("nan") if bad() else 1.0)
    )

    def bad() -> bool:
        return training.edit.sync.step == at and dist.get_rank() == training.case.world - 1

    before = []
    for step in range(case.steps):
        if step in (at, at + 1):
            before.append(training.digests()["masters"])
        training.step()
    training.edit.synchronize()
    del parameter
    masters = [piece.master for piece in ds_zero.pieces(training.engine)]
    return {
        "kept": before[0] == before[1],
        "finite": all(bool(torch.isfinite(master).all()) for master in masters),
    }


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_bad_gradient_in_lockstep_is_nobodys_step(stage: int, bf16: bool) -> None:
    case = ZeroCase(stage, bf16=bf16, steps=4)
    for result in run_ranks(_bad_gradient, case.world, case, 1):
        assert result == {"kept": True, "finite": True}


def _die(case: ZeroCase, lost: int) -> tuple[str, bool]:
    training = ZeroTraining(case)
    for step in range(case.steps):
        if step == 8 and dist.get_rank() == lost:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            training.step()
        except RuntimeError as error:
            return str(error), isinstance(error, PeerError)
    return "", False


def test_a_lost_rank_ends_the_others() -> None:
    case = ZeroCase(2, replicas=2, shard=1)
    survivors, lost = run_dying_ranks(_die, 2, {1}, case, 1)
    assert lost == {1: -signal.SIGKILL}
    message, between_replicas = survivors[0]
    assert between_replicas
    assert " in round " in message
    assert "failed in the peer group of replica 0 (ranks [0, 1]): " in message


def _private_names(stage: int) -> dict[str, Any]:
    case = ZeroCase(stage, steps=4)
    training = ZeroTraining(case)
    engine = training.engine
    training.step()
    pieces = ds_zero.pieces(engine)
    held = torch.tensor([sum(piece.master.numel() for piece in pieces)])
    dist.all_reduce(held, group=training.mesh.shard_group)
    whole = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    result: dict[str, Any] = {"held": int(held), "whole": whole}
    # What is written to the masters is what the forward sees.
    for unit in training.edit.sync.units:
        unit.copy_from(torch.full((unit.numel,), 0.25))
    training.edit._backend.flush()
    training.edit._backend.release()
    result["written"] = all((w == 0.25).all() for w in training.whole().values())
    if stage == 3:
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            result["whole while gathered"] = training.edit.sync.units[0].is_gathered
        ds_zero.release(engine)
        result["whole after release"] = training.edit.sync.units[0].is_gathered
        coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
        name = "_PartitionedParameterCoordinator__prefetch_bucket_sz"
        before = getattr(coordinator, name)
        with ds_zero.no_prefetch(engine):
            result["prefetch"] = (getattr(coordinator, name), before > 0)
    return result


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_keeps_things_where_we_look(stage: int) -> None:
    results = run_ranks(_private_names, 4, stage)
    for result in results:
        assert result.pop("held") == result.pop("whole")
        assert result.pop("written")
        if stage == 3:
            assert result.pop("whole while gathered")
            assert not result.pop("whole after release")
            assert result.pop("prefetch") == (0, True)
        assert not result


def _digest_after_each_step(case: ZeroCase) -> list[tuple[int, str]]:
    training = ZeroTraining(case)
    seen = []
    for _ in range(case.steps):
        # A round's landing is the first thing of a step; with SGD at 0 nothing else moves.
        training.step()
        seen.append((training.edit.sync.round, digest(s.anchor for s in training.edit.sync.outer)))
    return seen


def test_replicas_agree_bit_for_bit_after_each_synchronisation() -> None:
    case = ZeroCase(3, steps=13, edit={"landing": "layers"})
    results = run_ranks(_digest_after_each_step, case.world, case)
    assert [r for r, _ in results[0]][-1] == 2
    assert results[0] == results[2] and results[1] == results[3]


def test_bf16_is_close_to_the_fp32_reference() -> None:
    case = ZeroCase(3, bf16=True)
    losses, _ = reference(case)
    results = run_ranks(train, case.world, case)
    mean = np.mean([r["losses"] for r in results], axis=0)
    # Forward and backward in 8 bits of mantissa; measured 4e-3.
    assert np.allclose(mean, losses, atol=2e-2, rtol=0)
