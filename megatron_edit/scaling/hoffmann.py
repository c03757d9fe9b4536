"""The law L = E + A/N^alpha + B/D^beta: its fit, and the compute-optimal split of N and D.

Objective and parametrisation are those of Hoffmann et al. 2022, approach 3: the sum over runs of
Huber(1e-3) of the error of ln L. (The mean instead of the sum stops the optimizer early: the flaw
that Besiroglu et al. 2024 found in the published fit.)
"""

from dataclasses import dataclass
from itertools import product

import numpy as np
from scipy.optimize import minimize, nnls

from megatron_edit.scaling.forms import Array, FitFailed, Form, Law, Points

HUBER_DELTA = 1e-3
OBJECTIVE_SCALE = 1e3
"""The optimum is about 1e-3; unscaled, the relative tolerance of L-BFGS ends the search early."""
GRID_EXPONENTS = (0.0, 0.5, 1.0, 1.5, 2.0)
SMALLEST_SHARE = 0.02
"""Least part of the mean loss that each term has at a start: a term of nothing has no gradient."""
WIDEST_EXPONENT = 4.0
"""Exponents beyond this mean that a term has vanished from the fit."""


@dataclass(frozen=True)
class HoffmannForm(Form):
    """L = E + A/N^alpha + B/D^beta; theta = (ln A, ln B, ln E, alpha, beta)."""

    name = "hoffmann"
    labels = ("A", "B", "E", "alpha", "beta")

    @property
    def formula(self) -> str:
        return "E + A/N^alpha + B/D^beta"

    def varying(self) -> tuple[str, ...]:
        return ("parameters", "tokens")

    def log_loss(self, theta: Array, points: Points) -> Array:
        return _prediction(theta, np.log(points.parameters), np.log(points.tokens))[0]

    def fit(
        self, points: Points, log_loss: Array, weights: Array, start: Array | None = None
    ) -> Array:
        if start is not None:
            return self.fit_from(points, log_loss, weights, start[None], project=False)
        exponents = np.array([(0, 0, 0, *pair) for pair in product(GRID_EXPONENTS, repeat=2)])
        return self.fit_from(points, log_loss, weights, exponents)

    def fit_from(
        self,
        points: Points,
        log_loss: Array,
        weights: Array,
        starts: Array,
        project: bool = True,
    ) -> Array:
        """Returns the best of the optima reached from several starts.

        Args:
            points: Where the runs are.
            log_loss: ln L of the runs.
            weights: Weight of each run.
            starts: One theta per row.
            project: Keep only the exponents of each start and take A, B, E from a non-negative
                least squares at these exponents, in which the law is linear. From such starts
                L-BFGS always arrives at the same optimum; from Hoffmann's own it often ends where
                one of the terms is zero.

        Raises:
            FitFailed: No start reaches an optimum in which all three terms live.
        """
        found = self.optima(points, log_loss, weights, starts, project)
        value, theta = min(found, key=lambda pair: pair[0])
        if not np.isfinite(value) or np.abs(theta[3:]).max() > WIDEST_EXPONENT:
            raise FitFailed("no optimum with finite exponents")
        return theta

    def optima(
        self,
        points: Points,
        log_loss: Array,
        weights: Array,
        starts: Array,
        project: bool = True,
    ) -> list[tuple[float, Array]]:
        """Returns objective and theta that L-BFGS reaches from each start."""
        x, y = np.log(points.parameters), np.log(points.tokens)
        # Centred, ln A no longer trades off against alpha (nor ln B against beta).
        centre = np.array([x.mean(), y.mean()])
        x, y = x - centre[0], y - centre[1]
        found = []
        for theta in starts:
            start = _shift(theta, centre)
            if project:
                start = _project(x, y, log_loss, weights, theta[3], theta[4])
            result = minimize(
                _objective,
                start,
                args=(x, y, log_loss, weights),
                jac=True,
                method="L-BFGS-B",
                options={"ftol": 1e-15, "gtol": 1e-9, "maxiter": 3000, "maxfun": 6000},
            )
            found.append((float(result.fun) / OBJECTIVE_SCALE, _shift(result.x, -centre)))
        return found

    def readable(self, theta: Array) -> Array:
        return np.concatenate([np.exp(theta[:3]), theta[3:]])


