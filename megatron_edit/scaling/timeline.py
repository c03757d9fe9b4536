"""Picture of a simulated run: what each replica and the slow link do."""

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron_edit.scaling.scenario import Outcome

KIND_COLOURS = {
    "compute": "#4c78a8",
    "wait": "#f2cf5b",
    "link": "#e45756",
    "lost": "#b279a2",
    "down": "#54545a",
    "transfer": "#72b7b2",
}
KIND_WORDS = {
    "compute": "computes",
    "wait": "waits for replicas",
    "link": "waits for the link",
    "lost": "lost to a failure",
    "down": "under repair",
    "transfer": "link busy",
}
MOST_LANES = 12


def timeline_figure(outcome: Outcome, start: float, end: float) -> Figure:
    """Returns what each replica and the link do between two times.

    Args:
        outcome: A simulated run.
        start: Seconds.
        end: Seconds.
    """
    replicas = min(outcome.scenario.replicas, MOST_LANES)
    figure = Figure(figsize=(11, 1.6 + 0.42 * (replicas + 1)), layout="constrained")
    axes = figure.subplots()
    lanes = [-1, *range(replicas)]
    used: set[str] = set()
    for lane in lanes:
        for kind in KIND_COLOURS:
            spans = [
                (s.start, s.end - s.start)
                for s in outcome.spans
                if s.lane == lane and s.kind == kind and s.end > start and s.start < end
            ]
            if spans:
                used.add(kind)
                axes.broken_barh(
                    spans,
                    (lane - 0.4, 0.8),
                    facecolors=KIND_COLOURS[kind],
                    edgecolor="white",
                    linewidth=0.4,
                )
    axes.set_yticks(lanes, ["link", *(f"replica {i}" for i in range(replicas))])
    axes.invert_yaxis()
    axes.set(
        xlim=(start, end),
        xlabel="seconds",
        title=f"{_summary(outcome)}: utilisation {outcome.utilisation:.1%} of the whole run",
    )
    handles = [Patch(color=KIND_COLOURS[k], label=KIND_WORDS[k]) for k in KIND_COLOURS if k in used]
    figure.legend(handles=handles, ncols=len(handles), loc="outside lower center", fontsize=9)
    return figure


def _summary(outcome: Outcome) -> str:
    """Returns the method and what it was set to, in a few words."""
    scenario = outcome.scenario
    parts = [scenario.method, f"{scenario.replicas} replicas"]
    if scenario.method in ("edit", "streaming"):
        parts.append(f"H = {scenario.interval}")
    if scenario.method == "a_edit":
        parts.append(f"every {scenario.sync_seconds:g} s")
    if scenario.fragments > 1:
        parts.append(f"{scenario.fragments} fragments")
    if scenario.delay:
        parts.append(f"delay {scenario.delay}")
    return ", ".join(parts)
