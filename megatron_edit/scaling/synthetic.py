"""Runs with known laws: to check that a fit finds them again, and how often its intervals do."""

import numpy as np

from megatron_edit.scaling.fit import Fit, fit_runs
from megatron_edit.scaling.forms import Law, Points
from megatron_edit.scaling.runs import Run

RUNS = 245
"""As many as Hoffmann et al. 2022 fitted."""
SIZES = (44e6, 16e9)
TOKENS = (1e9, 5e11)


def synthetic_runs(law: Law, noise: float, seed: int, count: int = RUNS) -> list[Run]:
    """Returns runs spread evenly in ln N and ln D, with noise.

    Args:
        law: The truth.
        noise: Standard deviation of ln L.
        seed: Of sizes, tokens and noise.
        count: Number of runs.
    """
    rng = np.random.default_rng(seed)
    n = np.exp(rng.uniform(*np.log(SIZES), count))
    d = np.exp(rng.uniform(*np.log(TOKENS), count))
    log_loss = law.form.log_loss(law.theta, Points.of(n, d))
    losses = np.exp(log_loss + noise * rng.standard_normal(count))
    return [Run("sync", 1, *map(float, row)) for row in zip(n, d, losses, strict=True)]


def covered(fit: Fit, truth: Law) -> dict[str, bool]:
    """Returns for each parameter whether its 95 % interval holds the truth."""
    true = truth.values()
    return {k: r.low <= true[k] <= r.high for k, r in fit.values().items()}


def coverage(truth: Law, noise: float, repetitions: int, resamples: int) -> dict[str, int]:
    """Returns how many of the repetitions' intervals hold the truth, by parameter."""
    hits = dict.fromkeys(truth.values(), 0)
    for seed in range(repetitions):
        fit = fit_runs(synthetic_runs(truth, noise, seed), truth.form, resamples, seed)
        for name, hit in covered(fit, truth).items():
            hits[name] += hit
    return hits
