"""Bad pseudo gradients, injected before a synchronisation, end to end."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from harness import Case, Training, digest, mesh_of, start

BAD_UNIT = "layers.1"
BAD_REPLICA = 1
R2 = Case(layers=2, edit={"warmup_steps": 1, "sync_interval": 2})
R4 = replace(R2, replicas=4)
# `peer` needs three replicas; `history` needs the norms of some rounds.
HISTORY = {"detector": "history", "detector_warmup": 3, "detector_threshold": 8.0}


def outer_state(training: Training, name: str) -> Any:
    """The outer state of this rank's part of a unit."""
    return next(state for state in training.engine.outer if state.unit.name == name)


def poison(training: Training, kind: str, counted: bool = True) -> None:
    """Makes the pseudo gradient of this rank's part of the bad unit bad.

    Args:
        training: The training.
        kind: ``nan`` or ``inf``, of one element, or ``1000x``.
        counted: Whether the element is in a parameter that this rank counts in norms, rather than
            in its copy of one that another rank counts.
    """
    state = outer_state(training, BAD_UNIT)
    unit = state.unit
    if kind == "1000x":
        for local, anchor in zip(unit.locals, unit.views(state.anchor), strict=True):
            local.copy_(anchor - 1000 * (anchor - local))
        return
    local = unit.locals[unit.counted.index(counted)]
    local.view(-1)[0] = float(kind)


def until_round(training: Training, number: int) -> None:
    """Trains up to the step that begins with the synchronisation of a round."""
    engine = training.engine
    while not (engine.trigger.due(engine.step) and engine.round == number):
        training.step()


def expected_anchor(training: Training, state: Any, good: list[int]) -> torch.Tensor:
    """The formulas of a synchronisation, from the replicas that take part, in fp64."""
    config, mesh, unit = training.case.config, training.mesh, state.unit
    flat = torch.cat([local.reshape(-1) for local in unit.locals])
    replicas = mesh.peers.all_gather(flat, "test").double()
    anchor, momentum = state.anchor.double(), state.momentum.double()
    deltas = [anchor - replicas[replica] for replica in good]
    norms = torch.tensor([norm_of(training, unit, delta) for delta in deltas])
    relative = config.weight_temperature_relative
    assert relative is not None
    assert config.clip is not None
    temperature = relative * norms.double().quantile(0.5)
    weights = torch.softmax(-norms / temperature, dim=0)
    average = sum(w * delta for w, delta in zip(weights, deltas, strict=True))
    beta = min(1.0, config.clip / (norm_of(training, unit, average) + 1e-6))
    gradient = beta * average
    momentum = config.outer_momentum * momentum + gradient
    return anchor - config.outer_lr * (gradient + config.outer_momentum * momentum)


def norm_of(training: Training, unit: Any, flat: torch.Tensor) -> float:
    """Norm over the ranks of the stage, copies counted once."""
    squares = [
        piece.square().sum() * float(counted)
        for piece, counted in zip(unit.views(flat), unit.counted, strict=True)
    ]
    total = torch.stack(squares).sum()
    dist.all_reduce(total, group=training.mesh.stage_group)
    return math.sqrt(total.item())


def _one_bad_replica(
    case: Case, mesh: Any, kind: str, round_: int, bad_ranks: list[int], counted: bool
) -> dict[str, Any]:
    """Injects a fault on some ranks of the bad replica; trains on for one more round."""
    training = start(case, mesh=mesh)
    engine = training.engine
    until_round(training, round_)
    everybody = list(range(case.replicas))
    others = [replica for replica in everybody if replica != BAD_REPLICA]
    if dist.get_rank() in bad_ranks:
        poison(training, kind, counted)
    expected = {
        state.unit.name: expected_anchor(
            training, state, others if state.unit.name == BAD_UNIT else everybody
        )
        for state in engine.outer
    }
    engine.records()
    training.begin()
    training.forward(engine.step)
    off = max(
        (state.anchor - expected[state.unit.name]).abs().max().item() for state in engine.outer
    )
    moved = outer_state(training, BAD_UNIT).momentum.abs().max().item()
    back = all(
        torch.equal(torch.cat([local.reshape(-1) for local in state.unit.locals]), state.anchor)
        for state in engine.outer
    )
    anchor = digest(state.anchor for state in engine.outer)
    training.finish()
    (record,) = engine.records()
    losses = [training.step() for _ in range(2 * case.config.sync_interval)]
    moments = training.optimizer.optimizer.state.values()
    return {
        "accepted": {u: [row[i] for row in record.accepted] for i, u in enumerate(record.units)},
        "weights": {u: [row[i] for row in record.weights] for i, u in enumerate(record.units)},
        "off": off,
        "moved": moved,
        "back at the anchor": back,
        "anchor": anchor,
        "finite": all(map(math.isfinite, losses))
        and all(bool(value.isfinite().all()) for state in moments for value in state.values()),
        "later anomalies": [later.anomalies for later in engine.records()],
    }


