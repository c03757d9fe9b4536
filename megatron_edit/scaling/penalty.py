"""What local SGD costs in loss, as a share of the loss of synchronous training."""

import math
from dataclasses import dataclass

from megatron_edit.scaling.cluster import Assumptions
from megatron_edit.scaling.forms import Law
from megatron_edit.scaling.hoffmann import HoffmannForm
from megatron_edit.scaling.provenance import Constant, Kind
from megatron_edit.scaling.published import (
    DILOCO_FITS,
    DILOCO_INTERVAL,
    DILOCO_JOINT,
    DILOCO_LAWS,
    EPOCH,
    EPOCH_2024,
)

PUBLISHED_REPLICAS = 8
PUBLISHED_PARAMETERS = 10e9


@dataclass(frozen=True)
class LossPenalty:
    """Relative loss penalty of local SGD at equal tokens.

    Three parts: replicas, L_local(N, R) / L_sync(N) - 1 of two laws; rounds longer than the ones
    of the laws; delay. A law that says local SGD is better than synchronous training earns no
    credit: the first part is at least 0.

    Attributes:
        sync: Law of synchronous training.
        local: Law of local SGD with replicas in it.
        fitted_from: File of the two laws; None for the published ones.
        assumptions: Slopes of the other two parts.
    """

    assumptions: Assumptions
    sync: Law = DILOCO_FITS["DP"]
    local: Law = DILOCO_JOINT
    fitted_from: str | None = None

    def relative(
        self, parameters: float, tokens: float, replicas: int, interval: int, delay: int
    ) -> float:
        """Returns L_local / L_sync - 1, at least 0.

        Args:
            parameters: N.
            tokens: D; matters only where the laws depend on it.
            replicas: R.
            interval: H, inner steps of a round.
            delay: d, steps.
        """
        loss = float(self.sync.loss(parameters, tokens)[0])
        by_replicas = float(self.local.loss(parameters, tokens, replicas)[0]) / loss - 1.0
        longer = self.assumptions.interval_slope * max(0.0, math.log(interval / DILOCO_INTERVAL))
        quarters = 4.0 * delay / interval
        late = self.assumptions.delay_quarter * quarters**self.assumptions.delay_exponent
        return max(0.0, by_replicas) + (longer + late) / loss

    def warnings(self, parameters: float, replicas: int) -> list[str]:
        """Says where the published laws are stretched."""
        found = []
        if self.fitted_from is None and replicas > PUBLISHED_REPLICAS:
            found.append(
                f"loss penalty of {replicas} replicas is extrapolated; published up to "
                f"{PUBLISHED_REPLICAS}"
            )
        if self.fitted_from is None and parameters > 10 * PUBLISHED_PARAMETERS:
            found.append(f"loss penalty at {parameters:.3g} parameters is extrapolated")
        return found

    def provenance(self) -> list[Constant]:
        """Returns the laws with their origin."""
        kind = Kind.FITTED if self.fitted_from else Kind.PUBLISHED
        source = self.fitted_from or f"{DILOCO_LAWS}, H = {DILOCO_INTERVAL}, up to 8 replicas"
        return [
            Constant(name, _law_text(law), "nats", kind, source)
            for name, law in (("loss of sync", self.sync), ("loss of local SGD", self.local))
        ]


def _law_text(law: Law) -> str:
    numbers = ", ".join(f"{label} {value:.5g}" for label, value in law.values().items())
    return f"{law.form.formula}: {numbers}"


def tokens_to_equal_loss(
    parameters: float, tokens: float, penalty: float, law: Law = EPOCH
) -> float | None:
    """Returns the factor on D with which a penalised run reaches the unpenalised loss.

    Solves (1 + p) L(N, f D) = L(N, D) for f in a law of Hoffmann's form.

    Args:
        parameters: N.
        tokens: D.
        penalty: p, relative loss penalty.
        law: Loss by N and D.

    Returns:
        f, at least 1; None where no number of tokens makes up for the penalty.
    """
    assert isinstance(law.form, HoffmannForm)
    a, b, e, alpha, beta = law.theta
    wanted = float(law.loss(parameters, tokens)[0]) / (1.0 + penalty)
    data_term = wanted - math.exp(e) - math.exp(a) / parameters**alpha
    if data_term <= 0:
        return None
    needed = (math.exp(b) / data_term) ** (1.0 / beta)
    return max(1.0, float(needed / tokens))


EQUAL_LOSS_LAW = Constant(
    "loss by N and D for days to equal loss", _law_text(EPOCH), "nats", Kind.PUBLISHED, EPOCH_2024
)
