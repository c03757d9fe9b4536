"""Do several clusters beat the best single one, and from which bandwidth between them on?"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.optimize import brentq

from megatron_edit.scaling.planner import Plan, Planner, Setting, best

SLOWEST_GBPS, FASTEST_GBPS = 1e-4, 1e5
"""Bandwidths between which the crossover is looked for."""


@dataclass(frozen=True)
class Crossover:
    """Where a setting over several sites overtakes the best single site.

    Attributes:
        setting: The setting over several sites.
        gbps: Uplink rate from which on it is faster, in Gbit/s; None where it never is.
    """

    setting: Setting
    gbps: float | None


@dataclass(frozen=True)
class Verdict:
    """Several clusters against one.

    Attributes:
        single: The best plan on one site.
        several: The best plan on more than one.
        crossovers: Per variant of `several` the bandwidth from which on it wins.
    """

    single: Plan
    several: Plan
    crossovers: tuple[Crossover, ...]

    @property
    def several_win(self) -> bool:
        """Whether several clusters reach the loss of synchronous training sooner."""
        return self.several.equal_loss_days < self.single.equal_loss_days


def verdict(planner: Planner, plans: Sequence[Plan]) -> Verdict | None:
    """Compares the best plans on one and on several sites by days to equal loss.

    Args:
        planner: Evaluates settings at other bandwidths.
        plans: All plans of the cluster.

    Returns:
        None where there is one site only.
    """
    acceptable = planner.acceptable(plans)
    single = [p for p in acceptable if len(p.setting.layout.sites) == 1]
    several = [p for p in acceptable if len(p.setting.layout.sites) > 1]
    if not single or not several:
        return None
    one, many = best(single), best(several)
    layout = many.setting.layout
    variants = [Setting("sync", layout)] + [
        p.setting
        for p in acceptable
        if p.setting.layout == layout and p.setting.method in ("edit", "a_edit")
    ]
    return Verdict(
        one, many, tuple(Crossover(s, crossover_gbps(planner, s, one)) for s in variants)
    )


def crossover_gbps(planner: Planner, setting: Setting, single: Plan) -> float | None:
    """Returns the uplink rate at which a setting is as fast as a plan on one site.

    Args:
        planner: Evaluates the setting.
        setting: A setting over several sites.
        single: The plan to beat, in days to equal loss.
    """

    def lead(log_gbps: float) -> float:
        plan = planner.evaluate(setting, uplink_gbps=math.exp(log_gbps))
        return plan.equal_loss_days - single.equal_loss_days

    low, high = math.log(SLOWEST_GBPS), math.log(FASTEST_GBPS)
    if lead(high) >= 0:
        return None
    if lead(low) < 0:
        return SLOWEST_GBPS
    return math.exp(float(brentq(lead, low, high, xtol=1e-6)))
