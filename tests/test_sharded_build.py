"""A model that is sharded as it is built: the same weights, and never more than one whole unit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from distributed import run_ranks
from harness import Case, mesh_of
from torch.profiler import ProfilerActivity, profile

from megatron_edit.backends.megatron.data_parallel import EDiTDataParallel
from megatron_edit.backends.megatron.model import build_model
from megatron_edit.backends.megatron.sharding import Sharding

BASE = Case(replicas=1, shard=2, layers=2)
LAYOUTS = {
    "S2": BASE,
    "S2 tied": replace(BASE, tied=True),
    "S2 bf16": replace(BASE, bf16=True),
    "TP2 S2": replace(BASE, tp=2),
    "PP2 S2 tied": replace(BASE, pp=2, tied=True),
    "PP2 interleaved S2": replace(BASE, layers=4, pp=2, vpp=2),
}


def _differences(case: Case) -> dict[str, Any]:
    """Parameters that differ, in value or marks, between a whole and a sharded build."""
    mesh, args = mesh_of(case), case.args()
    sharding = Sharding(mesh, args.params_dtype)
    differ, compared, generators, early = [], 0, [], set()
    whole = build_model(args)
    generators.append(torch.get_rng_state())
    sharded = build_model(args, sharding=sharding)
    generators.append(torch.get_rng_state())
    for one, other in zip(whole, sharded, strict=True):
        early |= {name for name, p in other.named_parameters() if hasattr(p, "full_tensor")}
        parameters = dict(EDiTDataParallel(other, mesh, sharding).module.named_parameters())
        assert parameters.keys() == dict(one.named_parameters()).keys()
        for name, parameter in one.named_parameters():
            compared += 1
            full = parameters[name].full_tensor()
            marks = [
                {mark: value for mark, value in vars(p).items() if mark != "_is_param"}
                for p in (parameter, parameters[name])
            ]
            if not torch.equal(parameter.detach(), full) or marks[0] != marks[1]:
                differ.append(name)
    return {
        "differ": differ,
        "compared": compared,
        "same generator": torch.equal(*generators),
        "early": early,
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_and_marks_are_those_of_a_whole_build(name: str) -> None:
    case = LAYOUTS[name]
    for rank in run_ranks(_differences, case.world, case):
        assert rank["differ"] == []
        assert rank["compared"] >= 7
        assert rank["same generator"]
        assert any("layers" in name for name in rank["early"])


def _peak_of_building(case: Case, as_built: bool) -> dict[str, int]:
    """Most bytes in use at once while the model is built and sharded, beyond those before it."""
    mesh, args = mesh_of(case), case.args()
    sharding = Sharding(mesh)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = build_model(args, sharding=sharding if as_built else None)
        chunks = [EDiTDataParallel(chunk, mesh, sharding) for chunk in model]
    in_use = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            in_use += event.nbytes()
            peak = max(peak, in_use)
    units = [unit for chunk in chunks for unit in chunk.units]
    return {
        "peak": peak,
        "shards": 4 * sum(unit.numel for unit in units),
        "unit": 4 * max(sum(p.numel() for p in unit.parameters.values()) for unit in units),
    }


def test_building_takes_the_shards_and_one_whole_unit() -> None:
    case = replace(BASE, layers=12)
    for rank in run_ranks(_peak_of_building, 2, case, True):
        assert rank["shards"] < rank["peak"] < rank["shards"] + 1.5 * rank["unit"]
    for rank in run_ranks(_peak_of_building, 2, case, False):
        assert rank["peak"] > 2 * rank["shards"]
