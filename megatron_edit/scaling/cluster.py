"""CLUSTER.yaml: the hardware, the model and what the planner may try. Units are in the names."""

from pathlib import Path
from typing import Annotated, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from megatron_edit.config.edit_config import Compression
from megatron_edit.errors import ConfigurationError, did_you_mean
from megatron_edit.scaling.closed_forms import BACKWARD_SHARE, FORWARD_SHARE

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
EntryT = TypeVar("EntryT")
NotEmpty = Annotated[tuple[EntryT, ...], Field(min_length=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Model(_Section):
    """What is trained."""

    parameters: Positive
    """N, parameters of the model."""
    tokens: Positive
    """D, training tokens over all replicas."""
    batch_tokens: Positive
    """Tokens of one optimizer step over all replicas."""
    sequence_length: Count = 2048
    """Tokens of one sample; no replica can take less per step."""


class NetworkLink(_Section):
    """One end of a network, the same rate in both directions."""

    gbps: Positive
    """Bandwidth in Gbit/s."""
    latency_ms: NotNegative = 0.0
    """Time of a collective that does not depend on its payload, in ms."""


class Site(_Section):
    """A cluster: nodes that reach one another fast."""

    name: str
    """How the plan calls it."""
    nodes: Count
    """Machines."""
    gpus_per_node: Count = 8
    """Accelerators of a machine."""
    peak_tflops: Positive
    """Dense peak of one accelerator at the training precision, in TFLOP/s."""
    mfu: Fraction
    """Share of the peak reached on one node, without communication between nodes."""
    memory_gb: Positive
    """Memory of one accelerator in GB (1e9 bytes)."""
    node_link: NetworkLink
    """Link of one node to the others of its site."""
    uplink: NetworkLink | None = None
    """Link of the whole site to the other sites; needed where there are several."""


class Devices(_Section):
    """Edge devices that reach one another through a server."""

    count: Count
    """Devices that take part."""
    peak_tflops: Positive
    """Peak of one device in TFLOP/s."""
    mfu: Fraction
    """Share of the peak reached."""
    memory_gb: Positive
    """Memory of one device in GB that training may use."""
    download_mbps: Positive
    """Rate from the server to a device in Mbit/s."""
    upload_mbps: Positive
    """Rate from a device to the server in Mbit/s."""
    latency_ms: NotNegative = 0.0
    """Time of one synchronisation that does not depend on its payload, in ms."""
    availability: Fraction = 1.0
    """Share of the devices that are there in a round."""
    speed_spread: NotNegative = 0.0
    """Standard deviation of the log of the devices' speeds."""
    drop_slowest: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the devices, the slowest, for whose part a round does not wait."""
    devices_per_replica: Count = 1
    """S, devices that share one replica's state; they exchange the weights at every step."""
    server_gbps: Positive | None = None
    """Rate of the server in each direction in Gbit/s; none = never the bottleneck."""


class Search(_Section):
    """What the planner tries."""

    sync_intervals: Annotated[tuple[Count, ...], Field(min_length=1)] = (
        8,
        16,
        32,
        64,
        128,
        256,
        512,
    )
    """H (tau), inner steps of a round."""
    delays: NotEmpty[Annotated[int, Field(ge=0)]] = (0, 1, 4)
    """d, steps after which a synchronisation is applied."""
    compressions: NotEmpty[Compression] = get_args(Compression)
    """Encodings of the pseudo gradient."""
    warmup_steps: Annotated[int, Field(ge=0)] = 1000
    """Synchronous steps at the start of a run of local SGD."""
    max_loss_penalty: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Largest relative loss penalty against synchronous training that is acceptable."""
    fewest_rounds: Count = 30
    """Fewest synchronisations of a run of local SGD; the outer momentum needs dozens to act."""
    deadline_days: Positive | None = None
    """Longest training time; a plan that cannot keep it is refused."""


class Assumptions(_Section):
    """Numbers that a plan needs and that nobody gave; each may be set."""

    gradient_bytes: Positive = 2.0
    """Bytes of an element of a gradient on the network (bf16)."""
    weight_bytes: Positive = 2.0
    """Bytes of an element of a weight on the network (bf16)."""
    pseudo_gradient_bytes: Positive = 4.0
    """Bytes of an uncompressed element of a pseudo gradient (fp32)."""
    gradient_overlap: NotNegative = BACKWARD_SHARE
    """Step times that a gradient all-reduce hides behind: the backward."""
    sync_overlap: NotNegative = FORWARD_SHARE
    """Step times that an undelayed synchronisation hides behind: the forward."""
    gather_overlap: NotNegative = 1.0
    """Step times that the weight gathers inside a replica hide behind: forward and backward."""
    usable_memory: Fraction = 0.8
    """Share of the memory left to parameters and optimizer state; the rest holds activations."""
    sync_share: Fraction = 0.1
    """rho: a two-stage synchronisation is called effective if it takes no more of a round."""
    interval_slope: NotNegative = 0.0095
    """Nats of loss per factor e of H above 30: 2.9 % of perplexity from H = 50 to 1000, about what
    arXiv 2311.08105 reports, taken as logarithmic."""
    delay_quarter: NotNegative = 0.010
    """Nats of loss at a delay of a quarter of the round: a 1M-parameter simulation, one seed."""
    delay_exponent: Positive = 1.42
    """Power of d/H in the delay's penalty: 2.7 % of perplexity at half a round, same simulation."""
    price_per_gpu_hour: NotNegative = 0.0
    """Price of a GPU hour in any currency; 0 = no cost is printed."""


class Cluster(_Section):
    """The whole file: either `sites` or `devices`."""

    name: str
    """Title of the plan."""
    model: Model
    sites: tuple[Site, ...] = ()
    devices: Devices | None = None
    search: Search = Search()
    assumptions: Assumptions = Assumptions()

    @model_validator(mode="after")
    def _one_kind_of_hardware(self) -> "Cluster":
        if bool(self.sites) == (self.devices is not None):
            raise ValueError("give either sites or devices")
        names = [site.name for site in self.sites]
        if len(set(names)) < len(names):
            raise ValueError("two sites have the same name")
        without = [site.name for site in self.sites if site.uplink is None]
        if len(self.sites) > 1 and without:
            raise ValueError(f"site {without[0]!r} needs an uplink, there are several sites")
        if self.model.batch_tokens < self.model.sequence_length:
            raise ValueError("model.batch_tokens is less than one sequence")
        return self


COMPRESSION_FACTORS: dict[str, float] = {"none": 1.0, "bf16": 2.0, "int8": 4.0 / (1.0 + 4.0 / 256)}
"""fp32 bytes by encoded bytes; int8 carries one fp32 scale per block of 256."""

SettingsT = TypeVar("SettingsT", bound=BaseModel)


def validated(model: type[SettingsT], values: object, where: str) -> SettingsT:
    """Returns a checked model.

    Args:
        model: A pydantic model.
        values: What a file or the flags hold.
        where: File or command, for the message.

    Raises:
        ConfigurationError: Names the first field that is wrong, and what was given.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigurationError(f"{where}: {_finding(error, model)}") from None


def _finding(error: ValidationError, model: type[BaseModel]) -> str:
    """Returns the first finding of pydantic in one line, with the dotted name of the field."""
    first = error.errors(include_url=False)[0]
    location = [str(part) for part in first["loc"]]
    name = ".".join(location)
    if first["type"] == "extra_forbidden":
        known = _fields_at(model, location[:-1])
        listed = f"; allowed: {', '.join(known)}"
        return f"unknown key {name!r}{did_you_mean(location[-1], known) or listed}"
    if first["type"] == "missing":
        return f"{name} is missing"
    message = first["msg"].removeprefix("Value error, ")
    if not location:
        return message
    given = "" if first["type"] == "value_error" else f"got {first.get('input')!r}; "
    return f"{name}: {given}{message[0].lower()}{message[1:]}"


def _fields_at(model: type[BaseModel], location: list[str]) -> list[str]:
    """Returns the fields of the section that a location leads to."""
    current: type[BaseModel] = model
    for part in location:
        if part.isdigit():
            continue
        for candidate in _models_in(current.model_fields[part].annotation):
            current = candidate
    return list(current.model_fields)


def _models_in(annotation: object) -> list[type[BaseModel]]:
    """Returns the pydantic models that an annotation mentions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for a in getattr(annotation, "__args__", ()) for m in _models_in(a)]


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that is given twice; PyYAML would keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        keys = [key.value for key, _ in node.value]
        twice = [key for key in keys if keys.count(key) > 1]
        if twice:
            line = node.start_mark.line + 1
            raise yaml.YAMLError(f"key {twice[0]!r} is given twice in the block at line {line}")
        return dict(super().construct_mapping(node, deep))


def read_cluster(path: Path) -> Cluster:
    """Reads a CLUSTER.yaml.

    Raises:
        ConfigurationError: The file cannot be read, or a field is wrong.
    """
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _StrictLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: cannot be read ({error})") from None
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path}: is not YAML: {error}") from None
    except RecursionError:
        raise ConfigurationError(f"{path}: nested too deeply for a description") from None
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path}: holds no mapping of name, model, sites or devices")
    return validated(Cluster, values, str(path))
