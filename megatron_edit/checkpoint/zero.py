"""Saving and resuming a run on DeepSpeed's engine, exactly, at any step.

    <save>/<tag>/                          DeepSpeed's files of replica 0
    <save>/<tag>/edit_shard<s>.pt          outer state, counters, rounds under way, of shard rank s
    <save>/edit_replica<r>/<tag>/          the same of replica r > 0, without what all share
    <save>/latest                          the tag; renamed into place last

So DeepSpeed's ``zero_to_fp32.py`` finds a checkpoint of replica 0 where it looks for one. All hosts
must see ``<save>``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_edit.checkpoint import flights
from megatron_edit.engine.sync_engine import SyncEngine
from megatron_edit.errors import ConfigurationError
from megatron_edit.replicas.mesh import Mesh

LATEST = "latest"


class ZeroCheckpoints:
    """Takes the place of a DeepSpeed engine's ``save_checkpoint`` and ``load_checkpoint``.

    Args:
        engine: DeepSpeed's engine.
        sync: The engine of the synchronisations.
        mesh: The mesh.
        consolidate: Writes a loaded anchor to the parameters, where replicas cannot go on as they
            were.
    """

    def __init__(
        self, engine: Any, sync: SyncEngine, mesh: Mesh, consolidate: Callable[[], None]
    ) -> None:
        self._sync, self._mesh, self._consolidate = sync, mesh, consolidate
        self._save, self._load = engine.save_checkpoint, engine.load_checkpoint
        self._engine = engine

    def save(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        **arguments: Any,
    ) -> bool:
        """Writes a checkpoint between two steps; to be called by all ranks.

        Args:
            save_dir: The folder of all checkpoints of the run.
            tag: Name of this one; by default DeepSpeed's, ``global_step<n>``.
            client_state: The user's, given back by :meth:`load`.
            save_latest: Whether a load without a tag is to find this one.
            arguments: Further ones of DeepSpeed's ``save_checkpoint``.
        """
        tag = f"global_step{self._engine.global_steps}" if tag is None else str(tag)
        own = self._own_folder(save_dir)
        (own / tag).mkdir(parents=True, exist_ok=True)
        self._save(str(own), tag, client_state or {}, save_latest=False, **arguments)
        _replace(self._shard_file(own / tag), lambda path: torch.save(self._state(), path))
        dist.barrier()
        if save_latest and dist.get_rank() == 0:
            _replace(Path(save_dir) / LATEST, lambda path: path.write_text(tag))
        dist.barrier()
        return True

    def load(
        self, load_dir: str, tag: str | None = None, **arguments: Any
    ) -> tuple[str | None, Any]:
        """Reads a checkpoint; to be called by all ranks, before the first step.

        With as many replicas as it was written with, the run goes on as if it had not been
        interrupted. With more or fewer, every replica starts from the anchor, and from the moments
        of replica 0.

        Args:
            load_dir: The folder that was saved to.
            tag: By default that of the newest.
            arguments: Further ones of DeepSpeed's ``load_checkpoint``.

        Returns:
            The folder that was loaded and the client state, as DeepSpeed's ``load_checkpoint``.

        Raises:
            ConfigurationError: There is no such checkpoint, or its shard groups have another size.
        """
        root = Path(load_dir)
        tag = _latest(root) if tag is None else str(tag)
        state = _read(self._shard_file(root / tag))
        if state["shard"] != self._mesh.shard:
            raise ConfigurationError(
                f"{root / tag}: the checkpoint has {state['shard']} ranks a replica, this run "
                f"{self._mesh.shard}; allowed: the same"
            )
        same = state["replicas"] == self._mesh.replicas
        own = self._own_folder(load_dir) if same else root
        path, client_state = self._load(str(own), tag, **arguments)
        self._sync.step, self._sync.round = state["step"], state["round"]
        if state["has_anchor"]:
            self._sync.create_anchor(verify=False)
            self._take_shared(state["shared"])
            if same:
                mine = state if own == root else _read(self._shard_file(own / tag))
                self._take_own(state, mine["own"])
            else:
                self._start_anew(state["replicas"])
        return path, client_state

    def _own_folder(self, root: str) -> Path:
        replica = self._mesh.replica
        return Path(root) if replica == 0 else Path(root) / f"edit_replica{replica}"

    def _shard_file(self, folder: Path) -> Path:
        return folder / f"edit_shard{self._mesh.shard_rank}.pt"

    def _state(self) -> dict[str, Any]:
        sync = self._sync
        state: dict[str, Any] = {
            "replicas": self._mesh.replicas,
            "shard": self._mesh.shard,
            "step": sync.step,
            "round": sync.round,
            "has_anchor": bool(sync.outer),
            "own": {
                "steps_in_round": sync.steps_in_round,
                "skipped_in_round": sync.skipped_in_round.cpu(),
                "departures": _on_host(flights.replica_tensors(sync)),
            },
        }
        if self._mesh.replica == 0:
            state["shared"] = {
                "detector": _on_host(sync.detector.state_dict()),
                "anchor": {s.unit.name: s.anchor.cpu() for s in sync.outer},
                "momentum": {
                    s.unit.name: s.momentum.cpu() for s in sync.outer if s.momentum is not None
                },
                "rounds": flights.describe_rounds(sync),
                "under_way": _on_host(flights.shared_tensors(sync)),
            }
        return state

    def _take_shared(self, shared: dict[str, Any]) -> None:
        for state in self._sync.outer:
            state.anchor.copy_(shared["anchor"][state.unit.name])
            if state.momentum is not None and state.unit.name in shared["momentum"]:
                state.momentum.copy_(shared["momentum"][state.unit.name])

    def _take_own(self, state: dict[str, Any], own: dict[str, Any]) -> None:
        sync = self._sync
        sync.detector.load_state_dict(state["shared"]["detector"])
        flights.restore_rounds(sync, state["shared"]["rounds"])
        under_way = flights.shared_tensors(sync)
        for name, tensor in state["shared"]["under_way"].items():
            under_way[name].copy_(tensor)
        departures = flights.replica_tensors(sync)
        for name, tensor in own["departures"].items():
            departures[name].copy_(tensor)
        sync.steps_in_round = own["steps_in_round"]
        sync.skipped_in_round.copy_(own["skipped_in_round"])

    def _start_anew(self, replicas: int) -> None:
        if dist.get_rank() == 0:
            print(
                f"checkpoint of {replicas} replica(s), this run has {self._mesh.replicas}: all "
                "start from its anchor, and the outer momentum goes on",
                flush=True,
            )
        self._consolidate()


def _on_host(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def _latest(root: Path) -> str:
    try:
        return (root / LATEST).read_text().strip()
    except OSError as error:
        raise ConfigurationError(
            f"{root}: no checkpoint there ({LATEST}: {error.strerror}); give the folder of a save"
        ) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError) as error:
        raise ConfigurationError(
            f"{path}: no readable part of a checkpoint ({str(error).splitlines()[0]}); give the "
            "folder and tag of a whole one",
            per_host=True,
        ) from None
    return state


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file aside and renames it into place."""
    aside = path.with_name(path.name + ".tmp")
    write(aside)
    os.replace(aside, path)
