"""The forms a scaling law can take, and how each is fitted to runs with weights.

A form is a family of curves; a law is a form with its parameters. All fits minimise errors of
ln L, and all take one weight per run, so that a bootstrap resample is a vector of counts.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import least_squares

from megatron_edit.errors import ConfigurationError, unknown_name

Array = NDArray[np.float64]

VARIABLES = {"parameters": "N", "tokens": "D", "compute": "C"}
"""What a law of one variable may depend on, and its letter."""


class FitFailed(ArithmeticError):
    """The runs do not determine the law's parameters."""


@dataclass(frozen=True)
class Points:
    """Where a law is evaluated: one entry per run.

    Attributes:
        parameters: N, model parameters.
        tokens: D, training tokens over all replicas.
        replicas: M (or R), replicas; 1 for synchronous training.
    """

    parameters: Array
    tokens: Array
    replicas: Array

    @staticmethod
    def of(parameters: ArrayLike, tokens: ArrayLike, replicas: ArrayLike = 1.0) -> "Points":
        """Returns points from numbers or arrays that broadcast together."""
        n, d, m = np.broadcast_arrays(
            np.atleast_1d(np.asarray(parameters, float)),
            np.asarray(tokens, float),
            np.asarray(replicas, float),
        )
        return Points(n, d, m)

    def variable(self, name: str) -> Array:
        """Returns N, D, or C = 6 N D FLOP by its name in VARIABLES."""
        if name == "compute":
            return 6.0 * self.parameters * self.tokens
        if name not in VARIABLES:
            raise unknown_name("--variable", name, VARIABLES)
        return self.tokens if name == "tokens" else self.parameters

    def __len__(self) -> int:
        return len(self.parameters)

    def take(self, index: NDArray[np.intp] | NDArray[np.bool_]) -> "Points":
        """Returns the points at an index or mask."""
        return Points(self.parameters[index], self.tokens[index], self.replicas[index])


@dataclass(frozen=True)
class Form(ABC):
    """A family of laws L(N, D, M) with parameters theta."""

    name: ClassVar[str]
    labels: ClassVar[tuple[str, ...]]
    """What the values of `readable` are called."""

    @property
    @abstractmethod
    def formula(self) -> str:
        """The formula as text."""

    @abstractmethod
    def log_loss(self, theta: Array, points: Points) -> Array:
        """Returns the predicted ln L at the points."""

    @abstractmethod
    def fit(
        self, points: Points, log_loss: Array, weights: Array, start: Array | None = None
    ) -> Array:
        """Returns the parameters with the smallest weighted error of ln L.

        Args:
            points: Where the runs are.
            log_loss: ln L of the runs, L in nats.
            weights: Weight of each run, 0 or more.
            start: Parameters to start from, where the fit is iterative.

        Raises:
            FitFailed: The weighted runs do not determine the parameters.
        """

    @abstractmethod
    def readable(self, theta: Array) -> Array:
        """Returns the parameters as the formula writes them, one per label."""

    def varying(self) -> tuple[str, ...]:
        """Returns the columns that must take at least two values."""
        return ("parameters",)

    def check(self, points: Points) -> None:
        """Refuses runs that cannot determine this form.

        Raises:
            ConfigurationError: Fewer runs than parameters, or a column that never changes.
        """
        for column in self.varying():
            values = np.unique(points.variable(column) if column != "replicas" else points.replicas)
            if len(values) < 2:
                what = {"parameters": "model size", "tokens": "token count"}.get(column, "value")
                raise ConfigurationError(
                    f"column {column}: one {what} only ({values[0]:g}); {self.formula} needs at "
                    "least two, add runs or choose another --form"
                )
        if len(points) < len(self.labels):
            raise ConfigurationError(
                f"{len(points)} runs are fewer than the {len(self.labels)} parameters of "
                f"{self.formula}; add runs or choose a simpler --form"
            )


def _weighted_lstsq(columns: list[Array], target: Array, weights: Array) -> Array:
    """Returns weighted least-squares coefficients; refuses a rank-deficient design."""
    root = np.sqrt(weights)
    design = np.stack(columns, axis=1) * root[:, None]
    solution, _, rank, _ = np.linalg.lstsq(design, target * root, rcond=1e-10)
    if rank < design.shape[1]:
        raise FitFailed("the runs do not tell the parameters apart")
    return np.asarray(solution)


@dataclass(frozen=True)
class PowerForm(Form):
    """L = A x^a of one variable x; theta = (ln A, a)."""

    name = "power"
    over: str = "parameters"
    """The variable x, a key of VARIABLES."""
    labels = ("A", "a")

    @property
    def formula(self) -> str:
        return f"A {VARIABLES[self.over]}^a"

    def varying(self) -> tuple[str, ...]:
        return (self.over,)

    def log_loss(self, theta: Array, points: Points) -> Array:
        return np.asarray(theta[0] + theta[1] * np.log(points.variable(self.over)))

    def fit(
        self, points: Points, log_loss: Array, weights: Array, start: Array | None = None
    ) -> Array:
        x = np.log(points.variable(self.over))
        return _weighted_lstsq([np.ones_like(x), x], log_loss, weights)

    def readable(self, theta: Array) -> Array:
        return np.array([np.exp(theta[0]), theta[1]])


