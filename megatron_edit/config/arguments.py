"""The arguments of a run: flags and DeepSpeed JSON merged, completed and checked.

`parse_args` is what a training script calls. Its namespace has Megatron's names. Nothing here
builds a model or connects to other ranks, so a user's mistake ends a run within a second.
"""

import argparse
import os
from collections.abc import Sequence
from typing import Any

import torch

from megatron_edit.config import checks
from megatron_edit.config.batch_size import Batch, complete_batch
from megatron_edit.config.ds_config import ZERO_STAGES, load_ds_config
from megatron_edit.config.ds_keys import AUTO, DECAY_STYLES, without_effect
from megatron_edit.config.edit_config import show
from megatron_edit.config.flags import FLAG_NAMES, default_values
from megatron_edit.config.methods import resolve
from megatron_edit.config.parser import parse_flags
from megatron_edit.errors import ConfigurationError

DEFAULT_SPLIT = "969,30,1"


def parse_args(
    argv: Sequence[str] | None = None, world_size: int | None = None
) -> argparse.Namespace:
    """Parses, merges, completes and checks the arguments of a run.

    Args:
        argv: The command line; None takes it from `sys.argv`.
        world_size: Number of ranks; None takes it from `WORLD_SIZE`, 1 without that.

    Returns:
        A namespace with every flag under Megatron's name, and beyond them:
        `rank`, `local_rank`, `world_size`; `replicas`, `shard_size`, `num_microbatches`;
        `edit` (an `EditConfig`); `ds_config` (the JSON, its monitor sections updated by flags);
        `sources` (value name, `edit.` before those of `edit` -> `flag`, `json`, `method <name>`,
        `default` or `computed`); `params_dtype`, `kv_channels`,
        `virtual_pipeline_model_parallel_size`.

    Raises:
        ConfigurationError: A user's mistake.
    """
    given, edit_flags, unknown_flags = parse_flags(argv)
    args = argparse.Namespace(**{**default_values(), **given})
    args.sources = {name: "flag" if name in given else "default" for name in default_values()}
    _set_ranks(args, world_size)
    args.ds_config = load_ds_config(args.deepspeed_config, unknown_flags)
    if args.deepspeed and args.deepspeed_config is None:
        raise ConfigurationError("--deepspeed needs --deepspeed_config FILE")
    _merge_json(args, args.ds_config)
    args.edit, edit_sources = resolve(None, args.ds_config.get("edit", {}), edit_flags)
    args.sources |= {f"edit.{field}": source for field, source in edit_sources.items()}

    checks.check_required(args)
    checks.check_world(args)
    _set_replicas(args)
    _set_batch(args)
    _set_model(args)
    _set_schedule(args)
    _set_platform(args)
    checks.check_settings(args)
    return args


def _compute(args: argparse.Namespace, **values: object) -> None:
    """Sets values that follow from others, and notes that they do."""
    for name, value in values.items():
        setattr(args, name, value)
        args.sources[name] = "computed"


def _set_ranks(args: argparse.Namespace, world_size: int | None) -> None:
    args.rank = int(os.environ.get("RANK", "0"))
    args.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    args.world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
    args.sources |= dict.fromkeys(("rank", "local_rank", "world_size"), "launcher")


def _merge_json(args: argparse.Namespace, config: dict[str, Any]) -> None:
    """Takes over what the JSON says about values that have a flag."""
    stage = config.get("zero_optimization", {}).get("stage")
    schedule = (config.get("scheduler") or {}).get("type", "")
    switches = {
        "bf16.enabled": ("bf16", config.get("bf16", {}).get("enabled")),
        "gradient_clipping": ("clip_grad", config.get("gradient_clipping")),
        f"zero_optimization.stage {stage} =": (
            "data_parallel_sharding_strategy",
            ZERO_STAGES.get(stage),
        ),
        f"scheduler.type {schedule} =": ("lr_decay_style", DECAY_STYLES.get(schedule)),
        "train_batch_size": ("global_batch_size", config.get("train_batch_size")),
        "train_micro_batch_size_per_gpu": (
            "micro_batch_size",
            config.get("train_micro_batch_size_per_gpu"),
        ),
    }
    for key, (name, value) in switches.items():
        if value is not None and value != AUTO:
            _take_over(args, name, key, value)
    if "steps_per_print" in config and args.sources["log_interval"] == "default":
        args.log_interval, args.sources["log_interval"] = config["steps_per_print"], "json"
    _merge_monitors(args, config)


