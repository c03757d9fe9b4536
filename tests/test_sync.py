"""The order of events in a synchronising step, and that every parameter is synchronised once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from harness import (
    Case,
    CollectiveLog,
    Training,
    digests,
    mean_losses,
    mesh_of,
    run_engine,
    run_reference,
    start,
)
from skipping import skip_layer
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from megatron_edit.backends.megatron.units import MegatronUnit
from megatron_edit.engine.outer_state import OuterState
from megatron_edit.replicas.peers import Pending

# Step 0 is synchronous; steps 3 and 5 begin with a synchronisation.
SMALL = Case(layers=3, steps=6, edit={"warmup_steps": 1, "sync_interval": 2})
SMALL_S2 = replace(SMALL, shard=2)
SYNCHRONISING = (3, 5)
UNITS = ["embedding", "layers.0", "layers.1", "layers.2", "head"]

Event = tuple[str, str]


class Timeline:
    """Records what happens to the units of one training on this rank, in order.

    Events are ``(what, unit)``: ``launched`` and ``waited`` of the all-reduce, ``applied`` (the
    outer step), ``gathered`` (FSDP2 starts to), ``forward`` and ``done``.
    """

    def __init__(self, training: Training) -> None:
        self.events: list[Event] = []
        self._units = training.engine.units
        self._watch_collectives(training)
        self._watch_outer_steps()
        self._watch_gathers()
        for unit in self._units:
            unit.modules[0].register_forward_pre_hook(self._noting("forward", unit.name))
            unit.modules[-1].register_forward_hook(self._noting("done", unit.name))

    def take(self) -> list[Event]:
        """Returns the events since the last call."""
        taken, self.events = self.events, []
        return taken

    def _noting(self, what: str, unit: str) -> Callable[..., None]:
        return lambda *_: self.events.append((what, unit))

    def _watch_collectives(self, training: Training) -> None:
        sync = training.engine.mesh.peers
        all_reduce = sync.all_reduce

        def watched(flat: torch.Tensor, phase: str) -> Pending:
            pending = all_reduce(flat, phase)
            match = re.fullmatch(r"synchronising (\S+) in round \d+", phase)
            if match is None:
                return pending
            self.events.append(("launched", match[1]))
            wait = pending.wait

            def waited() -> None:
                wait()
                self.events.append(("waited", match[1]))

            pending.wait = waited  # type: ignore[method-assign]
            return pending

        sync.all_reduce = watched

    def _watch_outer_steps(self) -> None:
        land = OuterState.land

        def watched(state: OuterState, *args: Any) -> torch.Tensor:
            if any(state.unit is unit for unit in self._units):
                self.events.append(("applied", state.unit.name))
            return land(state, *args)

        OuterState.land = watched  # type: ignore[assignment, method-assign]

    def _watch_gathers(self) -> None:
        names = {id(m): unit.name for unit in self._units for m in unit.modules}
        unshard = FSDPParamGroup.unshard

        def watched(group: Any, *args: Any, **kwargs: Any) -> None:
            if not group.is_unsharded and group._all_gather_result is None:
                name = names.get(id(group.modules[0]))
                if name is not None:
                    self.events.append(("gathered", name))
            unshard(group, *args, **kwargs)

        FSDPParamGroup.unshard = watched


def until_synchronisation(training: Training) -> None:
    """Trains up to the first step that begins with a synchronisation."""
    while not training.engine.trigger.due(training.engine.step):
        training.step()


def with_prefetch(training: Training, depth: int) -> Training:
    engine = training.engine
    engine.config = engine.config.model_copy(update={"sync_prefetch": depth})
    return training


# --- The order of events ---------------------------------------------------------------------


def _timelines_by_depth() -> dict[int, dict[str, Any]]:
    mesh = mesh_of(SMALL_S2)
    outcome = {}
    for depth in (0, 1, 3):
        training = with_prefetch(start(SMALL_S2, mesh=mesh), depth)
        timeline = Timeline(training)
        steps = []
        for _ in range(SMALL_S2.steps):
            loss = training.step()
            steps.append((loss, timeline.take()))
        outcome[depth] = {
            "losses": [loss for loss, _ in steps],
            "events": [events for _, events in steps],
            "digests": digests(training),
        }
    return outcome


@pytest.fixture(scope="module")
def by_depth() -> list[dict[int, dict[str, Any]]]:
    """Per rank of R2 S2 and per prefetch depth: losses, events of every step, final state."""
    return run_ranks(_timelines_by_depth, SMALL_S2.world)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_next_all_reduces_are_in_flight_while_a_unit_computes(
    by_depth: list[dict[int, dict[str, Any]]], depth: int
) -> None:
    for rank in by_depth:
        for step in SYNCHRONISING:
            events = rank[depth]["events"][step]
            for position, unit in enumerate(UNITS):
                started, ended = events.index(("forward", unit)), events.index(("done", unit))
                launched = [name for what, name in events[:started] if what == "launched"]
                assert launched == UNITS[: position + depth + 1]
                waited = [name for what, name in events[:ended] if what == "waited"]
                assert waited == UNITS[: position + 1]


def test_no_unit_is_gathered_before_its_synchronisation(
    by_depth: list[dict[int, dict[str, Any]]],
) -> None:
    for rank in by_depth:
        for depth in rank:
            for step in SYNCHRONISING:
                events = rank[depth]["events"][step]
                for unit in UNITS:
                    assert events.index(("applied", unit)) < events.index(("gathered", unit))


def test_prefetch_depth_changes_nothing(by_depth: list[dict[int, dict[str, Any]]]) -> None:
    for rank in by_depth:
        for depth in (1, 3):
            assert rank[depth]["losses"] == rank[0]["losses"]
            assert rank[depth]["digests"] == rank[0]["digests"]


def _compute_while_the_peer_is_late(path: str) -> None:
    """Replica 1 takes part in an all-reduce only when replica 0 has computed the unit before."""
    training = start(SMALL)
    until_synchronisation(training)
    store = dist.FileStore(path, 2)
    store.set_timeout(timedelta(seconds=20))
    sync, layer = training.mesh.peers, training.chunks[0].module.decoder.layers[0]
    if training.mesh.replica == 0:
        layer.register_forward_hook(lambda *_: store.set("layers.0", "done"))
    else:
        all_reduce = sync.all_reduce

        def late(flat: torch.Tensor, phase: str) -> Pending:
            if phase.startswith("synchronising layers.1"):
                store.wait(["layers.0"])
            return all_reduce(flat, phase)

        sync.all_reduce = late  # type: ignore[method-assign]
    training.step()


def test_a_unit_computes_before_the_next_all_reduce_can_end(tmp_path: Path) -> None:
    run_ranks(_compute_while_the_peer_is_late, 2, str(tmp_path / "store"), timeout_s=60)


def _train_with_wrong_prefetch(guarded: bool) -> tuple[str, list[float]]:
    """FSDP2 is told to gather layer 1 while layer 0 runs, also on synchronising steps."""
    training = start(SMALL_S2)
    layers = training.chunks[0].module.decoder.layers
    layers[0].set_modules_to_forward_prefetch([layers[1]])
    if not guarded:
        MegatronUnit.is_gathered = property(lambda unit: False)  # type: ignore[assignment, method-assign]
    losses: list[float] = []
    try:
        for _ in range(SYNCHRONISING[0] + 1):
            losses.append(training.step())
    except AssertionError as error:
        return str(error), losses
    return "", losses


def test_a_gather_ahead_of_the_synchronisation_is_caught() -> None:
    for message, losses in run_ranks(_train_with_wrong_prefetch, 4, True):
        assert message == "layers.1 was gathered before its synchronisation"
        assert len(losses) == SYNCHRONISING[0]


def test_without_the_guard_a_wrong_prefetch_trains_on_stale_weights(
    by_depth: list[dict[int, dict[str, Any]]],
) -> None:
    results = run_ranks(_train_with_wrong_prefetch, 4, False)
    for (message, losses), right in zip(results, by_depth, strict=True):
        assert message == ""
        assert losses[:-1] == right[1]["losses"][: SYNCHRONISING[0]]
        assert abs(losses[-1] - right[1]["losses"][SYNCHRONISING[0]]) > 1e-4


# --- Exactly once ----------------------------------------------------------------------------


def _counts(case: Case, disturbance: str, mesh: Any) -> list[Counter[Event]]:
    """Per step how often each unit's all-reduce was launched and its outer step applied."""
    training = start(case, mesh=mesh)
    timeline = Timeline(training)
    if disturbance.startswith("skip"):
        skipped = {"skip first": {0}, "skip last": {1}, "skip all": {0, 1}}[disturbance]
        skip_layer(1, skipped, case.micro_batches)(training.chunks[0].module)
    counts = []
    for step in range(case.steps):
        if disturbance == "evaluate":
            training.evaluate(50 + step)
        training.begin()
        if disturbance == "begin twice":
            training.begin()
        training.forward(step)
        training.finish()
        if disturbance == "evaluate":
            training.evaluate(50 + step)
        events = [(what, u) for what, u in timeline.take() if what in ("launched", "applied")]
        counts.append(Counter(events))
    return counts


