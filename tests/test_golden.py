"""Pins a sequence of updates of each method, so that a change of any number is seen.

python tests/test_golden.py      writes tests/golden/methods.json anew
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_edit.config.edit_config import EditConfig
from megatron_edit.config.methods import PRESETS
from megatron_edit.engine.reference import NaiveReference

FILE = Path(__file__).parent / "golden" / "methods.json"
# The numbers are given to 7 digits.
TOLERANCE = 2e-6
STEPS = 16
# Rounds by the clock are no sequence that could be pinned.
METHODS = [method for method in PRESETS if method != "a_edit"]


class Slope(torch.nn.Module):
    """Two units of two numbers each: y = b . (a * x)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.tensor([0.5, -0.3]))
        self.second = torch.nn.Parameter(torch.tensor([0.2, 0.9]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.first * x) @ self.second


def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Squared distance from a target that differs between the replicas' data."""
    return (model(batch) - batch.sum(dim=1).sin()).square().mean()


def sequence(method: str) -> list[list[float]]:
    """Mean parameters of two replicas after each step, and after the last synchronisation."""
    settings: dict[str, Any] = {**PRESETS[method], "method": method, "replicas": 2}
    if method != "sync":
        settings |= {"warmup_steps": 2, "sync_interval": 3}
    if method == "edit":
        settings |= {"clip": 0.05}
    reference = NaiveReference(
        [Slope(), Slope()],
        {"first": ["first"], "second": ["second"]},
        loss,
        EditConfig(**settings),
        {"lr": 0.05, "betas": (0.9, 0.95), "weight_decay": 0.1},
        clip_grad=1.0,
    )
    generator = torch.Generator().manual_seed(5)
    rows = []
    for _ in range(STEPS):
        batches = [[torch.randn(4, 2, generator=generator) + i] for i in range(2)]
        reference.step(batches, lr=0.05)
        rows.append(_mean(reference))
    if method != "sync":
        reference.synchronize()
        rows.append(_mean(reference))
    return rows


def _mean(reference: NaiveReference) -> list[float]:
    flat = [torch.cat([p.detach() for p in model.parameters()]) for model in reference.replicas]
    return [round(value, 7) for value in torch.stack(flat).mean(dim=0).tolist()]


@pytest.mark.parametrize("method", METHODS)
def test_updates_are_the_pinned_ones(method: str) -> None:
    pinned = json.loads(FILE.read_text())[method]
    found = sequence(method)
    assert len(found) == len(pinned)
    for step, (row, expected) in enumerate(zip(found, pinned, strict=True)):
        assert row == pytest.approx(expected, abs=TOLERANCE), f"step {step}"


def test_methods_differ_from_one_another() -> None:
    pinned = json.loads(FILE.read_text())
    ends = {method: rows[-1] for method, rows in pinned.items()}
    for method in METHODS:
        # Averaging with and without a warm-up in its name are the same updates here.
        others = [m for m in METHODS if {m, method} != {"local_sgd", "post_local_sgd"}]
        same = [m for m in others if m != method and ends[m] == ends[method]]
        assert not same, f"{method} ends like {same}"


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps({method: sequence(method) for method in METHODS}, indent=1) + "\n")
