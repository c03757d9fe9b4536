"""Saving and resuming a run, bit for bit, at any step.

    <save>/iter_0000100/            torch.distributed.checkpoint: every tensor of the run
    <save>/iter_0000100/state.json  counters, layout, shape of the model, data
    <save>/iter_0000100/effective_config.json
    <save>/latest_checkpointed_iteration.txt

Parameters and moments are kept per replica, for in the middle of a round they differ; anchor and
outer momentum once, for they do not. Sharded tensors are DTensors, named as in the whole model.
A checkpoint is written to a folder aside, which is then renamed; the tracker file is renamed into
place last. So a folder that bears a checkpoint's name is whole. One of the same step that was there
before is kept until then. All hosts must see ``--save``.
"""

from __future__ import annotations

import json
import os
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import tensor_parallel

from megatron_edit.backends.megatron.optimizer import EDiTDistributedOptimizer, like_parameter
from megatron_edit.backends.megatron.units import local_of
from megatron_edit.checkpoint import flights
from megatron_edit.config.arguments import as_dict
from megatron_edit.engine.sync_engine import SyncEngine
from megatron_edit.engine.trigger import build_trigger
from megatron_edit.errors import ConfigurationError
from megatron_edit.replicas.mesh import Mesh

TRACKER = "latest_checkpointed_iteration.txt"
FORMAT = 2
SHAPE = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
    "normalization", "swiglu", "disable_bias_linear", "untie_embeddings_and_output_weights",
    "padded_vocab_size",
)  # fmt: skip
# Starts from zero where the run before had it switched off.
OPTIONAL = ("outer_momentum.", "compression.")
LAYOUT = (
    "replicas", "pipeline_model_parallel_size", "shard_size", "tensor_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
)  # fmt: skip


def checkpoint_folder(root: str | Path, iteration: int) -> Path:
    """The folder of a checkpoint."""
    return Path(root) / f"iter_{iteration:07d}"


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
    try:
        state = _read_whole(Path(args.load))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"--load: no readable checkpoint in {args.load}: {error}", per_host=True
        ) from None
    for what, names in (("model", SHAPE), ("layout", LAYOUT)):
        for name in names:
            saved, given = state[what][name], getattr(args, name)
            if saved != given:
                raise ConfigurationError(
                    f"--load: the checkpoint in {args.load} has {name} {saved}, this run has "
                    f"{given}; allowed: the same {what}"
                )
    _check_phase(args, state)
    return state


