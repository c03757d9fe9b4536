"""Pictures of plans. Laws have theirs in `law_plots`, simulated runs in `timeline`."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron_edit.errors import ConfigurationError
from megatron_edit.scaling.cluster import Cluster
from megatron_edit.scaling.edge import EdgePlan
from megatron_edit.scaling.planner import Plan, Planner, Setting
from megatron_edit.scaling.topology import bottleneck_gbps

PLAIN, RECOMMENDED, EXTRA, SYNC = "#4c78a8", "#2f8f4e", "#f2cf5b", "#e45756"
ENCODING_COLOURS = {"none": SYNC, "bf16": PLAIN, "int8": RECOMMENDED}
CUT = 5.0
"""Bars of days to equal loss are cut at this multiple of the days at equal tokens."""


def save(figure: Figure, path: Path) -> None:
    """Writes a picture.

    Raises:
        ConfigurationError: The file cannot be written, or its ending is no picture format.
    """
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--plot {path}: cannot be written ({error})") from None


def plan_figure(
    planner: Planner, plans: Sequence[Plan], chosen: Plan, bars: Sequence[Plan]
) -> Figure:
    """Returns utilisation against the slow link's bandwidth, and days of the settings to compare.

    Args:
        planner: Evaluates the layout at other bandwidths.
        plans: All plans; those of the layout on the left give the curves.
        chosen: The plan that is recommended.
        bars: Plans to compare by days.
    """
    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    layout = _widest_layout(plans, chosen)
    _utilisation_curves(left, planner, plans, layout)
    _day_bars(right, bars, chosen)
    figure.suptitle(planner.cluster.name)
    return figure


def _widest_layout(plans: Sequence[Plan], chosen: Plan) -> Setting:
    """Returns a setting of the chosen layout, or of the one with most replicas if that has one."""
    if chosen.setting.layout.replicas > 1:
        return chosen.setting
    return max((p.setting for p in plans), key=lambda setting: setting.layout.replicas)


def _utilisation_curves(
    axes: Axes, planner: Planner, plans: Sequence[Plan], shown: Setting
) -> None:
    """Draws u by bandwidth of sync and of plain rounds of each length, from the closed form."""
    layout = shown.layout
    several = len(layout.sites) > 1
    plain = [
        p
        for p in plans
        if p.setting.layout == layout
        and p.setting.method in ("sync", "edit")
        and p.setting.delay == 0
        and p.setting.compression == "none"
    ]
    rates = np.logspace(-1, 3, 120)
    colours = matplotlib.colormaps["viridis"](np.linspace(0.85, 0.0, max(len(plain) - 1, 1)))
    for plan in plain:
        values = [100 * u for u in planner.utilisation_by_rate(plan, rates)]
        sync = plan.setting.method == "sync"
        colour = SYNC if sync else colours[plain.index(plan) - 1]
        label = "sync" if sync else f"H={plan.setting.interval}"
        axes.semilogx(rates, values, color=colour, label=label)
    given = bottleneck_gbps(layout)
    axes.axvline(given, color="grey", linestyle="--", linewidth=1)
    axes.annotate(
        f" yours: {given:g}",
        (given, 3),
        color="grey",
        fontsize=9,
        ha="left" if given < 100 else "right",
    )
    where = "between the sites" if several else "of a node"
    axes.set(
        xlabel=f"bandwidth {where}, Gbit/s",
        ylabel="utilisation, %",
        ylim=(0, 103),
        title=f"{layout.label}, no delay, no compression",
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4)


def _day_bars(axes: Axes, bars: Sequence[Plan], chosen: Plan) -> None:
    """Draws days at equal tokens, and what must be added to reach the same loss."""
    labels = [plan.setting.label for plan in bars]
    place = np.arange(len(bars))[::-1]
    days = np.array([plan.days for plan in bars])
    extra = np.array([max(0.0, min(p.equal_loss_days, CUT * p.days) - p.days) for p in bars])
    colours = [PLAIN if plan is not chosen else RECOMMENDED for plan in bars]
    axes.barh(place, days, color=colours, height=0.65)
    axes.barh(place, extra, left=days, color=EXTRA, height=0.65)
    axes.set_yticks(place, labels, fontsize=8)
    for y, plan, total in zip(place, bars, days + extra, strict=True):
        shown = plan.equal_loss_days
        text = f"{shown:.3g}" if np.isfinite(shown) else "never"
        axes.annotate(f" {text}", (total, y), va="center", fontsize=8)
    axes.set(xlabel="days", title="days: equal tokens, and to equal loss")
    axes.set_xlim(0, 1.15 * float((days + extra).max()))
    axes.legend(
        handles=[
            Patch(color=PLAIN, label="equal tokens"),
            Patch(color=RECOMMENDED, label="equal tokens, recommended"),
            Patch(color=EXTRA, label="more tokens to equal loss"),
        ],
        fontsize=8,
        loc="upper center",
        bbox_to_anchor=(0.4, -0.14),
        ncols=3,
    )
    axes.grid(axis="x", alpha=0.3)


def edge_figure(cluster: Cluster, plans: Sequence[EdgePlan], chosen: EdgePlan) -> Figure:
    """Returns where a round's time goes by H, and days with the same H.

    Args:
        cluster: Its name and search.
        plans: All plans.
        chosen: The plan that is recommended.
    """
    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    undelayed = [plan for plan in plans if plan.delay == 0]
    _round_shares(left, undelayed)
    for encoding, colour in ENCODING_COLOURS.items():
        line = [p for p in undelayed if p.compression == encoding and p.interval > 1]
        if line:
            intervals = [p.interval for p in line]
            right.loglog(intervals, [p.days for p in line], "o-", color=colour, label=encoding)
            right.loglog(intervals, [p.equal_loss_days for p in line], "o:", color=colour)
    place = (chosen.interval, chosen.equal_loss_days)
    right.plot(*place, "*", color="black", markersize=13, label="recommended")
    ticks = sorted({p.interval for p in plans if p.interval > 1})
    right.set_xticks(ticks, [str(tick) for tick in ticks])
    right.minorticks_off()
    right.set(
        xlabel="H, inner steps of a round",
        ylabel="days",
        title="days at equal tokens; dotted: to equal loss",
    )
    right.grid(alpha=0.3)
    right.legend(fontsize=8)
    figure.suptitle(cluster.name)
    return figure


def _round_shares(axes: Axes, undelayed: Sequence[EdgePlan]) -> None:
    """Draws compute, upload and download as shares of a round, with the smallest payload."""
    smallest = min(undelayed, key=lambda plan: plan.upload).compression
    shown = [p for p in undelayed if p.compression == smallest or p.interval == 1]
    parts = {
        "compute, slowest device": ([p.compute for p in shown], PLAIN),
        "upload": ([p.upload for p in shown], SYNC),
        "download": ([p.download for p in shown], EXTRA),
    }
    place, bottom = np.arange(len(shown)), np.zeros(len(shown))
    total = np.array([p.compute + p.exposed for p in shown])
    for name, (values, colour) in parts.items():
        share = 100 * np.array(values) / total
        axes.bar(place, share, bottom=bottom, color=colour, label=name)
        bottom += share
    axes.set_xticks(place, ["sync" if p.interval == 1 else f"H={p.interval}" for p in shown])
    axes.set(
        ylabel="share of a round, %",
        ylim=(0, 116),
        title=f"one round, {smallest} (sync: bf16 gradients)",
    )
    axes.legend(fontsize=8, loc="upper center", ncols=3)