def _faults(case: Case, scenarios: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    mesh = mesh_of(case)
    return [
        _one_bad_replica(replace(case, edit={**case.edit, **scenario[0]}), mesh, *scenario[1:])
        for scenario in scenarios
    ]


def check(case: Case, scenarios: list[tuple[Any, ...]]) -> None:
    """The bad replica counts nothing in the bad unit, and everything else is as if it were well."""
    results = run_ranks(_faults, case.world, case, scenarios)
    size = case.world // case.replicas
    for number, scenario in enumerate(scenarios):
        for rank, outcomes in enumerate(results):
            outcome = outcomes[number]
            for unit, accepted in outcome["accepted"].items():
                good = [r != BAD_REPLICA or unit != BAD_UNIT for r in range(case.replicas)]
                assert accepted == good, (scenario, unit)
                weights = outcome["weights"][unit]
                assert [weight > 0 for weight in weights] == good, (scenario, unit)
                assert sum(weights) == pytest.approx(1.0), (scenario, unit)
            assert outcome["moved"] > 1e-3, scenario
            assert outcome["off"] < 1e-6, scenario
            assert outcome["back at the anchor"], scenario
            assert outcome["anchor"] == results[rank % size][number]["anchor"], scenario
            assert outcome["finite"], scenario
            assert set(outcome["later anomalies"]) == {0}, scenario


def test_one_bad_replica_of_two_is_excluded() -> None:
    check(
        R2,
        [
            ({}, "nan", 0, [1], True),
            ({}, "inf", 1, [1], True),
            (HISTORY, "1000x", 4, [1], True),
        ],
    )


def test_one_bad_replica_of_four_is_excluded() -> None:
    check(R4, [({}, kind, 1, [1], True) for kind in ("nan", "inf", "1000x")])


def test_a_bad_value_on_one_shard_rank_excludes_its_replica() -> None:
    check(replace(R2, shard=2), [({}, "nan", 1, [3], True), (HISTORY, "1000x", 4, [3], True)])


def test_a_bad_value_on_one_tensor_parallel_rank_excludes_its_replica() -> None:
    # The last: in that rank's copy of a norm weight, which the other rank counts.
    check(replace(R2, tp=2), [({}, "inf", 1, [3], True), ({}, "nan", 1, [3], False)])


def _all_bad() -> list[dict[str, Any]]:
    """All replicas are bad in three rounds, and well in the one after."""
    training = start(R2)
    engine = training.engine
    outcomes = []
    until_round(training, 1)
    for bad in (True, True, True, False):
        until_round(training, engine.round)
        state = outer_state(training, BAD_UNIT)
        if bad:
            poison(training, "nan" if training.mesh.replica else "inf")
        engine.records()
        before = digest([state.anchor]), digest([state.momentum])
        training.begin()
        training.forward(engine.step)
        after = digest([state.anchor]), digest([state.momentum])
        theta = torch.cat([local.reshape(-1) for local in state.unit.locals])
        others = [s for s in engine.outer if s is not state]
        training.finish()
        (record,) = engine.records()
        outcomes.append(
            {
                "untouched": before == after,
                "at the anchor": torch.equal(theta, state.anchor),
                "momentum": state.momentum.abs().max().item(),
                "others finite": all(bool(s.anchor.isfinite().all()) for s in others),
                "rolled back": record.rolled_back,
                "in a row": dict(zip(record.units, record.consecutive_rollbacks, strict=True)),
                "weights": [row[record.units.index(BAD_UNIT)] for row in record.weights],
            }
        )
    return outcomes


def test_all_replicas_bad_is_a_bitwise_rollback_and_counted() -> None:
    assert R2.config.max_consecutive_rollbacks == 3
    for outcomes in run_ranks(_all_bad, 2):
        for number, outcome in enumerate(outcomes[:3], start=1):
            assert outcome["momentum"] > 0
            assert outcome["untouched"]
            assert outcome["at the anchor"]
            assert outcome["rolled back"] == [BAD_UNIT]
            assert outcome["weights"] == [0.0, 0.0]
            assert outcome["others finite"]
            row = outcome["in a row"]
            assert row.pop(BAD_UNIT) == number
            assert set(row.values()) == {0}
        last = outcomes[3]
        assert not last["untouched"]
        assert last["rolled back"] == []
        assert set(last["in a row"].values()) == {0}


def _broken_in_the_middle_of_a_round() -> dict[str, Any]:
    """A replica's parameters turn NaN two steps before a synchronisation."""
    case = replace(R2, edit={"warmup_steps": 1, "sync_interval": 3})
    training = start(case)
    engine = training.engine
    until_round(training, 1)
    training.step()
    if training.mesh.replica == BAD_REPLICA:
        poison(training, "nan")
    losses = [training.step() for _ in range(4)]
    moments = training.optimizer.optimizer.state.values()
    return {
        "losses": losses,
        "skipped": float(training.optimizer.skipped_steps),
        "finite": all(bool(v.isfinite().all()) for state in moments for v in state.values()),
        "accepted": engine.records()[-1].accepted,
        "anchor": digest(state.anchor for state in engine.outer),
    }


def test_a_replica_that_turned_nan_skips_its_steps_and_returns_with_finite_moments() -> None:
    well, bad = run_ranks(_broken_in_the_middle_of_a_round, 2)
    assert [math.isfinite(loss) for loss in bad["losses"]] == [False, False, True, True]
    assert all(map(math.isfinite, well["losses"]))
    assert (well["skipped"], bad["skipped"]) == (0.0, 2.0)
    assert well["finite"]
    assert bad["finite"]
    assert well["accepted"] == bad["accepted"]
    assert all(well["accepted"][0])
    assert not all(well["accepted"][BAD_REPLICA])
    assert well["anchor"] == bad["anchor"]
