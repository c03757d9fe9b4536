"""Methods as rows of one table, and how a run's settings come together from four sources."""

from collections.abc import Mapping

from pydantic import ValidationError

from megatron_edit.config import EditConfig, check_keys, flag_name, validation_message
from megatron_edit.errors import ConfigurationError, unknown_name

PRESETS: dict[str, dict[str, object]] = {
    "sync": {"sync_trigger": "never"},
    "edit": {
        "sync_trigger": "steps",
        "warmup_steps": 1000,
        "weighting": "norm",
        "detector": "robust",
        "clip": 10.0,
        "outer_lr": 0.8,
        "outer_momentum": 0.85,
        "outer_nesterov": True,
    },
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
    return _build(values, sources), {
        field: sources.get(field, "default") for field in EditConfig.model_fields
    }


def _refuse_two_temperatures(values: Mapping[str, object], sources: Mapping[str, str]) -> None:
    relative = values.get("weight_temperature_relative")
    if relative is not None and "weight_temperature" in sources:
        raise ConfigurationError(
            f"edit.weight_temperature {values['weight_temperature']} "
            f"({sources['weight_temperature']}) and edit.weight_temperature_relative {relative} "
            f"({sources['weight_temperature_relative']}) exclude each other; give one of them"
        )


def _build(values: Mapping[str, object], sources: Mapping[str, str]) -> EditConfig:
    try:
        return EditConfig.model_validate(values)
    except ValidationError as error:
        field = str(error.errors()[0]["loc"][0])
        from_flag = sources.get(field) == "flag"
        name = flag_name(field) if from_flag else f"edit.{field}"
        raise ConfigurationError(validation_message(error, EditConfig, name)) from None
