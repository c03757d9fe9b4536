"""Saving and resuming a run, bit for bit, at any step. All hosts must see ``--save``."""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_edit.backends.megatron.optimizer import EDiTDistributedOptimizer
from megatron_edit.checkpoint import files, flights, storage
from megatron_edit.checkpoint.state import describe, iteration
from megatron_edit.checkpoint.tensors import (
    by_name,
    rank_tensors,
    replica_tensors,
    rng_tensors,
    set_rng,
    shared_tensors,
    steps_in_round,
)
from megatron_edit.config.arguments import as_dict
from megatron_edit.errors import CheckpointError
from megatron_edit.replicas.mesh import Mesh

# Starts from zero where the run before had it switched off.
OPTIONAL = ("outer_momentum.", "compression.")


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
        state = (iteration(self._args, engine), engine.round)
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

    Raises:
        CheckpointError: It cannot be written; on all ranks. The checkpoint before is as it was, and
            stays the newest.
    """
    engine, step = optimizer.engine, iteration(args, optimizer.engine)
    folder = files.checkpoint_folder(args.save, step)
    aside = files.folder_aside(folder)
    what = f"step {step}: cannot save the checkpoint {folder}"

    def finish() -> None:
        files.write_json(aside / files.CONFIG, as_dict(args))
        files.write_json(aside / files.STATE, describe(args, engine, data))
        files.put_in_place(folder)
        files.point_tracker(folder.parent, step)

    try:
        storage.on_first_rank(what, lambda: files.make_folder_aside(folder))
        storage.write_tensors(what, aside, _all_tensors(optimizer, mesh, args.rank))
        storage.on_first_rank(what, finish)
    except CheckpointError:
        if args.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise
    return folder


def _all_tensors(
    optimizer: EDiTDistributedOptimizer, mesh: Mesh, rank: int
) -> dict[str, torch.Tensor]:
    """What this rank has to save."""
    tensors = replica_tensors(optimizer, mesh) | rank_tensors(optimizer.engine, rank)
    tensors |= rng_tensors(rank)
    return tensors | shared_tensors(optimizer, mesh) if mesh.replica == 0 else tensors


def load(
    args: Namespace, mesh: Mesh, optimizer: EDiTDistributedOptimizer, state: dict[str, Any]
) -> bool:
    """Loads the checkpoint whose ``state.json`` is given; to be called by all ranks.

    With ``--finetune`` or ``--no-load-optim`` the replicas start from the consolidated parameters,
    the anchor, where the checkpoint has one.

    Returns:
        Whether the replicas hold the same parameters and nothing is under way between them: there
        is nothing to synchronise before they train on.
    """
    engine = optimizer.engine
    folder = Path(state["folder"])
    steps, lasted_s = [0] * mesh.replicas, 0.0
    consolidated = True
    if args.finetune or args.no_load_optim:
        source = "anchor" if state["has_anchor"] else f"replica{mesh.replica}.model"
        _load_into(folder, by_name(source, optimizer.named_parameters(), mesh))
    else:
        engine.step = state["replica_steps"][mesh.replica]
        if state["has_anchor"]:
            engine.create_anchor(verify=False)
        flights.restore_rounds(engine, state["in_flight"])
        own = replica_tensors(optimizer, mesh) | rank_tensors(engine, args.rank)
        rounds = steps_in_round(mesh.replicas)
        _load_into(folder, own | shared_tensors(optimizer, mesh) | rounds)
        steps = [int(count) for count in rounds.values()]
        engine.steps_in_round = steps[mesh.replica]
        lasted_s = float(own[f"replica{mesh.replica}.round_seconds"])
        consolidated = not any(steps) and not engine.flying
    if not args.finetune:
        engine.step = state["replica_steps"][mesh.replica]
        engine.round = state["round"]
        engine.rendezvous.resume(state["replica_steps"], sum(steps), lasted_s)
        if not args.no_load_rng:
            rng = rng_tensors(args.rank)
            _load_into(folder, rng)
            set_rng(args.rank, rng)
    return consolidated


def _load_into(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Fills tensors in place."""
    with files.refusing_damage(folder.parent):
        saved = storage.read_index(folder).state_dict_metadata
    wanted = {k: v for k, v in tensors.items() if k in saved or not k.startswith(OPTIONAL)}
    storage.read_tensors(folder, wanted)
