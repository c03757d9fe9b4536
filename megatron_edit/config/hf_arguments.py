"""The arguments of a run on a transformers model: Megatron's flags where they apply, and the JSON.

What the model is, its folder says; what shards it and in which precision, DeepSpeed's JSON says. So
Megatron's flags of these are refused here.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_edit.config.batch_size import Batch, complete_batch
from megatron_edit.config.ds_config import read_ds_json
from megatron_edit.config.ds_keys import AUTO
from megatron_edit.config.flags import FLAG_NAMES, FLAGS, Flag, default_values
from megatron_edit.config.parser import parse_flags
from megatron_edit.config.zero_config import read_zero_run
from megatron_edit.errors import ConfigurationError, together

SHARED = {
    "--seq-length", "--micro-batch-size", "--global-batch-size", "--train-iters", "--lr",
    "--lr-decay-style", "--lr-warmup-iters", "--weight-decay", "--clip-grad", "--adam-beta1",
    "--adam-beta2", "--adam-eps", "--seed", "--bf16", "--data-path", "--split",
    "--train-data-path", "--valid-data-path", "--test-data-path", "--data-cache-path",
    "--tokenizer-model", "--num-workers", "--save", "--save-interval", "--eval-interval",
    "--eval-iters", "--log-interval", "--distributed-timeout-minutes", "--deepspeed",
    "--deepspeed_config", "--local_rank",
}  # fmt: skip
"""Megatron's and DeepSpeed's flags that mean the same here."""

TABLES: dict[str, list[Flag]] = {
    "transformers": [
        Flag("--hf-model", "Folder of the transformers model to begin with.", None, str)
    ],
    **{title: [f for f in flags if f.name in SHARED] for title, flags in FLAGS.items()},
}
REQUIRED = ("hf_model", "seq_length", "micro_batch_size", "lr", "train_iters", "save",
            "deepspeed_config")  # fmt: skip
SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}
"""--lr-decay-style -> the Trainer's `lr_scheduler_type`."""


def parse_hf_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses, merges and checks the arguments of a run.

    Args:
        argv: The command line; None takes it from `sys.argv`.

    Returns:
        The values under Megatron's names, and beyond them `replicas`, `shard_size`,
        `num_microbatches`, `edit`, and `ds_config`, the JSON with the `edit` flags in it; what is
        "auto" there is left to the Trainer.

    Raises:
        ConfigurationError: A user's mistake.
    """
    given, edit_flags, mistakes = parse_flags(argv, TABLES, _elsewhere)
    if mistakes:
        raise ConfigurationError(together(mistakes))
    args = argparse.Namespace(**{**default_values(), "hf_model": None, **given})
    for name in REQUIRED:
        if getattr(args, name) is None:
            flag = FLAG_NAMES.get(name, "--hf-model")
            raise ConfigurationError(f"{flag} is missing; a run needs it")
    if not (Path(args.hf_model) / "config.json").is_file():
        raise ConfigurationError(
            f"--hf-model {args.hf_model}: no config.json there; give a folder of a transformers "
            "model",
            per_host=True,
        )
    if args.lr_decay_style not in SCHEDULES:
        raise ConfigurationError(
            f"--lr-decay-style: got {args.lr_decay_style}; allowed: {', '.join(SCHEDULES)}"
        )
    args.ds_config = read_ds_json(Path(args.deepspeed_config))
    args.ds_config["edit"] = {**args.ds_config.get("edit", {}), **edit_flags}
    _set_layout(args)
    args.tokenizer_type = "HuggingFaceTokenizer"
    args.tokenizer_model = args.tokenizer_model or args.hf_model
    args.train_samples = args.train_iters * args.global_batch_size
    if args.split is None and args.train_data_path is None:
        args.split = "969,30,1"
    if not (args.data_path or args.train_data_path):
        raise ConfigurationError("--data-path is missing; give a prefix")
    return args


def _elsewhere(flag: str) -> str | None:
    """Why a flag of `pretrain_edit.py` is none here."""
    if flag not in FLAG_NAMES.values() or flag in SHARED:
        return None
    return "the model's folder, the DeepSpeed JSON or the Trainer says that here; leave it out"


def _set_layout(args: argparse.Namespace) -> None:
    """Settles replicas and batch; the JSON's numbers must be "auto" or the same."""
    run = read_zero_run(args.ds_config)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    args.edit, args.replicas = run.edit, run.edit.replicas or 1
    args.shard_size = run.shard_size(world)
    layout = f"world {world} = replicas {args.replicas} x S {args.shard_size}"
    given = Batch(args.micro_batch_size, None, args.global_batch_size)
    batch = complete_batch(given, args.shard_size, args.replicas, layout)
    args.num_microbatches, args.global_batch_size = batch.accumulation, batch.total
    switches: dict[str, tuple[str, Any]] = {
        "train_micro_batch_size_per_gpu": ("--micro-batch-size", args.micro_batch_size),
        "gradient_accumulation_steps": ("--global-batch-size", args.num_microbatches),
        "train_batch_size": ("--global-batch-size", args.global_batch_size),
    }
    for key, (flag, value) in switches.items():
        if args.ds_config.setdefault(key, AUTO) not in (AUTO, value):
            raise ConfigurationError(
                f"{flag} asks for {key} {value}, and {args.deepspeed_config} has "
                f'{args.ds_config[key]}; give "auto" there, or the same'
            )
