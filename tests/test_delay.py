"""With a delay a step computes on while its norms are exchanged."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from harness import Case, start

from megatron_edit.config.methods import PRESETS
from megatron_edit.replicas.peers import Gathering

SMALL = Case(layers=2, edit={"warmup_steps": 1, "sync_interval": 2})
DELAYED = {
    "delay 1": replace(SMALL, edit={**SMALL.edit, "delay_steps": 1}),
    "delay 1, int8": replace(SMALL, edit={**SMALL.edit, "delay_steps": 1, "compression": "int8"}),
    "co2": replace(SMALL, edit={**PRESETS["co2"], "method": "co2", **SMALL.edit}),
}


def _compute_while_the_peer_is_late(case: Case, path: str) -> list[int]:
    """Replica 1 sends its norms off only when replica 0 has computed its last layer; returns the
    rounds that were synchronised."""
    training = start(case)
    engine, sync = training.engine, training.mesh.peers
    store = dist.FileStore(path, 2)
    store.set_timeout(timedelta(seconds=20))
    # The first of a step's two micro-batches sets the key before the second one does.
    if training.mesh.replica == 0:
        last = training.chunks[0].module.decoder.layers[-1]
        last.register_forward_hook(lambda *_: store.set(f"step {engine.step}", "computed"))
    else:
        start_all_gather = sync.start_all_gather

        def late(values: torch.Tensor, phase: str, payload: bool = False) -> Gathering:
            if phase.startswith("exchanging norms"):
                store.wait([f"step {engine.step}"])
            return start_all_gather(values, phase, payload)

        sync.start_all_gather = late  # type: ignore[method-assign]
    for _ in range(8):
        training.step()
    return [record.round for record in engine.records()]


@pytest.mark.parametrize("name", DELAYED)
def test_a_step_computes_before_the_norms_have_come(name: str, tmp_path: Path) -> None:
    results = run_ranks(
        _compute_while_the_peer_is_late, 2, DELAYED[name], str(tmp_path / "store"), timeout_s=60
    )
    # Steps 3, 5 and 7 begin with the end of a round; the last one has not landed.
    landed = [0, 1]
    assert results == [landed, landed]
