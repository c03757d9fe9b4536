"""Closed forms of time and bandwidth: one replica, one slow link, one round.

Units: seconds, bytes, bytes per second unless a name says otherwise. Network rates of users are in
bit/s; `bytes_per_second` converts. Formulas without a named source are arithmetic.
"""

from dataclasses import dataclass

FORWARD_SHARE = 1.0 / 3.0
"""Forward pass as a share of a step: the backward does twice the multiplications."""
BACKWARD_SHARE = 2.0 / 3.0


class Infeasible(ValueError):
    """No value of the wanted quantity reaches the target."""


def bytes_per_second(gigabits_per_second: float) -> float:
    """Converts Gbit/s to bytes/s."""
    return gigabits_per_second * 1e9 / 8.0


def step_seconds(
    parameters: float, tokens: float, chips: float, peak_flops: float, mfu: float
) -> float:
    """Returns T = 6 N B / (chips x peak x MFU), the compute time of one step of one replica.

    6 FLOP per parameter and token: Kaplan et al. 2020.

    Args:
        parameters: N.
        tokens: B, tokens that this replica processes in a step.
        chips: Accelerators of the replica.
        peak_flops: Peak of one of them in FLOP/s.
        mfu: Share of the peak that the model reaches, without communication between nodes.
    """
    return 6.0 * parameters * tokens / (chips * peak_flops * mfu)


def all_reduce_bytes(
    parameters: float, bytes_each: float, members: float, compression: float = 1.0
) -> float:
    """Returns S_eff = N x bytes x 2 (R - 1) / R / compression.

    What the link of each member carries in a ring all-reduce: a reduce-scatter and an all-gather.

    Args:
        parameters: N, elements that are reduced.
        bytes_each: Bytes of one element before compression.
        members: R, members of the ring.
        compression: Factor by which the payload shrinks.
    """
    return parameters * bytes_each * 2.0 * (members - 1.0) / members / compression


@dataclass(frozen=True)
class Round:
    """One round of local SGD on one replica.

    Attributes:
        interval: H, inner steps.
        step: T, seconds of one inner step.
        payload: S_eff, bytes on the slow link per synchronisation.
        latency: eps, seconds of a synchronisation that do not depend on the payload.
        overlap: omega, step times that a synchronisation may overlap: 0 blocking, 1/3 the forward
            (layer-wise), d with a delay of d steps.
    """

    interval: float
    step: float
    payload: float
    latency: float
    overlap: float

    def exposed(self, bandwidth: float) -> float:
        """Returns x = max(0, S_eff/W + eps - omega T), seconds per round in which nothing runs.

        Args:
            bandwidth: W of the slow link in bytes/s.
        """
        wire = self.payload / bandwidth if self.payload else 0.0
        return max(0.0, wire + self.latency - self.overlap * self.step)

    def utilisation(self, bandwidth: float) -> float:
        """Returns u = H T / (H T + x)."""
        busy = self.interval * self.step
        return busy / (busy + self.exposed(bandwidth))

    def smallest_bandwidth(self, utilisation: float) -> float:
        """Returns W = S_eff / (H T (1 - u) / u + omega T - eps) in bytes/s.

        Args:
            utilisation: u, to be reached.

        Raises:
            Infeasible: The latency alone breaks the target, whatever the bandwidth.
        """
        if not self.payload:
            return 0.0
        allowed = self.interval * self.step * (1.0 - utilisation) / utilisation
        room = allowed + self.overlap * self.step - self.latency
        if room <= 0:
            raise Infeasible(
                f"latency {self.latency:.3g} s per synchronisation exceeds the "
                f"{allowed + self.overlap * self.step:.3g} s that {utilisation:.0%} allows"
            )
        return self.payload / room


@dataclass(frozen=True)
class TwoStage:
    """Synchronisation of C clusters of n nodes: inside each cluster, then between them.

    t = 2 S/W0 (1 - 1/n) + e0 + 2 S/W1 (1 - 1/C) + e1; the question of arXiv 2409.13198.

    Attributes:
        payload: S, bytes of the parameters as they travel.
        nodes: n, members of the first stage.
        clusters: C, members of the second stage.
        inner_bandwidth: W0 in bytes/s.
        outer_bandwidth: W1 in bytes/s.
        inner_latency: e0 in seconds.
        outer_latency: e1 in seconds.
    """

    payload: float
    nodes: float
    clusters: float
    inner_bandwidth: float
    outer_bandwidth: float
    inner_latency: float = 0.0
    outer_latency: float = 0.0

    @property
    def inner_seconds(self) -> float:
        """Time of the first stage; 0 for one node."""
        if self.nodes <= 1:
            return 0.0
        return self.inner_latency + 2 * self.payload / self.inner_bandwidth * (1 - 1 / self.nodes)

    @property
    def outer_payload(self) -> float:
        """Bytes that a cluster's outer link carries in each direction."""
        return 2 * self.payload * (1 - 1 / self.clusters)

    @property
    def seconds(self) -> float:
        """Time of both stages."""
        if self.clusters <= 1:
            return self.inner_seconds
        return self.inner_seconds + self.outer_payload / self.outer_bandwidth + self.outer_latency

    def effective(self, interval: float, step: float, share: float) -> bool:
        """Whether t <= rho H T.

        Args:
            interval: H.
            step: T in seconds.
            share: rho, the part of a round that a synchronisation may take.
        """
        return self.seconds <= share * interval * step


STATE_BYTES = 16.0
"""Bytes per parameter of mixed-precision AdamW: bf16 weight and gradient, fp32 master weight and
two moments (Rajbhandari et al. 2020, ZeRO)."""
OUTER_STATE_BYTES = 8.0
"""Bytes per parameter of anchor and outer momentum in fp32."""


def state_bytes(parameters: float, shards: float, local_sgd: bool) -> float:
    """Returns the bytes of parameters and optimizer state on each of S ranks that share them.

    Args:
        parameters: N.
        shards: S, ranks that share one replica's state.
        local_sgd: Whether there are an anchor and an outer momentum.
    """
    return parameters * (STATE_BYTES + (OUTER_STATE_BYTES if local_sgd else 0.0)) / shards
