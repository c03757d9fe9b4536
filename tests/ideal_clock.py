"""The idealised wall clock of "Scaling Laws for DiLoCo" (arXiv 2503.09799)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Network:
    """A class of network of DILOCO_LAWS' idealised clock.

    Attributes:
        bits_per_s: Bandwidth in bit/s.
        latency_s: Latency of a collective in seconds.
    """

    bits_per_s: float
    latency_s: float


NETWORKS = {
    "high": Network(400e9, 1e-4),
    "medium": Network(100e9, 1e-3),
    "low": Network(10e9, 1e-2),
}
CHIP_FLOPS = 300e12
"""DILOCO_LAWS: effective FLOP/s of a chip in the idealised clock."""


@dataclass(frozen=True)
class IdealClock:
    """Training time as a sum of compute and unoverlapped communication.

    Attributes:
        parameters: N.
        chips: R, all chips.
        steps: T, optimizer steps.
        interval: H, inner steps of a round.
        outer: Network between replicas, and between all chips in data-parallel training.
        inner: Network inside a replica.
        bits_each: Bits of one element of a gradient.
    """

    parameters: float
    chips: float
    steps: float
    interval: float
    outer: Network
    inner: Network = NETWORKS["high"]
    bits_each: float = 16.0

    def compute(self, tokens: float) -> float:
        """Returns 6 N D / (R Q) in seconds for D tokens."""
        return 6.0 * self.parameters * tokens / (self.chips * CHIP_FLOPS)

    def all_reduce(self, network: Network, chips: float) -> float:
        """Returns 2 N bits / W (1 - 1/R) + eps in seconds."""
        bits = 2.0 * self.parameters * self.bits_each
        return bits / network.bits_per_s * (1.0 - 1.0 / chips) + network.latency_s

    def data_parallel(self) -> float:
        """Returns the communication time of data-parallel training in seconds."""
        return self.steps * self.all_reduce(self.outer, self.chips)

    def diloco(self, replicas: int) -> float:
        """Returns the communication time of DiLoCo in seconds.

        Args:
            replicas: M. A single replica communicates like data parallel, and once more a round.
        """
        if replicas == 1:
            return self.data_parallel() * (1.0 + 1.0 / self.interval)
        inside = self.steps * self.all_reduce(self.inner, self.chips / replicas)
        rounds = self.steps / self.interval
        return inside + rounds * self.all_reduce(self.outer, self.chips)
