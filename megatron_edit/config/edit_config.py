"""The `edit` section of the DeepSpeed JSON and the `--edit-*` flags, both made from one class.

A new setting is one line and its docstring in `EditConfig`: the JSON key, the flag, its help text,
its range check and its error message follow from them.
"""

import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from megatron_edit.errors import ConfigurationError, did_you_mean, together

FractionBelowOne = Annotated[float, Field(ge=0, lt=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
PositiveInt = Annotated[int, Field(ge=1)]

Method = Literal["sync", "local_sgd", "post_local_sgd", "diloco", "co2", "edit", "a_edit"]
Weighting = Literal["norm", "norm_per_step", "tokens", "uniform"]
Detector = Literal["none", "paper", "history", "peer", "robust"]
Compression = Literal["none", "bf16", "int8"]


_KIND_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    list: "a list",
}


class EditConfig(BaseModel):
    """Settings of the synchronisation between replicas."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    method: Method = "edit"
    """Named preset of the fields below, each of which may still be set by itself."""
    replicas: PositiveInt | None = None
    """Number of replicas: full copies of the model that train between two synchronisations on
    their own. The ranks of the world are divided among them."""
    sync_trigger: Literal["steps", "time", "never"] = "steps"
    """What ends a round: `steps` counts inner steps, `time` reads the clock, so that replicas of
    unequal speed do unequal numbers of steps, `never` averages gradients over all replicas at every
    step instead."""
    sync_interval: PositiveInt = 128
    """Length of a round in inner steps."""
    sync_seconds: PositiveFloat = 600.0
    """Length of a round in seconds, with the time trigger."""
    min_round_steps: PositiveInt = 1
    """Inner steps of all replicas together below which a round of the time trigger is skipped."""
    warmup_steps: Annotated[int, Field(ge=0)] = 1000
    """Inner steps at the start during which gradients are averaged over all replicas."""
    gradient_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type in which gradients cross between replicas that average them at every step: fp32, or bf16
    with half the bytes."""
    weighting: Weighting = "norm"
    """Weight of a replica in a synchronisation: softmax of minus its pseudo-gradient norm (`norm`),
    the same with the norm per step of the round (`norm_per_step`), its samples of the round
    (`tokens`), or equal (`uniform`)."""
    weight_temperature: PositiveFloat = 1.0
    """Divisor of the norms before the softmax, in units of the norm."""
    weight_temperature_relative: PositiveFloat | None = None
    """Divisor of the norms before the softmax, as a multiple of the median norm of the round.
    Replaces weight_temperature; none = off."""
    detector: Detector = "robust"
    """Test that excludes a replica's part of a unit from a synchronisation: z-test of the norm
    (`paper`), z-test of the log of its change (`history`), comparison with the other replicas
    (`peer`, needs 3 of them), `history` or `peer` (`robust`)."""
    detector_alpha: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """Weight of the newest value in the running mean and variance of the z-tests."""
    detector_threshold: PositiveFloat = 3.0
    """Standard deviations above the running mean from which a z-test excludes."""
    detector_warmup: Annotated[int, Field(ge=0)] = 10
    """Synchronisations before the z-tests act. Non-finite norms are excluded from the first on."""
    peer_threshold: PositiveFloat = 10.0
    """Scaled median absolute deviations above the median from which the peer test excludes."""
    peer_floor: Annotated[float, Field(ge=0)] = 0.3
    """Least distance above the median, as a fraction of it, at which the peer test excludes."""
    readmit_after: PositiveInt = 5
    """Exclusions of a finite norm in a row after which a z-test starts its statistics anew. Where
    it excludes all replicas, that happens before max_consecutive_rollbacks would end the run."""
    clip: PositiveFloat | None = 10.0
    """Largest norm of a unit's averaged pseudo gradient; larger ones are scaled down to it.
    none = off."""
    max_consecutive_rollbacks: PositiveInt = 3
    """Synchronisations in a row in which all replicas of one unit are excluded, or which find the
    same replica failing (max_nan_iterations), after which the run saves a checkpoint and stops."""
    outer_lr: Annotated[float, Field(gt=0, le=2)] = 0.8
    """Learning rate of the outer optimizer."""
    outer_momentum: FractionBelowOne = 0.85
    """Momentum of the outer optimizer."""
    outer_nesterov: bool = True
    """Whether the outer optimizer looks ahead (Nesterov)."""
    outer_momentum_clip: PositiveFloat | None = None
    """Largest absolute value of an element of the outer momentum (CO2). none = off."""
    staleness_gap_penalty: Annotated[float, Field(ge=1)] = 1.0
    """Divisor of the averaged pseudo gradient, for its age (CO2's lambda). 1 = off."""
    delay_steps: Annotated[int, Field(ge=0)] = 0
    """Inner steps that a synchronisation may take behind the training before its result is applied;
    local progress made meanwhile is kept. 0 applies it in the forward that starts it."""
    delay_round: bool = False
    """Whether a synchronisation takes one whole round, after which the replicas go on from the
    anchor (CO2)."""
    compression: Compression = "none"
    """Encoding of pseudo gradients between replicas: fp32 (`none`), or fewer bytes with error
    feedback: 2x (`bf16`) or about 4x (`int8`, one scale per 256 values)."""
    landing: Literal["auto", "layers", "boundary"] = "auto"
    """When the units of a synchronisation take its result: one by one in the forward, each before
    its gather (`layers`), or all before the first forward of the step (`boundary`). `auto` is
    `layers` on Megatron and `boundary` on DeepSpeed."""
    sync_prefetch: PositiveInt = 3
    """Units whose all-reduce is in flight ahead of the unit that computes."""
    offload_outer_state: bool = False
    """Whether anchor and outer momentum live in pinned host memory."""
    eval_on: Literal["local", "anchor"] = "local"
    """Parameters that are evaluated in the middle of a round: each replica's own or the anchor."""
    debug: bool = False
    """Whether the two fields below may be set."""
    debug_slow_replica: str | None = None
    """`I:FACTOR`: steps of replica I take FACTOR times as long. none = off."""
    debug_poison_replica: str | None = None
    """`I:STEP:KIND` or `I:FIRST-LAST:KIND`: spoils replica I in these steps; KIND is `nan`, `inf`,
    `scale` (its pseudo gradient times 1000) or `tokens` (random training tokens). none = off."""


def flag_name(field: str) -> str:
    """Returns the flag of a field: `sync_interval` -> `--edit-sync-interval`."""
    return "--edit-" + field.replace("_", "-")


def help_text(field: str) -> str:
    """Returns the help text of a field's flag: its docstring and its default."""
    info = EditConfig.model_fields[field]
    description = " ".join((info.description or "").split())
    return f"{description} ({allowed_values(info)}; default: {show(info.default)})"


def show(value: object) -> str:
    """Returns a value as a user writes it in a flag."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)


def inner_type(annotation: Any) -> tuple[Any, bool]:
    """Splits an annotation into its type without `Annotated` and `| None`, and "may be None"."""
    optional = False
    if get_origin(annotation) in (Union, types.UnionType):
        members = [a for a in get_args(annotation) if a is not type(None)]
        optional = len(members) < len(get_args(annotation))
        annotation = members[0]
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation, optional


def _bounds(info: FieldInfo) -> list[str]:
    """Returns the range rules of a field as text, wherever in its annotation they stand."""
    members = get_args(info.annotation)
    nested = [m for a in members if get_origin(a) is Annotated for m in a.__metadata__]
    rules = [rule for item in nested for rule in getattr(item, "metadata", [item])]
    symbols = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    return [
        f"{symbol} {getattr(rule, name):g}"
        for rule in [*info.metadata, *rules]
        for name, symbol in symbols.items()
        if hasattr(rule, name)
    ]


def allowed_values(info: FieldInfo) -> str:
    """Returns what a field accepts, in words."""
    kind, optional = inner_type(info.annotation)
    if get_origin(kind) is Literal:
        text = "one of " + ", ".join(show(choice) for choice in get_args(kind))
    else:
        text = " ".join([_KIND_NAMES.get(kind, "a value"), " and ".join(_bounds(info))]).strip()
    words = [repr(c) for m in get_args(info.annotation) if m is not kind for c in _choices(m)]
    return ", or ".join([text, *words, *(["none (null in JSON)"] if optional else [])])


def _choices(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def parse_flag_value(field: str, text: str, flag: str) -> object:
    """Turns the text after a flag into the value the JSON section would hold.

    Args:
        field: The field that the flag sets.
        text: What the user wrote.
        flag: The flag as the user wrote it, for the error message.

    Raises:
        ConfigurationError: The text is no value of the field's type.
    """
    info = EditConfig.model_fields[field]
    kind, optional = inner_type(info.annotation)
    word = text.strip().lower()
    if optional and word == "none":
        return None
    if kind is bool and word in ("true", "false"):
        return word == "true"
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    if kind in (int, float, bool):
        raise ConfigurationError(f"{flag}: got {text!r}; allowed: {allowed_values(info)}")
    return text


def check_keys(section: Mapping[str, object], model: type[BaseModel], where: str) -> None:
    """Refuses keys that a section's model does not know.

    Raises:
        ConfigurationError: Names the keys, and of the misspelt ones the right spelling.
    """
    if mistakes := unknown_keys(section, where, list(model.model_fields)):
        raise ConfigurationError(together(mistakes))


def unknown_keys(
    section: Mapping[str, object],
    where: str,
    allowed: Sequence[str],
    others: Sequence[str] = (),
) -> list[str]:
    """Returns what is wrong with the keys of a section: a text a misspelt one, one for the rest.

    Args:
        section: Keys and values as given.
        where: The section's name; empty for the top level.
        allowed: Keys to list for one that is not misspelt.
        others: Keys that are known, too.
    """
    known = [*allowed, *others]
    hints = {key: did_you_mean(key, known) for key in section if key not in known}
    mistakes = [
        f"{f'{where}.{key}' if where else 'top-level key'}: unknown name {key!r}{hint}"
        for key, hint in hints.items()
        if hint
    ]
    if strange := [repr(key) for key, hint in hints.items() if not hint]:
        names = f"unknown name{'s' * (len(strange) > 1)} {', '.join(strange)}"
        mistakes.append(f"{where or 'top-level key'}: {names}; allowed: {', '.join(allowed)}")
    return mistakes


def validation_message(error: ValidationError, model: type[BaseModel], name: str) -> str:
    """Returns the first finding of a pydantic error as one line.

    Args:
        error: What the model's constructor raised.
        model: The model whose fields were checked.
        name: The value as the user named it: a flag or a dotted JSON key.
    """
    first = error.errors(include_url=False)[0]
    given = first.get("input")
    info = model.model_fields[str(first["loc"][0])]
    kind, _ = inner_type(info.annotation)
    hint = did_you_mean(given, map(str, get_args(kind))) if get_origin(kind) is Literal else ""
    return f"{name}: got {show_given(given)}; allowed: {allowed_values(info)}{hint}"


def show_given(value: object) -> str:
    """Returns a refused value as JSON would write the simple ones."""
    if value is None:
        return "null"
    return show(value) if isinstance(value, bool) else repr(value)
