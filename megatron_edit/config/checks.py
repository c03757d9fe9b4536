"""Checks of the arguments against each other, before anything is built or connected.

Each function checks one theme, reads the namespace and raises `ConfigurationError`; none changes
it. `check_settings` runs all those that need the completed namespace.
"""

import argparse
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch

from megatron_edit.config.flags import FLAG_NAMES
from megatron_edit.config.injected_faults import parse_poison, parse_slow
from megatron_edit.errors import ConfigurationError

REQUIRED = [
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "max_position_embeddings",
    "lr",
    "tokenizer_type",
]
NEED_LOAD = (
    "no_load_optim", "no_load_rng", "finetune", "override_data_path",
    "override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler",
)  # fmt: skip
# In the folder of --save: the step of the newest checkpoint.
TRACKER = "latest_checkpointed_iteration.txt"


def check_settings(args: argparse.Namespace) -> None:
    """Runs every check of a completed namespace; the one that writes to disk is the last."""
    for check in (
        check_model,
        check_pipeline,
        check_recompute,
        check_training,
        check_edit,
        check_injection,
        check_backend,
        check_data,
        check_checkpoint,
    ):
        check(args)


def check_required(args: argparse.Namespace) -> None:
    """Refuses a command line that lacks a flag without default."""
    for name in REQUIRED:
        if getattr(args, name) is None:
            raise ConfigurationError(f"{FLAG_NAMES[name]} is missing; a run needs it")
    if (args.train_iters is None) == (args.train_samples is None):
        given = "neither is" if args.train_iters is None else "both are"
        raise ConfigurationError(f"--train-iters or --train-samples: {given} given; give one")


def check_world(args: argparse.Namespace) -> None:
    """Refuses a world that the model-parallel layout does not divide."""
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    if args.context_parallel_size > 1:
        raise ConfigurationError(
            f"--context-parallel-size: got {args.context_parallel_size}; allowed: 1, context "
            "parallelism is not supported; use --sequence-parallel"
        )
    if args.world_size % (tp * pp):
        raise ConfigurationError(
            f"world size {args.world_size} is not divisible by --tensor-model-parallel-size {tp} "
            f"x --pipeline-model-parallel-size {pp} = {tp * pp}; start a multiple of {tp * pp} "
            "ranks"
        )
    if args.sequence_parallel and tp == 1:
        raise ConfigurationError(
            "--sequence-parallel needs --tensor-model-parallel-size > 1, got 1; leave it out"
        )


def check_model(args: argparse.Namespace) -> None:
    """Refuses shapes that do not divide over heads and tensor-parallel ranks."""
    tp = args.tensor_model_parallel_size
    _divides(args, "hidden_size", "--num-attention-heads", args.num_attention_heads)
    _divides(args, "num_attention_heads", "--tensor-model-parallel-size", tp)
    if args.group_query_attention:
        _divides(args, "num_attention_heads", "--num-query-groups", args.num_query_groups)
        _divides(args, "num_query_groups", "--tensor-model-parallel-size", tp)
    elif args.sources["num_query_groups"] == "flag":
        raise ConfigurationError("--num-query-groups needs --group-query-attention; give both")
    _divides(args, "ffn_hidden_size", "--tensor-model-parallel-size", tp)
    if args.sequence_parallel:
        _divides(args, "seq_length", "--tensor-model-parallel-size", tp)
    if args.kv_channels % 2:
        raise ConfigurationError(
            f"--hidden-size {args.hidden_size} / --num-attention-heads "
            f"{args.num_attention_heads} = {args.kv_channels}; rotary embeddings need an even "
            "number per head"
        )
    if args.seq_length > args.max_position_embeddings:
        raise ConfigurationError(
            f"--seq-length {args.seq_length} is larger than --max-position-embeddings "
            f"{args.max_position_embeddings}; raise the latter to {args.seq_length}"
        )
    for name in ("attention_dropout", "hidden_dropout"):
        _in_range(args, name, low=0, high=1)
    for name in ("norm_epsilon", "init_method_std"):
        _positive(args, name)


