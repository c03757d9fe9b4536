"""The plan of edge devices as text, JSON and picture."""

from matplotlib.figure import Figure

from megatron_edit.errors import ConfigurationError
from megatron_edit.scaling.constants import plan_constants
from megatron_edit.scaling.edge import (
    DAY,
    REFERENCE_GPU_FLOPS,
    EdgePlan,
    EdgePlanner,
    best_edge,
    slowest_factor,
)
from megatron_edit.scaling.json_text import columnar
from megatron_edit.scaling.plots import edge_figure
from megatron_edit.scaling.provenance import Constant, Kind
from megatron_edit.scaling.published import UTILISATIONS, diloco_batch_tokens
from megatron_edit.scaling.site_report import plan_title
from megatron_edit.scaling.tables import constants_table, duration, number, percent, table

REFERENCE_GPUS = 8


class EdgeReport:
    """The plan of edge devices.

    Attributes:
        chosen: The best acceptable setting by days to equal loss.
        quickest: The best acceptable setting by days at equal tokens.
    """

    def __init__(self, planner: EdgePlanner, source: str) -> None:
        self.planner, self.cluster = planner, planner.cluster
        self.plans = planner.plans()
        acceptable = planner.acceptable(self.plans)
        self.chosen, self.quickest = best_edge(acceptable), best_edge(acceptable, "days")
        reference = Constant(
            "one H100", REFERENCE_GPU_FLOPS / 1e12, "TFLOP/s", Kind.ASSUMED, "989 at 40 % MFU"
        )
        self.constants = [*plan_constants(self.cluster, planner.penalty, source), reference]

    def edit_section(self) -> dict[str, object]:
        """Refuses: the trainer runs on a cluster's collectives, not through a server.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError(
            "--write: pretrain_edit.py does not run on devices behind a server; plan sites instead"
        )

    @property
    def reference_days(self) -> float:
        """Days of REFERENCE_GPUS H100 for the same tokens."""
        model = self.cluster.model
        flops = 6.0 * model.parameters * model.tokens
        return flops / (REFERENCE_GPUS * REFERENCE_GPU_FLOPS) / DAY

    def text(self, everything: bool = False) -> str:
        """Returns the plan for people."""
        shown = self.plans if everything else self._shown()
        devices, replicas = self.planner.devices, self.planner.replicas
        factor = slowest_factor(devices, replicas)
        parts = [
            plan_title(self.cluster),
            f"{replicas} replicas of {devices.devices_per_replica} of {devices.count} devices "
            f"(availability {devices.availability:g}); step {number(self.planner.step())} s on the "
            f"median device, {number(factor)} times that on the slowest that is waited for",
            f"memory: {number(self.planner.memory_gb())} GB of parameters and optimizer state on "
            f"a device, {devices.memory_gb:g} GB there\n",
            _plan_table(shown),
            "d: delay in steps. Loss: penalty at equal tokens against sync. = loss: days until the "
            "loss\nthat sync reaches.",
            "\nSmallest upload rate for a utilisation of the slowest device, Mbit/s (all rates "
            "growing alike)\n" + _upload_table(shown),
            self._recommendation(),
            *(f"warning: {text}" for text in self._warnings()),
            "\nConstants\n" + constants_table(self.constants),
        ]
        return "\n".join(parts)

    def _shown(self) -> list[EdgePlan]:
        """Returns sync, and each H plain and with the smallest payload."""
        kept = [p for p in self.plans if p.delay == 0 and p.compression in ("none", "int8")]
        return list(dict.fromkeys([self.plans[0], *kept, self.quickest, self.chosen]))

    def _recommendation(self) -> str:
        search, p = self.cluster.search, self.chosen
        quick = self.quickest
        return (
            f"\nBest with a loss penalty of at most {percent(search.max_loss_penalty)} % and at "
            f"least {search.fewest_rounds} rounds\n"
            f"  soonest at the loss of sync: {p.label}: {duration(p.equal_loss_days)}, "
            f"utilisation {percent(p.utilisation)} %, loss +{percent(p.penalty, 2)} %\n"
            f"  soonest at equal tokens: {quick.label}: {duration(quick.days)}\n"
            f"  as fast as {number(p.equivalent_gpus)} H100; {REFERENCE_GPUS} H100 train "
            f"synchronously in {duration(self.reference_days)}"
        )

    def _warnings(self) -> list[str]:
        model, replicas = self.cluster.model, self.planner.replicas
        found = self.planner.penalty.warnings(model.parameters, replicas)
        advised = diloco_batch_tokens(model.parameters, replicas)
        if model.batch_tokens > 2 * advised:
            found.append(
                f"batch_tokens {model.batch_tokens:.3g} is more than twice the best batch of "
                f"DiLoCo's law ({advised:.3g})"
            )
        return found

    def as_dict(self) -> dict[str, object]:
        """Returns the plan for JSON."""
        return {
            "name": self.cluster.name,
            "replicas": self.planner.replicas,
            "memory_gb": self.planner.memory_gb(),
            "best": self.chosen.row(),
            "best_at_equal_tokens": self.quickest.row(),
            f"days_of_{REFERENCE_GPUS}_h100": self.reference_days,
            "warnings": self._warnings(),
            "plans": columnar([plan.row() for plan in self.plans]),
            "constants": [constant.as_dict() for constant in self.constants],
        }

    def figure(self) -> Figure:
        """Returns the picture."""
        return edge_figure(self.cluster, self.plans, self.chosen)


def _plan_table(plans: list[EdgePlan]) -> str:
    header = ["setting", "compute s", "up s", "down s", "exposed s", "util %", "ktok/s", "rounds"]
    rows = [
        [
            p.label,
            number(p.compute),
            number(p.upload),
            number(p.download),
            number(p.exposed),
            percent(p.utilisation),
            number(p.tokens_per_s / 1e3),
            number(p.rounds, 4),
            number(p.days),
            percent(p.penalty),
            number(p.equal_loss_days),
        ]
        for p in plans
    ]
    return table([*header, "days", "loss +%", "= loss, days"], rows)


def _upload_table(plans: list[EdgePlan]) -> str:
    header = ["setting", *(f"{u:.0%}" for u in UTILISATIONS)]
    return table(header, [[p.label, *map(number, p.upload_mbps)] for p in plans])
