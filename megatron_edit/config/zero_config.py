"""The DeepSpeed JSON of a training on DeepSpeed's engine: whose key is whose, and what is refused.

The ``edit`` section is ours and strict. Everything else is DeepSpeed's and handed on to it as it
is, but for the batch size, which counts all replicas here and one of them there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_edit.config.batch_size import Batch, complete_batch
from megatron_edit.config.ds_config import HONOURED, read_ds_json
from megatron_edit.config.ds_keys import AUTO, REFUSED, WITHOUT_EFFECT
from megatron_edit.config.edit_config import EditConfig, unknown_keys
from megatron_edit.config.methods import resolve
from megatron_edit.errors import ConfigurationError, together

Json = Mapping[str, Any]
MEGATRON_PATH = "allowed: leave it out, or train on the Megatron path (pretrain_edit.py)"


@dataclass(frozen=True)
class ZeroRun:
    """What a JSON asks for.

    Attributes:
        edit: The ``edit`` section, completed.
        json: The rest, DeepSpeed's.
    """

    edit: EditConfig
    json: dict[str, Any]

    def shard_size(self, world_size: int) -> int:
        """S, ranks of a replica.

        Raises:
            ConfigurationError: The replicas do not divide the world.
        """
        replicas = self.edit.replicas or 1
        if world_size % replicas:
            possible = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
            raise ConfigurationError(
                f"edit.replicas: got {replicas} with {world_size} ranks; allowed: {possible}"
            )
        return world_size // replicas

    def batch(self, shard_size: int) -> Batch:
        """Micro batch, accumulation and the samples of a step of all replicas.

        Raises:
            ConfigurationError: The numbers do not multiply, or one is ``auto``.
        """
        keys = (
            "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size",
        )  # fmt: skip
        values = [self.json.get(key) for key in keys]
        for key, value in zip(keys, values, strict=True):
            if value == AUTO:
                raise ConfigurationError(
                    f"{key}: got 'auto', which only a Trainer fills in; allowed: a number"
                )
        replicas = self.edit.replicas or 1
        layout = f"world {shard_size * replicas} = replicas {replicas} x S {shard_size}"
        return complete_batch(Batch(*values), shard_size, replicas, layout)

    def replica_json(self, shard_size: int) -> dict[str, Any]:
        """DeepSpeed's JSON of one replica: its ``train_batch_size`` counts that one alone."""
        batch = self.batch(shard_size)
        assert batch.micro is not None and batch.accumulation is not None
        return {
            **self.json,
            "train_micro_batch_size_per_gpu": batch.micro,
            "gradient_accumulation_steps": batch.accumulation,
            "train_batch_size": batch.micro * batch.accumulation * shard_size,
        }


def read_zero_run(source: str | Json) -> ZeroRun:
    """Reads and checks a JSON, without importing DeepSpeed or connecting to other ranks.

    Args:
        source: A file, or its content.

    Raises:
        ConfigurationError: It is malformed, or asks for what cannot be had.
    """
    if not isinstance(source, str):
        return _checked(source)
    try:
        return _checked(read_ds_json(Path(source)))
    except ConfigurationError as error:
        text = str(error)
        named = text if text.startswith((source, "--deepspeed_config")) else f"{source}: {text}"
        raise ConfigurationError(named, per_host=error.per_host) from None


def _checked(content: Json) -> ZeroRun:
    json = {key: value for key, value in content.items() if key != "edit"}
    known = [key for key in [*HONOURED, *WITHOUT_EFFECT, *REFUSED] if "." not in key]
    mistakes = unknown_keys(json, "", known)
    mistakes += [f"{key}: {remedy}" for key, refused, remedy in REFUSALS if refused(json)]
    if mistakes:
        raise ConfigurationError(together(mistakes))
    edit, _ = resolve(None, content.get("edit", {}), {})
    if edit.replicas is None and edit.method != "sync":
        raise ConfigurationError("edit.replicas is missing; give the number of replicas")
    _check_edit(edit, json)
    return ZeroRun(edit, json)


def _zero(json: Json) -> Json:
    section: Json = json.get("zero_optimization", {})
    return section


def _on(key: str) -> Callable[[Json], bool]:
    """Whether a section is there and not switched off."""

    def test(json: Json) -> bool:
        section = json.get(key)
        if isinstance(section, Mapping):
            return bool(section.get("enabled", True))
        return bool(section)

    return test


def _zero_has(*keys: str) -> Callable[[Json], bool]:
    """Whether one of these keys of ``zero_optimization`` is set to something."""
    return lambda json: any(_zero(json).get(key) for key in keys)


def _offloads_to(device: str) -> Callable[[Json], bool]:
    sections = ("offload_optimizer", "offload_param")
    return lambda json: any((_zero(json).get(s) or {}).get("device") == device for s in sections)


def _quantised_or_hierarchical(json: Json) -> bool:
    zero = _zero(json)
    partition = zero.get("zero_hpz_partition_size", 1)
    return partition > 1 or any(
        zero.get(key)
        for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights",
                    "zero_quantized_gradients")
    )  # fmt: skip