def check_pipeline(args: argparse.Namespace) -> None:
    """Refuses layers that do not divide over stages, and interleaving where it is wrong."""
    pp, chunk = args.pipeline_model_parallel_size, args.num_layers_per_virtual_pipeline_stage
    _divides(args, "num_layers", "--pipeline-model-parallel-size", pp)
    if chunk is None:
        return
    flag = f"--num-layers-per-virtual-pipeline-stage {chunk}"
    if pp == 1:
        raise ConfigurationError(f"{flag} needs --pipeline-model-parallel-size > 1, got 1")
    if args.num_layers // pp % chunk:
        raise ConfigurationError(
            f"--num-layers {args.num_layers} over --pipeline-model-parallel-size {pp} are "
            f"{args.num_layers // pp} layers a stage, not divisible by {flag}"
        )
    if args.num_microbatches % pp:
        raise ConfigurationError(
            f"{flag}: interleaving needs the micro-batches of a step to be a multiple of "
            f"--pipeline-model-parallel-size {pp}, got {args.num_microbatches}; nearest "
            f"--global-batch-size that works: {_nearest(args, pp)}"
        )


def _nearest(args: argparse.Namespace, pp: int) -> int:
    unit = args.global_batch_size // args.num_microbatches
    return max(pp, round(args.num_microbatches / pp) * pp) * unit


def check_recompute(args: argparse.Namespace) -> None:
    """Refuses recompute flags that contradict each other."""
    granularity, method = args.recompute_granularity, args.recompute_method
    count = args.recompute_num_layers
    if granularity == "full" and (method is None or count is None):
        raise ConfigurationError(
            "--recompute-granularity full needs --recompute-method and --recompute-num-layers; "
            "give both"
        )
    if granularity != "full" and (method is not None or count is not None):
        flag = "--recompute-method" if method is not None else "--recompute-num-layers"
        raise ConfigurationError(
            f"{flag} needs --recompute-granularity full, got {granularity or 'none'}; give it or "
            f"leave {flag} out"
        )
    chunk = args.num_layers_per_virtual_pipeline_stage
    layers = chunk or args.num_layers // args.pipeline_model_parallel_size
    if count is not None and count > layers:
        raise ConfigurationError(
            f"--recompute-num-layers: got {count}; allowed: 1 to {layers}, the layers of a model "
            "chunk"
        )


def check_training(args: argparse.Namespace) -> None:
    """Refuses optimizer settings and schedules that are out of range or contradict."""
    _positive(args, "lr")
    _positive(args, "adam_eps")
    if not 0 <= args.min_lr <= args.lr:
        raise ConfigurationError(
            f"--min-lr: got {args.min_lr:g}; allowed: 0 to --lr, which is {args.lr:g}"
        )
    for name in ("adam_beta1", "adam_beta2"):
        _in_range(args, name, low=0, high=1)
    for name in ("weight_decay", "clip_grad"):
        if getattr(args, name) < 0:
            raise ConfigurationError(
                f"{FLAG_NAMES[name]}: got {getattr(args, name):g}; allowed: a number >= 0"
            )
    if args.lr_warmup_fraction is not None:
        if args.sources["lr_warmup_iters"] == "flag":
            raise ConfigurationError(
                "--lr-warmup-iters and --lr-warmup-fraction are both given; give one"
            )
        _in_range(args, "lr_warmup_fraction", low=0, high=1)
    if args.lr_warmup_iters >= args.lr_decay_iters:
        raise ConfigurationError(
            f"--lr-warmup-iters: got {args.lr_warmup_iters}; allowed: less than the "
            f"{args.lr_decay_iters} steps of the decay"
        )


def check_edit(args: argparse.Namespace) -> None:
    """Refuses synchronisation settings that cannot act in this layout."""
    if args.edit.detector == "peer" and args.replicas < 3:
        raise ConfigurationError(
            f"edit.detector: got peer with {args.replicas} replicas, it compares at least 3; use "
            "robust or history"
        )


