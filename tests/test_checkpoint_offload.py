"""An outer state that lives on the host goes to a checkpoint and comes back past the device."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed import run_ranks
from harness import Case, start
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from megatron_edit.backends.megatron.units import local_of
from megatron_edit.checkpoint.tensors import shared_tensors

OFFLOADING = Case(replicas=1, shard=2, layers=2, edit={"offload_outer_state": True})


def as_on_a_gpu(parameter: torch.Tensor) -> DTensor:
    """A parameter of the same sharding on a device that this machine lacks: a copy to it fails."""
    assert isinstance(parameter, DTensor)
    mesh = DeviceMesh.from_group(parameter.device_mesh.get_group(), "cuda")
    return DTensor.from_local(
        torch.empty_like(parameter.to_local(), device="meta"),
        mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _around_the_device(folder: Path) -> int:
    """Saves, spoils and loads the outer state; returns how many bytes of it came back exactly."""
    training = start(OFFLOADING)
    for _ in range(9):
        training.step()
    engine = training.engine
    homes = [home for state in engine.outer for home in (state.anchor, state.momentum)]
    before = [home.clone() for home in homes]
    assert all(home.count_nonzero() for home in homes)
    for state in engine.outer:
        state.unit.parameters = {n: as_on_a_gpu(p) for n, p in state.unit.parameters.items()}

    tensors = {
        name: tensor
        for name, tensor in shared_tensors(training.optimizer, training.mesh).items()
        if name.startswith(("anchor.", "outer_momentum."))
    }
    owned = {home.untyped_storage().data_ptr() for home in homes}
    assert {local_of(t).untyped_storage().data_ptr() for t in tensors.values()} == owned
    dcp.save(tensors, checkpoint_id=folder)
    for home in homes:
        home.fill_(float("nan"))
    dist.barrier()
    dcp.load(tensors, checkpoint_id=folder)
    return sum(
        home.nbytes for home, was in zip(homes, before, strict=True) if torch.equal(home, was)
    )


def test_an_offloaded_outer_state_is_saved_and_loaded_without_a_copy(tmp_path: Path) -> None:
    exact = run_ranks(_around_the_device, 2, tmp_path)
    metadata = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    elements = sum(entry.size.numel() for entry in metadata.values())  # type: ignore[union-attr]
    assert sum(exact) == 4 * elements > 0