def _read_whole(root: Path) -> dict[str, Any]:
    """Reads the newest checkpoint's ``state.json``."""
    folder = checkpoint_folder(root, int((root / TRACKER).read_text()))
    if not folder.exists() and _replaced(folder).exists():
        # The run was killed between the two renames that replace a checkpoint of the same step.
        folder = _replaced(folder)
    state = json.loads((folder / "state.json").read_text())
    if state.get("format") != FORMAT:
        raise ValueError(f"its format is {state.get('format')}, this version reads {FORMAT}")
    if not (folder / ".metadata").is_file():
        raise ValueError(f"{folder / '.metadata'} is missing")
    return {**state, "folder": str(folder)}


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
        ConfigurationError: The data, or the samples of a step, differ.
    """
    if state is None or args.finetune or args.override_data_path:
        return
    if state["data"] != data:
        raise ConfigurationError(
            f"--data-path: the data differ from those of the checkpoint in {args.load}; allowed: "
            "the same files, weights, split, sequence length and seed; or --override-data-path"
        )
    if state["global_batch_size"] != args.global_batch_size:
        raise ConfigurationError(
            f"--global-batch-size {args.global_batch_size}: the checkpoint in {args.load} has "
            f"{state['global_batch_size']}, by which its steps count samples; allowed: the same; "
            "or --override-data-path"
        )
    if state["train_samples"] != args.train_samples and args.rank == 0:
        print(
            f"warning: the checkpoint's run has {state['train_samples']} samples, this one "
            f"{args.train_samples}: with several epochs they come in another order",
            flush=True,
        )


class Saver:
    """Writes the checkpoints of a run, each state once.

    Args:
        args: The arguments of the run.
        mesh: The mesh.
        optimizer: Inner optimizer; its engine holds the rest.
        data: What the data are, see :func:`megatron_edit.data.datasets.data_identity`.
    """

    def __init__(
        self, args: Namespace, mesh: Mesh, optimizer: EDiTDistributedOptimizer, data: str
    ) -> None:
        self._args, self._mesh, self._optimizer, self._data = args, mesh, optimizer, data
        self._saved: tuple[int, int] | None = None

    def save(self) -> Path | None:
        """Saves the current step; to be called by all ranks between two steps.

        Returns:
            The folder of the checkpoint, or None where it has been written before.

        Raises:
            RuntimeError: The ranks are not at the same step and round. Nothing has been written.
        """
        engine = self._optimizer.engine
        state = (_iteration(self._args, engine), engine.round)
        _check_agreed(state, engine.device)
        if state == self._saved:
            return None
        self._saved = state
        return save(self._args, self._mesh, self._optimizer, self._data)


def _check_agreed(state: tuple[int, int], device: torch.device) -> None:
    """Compares what the ranks are about to save: iteration and round.

    Raises:
        RuntimeError: They differ. Raised on every rank.
    """
    own = torch.tensor(state, device=device)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    first, *others = torch.stack(everyone).tolist()
    for rank, other in enumerate(others, 1):
        if other != first:
            raise RuntimeError(
                f"rank 0 would save iteration {first[0]}, round {first[1]}, and rank {rank} "
                f"iteration {other[0]}, round {other[1]}; nothing is written"
            )


def save(args: Namespace, mesh: Mesh, optimizer: EDiTDistributedOptimizer, data: str) -> Path:
    """Writes a checkpoint of the current step, see :class:`Saver`.

    Returns:
        The folder of the checkpoint.
    """
    engine = optimizer.engine
    iteration = _iteration(args, engine)
    final = checkpoint_folder(args.save, iteration)
    aside = final.with_name(final.name + ".tmp")
    if args.rank == 0:
        for left_over in Path(args.save).glob("iter_*.tmp"):
            shutil.rmtree(left_over)
        aside.mkdir(parents=True)
    dist.barrier()
    tensors = _replica_tensors(optimizer, mesh) | _rank_tensors(engine, args.rank)
    tensors |= _rng_tensors(args.rank)
    if mesh.replica == 0:
        tensors |= _shared_tensors(optimizer, mesh)
    dcp.save(tensors, checkpoint_id=aside)
    if args.rank == 0:
        _write(aside / "effective_config.json", _as_json(as_dict(args)))
        _write(aside / "state.json", _as_json(_state(args, engine, data)))
        _put_in_place(aside, final)
        beside = Path(args.save) / (TRACKER + ".tmp")
        _write(beside, str(iteration))
        os.replace(beside, beside.with_suffix(""))
    dist.barrier()
    return final


def _replaced(folder: Path) -> Path:
    return folder.with_name(folder.name + ".old")


def _put_in_place(aside: Path, final: Path) -> None:
    """Renames a folder, and only then removes what bore the name before."""
    old = _replaced(final)
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    aside.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def load(
    args: Namespace, mesh: Mesh, optimizer: EDiTDistributedOptimizer, state: dict[str, Any]
) -> None:
    """Loads the checkpoint whose ``state.json`` is given; to be called by all ranks.

    With ``--finetune`` or ``--no-load-optim`` the replicas start from the consolidated parameters,
    the anchor, where the checkpoint has one.
    """
    engine = optimizer.engine
    folder = Path(state["folder"])
    if args.finetune or args.no_load_optim:
        source = "anchor" if state["has_anchor"] else f"replica{mesh.replica}.model"
        _load_into(folder, _named(source, optimizer.named_parameters(), mesh))
    else:
        engine.step = state["replica_steps"][mesh.replica]
        if state["has_anchor"]:
            engine.create_anchor(verify=False)
        flights.restore_rounds(engine, state["in_flight"])
        own = _replica_tensors(optimizer, mesh) | _rank_tensors(engine, args.rank)
        shared = _shared_tensors(optimizer, mesh)
        _load_into(folder, own | shared)
        _bring_home(engine, shared, mesh)
        engine.steps_in_round = int(own[f"replica{mesh.replica}.steps_in_round"])
    if not args.finetune:
        engine.step = state["replica_steps"][mesh.replica]
        engine.round = state["round"]
        engine.rendezvous.resume(state["replica_steps"])
        if not args.no_load_rng:
            rng = _rng_tensors(args.rank)
            _load_into(folder, rng)
            _set_rng(args.rank, rng)


def _state(args: Namespace, engine: SyncEngine, data: str) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "step": _iteration(args, engine),
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


def _iteration(args: Namespace, engine: SyncEngine) -> int:
    """Global batches trained on; checkpoints are written where all replicas know it."""
    return engine.consumed_samples // args.global_batch_size


def _as_json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"


def _write(path: Path, text: str) -> None:
    """Writes a file that is on the disk when this returns."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _named(prefix: str, tensors: dict[str, Any], mesh: Mesh) -> dict[str, torch.Tensor]:
    """Names tensors in the checkpoint: a part that a tensor-parallel rank holds bears its rank."""
    part = f"@tp{mesh.tensor_rank}of{mesh.tensor_parallel}" if mesh.tensor_parallel > 1 else ""
    return {f"{prefix}.{name}{part}": tensor.detach() for name, tensor in tensors.items()}