def check_data(args: argparse.Namespace) -> None:
    """Refuses data arguments that contradict each other or name files that are not there."""
    paths = {
        name: getattr(args, name)
        for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path")
        if getattr(args, name) is not None
    }
    if args.mock_data and paths:
        name = FLAG_NAMES[next(iter(paths))]
        raise ConfigurationError(f"--mock-data and {name} are both given; give one")
    if not (args.mock_data or "data_path" in paths or "train_data_path" in paths):
        raise ConfigurationError("--data-path is missing; give a prefix, or --mock-data")
    if "data_path" in paths and len(paths) > 1:
        raise ConfigurationError(
            f"--data-path and {FLAG_NAMES[list(paths)[1]]} are both given; give --data-path with "
            "--split, or --train-data-path, --valid-data-path, --test-data-path"
        )
    if "train_data_path" in paths and args.sources["split"] == "flag":
        raise ConfigurationError("--split and --train-data-path are both given; give one")
    for name, blend in paths.items():
        for prefix in blend_prefixes(blend, FLAG_NAMES[name]):
            _check_prefix(prefix, FLAG_NAMES[name])
    _check_shares(args)
    _check_tokenizer(args)


def blend_prefixes(blend: list[str], flag: str) -> list[str]:
    """Returns the prefixes of a blend `w1 p1 w2 p2` or `p1 p2`.

    Raises:
        ConfigurationError: Some of the weights are no positive numbers.
    """
    weights = [_as_float(word) for word in blend[::2]]
    if len(blend) % 2 or all(weight is None for weight in weights):
        return blend
    for word, weight in zip(blend[::2], weights, strict=True):
        if weight is None or not weight > 0:
            raise ConfigurationError(
                f"{flag}: got {word!r} as a weight; allowed: a number > 0, as in w1 p1 w2 p2"
            )
    return blend[1::2]


