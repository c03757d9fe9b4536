"""Faults and stragglers on demand: what may be asked for, and what it does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_lines import MOCK, command_line, refusal

from megatron_edit.config.edit_config import EditConfig
from megatron_edit.run import faults
from megatron_edit.run.faults import SCALE, Injection

BAD = [
    ("--edit-debug-slow-replica 1:4.3", ["edit.debug_slow_replica", "give --edit-debug too"]),
    ("--edit-debug-poison-replica 1:5:nan", ["edit.debug_poison_replica", "give --edit-debug too"]),
    ("--edit-debug true --edit-debug-slow-replica 4", ["got '4'", "I:FACTOR", "such as 1:4.3"]),
    ("--edit-debug true --edit-debug-slow-replica 1:0.5", ["got '1:0.5'", "FACTOR >= 1"]),
    ("--edit-debug true --edit-debug-slow-replica 9:2", ["got replica 9; allowed: 0 to 1"]),
    ("--edit-debug true --edit-debug-poison-replica 1:nan", ["got '1:nan'", "I:STEP:KIND"]),
    ("--edit-debug true --edit-debug-poison-replica 1:5:nam", ["'nam'", "did you mean 'nan'?"]),
    ("--edit-debug true --edit-debug-poison-replica 2:5:nan", ["got replica 2; allowed: 0 to 1"]),
    ("--edit-debug true --edit-debug-poison-replica 1:9-5:nan", ["got '1:9-5:nan'", "FIRST-LAST"]),
]


@pytest.mark.parametrize(("flags", "parts"), BAD)
def test_refused(flags: str, parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = command_line([*MOCK, "--edit-replicas", "2", *flags.split()])
    message = refusal(words, capsys)
    assert all(part in message for part in parts), message


def injected(replica: int, **fields: Any) -> Injection:
    config = EditConfig(replicas=2, debug=True, **fields)
    return Injection(config, SimpleNamespace(replica=replica))  # type: ignore[arg-type]


class FakeEngine:
    """Two units of three parameters, at 2 from an anchor of zeros."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.units = [SimpleNamespace(locals=[torch.full((3,), 2.0)]) for _ in range(2)]
        for unit in self.units:
            unit.copy_from = unit.locals[0].copy_
        self.outer = [
            SimpleNamespace(
                unit=unit,
                anchor=torch.zeros(3),
                pseudo_gradient=lambda unit=unit: -unit.locals[0],
            )
            for unit in self.units
        ]

    @property
    def parameters(self) -> torch.Tensor:
        return torch.stack([unit.locals[0] for unit in self.units])


@pytest.mark.parametrize("kind", ["nan", "inf", "scale"])
@pytest.mark.parametrize(("replica", "step"), [(1, 5), (1, 7), (1, 4), (1, 8), (0, 6)])
def test_parameters_are_spoiled_in_its_steps_of_its_replica(
    kind: str, replica: int, step: int
) -> None:
    engine: Any = FakeEngine(step)
    injected(replica, debug_poison_replica=f"1:5-7:{kind}").before_step(engine)
    if replica == 0 or step not in (5, 6, 7):
        assert (engine.parameters == 2.0).all()
    elif kind == "scale":
        assert (engine.parameters == 2.0 * SCALE).all()
    else:
        first = engine.parameters[:, 0]
        assert (first.isnan() if kind == "nan" else first.isinf()).all()


def test_tokens_are_random_in_its_steps_alone() -> None:
    engine: Any = FakeEngine(0)
    batch = {
        "tokens": torch.zeros(2, 8, dtype=torch.int64),
        "labels": torch.zeros(2, 8, dtype=torch.int64),
        "index": torch.tensor([3, 4]),
    }
    seen = []
    spoiled = injected(1, debug_poison_replica="1:1:tokens").spoil(iter([batch] * 3), engine, 50)
    for step in range(3):
        engine.step = step
        seen.append(next(spoiled))
    assert seen[0] is batch and seen[2] is batch
    tokens, labels = seen[1]["tokens"], seen[1]["labels"]
    assert len(tokens.unique()) > 5 and tokens.min() >= 0 and tokens.max() < 50
    # They are still a text: labels are the tokens that come next.
    assert torch.equal(tokens[:, 1:], labels[:, :-1])


@pytest.mark.parametrize(("replica", "slept"), [(1, [6.6]), (0, [])])
def test_a_slow_replica_waits_after_its_step(
    replica: int, slept: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeps: list[float] = []
    monkeypatch.setattr(faults.time, "sleep", sleeps.append)
    injected(replica, debug_slow_replica="1:4.3").after_step(2.0)
    assert sleeps == pytest.approx(slept)
