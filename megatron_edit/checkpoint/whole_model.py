"""A checkpoint of any layout as one whole model in one process.

The anchor is what the replicas agree on, so it is the model; a checkpoint without one (warm-up,
method ``sync``) has equal replicas, and the first is taken. Sharded tensors come back whole from
torch.distributed.checkpoint; the parts of tensor-parallel ranks are put together here.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from megatron_edit.backends.megatron.mesh import build_mesh, destroy_mesh
from megatron_edit.backends.megatron.model import build_model
from megatron_edit.checkpoint import files, storage
from megatron_edit.errors import ConfigurationError
from megatron_edit.platform import cpu

TIED_COPY = "output_layer.weight"
TENSOR_PART = re.compile(r"(?P<name>.+)@tp(?P<rank>\d+)of\d+")
# End of a parameter's name -> dimension that tensor parallelism splits. Others are copies.
SPLIT_DIMENSION = {
    "word_embeddings.weight": 0,
    "output_layer.weight": 0,
    "linear_qkv.weight": 0,
    "linear_qkv.bias": 0,
    "linear_fc1.weight": 0,
    "linear_fc1.bias": 0,
    "linear_proj.weight": 1,
    "linear_fc2.weight": 1,
}
# Transformer Engine keeps the norm before a linear layer in that layer.
LOCAL_NAMES = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
ONE_RANK = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "sequence_parallel": False,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "transformer_impl": "local",
    "params_dtype": torch.float32,
}
"""What differs between the arguments of a run and those of its whole model in one process."""


def find_checkpoint(root: str | Path, iteration: int | None = None) -> Path:
    """The folder of a checkpoint under a ``--save`` folder; by default the newest.

    Raises:
        ConfigurationError: There is none.
    """
    with files.refusing_damage(root):
        folder = files.find_checkpoint(Path(root), iteration)
    if not (folder / files.STATE).is_file():
        raise ConfigurationError(f"--load: no checkpoint {folder}")
    return folder


def read_run(folder: Path) -> Namespace:
    """The arguments of the run that wrote a checkpoint, changed to one rank without parallelism.

    Raises:
        ConfigurationError: The file is damaged.
    """
    with files.refusing_damage(folder.parent):
        config = files.read_json(folder / files.CONFIG, ["values"])
    return Namespace(**{**config["values"], **ONE_RANK})


def whole_parameters(folder: Path) -> dict[str, torch.Tensor]:
    """Name -> whole parameter, fp32 on the CPU, with the names of the local layers.

    Raises:
        ConfigurationError: A file of the checkpoint is damaged.
    """
    with files.refusing_damage(folder.parent):
        state = files.read_json(folder / files.STATE, ["has_anchor", "model"])
        storage.check_files(folder)
        saved = storage.read_index(folder).state_dict_metadata
    prefix = "anchor." if state["has_anchor"] else "replica0.model."
    parts = {
        key.removeprefix(prefix): torch.empty(entry.size)  # type: ignore[union-attr]
        for key, entry in saved.items()
        if key.startswith(prefix)
    }
    named = {prefix + name: tensor for name, tensor in parts.items()}
    storage.read_tensors(folder, named, no_dist=True)
    parameters = merge_tensor_parts(parts, gated=state["model"]["swiglu"])
    if not state["model"]["untie_embeddings_and_output_weights"]:
        # Under pipeline parallelism the last stage has a copy of its own.
        parameters.pop(TIED_COPY, None)
    return {_local_name(name): tensor for name, tensor in parameters.items()}


def merge_tensor_parts(parts: Mapping[str, torch.Tensor], gated: bool) -> dict[str, torch.Tensor]:
    """Puts the parts of tensor-parallel ranks together.

    Args:
        parts: ``<name>`` or ``<name>@tp<rank>of<size>`` -> tensor.
        gated: Whether the first layer of the MLP holds gate and up projection, one on the other;
            each is split by itself.
    """
    whole: dict[str, torch.Tensor] = {}
    split: dict[str, dict[int, torch.Tensor]] = {}
    for key, tensor in parts.items():
        if (part := TENSOR_PART.fullmatch(key)) is None:
            whole[key] = tensor
        else:
            split.setdefault(part["name"], {})[int(part["rank"])] = tensor
    for name, by_rank in split.items():
        tensors = [by_rank[rank] for rank in sorted(by_rank)]
        dimension = SPLIT_DIMENSION.get(".".join(name.split(".")[-2:]))
        if dimension is None:
            whole[name] = tensors[0]
        elif gated and "linear_fc1" in name:
            halves = zip(*(tensor.chunk(2) for tensor in tensors), strict=True)
            whole[name] = torch.cat([part for half in halves for part in half])
        else:
            whole[name] = torch.cat(tensors, dimension)
    return whole


def _local_name(name: str) -> str:
    for theirs, ours in LOCAL_NAMES.items():
        name = name.replace(theirs, ours)
    return name


@contextmanager
def one_rank_mesh() -> Iterator[None]:
    """megatron-core's process groups of a single process, where none are up."""
    cpu.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        build_mesh(1)
        yield
    finally:
        destroy_mesh()
        dist.destroy_process_group()


def load_whole_model(folder: Path, run: Namespace) -> GPTModel:
    """Builds the whole model of a checkpoint in this process, in evaluation mode.

    Args:
        folder: From :func:`find_checkpoint`.
        run: From :func:`read_run`.
    """
    model = build_model(run)[0]
    targets: dict[str, Any] = dict(model.named_parameters())
    parameters = whole_parameters(folder)
    if targets.keys() != parameters.keys():
        different = ", ".join(sorted(targets.keys() ^ parameters.keys()))
        raise RuntimeError(f"{folder} and the model do not have the same parameters: {different}")
    with torch.no_grad():
        for name, tensor in parameters.items():
            targets[name].copy_(tensor)
    return model.eval()
