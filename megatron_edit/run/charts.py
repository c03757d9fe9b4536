"""The TensorBoard charts of a run: tags and values."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron_edit.engine.record import SyncRecord
from megatron_edit.run.interval import Interval


def training_events(interval: Interval, args: Namespace) -> dict[str, float]:
    """Megatron's tags, and the loss of each replica."""
    events = {
        "lm loss": interval.loss,
        "learning-rate": interval.learning_rate,
        "grad-norm": interval.grad_norm,
        "batch-size": float(args.global_batch_size),
        "iteration-time": interval.step_ms / 1e3,
        "throughput": interval.tflops,
        "world-size": float(args.world_size),
        "loss-scale": 1.0,
        "edit/exposed-sync-ms": interval.exposed_ms,
    }
    return events | {f"edit/loss/replica-{i}": loss for i, loss in enumerate(interval.losses)}


def sync_events(record: SyncRecord) -> dict[str, float]:
    """The ``edit/`` tags of one synchronisation. A replica's weight is its mean over the units."""
    units = len(record.units)
    events = {
        "edit/pseudo-grad-norm": record.pseudo_grad_norm,
        "edit/anomalies": float(record.anomalies),
        "edit/rollbacks": float(len(record.rolled_back)),
        "edit/clip-coef": min(record.clip_coefficients),
        "edit/outer-momentum-norm": record.momentum_norm,
        "edit/drift": max(record.drift),
        "edit/sync-bytes": record.sync_bytes,
        "edit/computing-sync-ms": record.computing_ms,
    }
    for unit, norm in zip(record.units, record.averaged_norms, strict=True):
        events[f"edit/pseudo-grad-norm/{unit}"] = norm
    for replica, (weights, steps) in enumerate(zip(record.weights, record.steps, strict=True)):
        events[f"edit/weight/replica-{replica}"] = sum(weights) / units
        events[f"edit/steps-in-round/replica-{replica}"] = steps
    return events


def chart_layout(replicas: int, units: list[str]) -> dict[str, Any]:
    """One TensorBoard page (custom scalars) with the charts of the synchronisation."""

    def per_replica(tag: str) -> list[Any]:
        return ["Multiline", [f"edit/{tag}/replica-{i}$" for i in range(replicas)]]

    return {
        "EDiT": {
            "loss of each replica": per_replica("loss"),
            "weight of each replica": per_replica("weight"),
            "steps in round": per_replica("steps-in-round"),
            "pseudo-gradient norm of each unit": [
                "Multiline",
                [f"edit/pseudo-grad-norm/{unit}$" for unit in units],
            ],
            "pseudo-gradient norm": ["Multiline", ["edit/pseudo-grad-norm$"]],
            "anomalies and rollbacks": ["Multiline", ["edit/anomalies$", "edit/rollbacks$"]],
            "drift": ["Multiline", ["edit/drift$"]],
            "exposed synchronisation (ms)": ["Multiline", ["edit/exposed-sync-ms$"]],
            "computing of a synchronisation (ms)": ["Multiline", ["edit/computing-sync-ms$"]],
        }
    }
