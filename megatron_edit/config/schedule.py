"""The schedule of learning rate and weight decay, as the settings of a run give it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SETTINGS = (
    "lr", "min_lr", "lr_decay_style", "lr_decay_iters", "lr_warmup_iters", "lr_warmup_fraction",
    "weight_decay",
)  # fmt: skip
"""What gives the schedule, beside the global batch size."""


def schedule(values: Mapping[str, Any]) -> dict[str, Any]:
    """A schedule in samples of all replicas, by Megatron's names.

    Two runs with equal results have the same learning rate after the same samples.

    Args:
        values: The settings of a run by name: :data:`SETTINGS` and `global_batch_size`.
    """
    decay = values["lr_decay_iters"] * values["global_batch_size"]
    fraction = values["lr_warmup_fraction"]
    warmup = values["lr_warmup_iters"] * values["global_batch_size"]
    return {
        "lr": values["lr"],
        "min_lr": values["min_lr"],
        "lr_decay_style": values["lr_decay_style"],
        "lr_decay_samples": decay,
        "lr_warmup_samples": warmup if fraction is None else int(fraction * decay),
        "weight_decay": values["weight_decay"],
    }