def _take_over(args: argparse.Namespace, name: str, key: str, value: object) -> None:
    """Sets a value from the JSON; refuses one that the flag contradicts."""
    current = getattr(args, name)
    if args.sources[name] == "default":
        setattr(args, name, value)
        args.sources[name] = "json"
    elif current != value:
        raise ConfigurationError(
            f"{FLAG_NAMES[name]} {current} and {key} {value} in {args.deepspeed_config} are two "
            "switches that disagree; keep one"
        )


def _merge_monitors(args: argparse.Namespace, config: dict[str, Any]) -> None:
    """Lets flags override the monitor sections, which DeepSpeed's monitor reads."""
    tensorboard = config.get("tensorboard", {})
    if args.tensorboard_dir is not None:
        # Megatron's flag names the folder of the event files itself; DeepSpeed adds a job's name.
        config["tensorboard"] = {
            "job_name": "",
            **tensorboard,
            "enabled": True,
            "output_path": args.tensorboard_dir,
        }
    elif tensorboard.get("enabled") and tensorboard.get("output_path"):
        args.tensorboard_dir = tensorboard["output_path"]
        args.sources["tensorboard_dir"] = "json"
    if args.wandb_project:
        config["wandb"] = {
            **config.get("wandb", {}),
            "enabled": True,
            "project": args.wandb_project,
        }
    elif config.get("wandb", {}).get("enabled") and "project" in config["wandb"]:
        args.wandb_project = config["wandb"]["project"]
        args.sources["wandb_project"] = "json"


def _set_replicas(args: argparse.Namespace) -> None:
    """Settles the number of replicas, which has two names, and the ranks of each."""
    rest = args.world_size // (args.tensor_model_parallel_size * args.pipeline_model_parallel_size)
    instances, replicas = args.num_distributed_optimizer_instances, args.edit.replicas
    if instances is not None and replicas is not None and instances != replicas:
        raise ConfigurationError(
            f"--num-distributed-optimizer-instances {instances} and edit.replicas {replicas} "
            f"({args.sources['edit.replicas']}) are two switches that disagree; keep one"
        )
    chosen = replicas or instances
    possible = ", ".join(str(n) for n in range(1, rest + 1) if rest % n == 0)
    if chosen is None:
        if args.edit.method != "sync":
            raise ConfigurationError(
                f"--edit-replicas (edit.replicas) is missing; possible with {_model_parallel(args)}"
                f": {possible}"
            )
        chosen = 1
    if rest % chosen:
        raise ConfigurationError(
            f"world size {args.world_size} is not divisible by TP x PP x replicas = "
            f"{args.tensor_model_parallel_size} x {args.pipeline_model_parallel_size} x {chosen}; "
            f"possible replicas: {possible}"
        )
    if replicas is None:
        args.edit = args.edit.model_copy(update={"replicas": chosen})
        args.sources["edit.replicas"] = "flag" if instances else "default"
    _compute(
        args,
        replicas=chosen,
        num_distributed_optimizer_instances=chosen,
        shard_size=rest // chosen,
    )


def _model_parallel(args: argparse.Namespace) -> str:
    return (
        f"world size {args.world_size}, TP {args.tensor_model_parallel_size}, "
        f"PP {args.pipeline_model_parallel_size}"
    )


def layout(args: argparse.Namespace) -> str:
    """Returns the mesh in words: `world 8 = replicas 2 x PP 2 x S 2 x TP 1`."""
    return (
        f"world {args.world_size} = replicas {args.replicas} "
        f"x PP {args.pipeline_model_parallel_size} x S {args.shard_size} "
        f"x TP {args.tensor_model_parallel_size}"
    )


