"""DeepSpeed's own keys that are not honoured: those that may stay, and those that may not.

A key that only says how fast DeepSpeed's engines work, or that belongs to a part of DeepSpeed that
is not used here, does nothing: it may stay in the JSON and a run says so. A key that asks for
another training than the one that would run is refused, unless its value switches it off.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

AUTO: Final = "auto"
"""JSON value that leaves a setting to the flags."""


def _in_section(section: str, names: str) -> str:
    return " ".join(f"{section}.{name}" for name in names.split())


_STAGE_3 = """
    allgather_sequential max_live_parameters max_reuse_distance model_persistence_threshold
    module_granularity_threshold param_persistence_threshold prefetch_bucket_size
    use_all_reduce_for_fetch_params"""
_ZERO = f"""
    allgather_bucket_size allgather_partitions compute_grad_norm contiguous_gradients
    cpu_offload_use_pin_memory enable_sanity_checks find_unused_parameters
    ignore_unused_parameters leaf_module legacy_stage1 load_from_fp32_weights
    log_trace_cache_warnings memory_efficient_linear overlap_comm override_module_apply
    parameter_alignment pipeline_loading_checkpoint reduce_bucket_size reduce_scatter
    round_robin_gradients sub_group_size use_multi_rank_bucket_allreduce zero_hpz_partition_size
    {_STAGE_3} {" ".join(f"stage3_{name}" for name in _STAGE_3.split())}"""
_WHOLE_WEIGHTS = """
    elastic_checkpoint gather_16bit_weights_on_model_save gather_fp16_weights_on_model_save
    stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save"""
_LOSS_SCALING = """
    auto_cast check_grad_overflow consecutive_hysteresis hysteresis immediate_grad_update
    initial_scale_power loss_scale loss_scale_window min_loss_scale"""
_WITHOUT_EFFECT = {
    "FSDP2 shards, buckets and overlaps in its own way": f"""
        {_in_section("zero_optimization", _ZERO)} disable_allgather zero_allow_untested_optimizer
        zero_force_ds_cpu_optimizer use_data_before_expert_parallelism""",
    "checkpoints are those of --save; edit-export writes whole weights": f"""
        {_in_section("zero_optimization", _WHOLE_WEIGHTS)} checkpoint nebula datastates_ckpt""",
    "gradients are averaged in fp32": """
        prescale_gradients gradient_predivide_factor sparse_gradients""",
    "bf16 needs no loss scaling": _in_section("bf16", _LOSS_SCALING),
    "use --recompute-granularity, --recompute-method": "activation_checkpointing",
    "use --pipeline-model-parallel-size": "pipeline",
    "use --log-throughput": "wall_clock_breakdown memory_breakdown flops_profiler timers",
    "the effective configuration is always printed": "dump_state log_level",
    "use --transformer-impl": "compile graph_harvesting disable_python_gc hybrid_engine",
    "use gradient_accumulation_steps": "managed_gradient_accumulation",
    "nothing is offloaded to disks": "aio",
    "a run ends after --train-iters or --train-samples": "dataloader_drop_last",
}
WITHOUT_EFFECT = {key: why for why, keys in _WITHOUT_EFFECT.items() for key in keys.split()}
"""Key, with its section before a dot -> why it does nothing."""

_LESS_MEMORY = (
    "nothing is offloaded but edit.offload_outer_state; fewer edit.replicas shard a replica over "
    "more ranks, --recompute-granularity full keeps fewer activations; leave the key out"
)
REFUSED = {
    "optimizer": (
        "the inner optimizer is AdamW and its numbers are those of --lr, --weight-decay, "
        "--adam-beta1, --adam-beta2, --adam-eps; leave the section out, or make them all 'auto'"
    ),
    "scheduler": (
        "use --lr-decay-style, --lr-warmup-iters, --lr-decay-iters, --min-lr; leave the section "
        "out, or make its numbers all 'auto'"
    ),
    "fp16": "the shards are fp32, there is no loss scaling; use bf16",
    "amp": "use bf16",
    "torch_autocast": "use bf16",
    "bfloat16": "use the key bf16",
    "bf16.bf16_master_weights_and_grads": "the shards are fp32; leave the key out",
    "bf16.bf16_optimizer_states": "the optimizer's state is fp32; leave the key out",
    "data_types": "gradients and optimizer state are fp32; leave the section out",
    "communication_data_type": "gradients are reduced in fp32; leave the key out",
    "seq_parallel_communication_data_type": "use --sequence-parallel",
    "gradient_allreduce_op": "gradients are averaged; leave the key out",
    "sparse_attention": "attention is dense; leave the section out",
    "zero_optimization.offload_optimizer": _LESS_MEMORY,
    "zero_optimization.offload_param": _LESS_MEMORY,
    "zero_optimization.cpu_offload": _LESS_MEMORY,
    "zero_optimization.cpu_offload_params": _LESS_MEMORY,
    "zero_optimization.cpu_offload_param": _LESS_MEMORY,
    "zero_optimization.zenflow": _LESS_MEMORY,
    "zero_optimization.zero_quantized_weights": "use edit.compression, between replicas",
    "zero_optimization.zero_quantized_nontrainable_weights": "all weights are trained",
    "zero_optimization.zero_quantized_gradients": "use edit.compression, between replicas",
    "zero_optimization.mics_shard_size": "use edit.replicas",
    "zero_optimization.mics_hierarchical_params_gather": "use edit.replicas",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "the inner optimizer is AdamW",
    "tensor_parallel": "use --tensor-model-parallel-size",
    "sequence_parallel_size": "use --sequence-parallel",
    "expert_parallel": "experts are not supported",
    "data_efficiency": "use --data-path",
    "curriculum_learning": "use --data-path",
    "progressive_layer_drop": "every layer runs; leave the section out",
    "compression_training": "the whole model is trained; leave the section out",
    "quantize_training": "the whole model is trained; leave the section out",
    "weight_quantization": "the whole model is trained; leave the section out",
    "eigenvalue": "the whole model is trained; leave the section out",
    "autotuning": "edit-plan finds settings; leave the section out",
    "elasticity": "the number of ranks is fixed; use edit.replicas",
    "comet": "use tensorboard, csv_monitor or wandb",
}
"""Key, with its section before a dot -> why it is refused and the way round."""

REFUSED_STAGES = {
    0: "a replica of one rank holds everything: give 2, and as many edit.replicas as ranks",
    1: "give 2, which computes the same and shards the gradients too",
}
"""Stage of `zero_optimization` -> the way round."""

_FP32 = (None, AUTO, "fp32", "float32", "torch.float32")
# Sections of DeepSpeed that do nothing until their `enabled` is true.
_OFF_BY_DEFAULT = {
    "fp16", "amp", "torch_autocast", "bfloat16", "progressive_layer_drop", "eigenvalue",
    "curriculum_learning", "data_efficiency", "autotuning", "elasticity", "comet",
}  # fmt: skip

OPTIMIZERS = ("Adam", "AdamW", "adam", "adamw")
DECAY_STYLES = {
    "WarmupLR": "constant",
    "WarmupDecayLR": "linear",
    "WarmupCosineLR": "cosine",
}
"""DeepSpeed's schedule -> the `--lr-decay-style` that means the same."""