SCENARIOS = {
    "plain": (SMALL_S2, ""),
    "recompute": (replace(SMALL_S2, recompute=True), ""),
    "one micro-batch": (replace(SMALL_S2, micro_batches=1), ""),
    "evaluation in between": (SMALL_S2, "evaluate"),
    "evaluation, optim_grads": (replace(SMALL_S2, keep_gathered=True), "evaluate"),
    "gradients zeroed twice": (SMALL_S2, "begin twice"),
    "layer not in the first micro-batch": (SMALL_S2, "skip first"),
    "layer not in the last micro-batch": (SMALL_S2, "skip last"),
    "layer in no micro-batch": (SMALL_S2, "skip all"),
}


def _all_counts() -> dict[str, list[Counter[Event]]]:
    mesh = mesh_of(SMALL_S2)
    return {name: _counts(*scenario, mesh) for name, scenario in SCENARIOS.items()}


def test_every_unit_is_synchronised_exactly_once_per_round() -> None:
    once = Counter({(what, unit): 1 for what in ("launched", "applied") for unit in UNITS})
    for rank in run_ranks(_all_counts, SMALL_S2.world):
        for name, counts in rank.items():
            expected = [once if s in SYNCHRONISING else Counter() for s in range(SMALL_S2.steps)]
            assert counts == expected, name


