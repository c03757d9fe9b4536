"""Figures of the steps between two log lines."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_edit.run.nan_rows import NanRow


@dataclass
class Interval:
    """Figures of the steps since the last log line, gathered from all replicas.

    Attributes:
        iteration: Steps done.
        consumed_samples: Samples of all replicas so far.
        step_ms: Mean time of a step.
        learning_rate: Of the last step.
        losses: Mean loss of each replica over the interval.
        grad_norm: Of the last step, replica 0.
        skipped: Updates skipped in the interval, over all replicas.
        nan_iterations: Steps with a non-finite loss or gradient, over all replicas.
        nan_rows: Such steps in a row, of each replica.
        sync_round: Synchronisations so far.
        exposed_ms: Mean time per step that this rank waited for other replicas.
        tflops: Model TFLOP/s of one rank.
    """

    iteration: int
    consumed_samples: int
    step_ms: float
    learning_rate: float
    losses: list[float]
    grad_norm: float
    skipped: int
    nan_iterations: int
    nan_rows: list[NanRow]
    sync_round: int
    exposed_ms: float
    tflops: float

    @property
    def loss(self) -> float:
        """Mean over the replicas."""
        return sum(self.losses) / len(self.losses)


@dataclass
class Totals:
    """Sums since the last log line, on the device; reading them is left to the log line.

    A nan iteration is a step whose loss or whose gradient norm was not finite.
    """

    loss: torch.Tensor
    finite_losses: torch.Tensor
    nan_iterations: torch.Tensor
    skipped_before: torch.Tensor
    steps: int = 0
    exposed_ms: float = 0.0

    def add(self, loss: torch.Tensor, bad: torch.Tensor) -> None:
        """Adds the mean loss of a step, and whether it was a nan iteration; 0-dim."""
        finite = torch.isfinite(loss)
        self.loss += torch.where(finite, loss, torch.zeros_like(loss))
        self.finite_losses += finite
        self.nan_iterations += bad
        self.steps += 1