def _as_float(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _check_prefix(prefix: str, flag: str) -> None:
    for suffix in (".bin", ".idx"):
        if not Path(prefix + suffix).is_file():
            has_suffix = prefix.endswith((".bin", ".idx"))
            hint = "leave the suffix out" if has_suffix else "edit-preprocess writes it"
            raise ConfigurationError(
                f"{flag} {prefix}: the file {prefix}{suffix} is missing; {hint}", per_host=True
            )


def _check_shares(args: argparse.Namespace) -> None:
    """Refuses a malformed split, and splits that are empty but needed."""
    if args.train_data_path is not None:
        if args.eval_iters > 0 and args.valid_data_path is None:
            raise ConfigurationError(
                f"empty validation split: --eval-iters is {args.eval_iters} and "
                "--valid-data-path is missing; give it or --eval-iters 0"
            )
        return
    shares = parse_split(args.split)
    if shares[0] == 0:
        raise ConfigurationError(f"empty training split: --split {args.split}; give it a share")
    if args.eval_iters > 0 and shares[1] == 0:
        raise ConfigurationError(
            f"empty validation split: --split {args.split} and --eval-iters {args.eval_iters}; "
            "give it a share or --eval-iters 0"
        )


def parse_split(split: str) -> list[float]:
    """Returns the three shares of `--split`; those left out are 0.

    Raises:
        ConfigurationError: It is not one to three numbers >= 0.
    """
    shares = [_as_float(word) for word in split.split(",")]
    numbers = [share for share in shares if share is not None and 0 <= share < float("inf")]
    if len(numbers) != len(shares) or len(shares) > 3:
        raise ConfigurationError(
            f"--split: got {split!r}; allowed: up to three numbers >= 0, as in 949,50,1"
        )
    return numbers + [0.0] * (3 - len(numbers))


def _check_tokenizer(args: argparse.Namespace) -> None:
    if args.tokenizer_type == "NullTokenizer" and args.vocab_size is None:
        raise ConfigurationError("--tokenizer-type NullTokenizer needs --vocab-size")
    if args.tokenizer_type == "HuggingFaceTokenizer" and args.tokenizer_model is None:
        raise ConfigurationError("--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model")


def check_injection(args: argparse.Namespace) -> None:
    """Refuses faults to inject that cannot be, or that nobody asked for."""
    parse_slow(args.edit)
    parse_poison(args.edit)


def check_backend(args: argparse.Namespace) -> None:
    """Refuses backends and libraries that this machine lacks."""
    if args.distributed_backend == "nccl" and not torch.cuda.is_available():
        raise ConfigurationError(
            "--distributed-backend: got nccl, and there is no GPU; use gloo or leave it out"
        )
    if args.transformer_impl != "local" and available_transformer_impl() == "local":
        raise ConfigurationError(
            "--transformer-impl: got transformer_engine, which needs a GPU and the package "
            "transformer-engine; use local or leave it out"
        )
    for section, package in (("tensorboard", "tensorboard"), ("wandb", "wandb")):
        if args.ds_config.get(section, {}).get("enabled") and not find_spec(package):
            raise ConfigurationError(
                f"{section} is enabled and the package {package} is not installed; install it or "
                f"disable {section}",
                per_host=True,
            )
    if args.wandb_exp_name and not args.ds_config.get("wandb", {}).get("enabled"):
        raise ConfigurationError(
            f"--wandb-exp-name {args.wandb_exp_name}: nothing is sent to Weights & Biases; give "
            "--wandb-project too, or leave it out"
        )


def available_transformer_impl() -> str:
    """Returns the best `--transformer-impl` of this machine."""
    usable = torch.cuda.is_available() and find_spec("transformer_engine") is not None
    return "transformer_engine" if usable else "local"


def check_checkpoint(args: argparse.Namespace) -> None:
    """Refuses checkpoint flags without a folder, an empty `--load` and an unwritable `--save`."""
    for name in NEED_LOAD:
        if getattr(args, name) and args.load is None:
            raise ConfigurationError(f"{FLAG_NAMES[name]} needs --load")
    for name in ("override_opt_param_scheduler", "finetune"):
        if getattr(args, name) and args.use_checkpoint_opt_param_scheduler:
            raise ConfigurationError(
                f"--use-checkpoint-opt_param-scheduler and {FLAG_NAMES[name]} exclude each other; "
                "give one"
            )
    if args.save_interval is not None and args.save is None:
        raise ConfigurationError("--save-interval needs --save")
    if args.load is not None and not (Path(args.load) / TRACKER).is_file():
        raise ConfigurationError(
            f"--load {args.load}: no checkpoint there ({TRACKER} is missing); leave --load "
            "out to start anew",
            per_host=True,
        )
    if args.save is not None and os.environ.get("RANK", "0") == "0":
        _check_writable(args.save)


def _check_writable(folder: str) -> None:
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0")
    except OSError as error:
        raise ConfigurationError(
            f"--save {folder}: cannot write there ({error.strerror}); give a writable folder"
        ) from None


def _divides(args: argparse.Namespace, name: str, by: str, divisor: int) -> None:
    value = getattr(args, name)
    if value % divisor:
        lower, upper = value // divisor * divisor, (value // divisor + 1) * divisor
        near = f"{lower} or {upper}" if lower else str(upper)
        raise ConfigurationError(
            f"{FLAG_NAMES[name]} {value} is not divisible by {by} {divisor}; {near} would be"
        )


def _in_range(args: argparse.Namespace, name: str, low: float, high: float) -> None:
    value = getattr(args, name)
    if not low <= value < high:
        raise ConfigurationError(
            f"{FLAG_NAMES[name]}: got {value:g}; allowed: a number >= {low:g} and < {high:g}"
        )


def _positive(args: argparse.Namespace, name: str) -> None:
    if not getattr(args, name) > 0:
        raise ConfigurationError(
            f"{FLAG_NAMES[name]}: got {getattr(args, name):g}; allowed: a number > 0"
        )
