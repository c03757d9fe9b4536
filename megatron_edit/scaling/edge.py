"""Plans a run on edge devices: asymmetric links, memory, availability, the slowest device.

Every device (or group of devices) is a replica. A synchronisation sends each replica's pseudo
gradient to a server and fetches the mean: upload and download follow each other.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import ndtri

from megatron_edit.errors import ConfigurationError
from megatron_edit.scaling.closed_forms import Infeasible, Round, state_bytes, step_seconds
from megatron_edit.scaling.cluster import COMPRESSION_FACTORS, Cluster, Devices
from megatron_edit.scaling.penalty import LossPenalty, tokens_to_equal_loss
from megatron_edit.scaling.planner import DAY, TIE
from megatron_edit.scaling.published import UTILISATIONS
from megatron_edit.scaling.topology import GATHERS_PER_STEP

REFERENCE_GPU_FLOPS = 989e12 * 0.4
"""FLOP/s of one H100 in dense bf16 at 40 % MFU, to say how many of them the devices are worth."""


@dataclass(frozen=True)
class EdgePlan:
    """What one setting does on the devices. Times in seconds.

    Attributes:
        interval: H; 1 is synchronous training.
        delay: d, steps.
        compression: Encoding of the payload.
        replicas: Replicas whose part counts in a round.
        compute: H steps of the slowest device that is waited for.
        upload: Time to send a payload.
        download: Time to fetch the mean.
        exposed: Part of a round in which devices do not compute.
        utilisation: Compute time of the mean device by the length of a round, dropped devices
            counted as idle.
        tokens_per_s: Tokens per second.
        rounds: Synchronisations of the run.
        seconds: The whole run.
        penalty: Relative loss penalty.
        token_factor: Factor on the tokens that makes up for it; None where none does.
        equivalent_gpus: H100s at 40 % MFU that are as fast.
        upload_mbps: Smallest upload rate in Mbit/s for each of UTILISATIONS of the slowest device,
            the download rate growing with it; None where the latency alone is too long.
    """

    interval: int
    delay: int
    compression: str
    replicas: int
    compute: float
    upload: float
    download: float
    exposed: float
    utilisation: float
    tokens_per_s: float
    rounds: float
    seconds: float
    penalty: float
    token_factor: float | None
    equivalent_gpus: float
    upload_mbps: tuple[float | None, ...]

    @property
    def days(self) -> float:
        """Days of the run."""
        return self.seconds / DAY

    @property
    def equal_loss_days(self) -> float:
        """Days until the loss of synchronous training; infinite if never."""
        return self.days * self.token_factor if self.token_factor else math.inf

    @property
    def label(self) -> str:
        """The setting in a few words."""
        if self.interval == 1:
            return "sync"
        delay = f" d={self.delay}" if self.delay else ""
        return f"H={self.interval}{delay} {self.compression}"

    def row(self) -> dict[str, object]:
        """Returns the plan for JSON."""
        equal = self.equal_loss_days
        return {
            "method": "sync" if self.interval == 1 else "edit",
            "replicas": self.replicas,
            "sync_interval": self.interval,
            "delay_steps": self.delay,
            "compression": self.compression,
            "compute_s": self.compute,
            "upload_s": self.upload,
            "download_s": self.download,
            "exposed_s": self.exposed,
            "utilisation": self.utilisation,
            "tokens_per_s": self.tokens_per_s,
            "rounds": self.rounds,
            "days": self.days,
            "loss_penalty": self.penalty,
            "equal_loss_days": equal if math.isfinite(equal) else None,
            "equivalent_h100": self.equivalent_gpus,
            "smallest_upload_mbps": dict(
                zip([f"{u:.0%}" for u in UTILISATIONS], self.upload_mbps, strict=True)
            ),
        }


def slowest_factor(devices: Devices, replicas: int) -> float:
    """Returns the step time of the slowest device that is waited for, by the median device's.

    Step times are log-normal. Without dropping it is the median of the largest of R; dropping the
    slowest share q makes it the quantile 1 - q.

    Args:
        devices: Spread of the speeds, and the share that is dropped.
        replicas: R, replicas of a round.
    """
    quantile = 1.0 - devices.drop_slowest if devices.drop_slowest else 0.5 ** (1.0 / replicas)
    return math.exp(devices.speed_spread * float(ndtri(quantile)))


class EdgePlanner:
    """Evaluates settings on edge devices."""

    def __init__(self, cluster: Cluster, penalty: LossPenalty | None = None) -> None:
        if cluster.devices is None:
            raise ValueError("the cluster has no devices")
        self.cluster, self.devices = cluster, cluster.devices
        self.penalty = penalty or LossPenalty(cluster.assumptions)
        available = self.devices.count * self.devices.availability
        self.replicas = int(available / self.devices.devices_per_replica)
        self._check()

    def _check(self) -> None:
        """Refuses what cannot work.

        Raises:
            ConfigurationError: Names the number that breaks it.
        """
        model, devices = self.cluster.model, self.devices
        name = self.cluster.name
        if self.replicas < 1:
            raise ConfigurationError(
                f"{name}: {devices.count} devices x availability {devices.availability:g} are "
                f"fewer than devices_per_replica {devices.devices_per_replica}"
            )
        needed = self.memory_gb()
        if needed > devices.memory_gb:
            fits = math.ceil(devices.devices_per_replica * needed / devices.memory_gb)
            raise ConfigurationError(
                f"{name}: does not fit: {model.parameters:.4g} parameters need {needed:.1f} GB on "
                f"each device (16 + 8 bytes a parameter over {devices.devices_per_replica}), "
                f"memory_gb is {devices.memory_gb:g}; devices_per_replica {fits} would fit"
            )
        share = model.batch_tokens / self.replicas
        if share < model.sequence_length:
            raise ConfigurationError(
                f"{name}: batch_tokens {model.batch_tokens:.4g} over {self.replicas} replicas is "
                f"{share:.0f} tokens, less than one sequence of {model.sequence_length}"
            )

    def memory_gb(self) -> float:
        """Returns the GB of parameters and optimizer state on a device."""
        shards = self.devices.devices_per_replica
        return state_bytes(self.cluster.model.parameters, shards, local_sgd=True) / 1e9

    def step(self) -> float:
        """Returns the step of the median replica, with the gathers inside it if it is shared."""
        model, devices = self.cluster.model, self.devices
        shards = devices.devices_per_replica
        compute = step_seconds(
            model.parameters,
            model.batch_tokens / self.replicas,
            shards,
            devices.peak_tflops * 1e12,
            devices.mfu,
        )
        # Each device sends what it holds on to the next one: (S - 1)/S of the weights per gather.
        gathered = model.parameters * self.cluster.assumptions.weight_bytes * (shards - 1) / shards
        return compute + 2 * GATHERS_PER_STEP * gathered / _rate(devices.upload_mbps)

    def evaluate(self, interval: int, delay: int = 0, compression: str = "none") -> EdgePlan:
        """Returns what one setting does; interval 1 is synchronous training of gradients."""
        model, devices, assumed = self.cluster.model, self.devices, self.cluster.assumptions
        sync = interval == 1
        factor = 1.0 if sync else COMPRESSION_FACTORS[compression]
        each = assumed.gradient_bytes if sync else assumed.pseudo_gradient_bytes / factor
        payload = model.parameters * each / devices.devices_per_replica
        upload = self._transfer(payload, devices.upload_mbps)
        download = self._transfer(payload, devices.download_mbps)
        step = self.step()
        slowest = step * slowest_factor(devices, self.replicas)
        latency = devices.latency_ms / 1e3
        hidden = 0.0 if sync else delay * step / slowest
        current = Round(interval, slowest, upload + download, latency, hidden)
        # The payload is in seconds at the present rates, so the bandwidth is 1.
        exposed = current.exposed(1.0)
        length = interval * slowest + exposed
        counted = 1.0 - devices.drop_slowest
        tokens = interval * model.batch_tokens * counted
        mean_step = step * math.exp(devices.speed_spread**2 / 2)
        penalty = self._penalty(interval, delay)
        return EdgePlan(
            interval,
            delay,
            compression,
            self.replicas,
            interval * slowest,
            upload,
            download,
            exposed,
            min(1.0, counted * interval * mean_step / length),
            tokens / length,
            model.tokens / tokens,
            model.tokens / tokens * length,
            penalty,
            tokens_to_equal_loss(model.parameters, model.tokens, penalty),
            6.0 * model.parameters * tokens / length / REFERENCE_GPU_FLOPS,
            tuple(_scaled(devices.upload_mbps, current, u) for u in UTILISATIONS),
        )

    def _penalty(self, interval: int, delay: int) -> float:
        model = self.cluster.model
        if interval == 1:
            return 0.0
        return self.penalty.relative(model.parameters, model.tokens, self.replicas, interval, delay)

    def _transfer(self, payload: float, mbps: float) -> float:
        """Returns the seconds of one direction: a device's link, or the server's for all."""
        alone = payload / _rate(mbps)
        if self.devices.server_gbps is None:
            return alone
        everybody = payload * self.devices.devices_per_replica * self.replicas
        return max(alone, everybody / _rate(1e3 * self.devices.server_gbps))

    def plans(self) -> list[EdgePlan]:
        """Returns synchronous training and every setting of the search.

        Raises:
            ConfigurationError: Nothing keeps the deadline.
        """
        search = self.cluster.search
        plans = [self.evaluate(1)] + [
            self.evaluate(interval, delay, compression)
            for interval in search.sync_intervals
            for delay in search.delays
            for compression in search.compressions
            if 1 < interval > delay
        ]
        quickest = min(self.acceptable(plans), key=lambda plan: plan.seconds)
        if search.deadline_days is not None and quickest.days > search.deadline_days:
            raise ConfigurationError(
                f"{self.cluster.name}: search.deadline_days {search.deadline_days:g} cannot be "
                f"kept: the quickest acceptable setting ({quickest.label}) takes "
                f"{quickest.days:.3g} days"
            )
        return plans

    def acceptable(self, plans: Sequence[EdgePlan]) -> list[EdgePlan]:
        """Returns the plans within the stated loss penalty, with enough rounds."""
        search = self.cluster.search
        return [
            plan
            for plan in plans
            if plan.penalty <= search.max_loss_penalty
            and (plan.interval == 1 or plan.rounds >= search.fewest_rounds)
        ]


def best_edge(plans: Sequence[EdgePlan], objective: str = "equal_loss_days") -> EdgePlan:
    """Returns the best plan, and of nearly equal ones the one without delay or compression.

    Args:
        plans: At least one.
        objective: `days` at equal tokens, or `equal_loss_days`.
    """
    limit = TIE * min(getattr(plan, objective) for plan in plans)
    near = [plan for plan in plans if getattr(plan, objective) <= limit]
    order = list(COMPRESSION_FACTORS)
    return min(near, key=lambda p: (p.delay, order.index(p.compression), p.interval))


def _rate(mbps: float) -> float:
    """Converts Mbit/s to bytes/s."""
    return mbps * 1e6 / 8.0


def _scaled(mbps: float, current: Round, utilisation: float) -> float | None:
    """Returns the upload rate for a utilisation, all rates growing alike, or None."""
    try:
        return mbps * current.smallest_bandwidth(utilisation)
    except Infeasible:
        return None