def _replica_tensors(optimizer: EDiTDistributedOptimizer, mesh: Mesh) -> dict[str, torch.Tensor]:
    """Parameters, moments and counters of this replica."""
    prefix = f"replica{mesh.replica}"
    counters = {
        f"{prefix}.skipped_steps": optimizer.skipped_steps,
        f"{prefix}.steps_in_round": torch.tensor(optimizer.engine.steps_in_round),
        f"{prefix}.skipped_in_round": optimizer.engine.skipped_in_round,
    }
    model = _named(f"{prefix}.model", optimizer.named_parameters(), mesh)
    moments = _named(f"{prefix}.optimizer", optimizer.named_moments(), mesh)
    departures = _named(prefix, flights.replica_tensors(optimizer.engine), mesh)
    return model | moments | departures | counters


def _rank_tensors(engine: SyncEngine, rank: int) -> dict[str, torch.Tensor]:
    """What each rank's compression owes."""
    errors = flights.rank_tensors(engine)
    return {f"compression.rank{rank}.{name}": tensor for name, tensor in errors.items()}


def _shared_tensors(optimizer: EDiTDistributedOptimizer, mesh: Mesh) -> dict[str, torch.Tensor]:
    """What all replicas agree on: anchor, outer momentum, detector, what is under way."""
    engine = optimizer.engine
    anchors: dict[str, torch.Tensor] = {}
    momenta: dict[str, torch.Tensor] = {}
    for state in engine.outer:
        for named, flat in ((anchors, state.anchor), (momenta, state.momentum)):
            if flat is None:
                continue
            views = state.unit.views(flat)
            for (name, parameter), view in zip(state.unit.parameters.items(), views, strict=True):
                named[name] = like_parameter(view, parameter)
    detector = {f"detector.{k}": v for k, v in engine.detector.state_dict().items()}
    under_way = _named("shared", flights.shared_tensors(engine), mesh)
    outer = _named("anchor", anchors, mesh) | _named("outer_momentum", momenta, mesh)
    return outer | detector | under_way


def _bring_home(engine: SyncEngine, shared: dict[str, torch.Tensor], mesh: Mesh) -> None:
    """Copies a loaded outer state to where it lives, if that is not the device: a DTensor of an
    offloaded buffer is a copy on the device of its mesh."""
    for state in engine.outer:
        for prefix, flat in (("anchor", state.anchor), ("outer_momentum", state.momentum)):
            if flat is None:
                continue
            views = dict(zip(state.unit.parameters, state.unit.views(flat), strict=True))
            for name, loaded in _named(prefix, views, mesh).items():
                local = local_of(shared[name])
                if local.data_ptr() != loaded.data_ptr():
                    loaded.copy_(local)


def _load_into(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Fills tensors in place."""
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    wanted = {k: v for k, v in tensors.items() if k in saved or not k.startswith(OPTIONAL)}
    dcp.load(wanted, checkpoint_id=folder)


def _rng_tensors(rank: int) -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
    states |= {f"tracker.{name}": state for name, state in tracker.items()}
    return {f"rng.rank{rank}.{name}": state.clone() for name, state in states.items()}


def _set_rng(rank: int, tensors: dict[str, torch.Tensor]) -> None:
    prefix = f"rng.rank{rank}."
    states = {name.removeprefix(prefix): state for name, state in tensors.items()}
    tracker = {
        name.removeprefix("tracker."): state
        for name, state in states.items()
        if name.startswith("tracker.")
    }
    tensor_parallel.get_cuda_rng_tracker().set_states(tracker)
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    torch.set_rng_state(states["cpu"])