REFUSALS: list[tuple[str, Callable[[Json], bool], str]] = [
    (
        "zero_optimization.stage",
        lambda json: _zero(json).get("stage", 0) not in (1, 2, 3),
        "EDiT on DeepSpeed needs sharded fp32 masters; allowed: 1, 2 or 3",
    ),
    ("fp16", _on("fp16"), 'loss scales differ between replicas; allowed: "bf16"'),
    ("amp", _on("amp"), 'masters are not ZeRO\'s; allowed: "bf16"'),
    ("torch_autocast", _on("torch_autocast"), 'not supported; allowed: "bf16"'),
    (
        "zero_optimization.offload_*.device",
        _offloads_to("nvme"),
        'masters on disks cannot be synchronised; allowed: "cpu" or "none"',
    ),
    (
        "zero_optimization.offload_param",
        lambda json: (_zero(json).get("offload_param") or {}).get("device", "none") != "none",
        'not supported; allowed: "none", or offload_optimizer',
    ),
    (
        "zero_optimization.zero_hpz_partition_size, zero_quantized_*",
        _quantised_or_hierarchical,
        f"replicas take the place of ZeRO++; {MEGATRON_PATH}",
    ),
    (
        "zero_optimization.mics_shard_size",
        lambda json: _zero(json).get("mics_shard_size", -1) > 0,
        "a replica is the shard group; allowed: leave it out and set edit.replicas",
    ),
    (
        "zero_optimization.round_robin_gradients",
        _zero_has("round_robin_gradients"),
        "not supported; allowed: false",
    ),
    (
        "zero_optimization.zenflow",
        _zero_has("zenflow"),
        f"updates reach the masters late; {MEGATRON_PATH}",
    ),
    (
        "optimizer.type",
        lambda json: (
            str((json.get("optimizer") or {}).get("type", "")).lower()
            in ("muon", "onebitadam", "zerooneadam", "onebitlamb")
        ),
        "its state is not sharded like the masters; allowed: AdamW, Adam and the like",
    ),
    ("tensor_parallel", _on("tensor_parallel"), MEGATRON_PATH),
    ("pipeline", _on("pipeline"), MEGATRON_PATH),
    ("expert_parallel", _on("expert_parallel"), MEGATRON_PATH),
    (
        "sequence_parallel_size",
        lambda json: json.get("sequence_parallel_size", 1) > 1,
        MEGATRON_PATH,
    ),
    ("compile", lambda json: bool((json.get("compile") or {}).get("deepcompile")), "not supported"),
    (
        "data_types.grad_accum_dtype",
        lambda json: "fp16" in str((json.get("data_types") or {}).get("grad_accum_dtype")),
        'allowed: "fp32" or "bf16"',
    ),
    (
        "bf16.bf16_master_weights_and_grads",
        lambda json: bool((json.get("bf16") or {}).get("bf16_master_weights_and_grads")),
        "the anchor is fp32 and so must the masters be; allowed: false",
    ),
    ("elasticity", _on("elasticity"), "the number of ranks is fixed; allowed: leave it out"),
    (
        "gradient_allreduce_op",
        lambda json: str(json.get("gradient_allreduce_op", "mean")).lower() not in ("mean", "avg"),
        'gradients are averaged; allowed: "mean"',
    ),
]
"""Key, whether a JSON asks for it, why not and what to do instead."""


def _check_edit(edit: EditConfig, json: Json) -> None:
    """Refuses settings of the synchronisation that DeepSpeed's engine cannot follow."""
    zero = _zero(json)
    if edit.sync_trigger == "time":
        raise ConfigurationError(
            f"edit.sync_trigger time (method {edit.method}): ZeRO-3's checks and DeepSpeed's saves "
            f"are collectives of all replicas, which must be in step; allowed: steps; or "
            f"{MEGATRON_PATH.removeprefix('allowed: leave it out, or ')}"
        )
    if edit.compression != "none":
        raise ConfigurationError(
            f"edit.compression {edit.compression}: not supported on DeepSpeed's engine; allowed: "
            "none"
        )
    offloads = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    if offloads and (edit.warmup_steps > 0 or edit.sync_trigger == "never"):
        raise ConfigurationError(
            f"zero_optimization.offload_optimizer with edit.warmup_steps {edit.warmup_steps}: "
            "gradients go to the host before replicas could average them; allowed: "
            "edit.warmup_steps 0 (and a method with rounds), or no offload"
        )
    if edit.landing == "layers" and zero.get("stage") != 3:
        raise ConfigurationError(
            f"edit.landing layers: ZeRO-{zero.get('stage')} holds whole parameters; allowed: "
            "boundary, or zero_optimization.stage 3"
        )
    if edit.debug:
        raise ConfigurationError(
            "edit.debug: faults can be injected on the Megatron path alone; allowed: false"
        )
