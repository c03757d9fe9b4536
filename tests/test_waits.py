"""The benchmarks of what replicas wait for: their arithmetic."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import a_edit_idle, hidden_sync
from megatron_edit.replicas.peers import DONE


def test_report_of_idle_time() -> None:
    fast = {"step_s": 0.1, "slowest_step_s": 0.2, "elapsed_s": 100.0, "steps": 980}
    slow = {"step_s": 0.4, "slowest_step_s": 0.5, "elapsed_s": 100.0, "steps": 240}
    ranks: list[dict[str, Any]] = [
        fast | {"waits_s": [0.1, 0.3], "last_steps_s": [0.1, 0.1]},
        slow | {"waits_s": [0.0, 0.02], "last_steps_s": [0.4, 0.25]},
    ]
    text = a_edit_idle.report(ranks)
    assert "| 0 | 100.0 | 980 | 200.0 | 300.0 |" in text
    assert "| 1 | 400.0 | 240 | 10.0 | 20.0 |" in text
    # 1220 steps of 1000 + 250.
    assert "2 rounds in 100 s; together 97.6% of the steps" in text
    assert "under way in 1 of 2 rounds; the slowest of those steps took 400.0 ms" in text
    assert "of all steps of replica 1 500.0 ms" in text


def test_a_slow_link_carries_one_payload_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    slept: list[float] = []
    monkeypatch.setattr(hidden_sync.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(hidden_sync.time, "sleep", slept.append)
    sync: Any = SimpleNamespace(all_reduce=lambda flat, phase: DONE)
    hidden_sync.SlowLink(sync, numel=100)
    first, second = (sync.all_reduce(torch.zeros(size), "test") for size in (25, 75))
    now[0] = 10.25
    first.wait()
    now[0] = 13.0
    second.wait()
    third = sync.all_reduce(torch.zeros(50), "test")
    third.wait()
    # A quarter of 2 s; both together 2 s, which have passed; the link has been free since.
    assert slept == pytest.approx([0.25, 0.0, 1.0])
