"""Copies of one parameter on several ranks of a replica stay bitwise the same."""

from __future__ import annotations

from typing import Any

import pytest
from distributed import run_ranks
from harness import Case, digest, start, whole_name

BASE = {"warmup_steps": 1, "sync_interval": 3}
LAYOUTS = {
    "TP2": Case(layers=2, tp=2, steps=14),
    "PP2 tied": Case(layers=2, pp=2, tied=True, steps=14),
}
SETTINGS = {
    "int8": {"compression": "int8"},
    "int8, delay 1": {"compression": "int8", "delay_steps": 1},
    "bf16": {"compression": "bf16"},
}


def _train(layout: Case, settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each setting digests of this rank's copies, by name, parameters and anchors."""
    outcome, mesh = [], None
    for setting in settings:
        case = Case(**{**vars(layout), "edit": {**BASE, **setting}})
        training = start(case, mesh=mesh)
        mesh = training.mesh
        for _ in range(case.steps):
            training.step()
        training.engine.synchronize()
        copies: dict[str, Any] = {"replica": mesh.replica, "rounds": training.engine.round}
        for state in training.engine.outer:
            anchors = state.unit.views(state.anchor)
            named = zip(state.unit.parameters.items(), state.unit.locals, anchors, strict=True)
            for (name, parameter), local, anchor in named:
                if case.tied or not getattr(parameter, "tensor_model_parallel", False):
                    copies[whole_name(name, case)] = digest([local]), digest([anchor])
        outcome.append(copies)
    return outcome


@pytest.mark.parametrize("name", LAYOUTS)
def test_copies_are_the_same_after_several_rounds(name: str) -> None:
    case = LAYOUTS[name]
    results = run_ranks(_train, case.world, case, list(SETTINGS.values()))
    for ranks in zip(*results, strict=True):
        first, second = (rank for rank in ranks if rank["replica"] == 0)
        assert first["rounds"] == 5
        shared = first.keys() & second.keys() - {"replica", "rounds"}
        assert len(shared) == (1 if case.tied else 2 * case.layers + 1)
        for copy in shared:
            assert first[copy] == second[copy], copy
