"""Pictures of fitted laws: data, fit with interval, residuals, and the difference to sync."""

from collections.abc import Mapping

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_edit.scaling.compare import Comparison
from megatron_edit.scaling.fit import Fit
from megatron_edit.scaling.forms import Array, Points

MARKERS = "osD^vP*X"
AXIS_NAMES = {
    "parameters": "parameters N",
    "tokens": "tokens D",
    "compute": "compute C = 6 N D, FLOP",
}


def law_figure(fits: Mapping[str, Fit], comparisons: Mapping[str, Comparison], over: str) -> Figure:
    """Returns three panels: laws with data, residuals, and the change against sync.

    Args:
        fits: Fit of each group of runs.
        comparisons: Comparison of each group that has one.
        over: Variable of the x axis, a key of AXIS_NAMES.
    """
    figure = Figure(figsize=(13, 4.4), layout="constrained")
    data, residuals, change = figure.subplots(1, 3)
    colours = matplotlib.colormaps["viridis"](np.linspace(0.0, 0.9, len(fits)))
    style = {
        name: (colour, MARKERS[i % len(MARKERS)])
        for i, (name, colour) in enumerate(zip(fits, colours, strict=True))
    }
    for name, fit in fits.items():
        _draw_fit(data, residuals, name, fit, over, *style[name])
    data.set(xlabel=AXIS_NAMES[over], ylabel="loss, nats", title="runs, laws, 95 % intervals")
    data.set_xscale("log")
    data.legend(fontsize=8)
    data.grid(alpha=0.3, which="both")
    residuals.axhline(0, color="grey", linewidth=0.8)
    residuals.set_xscale("log")
    residuals.set(xlabel=AXIS_NAMES[over], ylabel="loss against the law, %", title="residuals")
    residuals.grid(alpha=0.3)
    _draw_changes(change, comparisons, {name: style[name] for name in comparisons})
    return figure


def _draw_fit(
    data: Axes, residuals: Axes, name: str, fit: Fit, over: str, colour: Array, marker: str
) -> None:
    points = fit.table.points
    x = points.variable(over)
    data.plot(
        x,
        np.exp(fit.table.log_loss),
        marker,
        color=colour,
        markersize=4.5,
        label=f"{name}: {fit.law.form.formula}",
    )
    residuals.plot(x, 100 * np.expm1(fit.residuals), marker, color=colour, markersize=4.5)
    for line in _lines(points, over):
        value, low, high = fit.curve(line)
        data.plot(line.variable(over), value, color=colour, linewidth=1)
        data.fill_between(line.variable(over), low, high, color=colour, alpha=0.2, linewidth=0)


def _lines(points: Points, over: str) -> list[Points]:
    """Returns paths through the runs: for each token count (or size) one, as far as it reaches."""
    x = points.variable(over)
    other = points.tokens if over == "parameters" else points.parameters
    collinear = len(np.unique(other)) == len(np.unique(x))
    masks = [np.full(len(x), True)] if collinear else [other == v for v in np.unique(other)]
    parts = [points.take(mask) for mask in masks]
    return [_path(part, over) for part in parts if len(np.unique(part.variable(over))) > 1]


def _path(part: Points, over: str) -> Points:
    """Returns a finer grid along some runs, log-linear between them."""
    x = np.log(part.variable(over))
    order = np.argsort(x)
    grid = np.linspace(x.min(), x.max(), 40)
    columns = (part.parameters, part.tokens, part.replicas)
    return Points(*(np.exp(np.interp(grid, x[order], np.log(c)[order])) for c in columns))


def _draw_changes(
    axes: Axes, comparisons: Mapping[str, Comparison], style: Mapping[str, tuple[Array, str]]
) -> None:
    """Draws L_method / L_sync - 1 by size, and its mean with interval at the right edge."""
    axes.axhline(0, color="grey", linewidth=0.8)
    if not comparisons:
        axes.text(0.5, 0.5, "nothing to compare", ha="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    sizes = [n for c in comparisons.values() for n, _, _ in c.by_size]
    edge = max(sizes) * (max(sizes) / min(sizes)) ** 0.12
    step = (max(sizes) / min(sizes)) ** 0.035
    for i, (name, found) in enumerate(comparisons.items()):
        colour, marker = style[name]
        x = [n for n, _, _ in found.by_size]
        y = [100 * change for _, _, change in found.by_size]
        axes.plot(x, y, marker, color=colour, markersize=4.5, label=name)
        mean = found.change
        axes.errorbar(
            edge * step**i,
            100 * mean.value,
            yerr=[[100 * (mean.value - mean.low)], [100 * (mean.high - mean.value)]],
            color=colour,
            fmt=marker,
            capsize=3,
            markersize=6,
        )
    axes.set_xscale("log")
    axes.set(
        xlabel="parameters N",
        ylabel="loss against synchronous, %",
        title="change at equal N and D (right: mean, 95 %)",
    )
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