@dataclass(frozen=True)
class ReplicaForm(Form):
    """L = A x^a M^b, M replicas; theta = (ln A, a, b)."""

    name = "replicas"
    over: str = "parameters"
    """The variable x, a key of VARIABLES."""
    labels = ("A", "a", "b")

    @property
    def formula(self) -> str:
        return f"A {VARIABLES[self.over]}^a M^b"

    def varying(self) -> tuple[str, ...]:
        return (self.over, "replicas")

    def log_loss(self, theta: Array, points: Points) -> Array:
        x, m = np.log(points.variable(self.over)), np.log(points.replicas)
        return np.asarray(theta[0] + theta[1] * x + theta[2] * m)

    def fit(
        self, points: Points, log_loss: Array, weights: Array, start: Array | None = None
    ) -> Array:
        x, m = np.log(points.variable(self.over)), np.log(points.replicas)
        return _weighted_lstsq([np.ones_like(x), x, m], log_loss, weights)

    def readable(self, theta: Array) -> Array:
        return np.array([np.exp(theta[0]), theta[1], theta[2]])


@dataclass(frozen=True)
class OffsetForm(Form):
    """L = A x^a + C of one variable x; theta = (ln A, a, ln C)."""

    name = "offset"
    over: str = "parameters"
    """The variable x, a key of VARIABLES."""
    labels = ("A", "a", "C")

    @property
    def formula(self) -> str:
        return f"A {VARIABLES[self.over]}^a + C"

    def varying(self) -> tuple[str, ...]:
        return (self.over,)

    def log_loss(self, theta: Array, points: Points) -> Array:
        return _sum_of_two(theta, np.log(points.variable(self.over)))

    def fit(
        self, points: Points, log_loss: Array, weights: Array, start: Array | None = None
    ) -> Array:
        x = np.log(points.variable(self.over))
        if len(np.unique(x[weights > 0])) < len(self.labels):
            raise FitFailed("A x^a + C needs three values of x")
        # With x centred, ln A and a are nearly independent and the search is well conditioned.
        centre = float(x.mean())
        x = x - centre
        root = np.sqrt(weights)

        def residuals(theta: Array) -> Array:
            return np.asarray(root * (_sum_of_two(theta, x) - log_loss))

        def jacobian(theta: Array) -> Array:
            share = np.exp(theta[0] + theta[1] * x - _sum_of_two(theta, x))
            return np.asarray(root[:, None] * np.stack([share, share * x, 1 - share], axis=1))

        shift = np.array([centre, 0.0, 0.0])
        if start is None:
            starts = _offset_starts(x, log_loss, weights)
        else:
            starts = [start + start[1] * shift]
        found = [least_squares(residuals, s, jac=jacobian, method="lm") for s in starts]
        best = np.asarray(min(found, key=lambda result: result.cost).x)
        if not np.isfinite(best).all():
            raise FitFailed("A x^a + C has no finite optimum")
        return best - best[1] * shift

    def readable(self, theta: Array) -> Array:
        return np.array([np.exp(theta[0]), theta[1], np.exp(theta[2])])


def _sum_of_two(theta: Array, x: Array) -> Array:
    """Returns ln(A e^(a x) + C) for theta = (ln A, a, ln C)."""
    return np.logaddexp(theta[0] + theta[1] * x, theta[2])


def _offset_starts(x: Array, log_loss: Array, weights: Array) -> list[Array]:
    """Returns log-linear fits of L - C for several C below the smallest loss."""
    loss = np.exp(log_loss)
    starts = []
    for share in (0.05, 0.3, 0.6, 0.9):
        offset = share * loss.min()
        line = _weighted_lstsq([np.ones_like(x), x], np.log(loss - offset), weights)
        starts.append(np.array([*line, np.log(offset)]))
    return starts


@dataclass(frozen=True)
class Law:
    """A form with its parameters.

    Attributes:
        form: The family.
        theta: Its internal parameters.
    """

    form: Form
    theta: Array

    def loss(
        self, parameters: ArrayLike, tokens: ArrayLike = 1.0, replicas: ArrayLike = 1.0
    ) -> Array:
        """Returns the loss in nats at N parameters, D tokens and M replicas."""
        points = Points.of(parameters, tokens, replicas)
        return np.asarray(np.exp(self.form.log_loss(self.theta, points)))

    def values(self) -> dict[str, float]:
        """Returns the parameters by the names in the formula."""
        numbers = self.form.readable(self.theta)
        return dict(zip(self.form.labels, map(float, numbers), strict=True))
