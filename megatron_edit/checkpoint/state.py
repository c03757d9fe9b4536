"""``state.json`` of a checkpoint: what it says, and whether a run may go on from there."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from megatron_edit.checkpoint import flights
from megatron_edit.checkpoint.files import STATE, find_checkpoint, read_json, refusing_damage
from megatron_edit.checkpoint.storage import check_files
from megatron_edit.engine.sync_engine import SyncEngine
from megatron_edit.engine.trigger import build_trigger
from megatron_edit.errors import ConfigurationError

FORMAT = 2
KEYS = (
    "step", "replica_steps", "round", "has_anchor", "in_flight", "global_batch_size",
    "train_samples", "model", "layout", "data",
)  # fmt: skip
"""What a run needs of it to go on."""
SHAPE = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
    "normalization", "swiglu", "disable_bias_linear", "untie_embeddings_and_output_weights",
    "padded_vocab_size",
)  # fmt: skip
LAYOUT = (
    "replicas", "pipeline_model_parallel_size", "shard_size", "tensor_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
)  # fmt: skip


def describe(args: Namespace, engine: SyncEngine, data: str) -> dict[str, Any]:
    """The content of ``state.json``, for the step that the engine is at."""
    return {
        "format": FORMAT,
        "step": iteration(args, engine),
        "replica_steps": engine.replica_steps,
        "round": engine.round,
        "has_anchor": bool(engine.outer),
        "in_flight": flights.describe_rounds(engine),
        "global_batch_size": args.global_batch_size,
        "train_samples": args.train_samples,
        "consumed_samples": engine.consumed_samples,
        "model": {name: getattr(args, name) for name in SHAPE},
        "layout": {name: getattr(args, name) for name in LAYOUT},
        "data": data,
    }


def iteration(args: Namespace, engine: SyncEngine) -> int:
    """Global batches trained on; checkpoints are written where all replicas know it."""
    return engine.consumed_samples // args.global_batch_size


def read_state(args: Namespace) -> dict[str, Any] | None:
    """Reads and checks ``state.json`` of the checkpoint that ``--load`` names.

    Cheap, and to be called before a model is built.

    Args:
        args: The arguments of the run, with ``padded_vocab_size``.

    Returns:
        Its content and its ``folder``, or None without ``--load``.

    Raises:
        ConfigurationError: There is no checkpoint, or this run cannot go on from it.
    """
    if args.load is None:
        return None
    with refusing_damage(args.load):
        state = _read_whole(Path(args.load))
    for what, names in (("model", SHAPE), ("layout", LAYOUT)):
        for name in names:
            saved, given = state[what].get(name), getattr(args, name)
            if saved != given:
                raise ConfigurationError(
                    f"--load: the checkpoint in {args.load} has {name} {saved}, this run has "
                    f"{given}; allowed: the same {what}"
                )
    _check_batch(args, state)
    _check_phase(args, state)
    return state


def _read_whole(root: Path) -> dict[str, Any]:
    """Reads the newest checkpoint's ``state.json``, and looks whether its files are all there."""
    folder = find_checkpoint(root)
    version = read_json(folder / STATE, ["format"])["format"]
    if version != FORMAT:
        raise ValueError(f"its format is {version}, this version reads {FORMAT}")
    state = read_json(folder / STATE, KEYS)
    check_files(folder)
    return {**state, "folder": str(folder)}


def _check_batch(args: Namespace, state: dict[str, Any]) -> None:
    """Refuses to count samples in other steps, unless told to."""
    if args.finetune or args.override_data_path:
        return
    if state["global_batch_size"] != args.global_batch_size:
        raise ConfigurationError(
            f"--global-batch-size {args.global_batch_size}: the checkpoint in {args.load} has "
            f"{state['global_batch_size']}, by which its steps count samples; allowed: the same; "
            "or --override-data-path"
        )


def _check_phase(args: Namespace, state: dict[str, Any]) -> None:
    """Refuses a phase or a trigger that the replicas of the checkpoint cannot enter together."""
    steps = state["replica_steps"]
    by_clock = args.edit.sync_trigger == "time"
    lockstep = not by_clock or build_trigger(args.edit).lockstep(min(steps))
    if len(set(steps)) > 1 and lockstep and not args.finetune:
        raise ConfigurationError(
            f"--load: the replicas of the checkpoint in {args.load} have done {steps} steps; "
            f"allowed: edit.sync_trigger time with edit.warmup_steps <= {min(steps)}, or --finetune"
        )
    consolidates = args.finetune or args.no_load_optim
    if state["has_anchor"] and not consolidates and build_trigger(args.edit).lockstep(min(steps)):
        raise ConfigurationError(
            f"edit.warmup_steps {args.edit.warmup_steps} (method {args.edit.method}): the "
            f"checkpoint in {args.load} is at step {state['step']} with its replicas apart, and "
            f"this run would be synchronous there; allowed: warmup_steps < {state['step']}; or "
            "--no-load-optim to start from the consolidated parameters"
        )


def check_data(args: Namespace, state: dict[str, Any] | None, data: str) -> None:
    """Refuses to resume on other data than the checkpoint's, unless told to. Warns of another
    length of the run.

    Raises:
        ConfigurationError: The data differ.
    """
    if state is None or args.finetune or args.override_data_path:
        return
    if state["data"] != data:
        raise ConfigurationError(
            f"--data-path: the data differ from those of the checkpoint in {args.load}; allowed: "
            "the same files, weights, split, sequence length and seed; or --override-data-path"
        )
    if state["train_samples"] != args.train_samples and args.rank == 0:
        print(
            f"warning: the checkpoint's run has {state['train_samples']} samples, this one "
            f"{args.train_samples}: with several epochs they come in another order",
            flush=True,
        )
