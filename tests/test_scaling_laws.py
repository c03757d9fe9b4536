"""Laws: published predictions, fits to the published table, recovery of known laws, intervals."""

from itertools import product

import numpy as np
import pytest
from literature import DILOCO_EXTRAPOLATION, HOFFMANN_UNROUNDED, diloco_runs
from scipy.optimize import check_grad

from megatron_edit.errors import ConfigurationError
from megatron_edit.scaling import hoffmann, published
from megatron_edit.scaling.compare import compare
from megatron_edit.scaling.fit import (
    choose_form,
    collinearity,
    curvature_note,
    extrapolation_warnings,
    fit_runs,
)
from megatron_edit.scaling.forms import (
    FitFailed,
    Law,
    OffsetForm,
    Points,
    PowerForm,
    ReplicaForm,
)
from megatron_edit.scaling.hoffmann import HoffmannForm, optimal_split
from megatron_edit.scaling.published import (
    DILOCO_FITS,
    DILOCO_JOINT,
    EPOCH,
    HOFFMANN_ROUNDED,
)
from megatron_edit.scaling.runs import Run, Table, groups
from megatron_edit.scaling.synthetic import covered, synthetic_runs

NOISE = 5e-4
"""Of ln L; half the Huber threshold."""


def diloco() -> dict[str, list[Run]]:
    """Returns the published table by column."""
    parts = groups([Run(*row) for row in diloco_runs()], by_replicas=True)
    return {"DP" if k == "sync" else "M" + k.split("=")[1]: v for k, v in parts.items()}


@pytest.mark.parametrize(
    ("law", "loss", "ratio"),
    [
        (HOFFMANN_ROUNDED, 1.936645, 92.83),
        (HOFFMANN_UNROUNDED, 1.920846, 59.04),
        (EPOCH, 1.973582, 18.38),
    ],
)
def test_published_predictions_and_splits(law: Law, loss: float, ratio: float) -> None:
    assert law.loss(70e9, 1.4e12)[0] == pytest.approx(loss, abs=1e-6)
    split = optimal_split(law, 5.88e23)
    assert split.tokens / split.parameters == pytest.approx(ratio, abs=0.006)
    assert 6 * split.parameters * split.tokens == pytest.approx(5.88e23)
    for factor in (0.9, 1.1):
        n = split.parameters * factor
        assert law.loss(n, 5.88e23 / 6 / n)[0] > split.loss


@pytest.mark.parametrize(
    ("column", "coefficient", "exponent"),
    [
        ("DP", 18.1704, -0.095389),
        ("M1", 18.3835, -0.096116),
        ("M2", 18.7989, -0.097003),
        ("M4", 19.7856, -0.099243),
        ("M8", 21.0839, -0.101870),
    ],
)
def test_regression_of_the_diloco_table(column: str, coefficient: float, exponent: float) -> None:
    values = fit_runs(diloco()[column], PowerForm(), resamples=20).law.values()
    assert values["A"] == pytest.approx(coefficient, abs=1e-4)
    assert values["a"] == pytest.approx(exponent, abs=1e-6)
    printed = DILOCO_FITS[column].values()
    assert values["A"] == pytest.approx(printed["A"], rel=3e-3)
    assert values["a"] == pytest.approx(printed["a"], abs=1.1e-4)


def test_joint_regression_of_the_diloco_table() -> None:
    runs = [run for name, part in diloco().items() if name != "DP" for run in part]
    values = fit_runs(runs, ReplicaForm(), resamples=20).law.values()
    assert values["A"] == pytest.approx(19.2517, abs=1e-4)
    assert values["a"] == pytest.approx(-0.098558, abs=1e-6)
    assert values["b"] == pytest.approx(0.011618, abs=1e-6)
    printed = DILOCO_JOINT.values()
    assert values["A"] == pytest.approx(printed["A"], rel=3e-3)
    assert values["b"] == pytest.approx(printed["b"], abs=1e-4)


def test_only_the_offset_form_reaches_the_measured_large_models() -> None:
    power = fit_runs(diloco()["DP"], PowerForm(), resamples=200)
    offset = fit_runs(diloco()["DP"], OffsetForm(), resamples=200)
    for size, measured in DILOCO_EXTRAPOLATION.items():
        point = Points.of(size, 20 * size)
        assert power.predict(point).law.high < measured[0]
        found = offset.predict(point).run
        assert found.low <= measured[0] <= found.high
    assert "try --form offset" in (curvature_note(power) or "")
    assert curvature_note(offset) is None


