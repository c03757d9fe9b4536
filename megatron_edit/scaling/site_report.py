"""The plan of one cluster or several as text, JSON and picture."""

import json
import math
from collections.abc import Iterable, Sequence

from matplotlib.figure import Figure

from megatron_edit.scaling.cluster import Cluster, Site
from megatron_edit.scaling.constants import plan_constants
from megatron_edit.scaling.crossover import Verdict, verdict
from megatron_edit.scaling.json_text import columnar
from megatron_edit.scaling.planner import Plan, Planner, best
from megatron_edit.scaling.plots import plan_figure
from megatron_edit.scaling.published import (
    DILOCO_LAWS,
    UTILISATIONS,
    diloco_batch_tokens,
    diloco_inner_lr,
)
from megatron_edit.scaling.tables import constants_table, duration, number, percent, table
from megatron_edit.scaling.trainer_settings import (
    edit_section,
    known_to_trainer,
    megatron_flags,
    refusal,
)


class SiteReport:
    """The plan of one cluster or several.

    Attributes:
        chosen: The best acceptable setting by days to equal loss.
        quickest: The best acceptable setting by days at equal tokens.
        writable: The best setting that the trainer of this version accepts.
    """

    def __init__(
        self, planner: Planner, source: str, measured: str | None = None, link: str = "node_link"
    ) -> None:
        self.planner, self.cluster = planner, planner.cluster
        self.plans = planner.plans()
        acceptable = planner.acceptable(self.plans)
        self.chosen, self.quickest = best(acceptable), best(acceptable, "days")
        self.writable = best(known_to_trainer(acceptable, self._warmup))
        self.verdict = verdict(planner, self.plans)
        self.constants = plan_constants(self.cluster, planner.penalty, source, measured, link)

    @property
    def _warmup(self) -> int:
        return self.cluster.search.warmup_steps

    def edit_section(self) -> dict[str, object]:
        """Returns the section of the best setting that the trainer accepts."""
        return edit_section(self.writable.setting, self._warmup, self.writable.step)

    def flags(self) -> list[str]:
        """Returns the flags of that setting."""
        return megatron_flags(self.cluster, self.writable)

    def shown(self) -> list[Plan]:
        """Returns the plans worth a line: sync and, for each H, plain and best, by set of sites."""
        found: list[Plan] = []
        for sites in _distinct(plan.setting.layout.sites for plan in self.plans):
            here = [p for p in self.plans if p.setting.layout.sites == sites]
            found.append(best([p for p in here if p.setting.method == "sync"], "days"))
            local = [p for p in here if p.setting.method != "sync"]
            for interval in dict.fromkeys(p.setting.interval for p in local):
                same = [p for p in local if p.setting.interval == interval]
                plain = [p for p in same if not p.setting.delay and p.setting.compression == "none"]
                found += dict.fromkeys(best(part) for part in (plain, same) if part)
        found += [*self._by_replicas(), self.quickest, self.chosen, self.writable]
        return list(dict.fromkeys(found))

    def _by_replicas(self) -> list[Plan]:
        """Returns sync and plain rounds of one length on all sites, for each number of replicas."""
        most = max(len(plan.setting.layout.sites) for plan in self.plans)
        chosen = self.chosen.setting
        intervals = self.cluster.search.sync_intervals
        interval = chosen.interval if chosen.method != "sync" else intervals[len(intervals) // 2]
        return [
            plan
            for plan in self.plans
            if len(plan.setting.layout.sites) == most
            and plan.setting.layout.sites[0] == self.cluster.sites[0]
            and plan.setting.interval in (1, interval)
            and not plan.setting.delay
            and plan.setting.compression == "none"
        ]

    def text(self, everything: bool = False) -> str:
        """Returns the plan for people."""
        shown = self.plans if everything else self.shown()
        parts = [
            plan_title(self.cluster),
            _plan_table(shown, self.cluster.assumptions.price_per_gpu_hour),
            "d: delay in steps. Loss: penalty at equal tokens against sync. = loss: days until the "
            "loss\nthat sync reaches. GPU h: at equal tokens, idle GPUs included.",
            "\nSmallest bandwidth of the slow link for a utilisation, Gbit/s\n"
            + _bandwidth_table([p for p in shown if p.setting.layout.replicas > 1]),
            self._recommendation(),
        ]
        if self.verdict:
            parts.append(_verdict_text(self.verdict))
        parts += [self._settings_text(), self._warning_text()]
        parts.append("\nConstants\n" + constants_table(self.constants))
        return "\n".join(part for part in parts if part)

    def _recommendation(self) -> str:
        allowed = percent(self.cluster.search.max_loss_penalty)
        rows = [
            ("soonest at the loss of sync", self.chosen),
            ("soonest at equal tokens", self.quickest),
        ]
        lines = [
            f"  {what}: {p.setting.label}: {duration(p.days)}, {duration(p.equal_loss_days)} to "
            f"equal loss, utilisation {percent(p.utilisation)} %, loss +{percent(p.penalty, 2)} %"
            for what, p in rows
        ]
        search, rho = self.cluster.search, self.cluster.assumptions.sync_share
        if self.chosen.setting.method != "sync":
            share = self.chosen.sync / (self.chosen.setting.interval * self.chosen.step)
            lines.append(
                f"  its synchronisation takes {percent(share)} % of a round: "
                f"{'' if self.chosen.effective else 'not '}effective at rho = {percent(rho)} %"
            )
        head = (
            f"\nBest with a loss penalty of at most {allowed} % and {search.fewest_rounds} rounds"
        )
        return "\n".join([head, *lines])

    def _settings_text(self) -> str:
        lines = ["\nSettings for pretrain_edit.py"]
        wanted = edit_section(self.chosen.setting, self._warmup, self.chosen.step)
        why = refusal(wanted)
        if why is not None:
            lines.append(
                f"  the best setting needs what this trainer does not have ({why}); the best that "
                f"it has is {self.writable.setting.label}: {number(self.writable.equal_loss_days)} "
                "days to equal loss"
            )
        lines.append(f'  "edit": {json.dumps(self.edit_section())}')
        lines += [f"  {flag}" for flag in self.flags()]
        model, replicas = self.cluster.model, self.writable.setting.layout.replicas
        lines.append(
            f"  starting points ({DILOCO_LAWS}): inner lr "
            f"{diloco_inner_lr(model.parameters, replicas):.2g}, batch "
            f"{diloco_batch_tokens(model.parameters, replicas):.2g} tokens "
            f"(yours {model.batch_tokens:.2g})"
        )
        return "\n".join(lines)

    def _warning_text(self) -> str:
        setting = self.chosen.setting
        found = self.planner.penalty.warnings(
            self.cluster.model.parameters, setting.layout.replicas
        )
        if self.chosen.warmup > 0.05 * self.chosen.seconds:
            found.append(
                f"the synchronous warm-up takes {percent(self.chosen.warmup / self.chosen.seconds)}"
                " % of the run: shorten search.warmup_steps"
            )
        return "\n".join(["", *(f"warning: {text}" for text in found)]) if found else ""

    def as_dict(self) -> dict[str, object]:
        """Returns the plan for JSON."""
        compared = None
        if self.verdict:
            compared = {
                "single": self.verdict.single.row(),
                "several": self.verdict.several.row(),
                "several_win": self.verdict.several_win,
                "crossover_gbps": [
                    {"setting": c.setting.label, "gbps": c.gbps} for c in self.verdict.crossovers
                ],
            }
        return {
            "name": self.cluster.name,
            "best": self.chosen.row(),
            "best_at_equal_tokens": self.quickest.row(),
            "best_of_this_trainer": self.writable.row(),
            "edit": self.edit_section(),
            "flags": self.flags(),
            "several_clusters": compared,
            "plans": columnar([plan.row() for plan in self.plans]),
            "constants": [constant.as_dict() for constant in self.constants],
        }

    def figure(self) -> Figure:
        """Returns the picture."""
        bars = []
        for sites in _distinct(plan.setting.layout.sites for plan in self.plans):
            here = [p for p in self.plans if p.setting.layout.sites == sites]
            bars.append(best([p for p in here if p.setting.method == "sync"], "days"))
        local = sorted(
            (p for p in self.shown() if p.setting.method != "sync"),
            key=lambda plan: plan.equal_loss_days,
        )
        picked = dict.fromkeys([*bars, self.chosen, *local[:5], self.quickest])
        return plan_figure(self.planner, self.plans, self.chosen, list(picked))


def plan_title(cluster: Cluster) -> str:
    """Returns the name and the model of a plan."""
    model = cluster.model
    return (
        f"{cluster.name}\n{model.parameters:.4g} parameters, {model.tokens:.4g} tokens, "
        f"{model.batch_tokens:.4g} tokens per step "
        f"({math.ceil(model.tokens / model.batch_tokens):,} steps)\n"
    )


def _distinct(site_sets: Iterable[tuple[Site, ...]]) -> list[tuple[Site, ...]]:
    """Returns the sets of sites that differ in more than their names."""
    found: dict[tuple[Site, ...], tuple[Site, ...]] = {}
    for sites in site_sets:
        nameless = tuple(site.model_copy(update={"name": ""}) for site in sites)
        found.setdefault(nameless, sites)
    return list(found.values())


def _plan_table(plans: Sequence[Plan], price: float) -> str:
    header = ["setting", "step s", "sync s", "exposed s", "util %", "Mtok/s", "days", "GPU h"]
    header += ["cost"] if price else []
    rows = []
    for p in plans:
        row = [
            p.setting.label,
            number(p.step),
            number(p.sync),
            number(p.exposed),
            percent(p.utilisation),
            number(p.tokens_per_s / 1e6),
            number(p.days),
            number(p.gpu_hours),
            *([number(p.gpu_hours * price)] if price else []),
            percent(p.penalty, 2),
            number(p.equal_loss_days),
        ]
        rows.append(row)
    return table([*header, "loss +%", "= loss, days"], rows)


def _bandwidth_table(plans: Sequence[Plan]) -> str:
    header = ["setting", *(f"{u:.0%}" for u in UTILISATIONS)]
    return table(header, [[p.setting.label, *map(number, p.bandwidths)] for p in plans])


def _verdict_text(found: Verdict) -> str:
    single, several = found.single, found.several
    won = "beat" if found.several_win else "do not beat"
    lines = [
        f"\nSeveral clusters {won} the best single one: {several.setting.label} in "
        f"{number(several.equal_loss_days)} days to equal loss against {single.setting.label} in "
        f"{number(single.equal_loss_days)}",
        "From this bandwidth between the sites on, Gbit/s",
    ]
    rows = [
        [c.setting.label, number(c.gbps) if c.gbps else "never"]
        for c in found.crossovers
        if c.setting.method == "sync"
        or (not c.setting.delay and c.setting.compression in ("none", "int8"))
    ]
    return "\n".join([*lines, table(["setting", "Gbit/s"], rows)])
