"""The DeepSpeed JSON: read strictly, honoured or refused key by key.

DeepSpeed itself accepts unknown top-level keys in silence. Here every key is honoured, or refused
with what to use instead, so that a JSON never asks for something that does not happen.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron_edit.config.edit_config import (
    EditConfig,
    PositiveInt,
    check_keys,
    show_given,
    validation_message,
)
from megatron_edit.errors import ConfigurationError, unknown_name
from megatron_edit.platform.ds_compat import name_accelerator

ZERO_STAGES = {2: "optim_grads", 3: "optim_grads_params"}
"""ZeRO stage -> the `--data-parallel-sharding-strategy` that means the same."""

MONITORS = {
    "tensorboard": "TensorBoardConfig",
    "csv_monitor": "CSVConfig",
    "wandb": "WandbConfig",
}
"""Monitor section -> DeepSpeed's model of it in `deepspeed.monitor.config`."""

AUTO: Final = "auto"
"""JSON value of a batch field that leaves the number to the flags."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class Bf16Section(_Section):
    """The `bf16` section."""

    enabled: bool = False
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
    gradient_clipping: Annotated[float, Field(ge=0)] = 1.0
    """Largest norm of the inner gradient; 0 = off."""
    steps_per_print: PositiveInt = 10
    """Steps between two log lines."""


SECTIONS: dict[str, type[BaseModel]] = {
    "bf16": Bf16Section,
    "zero_optimization": ZeroSection,
    "edit": EditConfig,
}
HONOURED = [*BatchSection.model_fields, *SECTIONS, *MONITORS, "comms_logger"]

NOT_HONOURED = {
    "optimizer": "the inner optimizer is AdamW; use --lr, --weight-decay, --adam-beta1, ...",
    "scheduler": "use --lr-decay-style, --lr-warmup-iters, --lr-decay-iters, --min-lr",
    "fp16": "use bf16",
    "amp": "use bf16",
    "torch_autocast": "use bf16",
    "bfloat16": "use the key bf16",
    "data_types": "gradients and optimizer state are fp32",
    "communication_data_type": "gradients are reduced in fp32",
    "seq_parallel_communication_data_type": "use --sequence-parallel",
    "prescale_gradients": "gradients are averaged",
    "gradient_predivide_factor": "gradients are averaged",
    "gradient_allreduce_op": "gradients are averaged",
    "managed_gradient_accumulation": "use gradient_accumulation_steps",
    "sparse_gradients": "gradients are dense",
    "sparse_attention": "attention is dense",
    "zero_allow_untested_optimizer": "no ZeRO engine of DeepSpeed is used",
    "zero_force_ds_cpu_optimizer": "use edit.offload_outer_state",
    "activation_checkpointing": "use --recompute-granularity, --recompute-method",
    "tensor_parallel": "use --tensor-model-parallel-size",
    "pipeline": "use --pipeline-model-parallel-size",
    "expert_parallel": "experts are not supported",
    "use_data_before_expert_parallelism": "experts are not supported",
    "checkpoint": "use --save, --load, --save-interval",
    "datastates_ckpt": "use --save, --load, --save-interval",
    "nebula": "use --save, --load, --save-interval",
    "data_efficiency": "use --data-path",
    "curriculum_learning": "use --data-path",
    "dataloader_drop_last": "use --train-iters or --train-samples",
    "progressive_layer_drop": "every layer runs",
    "compression_training": "not supported",
    "weight_quantization": "not supported",
    "hybrid_engine": "not supported",
    "eigenvalue": "not supported",
    "compile": "not supported",
    "aio": "nothing is offloaded to disks",
    "autotuning": "not supported",
    "elasticity": "the number of ranks is fixed; use edit.replicas",
    "flops_profiler": "use --log-throughput",
    "wall_clock_breakdown": "use --log-throughput",
    "memory_breakdown": "not supported",
    "timers": "use --log-throughput",
    "dump_state": "the effective configuration is always printed",
    "disable_allgather": "not supported",
    "disable_python_gc": "not supported",
    "graph_harvesting": "not supported",
    "log_level": "not supported",
    "comet": "use tensorboard, csv_monitor or wandb",
}
"""DeepSpeed's other top-level keys -> what to use instead."""


def load_ds_config(path: str) -> dict[str, Any]:
    """Reads and checks a DeepSpeed JSON file.

    Raises:
        ConfigurationError: The file is missing or malformed, or holds a key or value that is
            unknown, given twice, or not honoured.
    """
    config = _read_json(Path(path))
    try:
        check_ds_config(config)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from None
    return config


def check_ds_config(config: dict[str, Any]) -> None:
    """Checks every key and value of a parsed DeepSpeed JSON but the values of `edit`.

    Those are checked when they meet the flags, see `methods.resolve`.

    Raises:
        ConfigurationError: Names the key, what was given and what is allowed.
    """
    for key, value in config.items():
        if key in NOT_HONOURED:
            _refuse_not_honoured(key, value)
        elif key not in HONOURED:
            raise unknown_name("top-level key", key, HONOURED)
    scalars = {key: config[key] for key in BatchSection.model_fields if key in config}
    _check_values(scalars, BatchSection, prefix="")
    for key in [*SECTIONS, *MONITORS, "comms_logger"]:
        section = config.get(key, {})
        if not isinstance(section, dict):
            raise ConfigurationError(
                f"{key}: got {show_given(section)}; allowed: an object {{...}}"
            )
        if key in SECTIONS:
            check_keys(section, SECTIONS[key], key)
    for key in ("bf16", "zero_optimization"):
        _check_values(config.get(key, {}), SECTIONS[key], prefix=f"{key}.")
    for key in [*MONITORS, "comms_logger"]:
        if key in config:
            model = _deepspeed_model(key)
            check_keys(config[key], model, key)
            _check_values(config[key], model, prefix=f"{key}.")


def _refuse_not_honoured(key: str, value: object) -> None:
    """Refuses a DeepSpeed key unless its value switches off what it stands for."""
    off = value is False or (isinstance(value, dict) and value.get("enabled") is False)
    if not off:
        raise ConfigurationError(
            f"{key}: a DeepSpeed key that is not honoured here; {NOT_HONOURED[key]}"
        )


def _check_values(section: dict[str, Any], model: type[BaseModel], prefix: str) -> None:
    try:
        model(**section)
    except ValidationError as error:
        field = error.errors()[0]["loc"][0]
        raise ConfigurationError(validation_message(error, model, f"{prefix}{field}")) from None


def _deepspeed_model(section: str) -> type[BaseModel]:
    # Importing deepspeed takes seconds: only a JSON that has such a section pays for it.
    name_accelerator()
    if section == "comms_logger":
        from deepspeed.comm.config import CommsLoggerConfig

        return CommsLoggerConfig
    from deepspeed.monitor import config

    model: type[BaseModel] = getattr(config, MONITORS[section])
    return model


def _read_json(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigurationError(
            f"--deepspeed_config {path}: {reason}; give a readable DeepSpeed JSON file",
            per_host=True,
        ) from None
    try:
        config = json.loads(
            text,
            object_pairs_hook=_refuse_duplicates(path),
            parse_constant=_refuse_constant(path),
        )
    except json.JSONDecodeError as error:
        raise ConfigurationError(
            f"{path}:{error.lineno}:{error.colno}: malformed JSON: {error.msg}"
        ) from None
    if not isinstance(config, dict):
        raise ConfigurationError(f"{path}: got {show_given(config)}; allowed: an object {{...}}")
    return config


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