def _prediction(theta: Array, x: Array, y: Array) -> tuple[Array, Array]:
    """Returns ln L, and the share of each of the three terms in L, shape [3, runs]."""
    a, b, e, alpha, beta = theta
    terms = np.stack([a - alpha * x, b - beta * y, np.full_like(x, e)])
    largest = terms.max(axis=0)
    shares = np.exp(terms - largest)
    total = shares.sum(axis=0)
    return largest + np.log(total), shares / total


def _objective(
    theta: Array, x: Array, y: Array, log_loss: Array, weights: Array
) -> tuple[float, Array]:
    """Returns the scaled objective and its gradient with respect to theta."""
    predicted, shares = _prediction(theta, x, y)
    error = predicted - log_loss
    size = np.abs(error)
    huber = np.where(size <= HUBER_DELTA, 0.5 * error**2, HUBER_DELTA * (size - 0.5 * HUBER_DELTA))
    slope = weights * np.clip(error, -HUBER_DELTA, HUBER_DELTA)
    by_term = shares * slope
    gradient = np.concatenate(
        [by_term.sum(axis=1), [-(by_term[0] * x).sum(), -(by_term[1] * y).sum()]]
    )
    return OBJECTIVE_SCALE * float((weights * huber).sum()), OBJECTIVE_SCALE * gradient


def _shift(theta: Array, centre: Array) -> Array:
    """Returns theta for variables from which the centre has been subtracted."""
    a, b, e, alpha, beta = theta
    return np.array([a - alpha * centre[0], b - beta * centre[1], e, alpha, beta])


def _project(
    x: Array, y: Array, log_loss: Array, weights: Array, alpha: float, beta: float
) -> Array:
    """Returns theta at given exponents with A, B, E by non-negative least squares of L."""
    # Dividing by the loss makes the residuals relative, which is what errors of ln L are.
    scale = np.sqrt(weights) * np.exp(-log_loss)
    design = np.stack([np.exp(-alpha * x), np.exp(-beta * y), np.ones_like(x)], axis=1)
    coefficients, _ = nnls(design * scale[:, None], np.sqrt(weights))
    floor = SMALLEST_SHARE * float(np.exp(log_loss.mean()))
    return np.array([*np.log(np.maximum(coefficients, floor)), alpha, beta])


@dataclass(frozen=True)
class Split:
    """How to spend a compute budget.

    Attributes:
        compute: C = 6 N D in FLOP.
        parameters: N*, the best number of parameters.
        tokens: D*, the best number of tokens.
        loss: Loss predicted there, in nats.
    """

    compute: float
    parameters: float
    tokens: float
    loss: float


def optimal_split(law: Law, compute: float) -> Split:
    """Returns the compute-optimal N and D of a law of Hoffmann's form.

    G = (alpha A / (beta B))^(1/(alpha+beta)), N* = G (C/6)^(beta/(alpha+beta)),
    D* = (C/6)^(alpha/(alpha+beta)) / G (Hoffmann et al. 2022, equation 4).

    Args:
        law: A law of HoffmannForm.
        compute: Budget C in FLOP.
    """
    a, b, _, alpha, beta = law.theta
    total = alpha + beta
    log_g = (np.log(alpha) + a - np.log(beta) - b) / total
    log_budget = np.log(compute / 6.0)
    parameters = float(np.exp(log_g + beta / total * log_budget))
    tokens = float(np.exp(alpha / total * log_budget - log_g))
    return Split(compute, parameters, tokens, float(law.loss(parameters, tokens)[0]))
