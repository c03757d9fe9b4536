"""Plans a training run on clusters: sync against local SGD at each interval, R, delay, payload."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_edit.errors import ConfigurationError
from megatron_edit.scaling.closed_forms import Infeasible, Round, bytes_per_second
from megatron_edit.scaling.cluster import COMPRESSION_FACTORS, Cluster
from megatron_edit.scaling.penalty import LossPenalty, tokens_to_equal_loss
from megatron_edit.scaling.published import UTILISATIONS
from megatron_edit.scaling.topology import (
    Layout,
    layouts,
    step_times,
    sync_time,
)

DAY = 86400.0
UNEQUAL_STEPS = 1.02
"""Ratio of the slowest to the fastest replica's step from which synchronising by time is tried."""
TIE = 1.005
"""Plans within this factor of the best are equal; the simplest of them is taken."""


@dataclass(frozen=True)
class Setting:
    """What a user chooses.

    Attributes:
        method: `sync`, `edit` or `a_edit`.
        layout: Replicas on sites.
        interval: H, inner steps of a round; 1 for sync.
        delay: d, steps.
        compression: Encoding of the pseudo gradient.
    """

    method: str
    layout: Layout
    interval: int = 1
    delay: int = 0
    compression: str = "none"

    @property
    def label(self) -> str:
        """The setting in a few words."""
        if self.method == "sync":
            return f"sync {self.layout.label}"
        extras = f" d={self.delay}" if self.delay else ""
        extras += f" {self.compression}" if self.compression != "none" else ""
        return f"{self.method} H={self.interval}{extras} {self.layout.label}"


@dataclass(frozen=True)
class Plan:
    """What a setting does. Times in seconds, rates in tokens/s.

    Attributes:
        setting: The choice.
        step: Inner step of a replica, its own gathers included.
        sync: Wire time of one synchronisation.
        exposed: Seconds per round in which nothing runs.
        utilisation: Compute time by elapsed time, of all accelerators paid for.
        tokens_per_s: Tokens per second after the warm-up.
        rounds: Synchronisations; steps for sync.
        warmup: Seconds of the synchronous warm-up.
        seconds: The whole run.
        gpu_hours: Accelerator hours of the whole run.
        penalty: Relative loss penalty against synchronous training at equal tokens.
        token_factor: Factor on the tokens that makes up for the penalty; None where none does.
        effective: Whether the synchronisation takes no more than rho of a round.
        bandwidths: Smallest bandwidth of the slow link in Gbit/s for each of UTILISATIONS
            (relative to a replica's own steps); None where the latency alone is too long.
    """

    setting: Setting
    step: float
    sync: float
    exposed: float
    utilisation: float
    tokens_per_s: float
    rounds: float
    warmup: float
    seconds: float
    gpu_hours: float
    penalty: float
    token_factor: float | None
    effective: bool
    bandwidths: tuple[float | None, ...]

    @property
    def days(self) -> float:
        """Days of the run."""
        return self.seconds / DAY

    @property
    def equal_loss_days(self) -> float:
        """Days until the loss that synchronous training reaches; infinite if never."""
        return self.days * self.token_factor if self.token_factor else math.inf

    def row(self) -> dict[str, object]:
        """Returns the plan for JSON."""
        setting, layout = self.setting, self.setting.layout
        equal = self.equal_loss_days
        return {
            "method": setting.method,
            "sites": [site.name for site in layout.sites],
            "replicas": layout.replicas,
            "nodes_per_replica": list(layout.nodes_per_replica),
            "sync_interval": setting.interval,
            "delay_steps": setting.delay,
            "compression": setting.compression,
            "step_s": self.step,
            "sync_s": self.sync,
            "exposed_s": self.exposed,
            "utilisation": self.utilisation,
            "tokens_per_s": self.tokens_per_s,
            "rounds": self.rounds,
            "warmup_days": self.warmup / DAY,
            "days": self.days,
            "gpu_hours": self.gpu_hours,
            "loss_penalty": self.penalty,
            "equal_loss_days": equal if math.isfinite(equal) else None,
            "two_stage_effective": self.effective,
            "smallest_gbps": dict(
                zip([f"{u:.0%}" for u in UTILISATIONS], self.bandwidths, strict=True)
            ),
        }


