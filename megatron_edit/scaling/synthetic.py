"""Runs with known laws: to check that a fit finds them again, and how often its intervals do.

python -m megatron_edit.scaling.synthetic --noise 0.001
"""

import numpy as np

from megatron_edit.scaling.command import Parser
from megatron_edit.scaling.fit import Fit, fit_runs
from megatron_edit.scaling.forms import Law, Points
from megatron_edit.scaling.published import EPOCH, HOFFMANN_ROUNDED
from megatron_edit.scaling.runs import Run, Table

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
    (small, large), (few, many) = np.log([SIZES, TOKENS])
    n = np.exp(rng.uniform(small, large, count))
    d = np.exp(rng.uniform(few, many, count))
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


def recovery(truth: Law, noise: float, sets: int) -> dict[str, float]:
    """Returns the largest relative error of each parameter over several sets of runs."""
    largest = dict.fromkeys(truth.values(), 0.0)
    for seed in range(sets):
        table = Table.of(synthetic_runs(truth, noise, seed))
        theta = truth.form.fit(table.points, table.log_loss, np.ones(len(table)))
        for name, value in Law(truth.form, theta).values().items():
            error = abs(value / truth.values()[name] - 1.0)
            largest[name] = max(largest[name], error)
    return largest


def main() -> None:
    """Prints errors of the fits, and the coverage of the intervals, which takes minutes."""
    parser = Parser(__doc__)
    parser.add_argument("--noise", type=float, default=1e-3, help="of ln L (0.001)")
    parser.add_argument("--sets", type=int, default=20, help="for the errors (20)")
    parser.add_argument("--repetitions", type=int, default=100, help="for the coverage (100)")
    parser.add_argument("--resamples", type=int, default=200, help="of each bootstrap (200)")
    args = parser.parse_args()
    for name, law in (("Besiroglu", EPOCH), ("Hoffmann", HOFFMANN_ROUNDED)):
        errors = recovery(law, args.noise, args.sets)
        words = ", ".join(f"{label} {100 * error:.2f} %" for label, error in errors.items())
        print(f"{name}, noise {args.noise:g}: largest errors of {args.sets} sets: {words}")
        if args.repetitions:
            hits = coverage(law, args.noise, args.repetitions, args.resamples)
            print(f"{name}: of {args.repetitions} intervals hold the truth: {hits}")


if __name__ == "__main__":
    main()