def _is_auto_optimizer(section: dict[str, Any]) -> bool:
    """Whether an `optimizer` section is AdamW and leaves every number to the flags."""
    params = _params(section, OPTIMIZERS)
    implementation = {"torch_adam": (True, False), "adam_w_mode": (True,), "fused": (True, False)}
    return "lr" in params and all(
        value in implementation.get(name, (AUTO,)) for name, value in params.items()
    )


def _is_auto_scheduler(section: dict[str, Any]) -> bool:
    """Whether a `scheduler` section says no more than the style of the decay."""
    params = _params(section, tuple(DECAY_STYLES))
    return "warmup_num_steps" in params and all(value == AUTO for value in params.values())


def _params(section: dict[str, Any], types: tuple[str, ...]) -> dict[str, Any]:
    """Returns the numbers of a section of one of these types; none of another, as of none."""
    params = section.get("params")
    return params if section.get("type") in types and isinstance(params, dict) else {}


_OFF_SECTIONS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "optimizer": _is_auto_optimizer,
    "scheduler": _is_auto_scheduler,
    "data_types": lambda section: all(entry in _FP32 for entry in section.values()),
    "tensor_parallel": lambda section: section.get("autotp_size", 0) in (0, 1, AUTO),
}
_OFF_VALUES: dict[str, tuple[object, ...]] = {
    "communication_data_type": _FP32,
    "seq_parallel_communication_data_type": _FP32,
    "gradient_allreduce_op": ("mean",),
    "sequence_parallel_size": (1,),
    "zero_optimization.mics_shard_size": (-1, 0),
}


def is_off(key: str, value: Any) -> bool:
    """Whether the value of one of DeepSpeed's keys asks for nothing that is not done anyway."""
    if not isinstance(value, dict):
        return value in (None, False, AUTO, *_OFF_VALUES.get(key, ()))
    if key in _OFF_SECTIONS:
        return _OFF_SECTIONS[key](value)
    if "device" in value:
        return value["device"] in ("none", None)
    return value.get("enabled", key not in _OFF_BY_DEFAULT) in (False, AUTO)


def _dotted(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the keys of a DeepSpeed JSON as the tables name them, with their values."""
    for key, value in config.items():
        if key in ("bf16", "zero_optimization") and isinstance(value, dict):
            yield from ((f"{key}.{name}", entry) for name, entry in value.items())
        else:
            yield key, value


def refusals(config: Mapping[str, Any]) -> list[str]:
    """Returns why keys that ask for another training are refused, one text a key."""
    values = dict(_dotted(config))
    texts = [
        f"{key}: a DeepSpeed key that is not honoured here; {REFUSED[key]}"
        for key, value in values.items()
        if key in REFUSED and not is_off(key, value)
    ]
    stage = values.get("zero_optimization.stage")
    if isinstance(stage, int) and stage in REFUSED_STAGES:
        texts.append(
            f"zero_optimization.stage: got {stage}; allowed: one of 2, 3; {REFUSED_STAGES[stage]}"
        )
    return texts


def without_effect(config: Mapping[str, Any]) -> str:
    """Returns one line on the keys that do nothing here, or an empty string if there are none."""
    keys_by_reason: dict[str, list[str]] = {}
    for key, value in _dotted(config):
        if key in WITHOUT_EFFECT and not is_off("", value):
            keys_by_reason.setdefault(WITHOUT_EFFECT[key], []).append(key)
    parts = [f"{', '.join(keys)} ({why})" for why, keys in keys_by_reason.items()]
    return "without effect here: " + "; ".join(parts) if parts else ""
