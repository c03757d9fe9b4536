"""Does local SGD differ from synchronous training? A paired bootstrap over equal (N, D)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import permutation_test

from megatron_edit.errors import ConfigurationError
from megatron_edit.scaling.fit import Range, bootstrap, percentile_range, resample_counts
from megatron_edit.scaling.forms import Array, FitFailed, Form
from megatron_edit.scaling.runs import Run, Table

FEWEST_PAIRS = 3
SIGNIFICANCE = 0.05


@dataclass(frozen=True)
class Comparison:
    """A method against synchronous training at equal N and D.

    Attributes:
        pairs: Number of (N, D) that both have; repeated runs of one are averaged.
        change: Mean of L_method / L_sync - 1 with its 95 % interval.
        p_value: Two-sided bootstrap p-value of "no change"; at least 1 / resamples.
        p_sign_flip: The same by exact sign flips of the pairs. With few pairs the bootstrap is too
            sure of itself; n pairs can never give less than 2^(1-n) here.
        parameters: Difference of each parameter of the law, method minus synchronous.
        by_size: (N, D, L_method / L_sync - 1) of each pair.
    """

    pairs: int
    change: Range
    p_value: float
    p_sign_flip: float
    parameters: dict[str, Range]
    by_size: tuple[tuple[float, float, float], ...]

    @property
    def differs(self) -> bool:
        """Whether the 95 % interval of the change excludes 0 and the sign flips agree."""
        outside = not self.change.low <= 0.0 <= self.change.high
        return outside and self.p_sign_flip <= SIGNIFICANCE

    def verdict(self) -> str:
        """Returns the finding in words."""
        if not self.differs:
            few = f"; {self.pairs} pairs are too few to" if self.pairs < 6 else ""
            return f"no difference from synchronous training is shown{few and few + ' show one'}"
        return f"{'worse' if self.change.value > 0 else 'better'} than synchronous training"


def compare(
    runs: Sequence[Run],
    baseline: Sequence[Run],
    form: Form,
    resamples: int = 1000,
    seed: int = 0,
) -> Comparison:
    """Compares a method's runs with synchronous runs of the same N and D.

    One resample draws pairs, so that what both runs of a pair share (size, data, luck of the
    design) cancels; both laws are fitted to the same draw.

    Args:
        runs: Runs of one method, one number of replicas.
        baseline: Synchronous runs.
        form: The law whose parameters are compared.
        resamples: Bootstrap resamples.
        seed: Seed of the resampling.

    Raises:
        ConfigurationError: Fewer than three common (N, D).
    """
    ours, theirs = _by_point(runs), _by_point(baseline)
    keys = [key for key in ours if key in theirs]
    if len(keys) < FEWEST_PAIRS:
        raise ConfigurationError(
            f"{len(keys)} pairs of (parameters, tokens) are common to {runs[0].method} and "
            f"{baseline[0].method}; at least {FEWEST_PAIRS} are needed to compare them"
        )
    left, right = _table(ours, keys), _table(theirs, keys)
    difference = left.log_loss - right.log_loss
    counts = resample_counts(len(keys), resamples, seed)
    means = counts @ difference / len(keys)
    tail = min(float(np.mean(means <= 0)), float(np.mean(means >= 0)))
    return Comparison(
        len(keys),
        percentile_range(float(np.expm1(difference.mean())), np.expm1(means)),
        max(min(2 * tail, 1.0), 1.0 / resamples),
        _sign_flip_p(difference, seed),
        _parameter_differences(left, right, form, counts),
        tuple((*key, float(np.expm1(d))) for key, d in zip(keys, difference, strict=True)),
    )


def _sign_flip_p(difference: Array, seed: int) -> float:
    """Returns the two-sided p-value of mean 0 under random signs; exact up to 13 pairs."""
    if not np.any(difference):
        return 1.0
    result = permutation_test(
        (difference,), np.mean, permutation_type="samples", n_resamples=9999, rng=seed
    )
    return float(result.pvalue)


def _by_point(runs: Sequence[Run]) -> dict[tuple[float, float], Run]:
    """Returns one run per (N, D); repeated ones are averaged in ln L."""
    logs: dict[tuple[float, float], list[float]] = {}
    for run in runs:
        logs.setdefault((run.parameters, run.tokens), []).append(float(np.log(run.loss)))
    first = runs[0]
    return {
        key: Run(first.method, first.replicas, *key, float(np.exp(np.mean(values))))
        for key, values in logs.items()
    }


def _table(by_point: dict[tuple[float, float], Run], keys: Sequence[tuple[float, float]]) -> Table:
    return Table.of(by_point[key] for key in keys)


def _parameter_differences(
    left: Table, right: Table, form: Form, counts: NDArray[np.int64]
) -> dict[str, Range]:
    """Returns left minus right of each parameter; empty where the pairs do not determine them."""
    try:
        form.check(left.points)
        thetas = [form.fit(t.points, t.log_loss, np.ones(len(t))) for t in (left, right)]
    except (ConfigurationError, FitFailed):
        return {}
    samples = []
    for row in counts:
        pair = [
            bootstrap(table, form, theta, row[None])[0]
            for table, theta in zip((left, right), thetas, strict=True)
        ]
        if all(len(part) for part in pair):
            samples.append(form.readable(pair[0][0]) - form.readable(pair[1][0]))
    if not samples:
        return {}
    values = form.readable(thetas[0]) - form.readable(thetas[1])
    return {
        label: percentile_range(float(values[i]), np.array(samples)[:, i])
        for i, label in enumerate(form.labels)
    }
