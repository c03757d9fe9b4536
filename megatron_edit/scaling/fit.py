"""Fits a law to runs: bootstrap intervals, predictions, and warnings where the data end."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import f as f_distribution

from megatron_edit.errors import ConfigurationError, unknown_name
from megatron_edit.scaling.forms import (
    VARIABLES,
    Array,
    FitFailed,
    Form,
    Law,
    OffsetForm,
    Points,
    PowerForm,
    ReplicaForm,
)
from megatron_edit.scaling.hoffmann import HoffmannForm
from megatron_edit.scaling.runs import Run, Table

FORMS = ("auto", "power", "offset", "replicas", "hoffmann")
COLLINEAR_R2 = 0.99
"""Share of the variance of ln D that ln N explains from which on alpha and beta are not told
apart; D = 20 N in every run gives 1."""
EXTRAPOLATION_FACTOR = 10.0
"""A prediction beyond this multiple of the largest run is warned about."""
CURVATURE_P = 0.01
INTERVAL = (2.5, 97.5)
"""Percentiles of a 95 % interval."""


@dataclass(frozen=True)
class Range:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Prediction:
    """A predicted loss.

    Attributes:
        law: Loss of the law with the interval of its bootstrap.
        run: The same loss with the interval for one further run: the residuals on top.
        warnings: Why not to trust it.
    """

    law: Range
    run: Range
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Fit:
    """A law fitted to a table.

    Attributes:
        law: The point estimate.
        table: The runs.
        samples: Parameters theta of each bootstrap resample, shape [resamples, parameters].
        failures: Resamples on which the fit failed; they are not in `samples`.
    """

    law: Law
    table: Table
    samples: Array
    failures: int

    @property
    def residuals(self) -> Array:
        """ln L of each run minus the law's."""
        return self.table.log_loss - self.law.form.log_loss(self.law.theta, self.table.points)

    def values(self) -> dict[str, Range]:
        """Returns the law's parameters with their intervals."""
        readable = np.array([self.law.form.readable(theta) for theta in self.samples])
        return {
            label: percentile_range(value, readable[:, i])
            for i, (label, value) in enumerate(self.law.values().items())
        }

    def curve(self, points: Points) -> tuple[Array, Array, Array]:
        """Returns the law's loss at the points and the ends of its 95 % interval."""
        losses = np.exp([self.law.form.log_loss(theta, points) for theta in self.samples])
        low, high = np.percentile(losses, INTERVAL, axis=0)
        return np.exp(self.law.form.log_loss(self.law.theta, points)), low, high

    def predict(self, points: Points, seed: int = 0) -> Prediction:
        """Predicts the loss of one run.

        Args:
            points: Where; a single point.
            seed: Seed of the residuals drawn for the interval of a further run.
        """
        logs = np.array([self.law.form.log_loss(theta, points)[0] for theta in self.samples])
        rng = np.random.default_rng(seed)
        # Fitted residuals are smaller than the errors, by the parameters that the fit used up.
        free = max(len(self.table) - len(self.law.theta), 1)
        inflation = np.sqrt(len(self.table) / free)
        noise = inflation * rng.choice(self.residuals, size=(20, len(logs)))
        value = float(np.exp(self.law.form.log_loss(self.law.theta, points)[0]))
        return Prediction(
            percentile_range(value, np.exp(logs)),
            percentile_range(value, np.exp(logs + noise).ravel()),
            tuple(extrapolation_warnings(points, self.table.points)),
        )


def percentile_range(value: float, samples: Array) -> Range:
    """Returns a value with the 95 % percentile interval of its bootstrap samples."""
    low, high = np.percentile(samples, INTERVAL)
    return Range(float(value), float(low), float(high))


def extrapolation_warnings(wanted: Points, seen: Points) -> list[str]:
    """Says in which variables a prediction lies beyond 10 times the largest run."""
    found = []
    for name in ("parameters", "tokens", "compute"):
        asked, largest = wanted.variable(name).max(), seen.variable(name).max()
        # A hair above the factor is rounding, not extrapolation.
        if asked > EXTRAPOLATION_FACTOR * largest * (1 + 1e-9):
            found.append(
                f"extrapolation: {name} {asked:.3g} is {asked / largest:.0f} times the largest "
                f"run ({largest:.3g})"
            )
    most = seen.replicas.max()
    if wanted.replicas.max() > most:
        found.append(f"extrapolation: {wanted.replicas.max():.0f} replicas, runs have {most:.0f}")
    return found


def collinearity(points: Points) -> float:
    """Returns the share of the variance of ln D that ln N explains; 1 if either never changes."""
    x, y = np.log(points.parameters), np.log(points.tokens)
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return 1.0
    return float(np.corrcoef(x, y)[0, 1] ** 2)


