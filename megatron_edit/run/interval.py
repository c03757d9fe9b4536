"""Figures of the steps between two log lines."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch


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
        most_nans_in_row: The most such steps in a row of each replica that the interval has seen.
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
    most_nans_in_row: list[int]
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
    nans_in_row: torch.Tensor
    most_nans_in_row: torch.Tensor
    skipped_before: torch.Tensor
    steps: int = 0
    exposed_ms: float = 0.0
    started_s: float = field(default_factory=time.perf_counter)

    def add(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        """Adds the mean loss of a step."""
        finite = torch.isfinite(loss)
        bad = ~(finite & torch.isfinite(grad_norm))
        self.loss += torch.where(finite, loss, torch.zeros_like(loss))
        self.finite_losses += finite
        self.nan_iterations += bad
        self.nans_in_row = torch.where(bad, self.nans_in_row + 1, torch.zeros_like(loss))
        self.most_nans_in_row = torch.maximum(self.most_nans_in_row, self.nans_in_row)
        self.steps += 1
