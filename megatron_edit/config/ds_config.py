"""The DeepSpeed JSON: read strictly, honoured or refused key by key.

DeepSpeed itself accepts unknown top-level keys in silence. Here every key is honoured, or refused
with what to use instead, or named at the start of a run as one that does nothing (`ds_keys`), so
that a JSON never asks for something that silently does not happen.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron_edit.config.ds_keys import AUTO, REFUSED, WITHOUT_EFFECT, refusals
from megatron_edit.config.edit_config import (
    EditConfig,
    PositiveInt,
    show_given,
    unknown_keys,
    validation_message,
)
from megatron_edit.config.json_file import read_json
from megatron_edit.errors import ConfigurationError, together
from megatron_edit.platform.ds_compat import name_accelerator

ZERO_STAGES = {2: "optim_grads", 3: "optim_grads_params"}
"""ZeRO stage -> the `--data-parallel-sharding-strategy` that means the same."""

MONITORS = {
    "tensorboard": "TensorBoardConfig",
    "csv_monitor": "CSVConfig",
    "wandb": "WandbConfig",
}
"""Monitor section -> DeepSpeed's model of it in `deepspeed.monitor.config`."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class Bf16Section(_Section):
    """The `bf16` section."""

    enabled: bool | Literal["auto"] = AUTO
    """Whether forward and backward compute in bfloat16 over fp32 shards."""


class ZeroSection(_Section):
    """The `zero_optimization` section."""

    stage: Literal[2, 3] = 3
    """3 releases gathered parameters after use, 2 keeps them until the step ends."""


class BatchSection(_Section):
    """Top-level scalars of the JSON."""

    train_batch_size: PositiveInt | Literal["auto"] = AUTO
    """Samples of one step over all replicas."""
    train_micro_batch_size_per_gpu: PositiveInt | Literal["auto"] = AUTO
    """Samples of one forward pass of one data-parallel rank."""
    gradient_accumulation_steps: PositiveInt | Literal["auto"] = AUTO
    """Micro-batches of one step."""
    gradient_clipping: Annotated[float, Field(ge=0)] | Literal["auto"] = AUTO
    """Largest norm of the inner gradient; 0 = off."""
    steps_per_print: PositiveInt = 10
    """Steps between two log lines."""


SECTIONS: dict[str, type[BaseModel]] = {
    "bf16": Bf16Section,
    "zero_optimization": ZeroSection,
    "edit": EditConfig,
}
COMMS_LOGGER = "comms_logger"
SECTION_NAMES = [*SECTIONS, *MONITORS, COMMS_LOGGER]
HONOURED = [*BatchSection.model_fields, *SECTION_NAMES, "scheduler"]


def load_ds_config(path: str | None, unknown_flags: Sequence[str] = ()) -> dict[str, Any]:
    """Reads and checks a DeepSpeed JSON file.

    Args:
        path: The file; None for an empty JSON.
        unknown_flags: What is wrong with the command line, to be told together with the keys.

    Raises:
        ConfigurationError: The file is missing or malformed, or holds keys or a value that are
            unknown, given twice, or not honoured; or there are unknown flags.
    """
    config = {} if path is None else read_ds_json(Path(path))
    keys = mistaken_keys(config)
    if keys or unknown_flags:
        in_file = [f"{path}: {together(keys)}"] if keys else []
        raise ConfigurationError(together([*unknown_flags, *in_file]))
    try:
        check_ds_config(config)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from None
    return config


def mistaken_keys(config: dict[str, Any]) -> list[str]:
    """Returns what is wrong with the keys of a parsed DeepSpeed JSON, one text a mistake."""
    foreign = [*WITHOUT_EFFECT, *REFUSED]
    mistakes = unknown_keys(config, "", HONOURED, foreign)
    for section, keys in config.items():
        if section in SECTION_NAMES and isinstance(keys, dict):
            others = [key.removeprefix(f"{section}.") for key in foreign]
            allowed = list(_section_model(section).model_fields)
            mistakes += unknown_keys(keys, section, allowed, others)
    return mistakes + refusals(config)


def check_ds_config(config: dict[str, Any]) -> None:
    """Checks every value of a parsed DeepSpeed JSON but those of `edit`.

    Those are checked when they meet the flags, see `methods.resolve`.

    Raises:
        ConfigurationError: Names the key, what was given and what is allowed.
    """
    _check_values(config, BatchSection, prefix="")
    for name in SECTION_NAMES:
        section = config.get(name, {})
        if not isinstance(section, dict):
            raise ConfigurationError(
                f"{name}: got {show_given(section)}; allowed: an object {{...}}"
            )
        if name in config and name != "edit":
            _check_values(section, _section_model(name), prefix=f"{name}.")


def _check_values(section: dict[str, Any], model: type[BaseModel], prefix: str) -> None:
    """Checks those values of a section that its model knows."""
    try:
        model(**{name: section[name] for name in model.model_fields if name in section})
    except ValidationError as error:
        field = error.errors()[0]["loc"][0]
        raise ConfigurationError(validation_message(error, model, f"{prefix}{field}")) from None


def _section_model(section: str) -> type[BaseModel]:
    if section in SECTIONS:
        return SECTIONS[section]
    # Importing deepspeed takes seconds: only a JSON that has such a section pays for it.
    name_accelerator()
    if section == COMMS_LOGGER:
        from deepspeed.comm.config import CommsLoggerConfig

        return CommsLoggerConfig
    from deepspeed.monitor import config

    model: type[BaseModel] = getattr(config, MONITORS[section])
    return model


def read_ds_json(path: Path) -> dict[str, Any]:
    """Reads a DeepSpeed JSON file, strictly.

    Raises:
        ConfigurationError: It is missing or malformed, or gives a key twice.
    """
    return read_json(
        path,
        "--deepspeed_config",
        object_pairs_hook=_refuse_duplicates(path),
        parse_constant=_refuse_constant(path),
    )


def _refuse_duplicates(path: Path) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """Returns a hook for `json.loads` that refuses an object with the same key twice."""

    def hook(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise ConfigurationError(
                    f"{path}: duplicate key {key!r}, given as {show_given(result[key])} and as "
                    f"{show_given(value)}; keep one"
                )
            result[key] = value
        return result

    return hook


def _refuse_constant(path: Path) -> Callable[[str], float]:
    """Returns a hook for `json.loads` that refuses NaN and Infinity, which JSON does not have."""

    def hook(constant: str) -> float:
        raise ConfigurationError(f"{path}: got {constant}; allowed: finite numbers")

    return hook