class Planner:
    """Evaluates settings on one cluster."""

    def __init__(self, cluster: Cluster, penalty: LossPenalty | None = None) -> None:
        self.cluster = cluster
        self.penalty = penalty or LossPenalty(cluster.assumptions)

    def evaluate(self, setting: Setting, uplink_gbps: float | None = None) -> Plan:
        """Returns what a setting does.

        Args:
            setting: The choice.
            uplink_gbps: Rate of the links between sites instead of their own.
        """
        model, assumed = self.cluster.model, self.cluster.assumptions
        layout = setting.layout
        step = self._step(setting)
        gradients, rate = self._round_of(Setting("sync", layout), step, uplink_gbps)
        current, rate = self._round_of(setting, step, uplink_gbps)
        exposed = current.exposed(rate)
        wire = current.latency + (current.payload / rate if current.payload else 0.0)
        length = setting.interval * step + exposed
        steps = math.ceil(model.tokens / model.batch_tokens)
        warm = 0 if setting.method == "sync" else min(self.cluster.search.warmup_steps, steps)
        warmup = warm * (step + gradients.exposed(rate))
        rounds = (steps - warm) / setting.interval
        seconds = warmup + rounds * length
        ideal = 6.0 * model.parameters * model.batch_tokens / layout.flops
        penalty = self._penalty(setting)
        return Plan(
            setting,
            step,
            wire,
            exposed,
            setting.interval * ideal / length,
            setting.interval * model.batch_tokens / length,
            rounds,
            warmup,
            seconds,
            layout.gpus * seconds / 3600.0,
            penalty,
            tokens_to_equal_loss(model.parameters, model.tokens, penalty),
            wire <= assumed.sync_share * setting.interval * step,
            tuple(_gbps(current, u) for u in UTILISATIONS),
        )

    def _round_of(
        self, setting: Setting, step: float, uplink_gbps: float | None
    ) -> tuple[Round, float]:
        """Returns a setting's round as seen from the slow link, and the link's bytes/s."""
        model, assumed = self.cluster.model, self.cluster.assumptions
        if setting.method == "sync":
            each, omega = assumed.gradient_bytes, assumed.gradient_overlap
        else:
            each = assumed.pseudo_gradient_bytes / COMPRESSION_FACTORS[setting.compression]
            omega = float(setting.delay) if setting.delay else assumed.sync_overlap
        time = sync_time(setting.layout, model, each, uplink_gbps)
        return Round(setting.interval, step, time.payload, time.fixed, omega), time.bandwidth

    def _step(self, setting: Setting) -> float:
        """Returns T: the slowest replica's, or by the clock the mean over all of them."""
        layout = setting.layout
        times = step_times(layout, self.cluster.model, self.cluster.assumptions)
        if setting.method != "a_edit":
            return max(times)
        counts = layout.replicas_per_site
        return layout.replicas / sum(n / t for n, t in zip(counts, times, strict=True))

    def _penalty(self, setting: Setting) -> float:
        model = self.cluster.model
        if setting.method == "sync":
            return 0.0
        return self.penalty.relative(
            model.parameters,
            model.tokens,
            setting.layout.replicas,
            setting.interval,
            setting.delay,
        )

    def utilisation_by_rate(self, plan: Plan, rates: Iterable[float]) -> list[float]:
        """Returns H T / (H T + x) of a plan with its slow link at other rates in Gbit/s."""
        current, _ = self._round_of(plan.setting, plan.step, None)
        return [current.utilisation(bytes_per_second(rate)) for rate in rates]

    def settings(self) -> Iterator[Setting]:
        """Yields every setting of the search that fits.

        Raises:
            ConfigurationError: None does; says which number breaks the layout with most memory.
        """
        problems, found = [], False
        for layout in layouts(self.cluster):
            for local_sgd in (False, True):
                problem = layout.problem(self.cluster.model, self.cluster.assumptions, local_sgd)
                if problem:
                    problems.append(problem)
                elif local_sgd and layout.replicas > 1:
                    yield from self._local_settings(layout)
                elif not local_sgd:
                    found = True
                    yield Setting("sync", layout)
        if not found:
            raise ConfigurationError(f"{self.cluster.name}: no layout is possible: {problems[-1]}")

    def _local_settings(self, layout: Layout) -> Iterator[Setting]:
        search = self.cluster.search
        times = step_times(layout, self.cluster.model, self.cluster.assumptions)
        methods = ["edit"] + (["a_edit"] if max(times) > UNEQUAL_STEPS * min(times) else [])
        for method in methods:
            for interval in search.sync_intervals:
                for delay in search.delays:
                    # A-EDiT has no delayed form.
                    if delay >= interval or (delay and method == "a_edit"):
                        continue
                    for compression in search.compressions:
                        yield Setting(method, layout, interval, delay, compression)

    def plans(self) -> list[Plan]:
        """Returns the plan of every setting.

        Raises:
            ConfigurationError: Nothing fits, or nothing keeps the deadline.
        """
        plans = [self.evaluate(setting) for setting in self.settings()]
        deadline = self.cluster.search.deadline_days
        quickest = best(self.acceptable(plans), "days")
        if deadline is not None and quickest.days > deadline:
            raise ConfigurationError(
                f"{self.cluster.name}: search.deadline_days {deadline:g} cannot be kept: the "
                f"quickest acceptable setting ({quickest.setting.label}) takes "
                f"{quickest.days:.3g} days"
            )
        return plans

    def acceptable(self, plans: Sequence[Plan]) -> list[Plan]:
        """Returns the plans within the stated loss penalty, with enough rounds."""
        search = self.cluster.search
        return [
            plan
            for plan in plans
            if plan.penalty <= search.max_loss_penalty
            and (plan.setting.method == "sync" or plan.rounds >= search.fewest_rounds)
        ]


def best(plans: Sequence[Plan], objective: str = "equal_loss_days") -> Plan:
    """Returns the best plan, and of nearly equal ones the one with the least trouble.

    Args:
        plans: At least one.
        objective: `days` at equal tokens, or `equal_loss_days`.
    """
    limit = TIE * min(getattr(plan, objective) for plan in plans)
    near = [plan for plan in plans if getattr(plan, objective) <= limit]
    order = list(COMPRESSION_FACTORS)

    def trouble(plan: Plan) -> tuple[object, ...]:
        setting = plan.setting
        apart = setting.method != "sync"
        return (
            apart,
            round(plan.penalty, 4),
            setting.delay,
            order.index(setting.compression),
            setting.layout.replicas,
            setting.interval,
        )

    return min(near, key=trouble)


def _gbps(current: Round, utilisation: float) -> float | None:
    """Returns the smallest bandwidth in Gbit/s, or None."""
    try:
        return current.smallest_bandwidth(utilisation) * 8.0 / 1e9
    except Infeasible:
        return None