def test_hyper_parameter_laws() -> None:
    assert published.diloco_inner_lr(1e9, 1) == pytest.approx(22256 * 1e9**-0.8827)
    assert published.diloco_inner_lr(1e9, 8) / published.diloco_inner_lr(1e9, 1) == pytest.approx(
        8**0.2929
    )
    assert published.diloco_batch_tokens(2.4e9, 2) == pytest.approx(
        14.521 * 2.4e9**0.4695 * 2**0.3399
    )


def test_gradient_of_the_hoffmann_objective() -> None:
    table = Table.of(synthetic_runs(EPOCH, 3e-3, 0, 40))
    x, y = np.log(table.points.parameters), np.log(table.points.tokens)
    args = (x - x.mean(), y - y.mean(), table.log_loss, np.ones(40))
    theta = np.array([0.1, -0.4, 0.5, 0.3, 0.4])

    def value(theta: np.ndarray) -> float:
        return hoffmann._objective(theta, *args)[0]

    def gradient(theta: np.ndarray) -> np.ndarray:
        return hoffmann._objective(theta, *args)[1]

    assert check_grad(value, gradient, theta) < 1e-3 * np.linalg.norm(gradient(theta))


@pytest.mark.parametrize("law", [EPOCH, HOFFMANN_ROUNDED], ids=["epoch", "hoffmann"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_fit_recovers_a_known_law(law: Law, seed: int) -> None:
    table = Table.of(synthetic_runs(law, NOISE, seed))
    theta = HoffmannForm().fit(table.points, table.log_loss, np.ones(len(table)))
    found, true = Law(HoffmannForm(), theta).values(), law.values()
    limits = {"A": 0.02, "B": 0.02, "E": 0.002, "alpha": 0.01, "beta": 0.01}
    for name, limit in limits.items():
        assert found[name] == pytest.approx(true[name], rel=limit), name


def hoffmann_grid() -> np.ndarray:
    """The 4,500 starts of Hoffmann et al. 2022, one theta per row."""
    coefficients, constant = (0.0, 5.0, 10.0, 15.0, 20.0, 25.0), (-1.0, -0.5, 0.0, 0.5, 1.0)
    exponents = hoffmann.GRID_EXPONENTS
    return np.array(list(product(coefficients, coefficients, constant, exponents, exponents)))


def objective(theta: np.ndarray, points: Points, log_loss: np.ndarray) -> float:
    """The sum over runs of Huber(1e-3) of the error of ln L."""
    x, y = np.log(points.parameters), np.log(points.tokens)
    scaled, _ = hoffmann._objective(theta, x, y, log_loss, np.ones_like(x))
    return scaled / hoffmann.OBJECTIVE_SCALE


def test_fifty_random_starts_reach_one_optimum() -> None:
    table = Table.of(synthetic_runs(EPOCH, NOISE, 3))
    rng = np.random.default_rng(0)
    low, high = [0, 0, -1, 0, 0], [25, 25, 1, 2, 2]
    starts = rng.uniform(low, high, size=(50, 5))
    form, ones = HoffmannForm(), np.ones(len(table))
    found = form.optima(table.points, table.log_loss, ones, starts)
    values = np.array([value for value, _ in found])
    thetas = np.array([theta for _, theta in found])
    assert values.max() / values.min() - 1 < 1e-9
    assert np.ptp(thetas, axis=0).max() < 1e-5
    # Hoffmann's own starts, some of them: none is better, and the best of them is the same.
    grid = rng.permutation(hoffmann_grid())[:40]
    own = form.optima(table.points, table.log_loss, ones, grid, project=False)
    assert min(value for value, _ in own) == pytest.approx(values.min(), rel=1e-9)
    assert objective(thetas[0], table.points, table.log_loss) == pytest.approx(values[0])


def test_hoffmann_grid_is_the_published_one() -> None:
    assert hoffmann_grid().shape == (4500, 5)


def test_intervals_cover_the_truth() -> None:
    """A short form of `python -m megatron_edit.scaling.synthetic`, which repeats 100 times."""
    hits = [
        sum(covered(fit_runs(synthetic_runs(EPOCH, 1e-3, s), EPOCH.form, 50, s), EPOCH).values())
        for s in range(4)
    ]
    assert sum(hits) >= 16, hits


def test_offset_form_recovers_a_known_law() -> None:
    n = np.geomspace(1e7, 1e10, 30)
    noise = np.random.default_rng(0).normal(0, 1e-3, 30)
    losses = (60 * n**-0.2 + 1.7) * np.exp(noise)
    runs = [Run("sync", 1, a, 20 * a, b) for a, b in zip(n, losses, strict=True)]
    values = fit_runs(runs, OffsetForm(), resamples=50).values()
    assert values["C"].low < 1.7 < values["C"].high
    assert values["a"].value == pytest.approx(-0.2, abs=0.01)


def test_collinear_runs_fall_back_and_say_so() -> None:
    points = Table.of(diloco()["DP"]).points
    assert collinearity(points) == pytest.approx(1.0)
    for wanted in ("auto", "hoffmann"):
        form, notes = choose_form(wanted, "parameters", points)
        assert isinstance(form, PowerForm)
        assert "collinear" in notes[0]
    free = Table.of(synthetic_runs(EPOCH, NOISE, 0, 30)).points
    form, notes = choose_form("auto", "parameters", free)
    assert isinstance(form, HoffmannForm)
    assert not notes


@pytest.mark.parametrize(
    ("runs", "form", "message"),
    [
        ([Run("sync", 1, 1e8, 2e9, 3.0)] * 4, PowerForm(), "one model size only"),
        (synthetic_runs(EPOCH, 0, 0, 4), HoffmannForm(), "4 runs are fewer than the 5 parameters"),
        (diloco()["DP"], ReplicaForm(), "column replicas: one value only"),
        (
            [Run("sync", 1, n, 1e9, 3 - n / 1e9) for n in (1e7, 2e7, 4e7, 8e7, 16e7)],
            HoffmannForm(),
            "one token count only",
        ),
    ],
)
def test_runs_that_do_not_determine_a_law(runs: list[Run], form: PowerForm, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        fit_runs(runs, form, resamples=10)


def test_degenerate_resamples_are_counted() -> None:
    runs = diloco()["DP"][:2]
    fit = fit_runs(runs, PowerForm(), resamples=200)
    # Half of all draws of two from two are the same run twice.
    assert 60 < fit.failures < 140
    assert len(fit.samples) == 200 - fit.failures


def test_an_offset_needs_three_sizes() -> None:
    table = Table.of(diloco()["DP"])
    weights = np.array([1.0, 2.0, 0, 0, 0, 0, 0])
    with pytest.raises(FitFailed, match="three values"):
        OffsetForm().fit(table.points, table.log_loss, weights)


@pytest.mark.parametrize(
    ("point", "words"),
    [
        (Points.of(4e9, 8e10), []),
        (Points.of(30e9, 20e9), ["parameters 3e+10"]),
        (Points.of(1e9, 1e12), ["tokens 1e+12"]),
        (Points.of(1e9, 2e10, 16), ["16 replicas"]),
    ],
)
def test_extrapolation_is_warned_about(point: Points, words: list[str]) -> None:
    seen = Points.of([35e6, 2.4e9], [7e8, 4.8e10], 8)
    found = extrapolation_warnings(point, seen)
    assert bool(found) == bool(words)
    for word in words:
        assert any(word in text for text in found)


def test_paired_comparison_on_the_published_table() -> None:
    columns = diloco()
    changes = {}
    for name in ("M1", "M2", "M4", "M8"):
        found = compare(columns[name], columns["DP"], PowerForm(), resamples=300)
        changes[name] = found.change.value
        assert found.differs
        assert found.pairs == 7
        assert found.p_sign_flip >= 2**-6
    assert changes["M1"] < 0 < changes["M2"] < changes["M4"] < changes["M8"]
    better = compare(columns["M1"], columns["DP"], PowerForm(), resamples=300)
    assert "better" in better.verdict()
    assert better.parameters["a"].value == pytest.approx(-0.000727, abs=1e-6)


def test_paired_comparison_finds_nothing_where_there_is_nothing() -> None:
    wrong = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        base = diloco()["DP"]
        alike = [
            Run("edit", 2, r.parameters, r.tokens, r.loss * np.exp(e))
            for r, e in zip(base, rng.normal(0, 0.003, len(base)), strict=True)
        ]
        wrong += compare(alike, base, PowerForm(), resamples=100, seed=seed).differs
    assert wrong <= 6


def test_few_pairs_never_count_as_a_difference() -> None:
    columns = diloco()
    found = compare(columns["M8"][:4], columns["DP"], PowerForm(), resamples=200)
    assert found.p_value < 0.05
    assert not found.differs
    assert "too few" in found.verdict()
    with pytest.raises(ConfigurationError, match="2 pairs"):
        compare(columns["M8"][:2], columns["DP"], PowerForm())