def _set_batch(args: argparse.Namespace) -> None:
    accumulation = args.ds_config.get("gradient_accumulation_steps")
    given = Batch(
        args.micro_batch_size,
        None if accumulation == AUTO else accumulation,
        args.global_batch_size,
    )
    batch = complete_batch(given, args.shard_size, args.replicas, layout(args))
    _compute(args, num_microbatches=batch.accumulation)
    if given.micro is None:
        _compute(args, micro_batch_size=batch.micro)
    if given.total is None:
        _compute(args, global_batch_size=batch.total)


def _set_model(args: argparse.Namespace) -> None:
    pp, chunk = args.pipeline_model_parallel_size, args.num_layers_per_virtual_pipeline_stage
    chunks = None if chunk is None else args.num_layers // pp // chunk
    _compute(
        args,
        kv_channels=args.hidden_size // args.num_attention_heads,
        params_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        virtual_pipeline_model_parallel_size=None if chunks == 1 else chunks,
    )
    if args.ffn_hidden_size is None:
        # Megatron's rule: 2/3 of 4 x hidden for gated units, rounded down to a multiple of 64.
        width = 4 * args.hidden_size
        gated = max(64, width * 2 // 3 // 64 * 64)
        _compute(args, ffn_hidden_size=gated if args.swiglu else width)
    if not args.group_query_attention and args.sources["num_query_groups"] == "default":
        _compute(args, num_query_groups=args.num_attention_heads)


def _set_schedule(args: argparse.Namespace) -> None:
    """Completes steps and samples, decay and split."""
    if args.train_iters is None:
        _compute(args, train_iters=args.train_samples // args.global_batch_size)
        if args.train_iters == 0:
            raise ConfigurationError(
                f"--train-samples: got {args.train_samples}; allowed: at least one global batch, "
                f"{args.global_batch_size}"
            )
    _compute(args, train_samples=args.train_iters * args.global_batch_size)
    if args.lr_decay_iters is None:
        _compute(args, lr_decay_iters=args.train_iters)
    if args.split is None and args.train_data_path is None:
        args.split = DEFAULT_SPLIT


def _set_platform(args: argparse.Namespace) -> None:
    if args.distributed_backend is None:
        _compute(args, distributed_backend="nccl" if torch.cuda.is_available() else "gloo")
    if args.transformer_impl is None:
        _compute(args, transformer_impl=checks.available_transformer_impl())


def describe(args: argparse.Namespace) -> str:
    """Returns the effective configuration as a table: name, value, source.

    Before it stands a line on the keys of the JSON that do nothing, if there are any.
    """
    rows = [(name, as_text(value), args.sources[name]) for name, value in _values(args).items()]
    name_width = max(len(name) for name, _, _ in rows)
    value_width = max(len(value) for _, value, _ in rows)
    lines = [f"  {name:<{name_width}}  {value:<{value_width}}  {src}" for name, value, src in rows]
    table = [f"effective configuration ({layout(args)})", *lines]
    return "\n".join(filter(None, [without_effect(args.ds_config), *table]))


def as_text(value: object) -> str:
    """Returns a value as the table of settings shows it."""
    return " ".join(map(str, value)) if isinstance(value, list) else show(value) or "''"


def as_dict(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the effective configuration as values that JSON can hold."""
    return {
        "values": _values(args),
        "sources": dict(args.sources),
        "ds_config": args.ds_config,
    }


def _values(args: argparse.Namespace) -> dict[str, Any]:
    """Returns every value that has a source; those of `edit` last, under `edit.<field>`."""
    values = {name: getattr(args, name) for name in args.sources if "." not in name}
    values["params_dtype"] = str(args.params_dtype).removeprefix("torch.")
    edit = args.edit.model_dump()
    return {**values, **{f"edit.{field}": value for field, value in edit.items()}}
