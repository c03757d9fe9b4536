"""Chains behind the training: the order of their stages, and that it changes no number."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from distributed import run_ranks
from harness import Case, digests, mesh_of, start
from skipping import skip_layer

from megatron_edit.replicas.chains import Chains, Stage

CPU = torch.device("cpu")


def stages(name: str, log: list[str]) -> list[Stage]:
    """Three stages that log their names, such as A0."""
    return [partial(log.append, f"{stage}{name}") for stage in "ABC"]


def order(ahead: int, chains: int) -> str:
    """The order of the stages of some chains that all start before one is waited for."""
    log: list[str] = []
    runner = Chains(CPU, ahead)
    pending = [runner.run(stages(str(number), log)) for number in range(chains)]
    runner.flush()
    for chain in pending:
        chain.wait()
    return " ".join(log)


def test_stages_take_turns() -> None:
    assert order(3, 5) == "A0 A1 A2 B0 A3 B1 C0 A4 B2 C1 B3 C2 B4 C3 C4"
    assert order(1, 3) == "A0 A1 B0 C0 A2 B1 C1 B2 C2"
    assert order(0, 2) == "A0 B0 C0 A1 B1 C1"
    # Fewer chains than may be under way.
    assert order(3, 1) == "A0 B0 C0"


@pytest.mark.parametrize("ahead", [0, 3])
def test_a_chain_of_one_stage_begins_at_once(ahead: int) -> None:
    log: list[str] = []
    runner = Chains(CPU, ahead)
    runner.run([partial(log.append, "only")]).wait()
    assert log == ["only"]


def test_a_wait_changes_no_turn() -> None:
    log: list[str] = []
    runner = Chains(CPU, ahead=1)
    first = runner.run(stages("0", log))
    with pytest.raises(AssertionError, match="waited for before its turns have come"):
        first.wait()
    second = runner.run(stages("1", log))
    runner.flush()
    second.wait()
    first.wait()
    first.wait()
    assert " ".join(log) == "A0 A1 B0 C0 B1 C1"


def test_the_first_failure_is_told() -> None:
    def fail() -> None:
        raise ValueError("the first stage")

    def follow() -> None:
        raise AssertionError("a later stage, which has nothing to go on with")

    with pytest.raises(ValueError, match="the first stage"):
        Chains(CPU).run([fail, follow]).wait()


def _train(case: Case, prefetches: list[int]) -> list[dict[str, Any]]:
    outcome, mesh = [], mesh_of(case)
    for prefetch in prefetches:
        training = start(replace(case, edit={**case.edit, "sync_prefetch": prefetch}), mesh=mesh)
        losses = [training.step() for _ in range(case.steps)]
        outcome.append({"losses": losses, "digests": digests(training)})
    return outcome


def _train_with_a_layer_skipped_in_one_replica(case: Case) -> list[str]:
    """Replica 1 leaves layer 0 out of the first of two micro-batches: it lands in another order.
    Returns a digest of every anchor."""
    training = start(case)
    if training.mesh.replica == 1:
        skip_layer(0, {0}, case.micro_batches)(training.chunks[0].module)
    anchors = []
    for _ in range(case.steps):
        training.step()
        anchors.append(digests(training)["anchor"])
    return anchors


INT8 = {"warmup_steps": 1, "sync_interval": 3, "compression": "int8"}
CASES = {
    "delay 2": Case(steps=12, edit={**INT8, "delay_steps": 2}),
    "S2": Case(shard=2, steps=12, edit=INT8),
    "PP2 tied": Case(pp=2, tied=True, steps=12, edit=INT8),
}


@pytest.mark.parametrize("name", CASES)
def test_how_many_are_under_way_changes_nothing(name: str) -> None:
    case = CASES[name]
    results = run_ranks(_train, case.world, case, [1, 3, 9])
    for one_ahead, *others in results:
        assert all(other == one_ahead for other in others)
    # The loss is known on the last stage of a pipeline.
    assert any(len(set(one_ahead["losses"])) == case.steps for one_ahead, *_ in results)


def test_the_order_of_landings_does_not_matter() -> None:
    case = Case(layers=3, steps=8, edit=INT8)
    one, other = run_ranks(
        _train_with_a_layer_skipped_in_one_replica, case.world, case, timeout_s=60
    )
    assert one == other
    # Steps 4 and 7 begin with a synchronisation.
    assert len(set(one[1:])) == 3
