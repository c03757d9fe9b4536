"""Who trains where: replicas on the nodes of one or several sites, and what each step costs there.

A replica is a whole number of nodes of one site, over which it is sharded (ZeRO-3). Replicas
synchronise in two stages: inside each site, then between the sites.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from megatron_edit.scaling.closed_forms import (
    TwoStage,
    all_reduce_bytes,
    bytes_per_second,
    state_bytes,
    step_seconds,
)
from megatron_edit.scaling.cluster import Assumptions, Cluster, Model, Site

MOST_SITES_IN_SUBSETS = 4
"""Up to so many sites every combination is tried, beyond it single ones and all together."""
GATHERS_PER_STEP = 1.5
"""ZeRO-3 gathers the weights in forward and backward and reduce-scatters the gradients: 1.5 times
the bytes of an all-reduce (Rajbhandari et al. 2020)."""


@dataclass(frozen=True)
class Layout:
    """Replicas on sites.

    Attributes:
        sites: The sites in use.
        nodes_per_replica: Nodes of each replica, by site.
        replicas_per_site: Replicas of each site.
    """

    sites: tuple[Site, ...]
    nodes_per_replica: tuple[int, ...]
    replicas_per_site: tuple[int, ...]

    @property
    def replicas(self) -> int:
        """R, all replicas."""
        return sum(self.replicas_per_site)

    @property
    def gpus(self) -> int:
        """Accelerators of the sites in use, idle ones included: they are paid for."""
        return sum(site.nodes * site.gpus_per_node for site in self.sites)

    @property
    def flops(self) -> float:
        """FLOP/s of all these accelerators at their MFU."""
        return sum(s.nodes * s.gpus_per_node * s.peak_tflops * 1e12 * s.mfu for s in self.sites)

    @property
    def label(self) -> str:
        """Sites and replicas in words."""
        return f"{'+'.join(site.name for site in self.sites)} R={self.replicas}"

    def problem(self, model: Model, assumptions: Assumptions, local_sgd: bool) -> str | None:
        """Returns the number that makes the layout impossible, or None.

        Args:
            model: What is trained.
            assumptions: Usable share of the memory.
            local_sgd: Whether anchor and outer momentum are kept.
        """
        share = model.batch_tokens / self.replicas
        if share < model.sequence_length:
            return (
                f"batch_tokens {model.batch_tokens:.4g} over {self.replicas} replicas is "
                f"{share:.0f} tokens, less than one sequence of {model.sequence_length}"
            )
        for site, nodes in zip(self.sites, self.nodes_per_replica, strict=True):
            shards = nodes * site.gpus_per_node
            needed = state_bytes(model.parameters, shards, local_sgd) / 1e9
            usable = site.memory_gb * assumptions.usable_memory
            if needed > usable:
                return (
                    f"does not fit: {model.parameters:.4g} parameters over {shards} GPUs of "
                    f"{site.name} need {needed:.1f} GB each, {usable:.1f} GB of {site.memory_gb:g} "
                    "GB are usable"
                )
        return None


def layouts(cluster: Cluster) -> Iterator[Layout]:
    """Yields every way to place replicas: sets of sites, and GPUs per replica.

    All replicas have the same number of GPUs, as the trainer's mesh wants it. Nodes that are left
    over are idle.
    """
    for sites in _site_sets(cluster.sites):
        smallest = min(sites, key=lambda site: site.nodes * site.gpus_per_node)
        for count in range(1, smallest.nodes + 1):
            gpus, rest = count * smallest.gpus_per_node, smallest.nodes % count
            if rest or any(gpus % site.gpus_per_node for site in sites):
                continue
            nodes = tuple(gpus // site.gpus_per_node for site in sites)
            counts = tuple(site.nodes // k for site, k in zip(sites, nodes, strict=True))
            yield Layout(sites, nodes, counts)


def _site_sets(sites: tuple[Site, ...]) -> Iterator[tuple[Site, ...]]:
    every = len(sites) <= MOST_SITES_IN_SUBSETS
    sizes = range(1, len(sites) + 1) if every else sorted({1, len(sites)})
    for size in sizes:
        yield from combinations(sites, size)


@dataclass(frozen=True)
class SyncTime:
    """One all-reduce over all replicas as a function of the slow link's bandwidth.

    Attributes:
        payload: Bytes on the slow link.
        fixed: Seconds that do not depend on the slow link's bandwidth: latencies, and the stage
            inside the sites where the slow link is between sites.
        bandwidth: The slow link as it is, bytes/s.
    """

    payload: float
    fixed: float
    bandwidth: float

    @property
    def seconds(self) -> float:
        """Time of the all-reduce."""
        return self.fixed + (self.payload / self.bandwidth if self.payload else 0.0)


def step_times(layout: Layout, model: Model, assumptions: Assumptions) -> list[float]:
    """Returns the seconds of an inner step of a replica of each site, its own gathers included."""
    times = []
    for site, nodes in zip(layout.sites, layout.nodes_per_replica, strict=True):
        compute = step_seconds(
            model.parameters,
            model.batch_tokens / layout.replicas,
            nodes * site.gpus_per_node,
            site.peak_tflops * 1e12,
            site.mfu,
        )
        gathers = GATHERS_PER_STEP * all_reduce_bytes(
            model.parameters, assumptions.weight_bytes, nodes
        )
        link = site.node_link
        wire = gathers / bytes_per_second(link.gbps)
        latency = link.latency_ms / 1e3 if nodes > 1 else 0.0
        times.append(compute + max(0.0, wire + latency - assumptions.gather_overlap * compute))
    return times


def sync_time(
    layout: Layout, model: Model, bytes_each: float, uplink_gbps: float | None = None
) -> SyncTime:
    """Returns the all-reduce of all parameters over the replicas.

    Args:
        layout: Replicas on sites.
        model: What is trained.
        bytes_each: Bytes of one element as it travels.
        uplink_gbps: Rate of all uplinks instead of their own; None keeps them.
    """
    payload = model.parameters * bytes_each
    stages = [
        TwoStage(
            payload,
            count,
            len(layout.sites),
            # The nodes of a replica hold different shards, each with a ring of its own.
            nodes * bytes_per_second(site.node_link.gbps),
            bytes_per_second(uplink_gbps or _uplink_gbps(layout)),
            site.node_link.latency_ms / 1e3,
            max((s.uplink.latency_ms / 1e3 for s in layout.sites if s.uplink), default=0.0),
        )
        for site, nodes, count in zip(
            layout.sites, layout.nodes_per_replica, layout.replicas_per_site, strict=True
        )
    ]
    first = max(stages, key=lambda stage: stage.inner_seconds)
    if len(layout.sites) > 1:
        return SyncTime(
            first.outer_payload, first.inner_seconds + first.outer_latency, first.outer_bandwidth
        )
    if layout.replicas == 1:
        return SyncTime(0.0, 0.0, first.inner_bandwidth)
    nodes = layout.nodes_per_replica[0]
    on_node = all_reduce_bytes(model.parameters, bytes_each, layout.replicas) / nodes
    return SyncTime(on_node, first.inner_latency, first.inner_bandwidth / nodes)


def bottleneck_gbps(layout: Layout) -> float:
    """Returns the rate of the slow link: an uplink, or a node's where there is one site."""
    if len(layout.sites) > 1:
        return _uplink_gbps(layout)
    return layout.sites[0].node_link.gbps


def _uplink_gbps(layout: Layout) -> float:
    """Returns the slowest uplink; infinite where the sites need none."""
    return min((s.uplink.gbps for s in layout.sites if s.uplink), default=float("inf"))
