"""The numbers that went into a plan, each with where it comes from."""

from dataclasses import replace

from pydantic import BaseModel

from megatron_edit.scaling.closed_forms import OUTER_STATE_BYTES, STATE_BYTES
from megatron_edit.scaling.cluster import Cluster
from megatron_edit.scaling.penalty import EQUAL_LOSS_LAW, LossPenalty
from megatron_edit.scaling.provenance import Constant, Kind
from megatron_edit.scaling.published import STREAMING_DILOCO


def plan_constants(
    cluster: Cluster,
    penalty: LossPenalty,
    source: str,
    measured: str | None = None,
    link: str = "node_link",
) -> list[Constant]:
    """Returns every constant of a plan.

    Args:
        cluster: What the file says; fields left out are assumptions.
        penalty: The laws of the loss.
        source: Name of the file.
        measured: Name of the file with a measured link, if there is one.
        link: Field of a site that was measured.
    """
    found = _section("model", cluster.model, source)
    for site in cluster.sites:
        found += _section(site.name, site, source)
    if measured:
        found = [_as_measured(c, measured) if f".{link}." in c.name else c for c in found]
    if cluster.devices:
        found += _section("devices", cluster.devices, source)
    found += _section("search", cluster.search, source)
    found += _section("", cluster.assumptions, source)
    found += penalty.provenance()
    found += [
        EQUAL_LOSS_LAW,
        Constant(
            "loss of compression", 0, "nats", Kind.PUBLISHED, f"{STREAMING_DILOCO}: none at 4 bits"
        ),
        Constant("state", STATE_BYTES, "bytes/parameter", Kind.PUBLISHED, "ZeRO, 1910.02054"),
        Constant(
            "outer state",
            OUTER_STATE_BYTES,
            "bytes/parameter",
            Kind.GIVEN,
            "anchor, momentum in fp32",
        ),
        Constant("FLOP per parameter and token", 6, "", Kind.PUBLISHED, "Kaplan et al. 2020"),
    ]
    return found


def _as_measured(constant: Constant, file: str) -> Constant:
    return replace(constant, kind=Kind.MEASURED, source=file)


def _section(prefix: str, section: BaseModel, source: str) -> list[Constant]:
    """Returns the numbers of one section: given where the file has them, assumed elsewhere."""
    found = []
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        label = f"{prefix}.{name}".lstrip(".")
        if isinstance(value, BaseModel):
            found += _section(label, value, source)
        elif isinstance(value, int | float):
            given = name in section.model_fields_set
            why = " ".join((info.description or "").split())
            kind = Kind.GIVEN if given else Kind.ASSUMED
            found.append(Constant(label, value, "", kind, source if given else why))
    return found
