"""Every method of the family trains like the naive reference."""

from __future__ import annotations

import numpy as np
import pytest
from distributed import run_ranks
from harness import Case, mean_losses, run_engine, run_reference

from megatron_edit.config.methods import PRESETS


def preset(method: str, **fields: object) -> dict[str, object]:
    """A method's own settings, but for rounds short enough for a test."""
    short = {"warmup_steps": 3, "sync_interval": 4, "weight_temperature_relative": None}
    return {**PRESETS[method], **short, "method": method, **fields}


CASES = {
    "local_sgd": Case(edit=preset("local_sgd", warmup_steps=0)),
    "post_local_sgd S2": Case(shard=2, edit=preset("post_local_sgd")),
    "diloco": Case(edit=preset("diloco", warmup_steps=0)),
    "diloco R3": Case(replicas=3, edit=preset("diloco")),
    "co2": Case(edit=preset("co2")),
    "co2 S2, clip and penalty": Case(
        shard=2, edit=preset("co2", outer_momentum_clip=1e-3, staleness_gap_penalty=1.5)
    ),
    "co2 without momentum": Case(edit=preset("co2", outer_momentum=0.0)),
    "edit, delay 1": Case(edit={"delay_steps": 1}),
    "edit, delay 3": Case(edit={"delay_steps": 3}),
    "edit, delay 2, S2, offloaded": Case(
        shard=2, edit={"delay_steps": 2, "offload_outer_state": True}
    ),
    "edit, delay 4 of 6, PP2 tied": Case(
        pp=2, tied=True, steps=33, edit={"delay_steps": 4, "sync_interval": 6}
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_method_equals_reference(name: str) -> None:
    case = CASES[name]
    plain = Case(replicas=case.replicas, tied=case.tied, edit=case.edit, steps=case.steps)
    weights, losses, anchor = run_ranks(run_reference, 1, plain)[0]
    results = run_ranks(run_engine, case.world, case, weights, anchor)
    np.testing.assert_allclose(mean_losses(results), losses, rtol=0, atol=1e-5)
    assert max(result["distance"] for result in results) < 5e-5