def choose_form(name: str, over: str, points: Points) -> tuple[Form, list[str]]:
    """Returns the form to fit and what must be said about the choice.

    Args:
        name: One of FORMS. `auto` takes Hoffmann's where N and D vary independently and there
            are enough runs, and a power law otherwise.
        over: The variable of a law of one variable, a key of VARIABLES.
        points: The runs of one group.

    Raises:
        ConfigurationError: The name is unknown, or the runs cannot determine the form.
    """
    if name not in FORMS:
        raise unknown_name("--form", name, FORMS)
    if over not in VARIABLES:
        raise unknown_name("--variable", over, VARIABLES)
    notes = []
    several = len(np.unique(points.replicas)) > 1
    simple: Form = ReplicaForm(over) if several else PowerForm(over)
    forms: dict[str, Form] = {
        "power": PowerForm(over),
        "offset": OffsetForm(over),
        "replicas": ReplicaForm(over),
        "hoffmann": HoffmannForm(),
        "auto": simple,
    }
    form = forms[name]
    if name in ("auto", "hoffmann"):
        r2 = collinearity(points)
        separable = r2 < COLLINEAR_R2
        if separable and len(points) >= len(HoffmannForm.labels) and not several:
            form = HoffmannForm()
        elif name == "hoffmann" and not separable:
            HoffmannForm().check(points)
            form = simple
        if not separable:
            notes.append(
                f"ln N and ln D are collinear (r^2 = {r2:.4f}): alpha and beta cannot be "
                f"separated, {form.formula} is fitted instead of {HoffmannForm().formula}"
            )
    form.check(points)
    return form, notes


def curvature_note(fit: Fit) -> str | None:
    """Says that the residuals of a power law bend: the loss levels off, or the law is another.

    An F-test of a quadratic term in ln x.

    Args:
        fit: A fit of any form; only power laws are tested.
    """
    form, table = fit.law.form, fit.table
    if not isinstance(form, PowerForm):
        return None
    x = np.log(table.points.variable(form.over))
    free = len(x) - 3
    if free < 1 or len(np.unique(x)) < 4:
        return None
    _, rest, *_ = np.polyfit(x - x.mean(), table.log_loss, 2, full=True)
    quadratic, linear = float(rest[0]), float((fit.residuals**2).sum())
    # Losses with few digits leave rounding only; nothing can be said below it.
    if linear < 1e-12:
        return None
    p_value = float(f_distribution.sf((linear - quadratic) / (quadratic / free), 1, free))
    if p_value > CURVATURE_P:
        return None
    return (
        f"the residuals bend (F-test, p < {CURVATURE_P}): a pure power law does not hold over this "
        "range and must not be extrapolated; try --form offset"
    )


def fit_runs(runs: Sequence[Run], form: Form, resamples: int = 1000, seed: int = 0) -> Fit:
    """Fits a form to runs, with a bootstrap over the runs.

    Args:
        runs: At least as many as the form has parameters.
        form: The family of laws.
        resamples: Bootstrap resamples; each fit starts at the point estimate.
        seed: Seed of the resampling.

    Raises:
        ConfigurationError: The runs do not determine the form.
    """
    table = Table.of(runs)
    form.check(table.points)
    try:
        theta = form.fit(table.points, table.log_loss, np.ones(len(table)))
    except FitFailed as error:
        raise ConfigurationError(f"{form.formula} cannot be fitted: {error}") from None
    counts = resample_counts(len(table), resamples, seed)
    samples, failures = bootstrap(table, form, theta, counts)
    if len(samples) == 0:
        raise ConfigurationError(
            f"{form.formula}: all {failures} bootstrap fits failed; add runs or choose a simpler "
            "--form"
        )
    return Fit(Law(form, theta), table, samples, failures)


def resample_counts(size: int, resamples: int, seed: int) -> NDArray[np.int64]:
    """Returns how often each run is drawn in each resample, shape [resamples, size]."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(size, np.full(size, 1.0 / size), size=resamples)


def bootstrap(
    table: Table, form: Form, start: Array, counts: NDArray[np.int64]
) -> tuple[Array, int]:
    """Fits every resample from one start.

    Args:
        table: The runs.
        form: The family of laws.
        start: The point estimate, from which each fit starts.
        counts: How often each run is drawn, one row per resample.

    Returns:
        The parameters of the resamples that could be fitted, and the number of the others.
    """
    samples, failures = [], 0
    for row in counts:
        try:
            samples.append(form.fit(table.points, table.log_loss, row.astype(float), start))
        except FitFailed:
            failures += 1
    return np.array(samples).reshape(-1, len(start)), failures
