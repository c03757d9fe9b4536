"""Units: what is gathered and synchronised as one.

A unit is the embedding, one transformer layer, or the final norm with the output head. Units are
numbered over the whole replica, so that a vector with one number per unit means the same on every
rank, whatever its pipeline stage.

Tied embeddings make the embedding and the head one unit: a matrix that is used at both ends must
get one verdict and one weight. In a pipeline that unit has parts on the first and the last stage.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from megatron.core.models.gpt import GPTModel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from megatron_edit.backends.megatron.sharding import Sharding
from megatron_edit.engine.backend import Unit
from megatron_edit.platform.fsdp_compat import gather_begun
from megatron_edit.replicas.mesh import Mesh


@dataclass
class MegatronUnit(Unit):
    """The part of one unit that this rank holds.

    Attributes:
        name: ``embedding``, ``layers.<n>`` or ``head``.
        index: Its number among the units of the whole replica.
        modules: Its modules in the order of their use; the first one's forward comes first.
        parameters: Name in the whole model -> parameter, a DTensor when FSDP2 shards it.
        spans_stages: Whether another pipeline stage holds a part of it, too.
        locals: This rank's shards of the parameters, fp32; they keep their storage for good.
        counted: For each parameter whether this rank counts it in a norm over the replica; of
            copies that several ranks hold, one is counted.
    """

    name: str
    index: int
    modules: list[nn.Module]
    parameters: dict[str, nn.Parameter]
    spans_stages: bool = False
    locals: list[torch.Tensor] = field(default_factory=list)
    counted: list[bool] = field(default_factory=list)

    @property
    def is_gathered(self) -> bool:
        """Whether FSDP2 holds the full parameters of the unit, or has begun to gather them."""
        if not any(isinstance(parameter, DTensor) for parameter in self.parameters.values()):
            return False
        if any(gather_begun(m) for m in self.modules if isinstance(m, FSDPModule)):
            return True
        return not all(isinstance(p, DTensor) for m in self.modules for p in m.parameters())

    def copy_from(self, flat: torch.Tensor) -> None:
        """Copies a flat ``[numel]`` buffer into the parameters."""
        torch._foreach_copy_(self.locals, self.views(flat))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds: a DTensor's shard, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like_parameter(local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Wraps a local tensor as a DTensor sharded like ``parameter``, if that is one.

    They share their storage, also where the tensor is on the host and the parameter is not.
    """
    if not isinstance(parameter, DTensor):
        return local
    mesh = parameter.device_mesh
    if mesh.device_type != local.device.type:
        # On the parameter's mesh it would be a copy on the device.
        mesh = DeviceMesh.from_group(mesh.get_group(), local.device.type)
    return DTensor.from_local(
        local,
        mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def unit_names(num_layers: int, tied: bool) -> list[str]:
    """Names of all units of a replica, in the order of their index."""
    layers = [f"layers.{layer}" for layer in range(num_layers)]
    return ["embedding", *layers] + ([] if tied else ["head"])


def split_into_units(chunk: GPTModel, mesh: Mesh, sharding: Sharding) -> list[MegatronUnit]:
    """Finds the units of a model chunk and shards those that are still whole.

    Args:
        chunk: A model chunk with fp32 parameters on their final device.
        mesh: The mesh.
        sharding: How to shard.

    Returns:
        The units this chunk has a part of, in the order of their forward.
    """
    units = _find_units(chunk, mesh)
    for unit in units:
        # A tied matrix is used at both ends of the chunk: it stays gathered with the chunk itself.
        if not (unit.index == 0 and chunk.pre_process and len(unit.modules) > 1):
            sharding.shard(unit.modules)
    sharding.shard_root(chunk)
    owner = {name: unit for unit in units for name in unit.parameters}
    for local_name, parameter in chunk.named_parameters():
        name = global_name(chunk, local_name)
        unit = owner[name]
        unit.parameters[name] = parameter
        unit.locals.append(local_of(parameter.detach()))
        unit.counted.append(_is_counted(parameter, mesh))
    return units


def global_name(chunk: GPTModel, name: str) -> str:
    """A parameter's name in the whole model: layers counted over all stages, from 0."""
    prefix = "decoder.layers."
    if not name.startswith(prefix):
        return name
    number, rest = name[len(prefix) :].split(".", 1)
    return f"{prefix}{chunk.decoder.layers[int(number)].layer_number - 1}.{rest}"


def _find_units(chunk: GPTModel, mesh: Mesh) -> list[MegatronUnit]:
    tied = chunk.share_embeddings_and_output_weights
    layers = chunk.decoder.layers
    ends: dict[str, list[nn.Module]] = {"embedding": [], "head": []}
    if chunk.pre_process:
        ends["embedding"].append(chunk.embedding)
    if chunk.post_process:
        final_norm = getattr(chunk.decoder, "final_layernorm", None)
        head = [final_norm, chunk.output_layer] if final_norm is not None else [chunk.output_layer]
        ends["embedding" if tied else "head"] += head
    numbered = [
        ("embedding", 0, ends["embedding"]),
        *((f"layers.{la.layer_number - 1}", la.layer_number, [la]) for la in layers),
        ("head", chunk.config.num_layers + 1, ends["head"]),
    ]
    spans = tied and mesh.pipeline_parallel > 1
    units = [
        MegatronUnit(name, index, modules, {}, spans_stages=spans and index == 0)
        for name, index, modules in numbered
        if modules
    ]
    for unit in units:
        inside = {id(p) for module in unit.modules for p in module.parameters()}
        for name, parameter in chunk.named_parameters():
            if id(parameter) in inside:
                unit.parameters[global_name(chunk, name)] = parameter
    return units


def _is_counted(parameter: nn.Parameter, mesh: Mesh) -> bool:
    # megatron-core marks the last stage's copy of a tied embedding as ``shared``.
    if getattr(parameter, "shared", False):
        return False
    return getattr(parameter, "tensor_model_parallel", False) or mesh.tensor_rank == 0
