"""Methods as rows of one table, and how a run's settings come together from four sources."""

from collections.abc import Mapping

from pydantic import ValidationError

from megatron_edit.config.edit_config import EditConfig, check_keys, flag_name, validation_message
from megatron_edit.errors import ConfigurationError, unknown_name

_AVERAGING: dict[str, object] = {
    "sync_trigger": "steps",
    "weighting": "uniform",
    "detector": "none",
    "clip": None,
}
_EDIT: dict[str, object] = {
    "warmup_steps": 1000,
    "weighting": "norm",
    "detector": "robust",
    "clip": 10.0,
    "outer_lr": 0.8,
    "outer_momentum": 0.85,
    "outer_nesterov": True,
}
_PLAIN_OUTER: dict[str, object] = {"outer_lr": 1.0, "outer_momentum": 0.0, "outer_nesterov": False}

PRESETS: dict[str, dict[str, object]] = {
    "sync": {"sync_trigger": "never"},
    "local_sgd": {**_AVERAGING, **_PLAIN_OUTER, "warmup_steps": 0},
    "post_local_sgd": {**_AVERAGING, **_PLAIN_OUTER, "warmup_steps": 1000},
    "diloco": {
        **_AVERAGING,
        "outer_lr": 0.7,
        "outer_momentum": 0.9,
        "outer_nesterov": True,
        "warmup_steps": 0,
        "sync_interval": 500,
    },
    "co2": {
        **_AVERAGING,
        "outer_lr": 1.0,
        "outer_momentum": 0.5,
        "outer_nesterov": False,
        "warmup_steps": 1000,
        "sync_interval": 48,
        "delay_round": True,
    },
    "edit": {"sync_trigger": "steps", **_EDIT},
    "a_edit": {"sync_trigger": "time", **_EDIT},
}
"""The fields a method sets; a user's flag or JSON key beats it."""


def resolve(
    method: str | None,
    json_values: Mapping[str, object],
    flag_values: Mapping[str, object],
) -> tuple[EditConfig, dict[str, str]]:
    """Merges flags, JSON section, method preset and defaults, in this order of precedence.

    Args:
        method: The method; None takes it from the flags, the JSON or the default.
        json_values: The `edit` section.
        flag_values: Values of the `--edit-*` flags by field.

    Returns:
        The configuration, and where each field's value is from: `flag`, `json`, `method <name>`
        or `default`.

    Raises:
        ConfigurationError: An unknown key, method or value, or two settings that exclude another.
    """
    check_keys(json_values, EditConfig, "edit")
    given = {**json_values, **flag_values}
    chosen = given.get("method", EditConfig.model_fields["method"].default)
    if method is not None:
        chosen = given["method"] = method
    if not isinstance(chosen, str) or chosen not in PRESETS:
        name = flag_name("method") if "method" in flag_values else "edit.method"
        raise unknown_name(name, chosen, PRESETS)
    values: dict[str, object] = {}
    sources: dict[str, str] = {}
    layers = [
        (f"method {chosen}", PRESETS[chosen]),
        ("json", json_values),
        ("flag", flag_values),
    ]
    for source, layer in layers:
        values.update(layer)
        sources.update(dict.fromkeys(layer, source))
    values["method"] = chosen
    _refuse_two_temperatures(values, sources)
    config = _build(values, sources)
    _check_combinations(config)
    return config, {field: sources.get(field, "default") for field in EditConfig.model_fields}


def _refuse_two_temperatures(values: Mapping[str, object], sources: Mapping[str, str]) -> None:
    relative = values.get("weight_temperature_relative")
    if relative is not None and "weight_temperature" in sources:
        raise ConfigurationError(
            f"edit.weight_temperature {values['weight_temperature']} "
            f"({sources['weight_temperature']}) and edit.weight_temperature_relative {relative} "
            f"({sources['weight_temperature_relative']}) exclude each other; give one of them"
        )


def _check_combinations(config: EditConfig) -> None:
    """Refuses settings that exclude one another.

    Raises:
        ConfigurationError: Names the two settings.
    """
    delayed = config.delay_steps > 0 or config.delay_round
    if config.sync_trigger == "time" and delayed:
        raise ConfigurationError(
            "edit.sync_trigger time and a delay (edit.delay_steps, edit.delay_round) exclude each "
            "other: replicas reach no common step to apply the result at; give edit.delay_steps 0"
        )
    if config.sync_trigger == "steps" and config.delay_steps >= config.sync_interval:
        raise ConfigurationError(
            f"edit.delay_steps: got {config.delay_steps}; allowed: less than edit.sync_interval "
            f"{config.sync_interval}"
        )
    if config.delay_round and config.delay_steps:
        raise ConfigurationError(
            f"edit.delay_round and edit.delay_steps {config.delay_steps} exclude each other"
        )
    if config.delay_round and config.outer_nesterov:
        raise ConfigurationError(
            "edit.delay_round needs edit.outer_nesterov false: the age of the result is only "
            "accounted for without Nesterov momentum"
        )
    if config.sync_trigger == "never" and config.compression != "none":
        raise ConfigurationError(
            f"edit.compression {config.compression}: with edit.sync_trigger never (method sync) "
            "there is no pseudo gradient to compress; give none"
        )


def _build(values: Mapping[str, object], sources: Mapping[str, str]) -> EditConfig:
    try:
        return EditConfig.model_validate(values)
    except ValidationError as error:
        field = str(error.errors()[0]["loc"][0])
        from_flag = sources.get(field) == "flag"
        name = flag_name(field) if from_flag else f"edit.{field}"
        raise ConfigurationError(validation_message(error, EditConfig, name)) from None