def test_units_hold_every_parameter_once() -> None:
    def names(case: Case) -> tuple[list[str], list[str]]:
        training = start(case)
        held = [name for unit in training.engine.units for name in unit.parameters]
        return held, [name for name, _ in training.chunks[0].module.named_parameters()]

    for tied in (False, True):
        case = replace(SMALL, replicas=1, tied=tied)
        held, all_names = run_ranks(names, 1, case)[0]
        assert sorted(held) == sorted(all_names)


@pytest.mark.parametrize(
    ("skipped", "keep_gathered"),
    [(0, False), (1, True)],
    ids=["first, ZeRO-3", "last, optim_grads"],
)
def test_a_layer_skipped_in_a_micro_batch_trains_like_the_reference(
    skipped: int, keep_gathered: bool
) -> None:
    case = Case(layers=3, shard=2, keep_gathered=keep_gathered)
    prepare = skip_layer(1, {skipped}, case.micro_batches)
    weights, losses, anchor = run_ranks(run_reference, 1, case, prepare)[0]
    results = run_ranks(run_engine, case.world, case, weights, anchor, prepare)
    np.testing.assert_allclose(mean_losses(results), losses, rtol=0, atol=1e-5)
    assert max(result["distance"] for result in results) < 5e-5


# --- Evaluation, end of training, several engines --------------------------------------------


def _train_evaluated(case: Case, evaluated: bool, mesh: Any) -> tuple[list[float], dict[str, str]]:
    training = start(case, mesh=mesh)
    losses = []
    for step in range(case.steps):
        if evaluated:
            training.evaluate(50 + step)
        losses.append(training.step())
        if evaluated:
            training.evaluate(60 + step)
            training.evaluate(70 + step)
    training.engine.synchronize()
    return losses, digests(training)


def _evaluated_and_not() -> list[tuple[Any, ...]]:
    cases = [SMALL_S2, replace(SMALL_S2, keep_gathered=True), replace(SMALL_S2, tied=True)]
    mesh = mesh_of(SMALL_S2)
    return [tuple(_train_evaluated(case, e, mesh) for e in (False, True)) for case in cases]


def test_evaluation_between_steps_changes_nothing() -> None:
    for rank in run_ranks(_evaluated_and_not, SMALL_S2.world):
        for plain, evaluated in rank:
            assert plain == evaluated


def _end_in_an_unfinished_round() -> dict[str, Any]:
    case = replace(SMALL, edit={"warmup_steps": 1, "sync_interval": 5})
    training = start(case)
    engine = training.engine
    training.step()
    before_anchor = digests(training)
    engine.synchronize()
    untouched = digests(training) == before_anchor
    for _ in range(3):
        training.step()
    apart = digests(training)
    engine.synchronize()
    together = digests(training)
    records = engine.records()
    engine.synchronize()
    again = digests(training)
    training.step()
    return {
        "untouched in the warm-up": untouched,
        "apart": apart["parameters"],
        "together": together["parameters"],
        "anchor": together["anchor"],
        "unchanged by a second call": again == together,
        "rounds": [(record.round, record.step, record.steps) for record in records],
        "later": engine.records(),
        "steps in round": engine.steps_in_round,
    }


def test_the_end_of_training_synchronises_an_unfinished_round() -> None:
    first, second = run_ranks(_end_in_an_unfinished_round, 2)
    assert first["untouched in the warm-up"]
    assert first["apart"] != second["apart"]
    assert first["together"] == second["together"] == first["anchor"] == second["anchor"]
    assert first["rounds"] == second["rounds"] == [(0, 4, [3.0, 3.0])]
    assert first["unchanged by a second call"]
    assert first["later"] == []
    assert first["steps in round"] == 1


def _two_trainings(together: bool) -> list[tuple[list[float], dict[str, str]]]:
    cases = [SMALL, replace(SMALL, layers=2, edit={"warmup_steps": 2, "sync_interval": 1})]
    mesh = mesh_of(SMALL)
    losses: list[list[float]] = [[], []]
    if together:
        trainings = [start(case, mesh=mesh) for case in cases]
        for _ in range(SMALL.steps):
            for training, own in zip(trainings, losses, strict=True):
                own.append(training.step())
        for training in trainings:
            training.engine.synchronize()
    else:
        trainings = []
        for case, own in zip(cases, losses, strict=True):
            training = start(case, mesh=mesh)
            own.extend(training.step() for _ in range(SMALL.steps))
            training.engine.synchronize()
            trainings.append(training)
    return [(own, digests(t)) for own, t in zip(losses, trainings, strict=True)]


def test_two_engines_in_one_process_do_not_meet() -> None:
    assert run_ranks(_two_trainings, 2, True) == run_ranks(_two_trainings, 2, False)


# --- Pipelines -------------------------------------------------------------------------------

PIPELINES = {
    "PP2": replace(SMALL, layers=4, pp=2),
    "PP2 interleaved": replace(SMALL, layers=4, pp=2, vpp=2),
    "PP2 tied": replace(SMALL, layers=4, pp=2, tied=True),
}


def _pipeline_step(case: Case) -> dict[str, Any]:
    """What a synchronising step of a pipeline sends, before its first forward and in it."""
    training = start(case)
    timeline = Timeline(training)
    until_synchronisation(training)
    timeline.take()
    config = training.chunks[0].config
    finalize = config.finalize_model_grads_func
    with CollectiveLog() as log:
        training.begin()
        before = after = len(log.entries)
        began = timeline.take()

        def marked(*args: Any, **kwargs: Any) -> None:
            nonlocal after
            after = len(log.entries)
            finalize(*args, **kwargs)

        config.finalize_model_grads_func = marked
        training.forward(training.engine.step)
        config.finalize_model_grads_func = finalize
    training.finish()
    worker = tuple(dist.get_process_group_ranks(training.mesh.worker_group))
    collectives = [
        [e.name for e in entries if e.ranks == worker and e.name not in ("send", "recv_")]
        for entries in (log.entries[:before], log.entries[before:after])
    ]
    return {
        "launched": [unit for what, unit in began + timeline.take() if what == "launched"],
        "own units": [unit.name for unit in training.engine.units],
        "applied before": [unit for what, unit in began if what == "applied"],
        "before": collectives[0],
        "in the forward": collectives[1],
    }


@pytest.mark.parametrize("name", PIPELINES)
def test_stages_meet_before_the_first_forward_and_never_in_it(name: str) -> None:
    """A stage cannot wait in its forward for a later one, whose forward it has yet to feed."""
    case = PIPELINES[name]
    results = run_ranks(_pipeline_step, case.world, case)
    for result in results:
        # The norms, and a tied embedding's second norm.
        assert len(result["before"]) == (2 if case.tied else 1)
        assert result["in the forward"] == []
        assert sorted(result["launched"]) == sorted(result["own units"])
    for first, second in zip(results[: case.pp], results[case.pp :], strict=True):
        assert first["launched"] == second["launched"]
        assert first["applied before"] == (["embedding"] if case.tied else [])
