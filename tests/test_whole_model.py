"""Checkpoints of any layout come back as the whole model, also in transformers."""

from __future__ import annotations

import json
import zlib
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from command_lines import command_line
from distributed import run_ranks
from harness import own_part

from megatron_edit.backends.megatron.build import get_edit_model_and_optimizer
from megatron_edit.backends.megatron.mesh import build_mesh
from megatron_edit.backends.megatron.model import build_model
from megatron_edit.backends.megatron.units import global_name
from megatron_edit.checkpoint import checkpoint, files, whole_model
from megatron_edit.commands import export
from megatron_edit.config.arguments import parse_args
from megatron_edit.errors import ConfigurationError
from megatron_edit.run.trainer import optimizer_config

ROOT = Path(__file__).resolve().parent.parent
LLAMA = "--mock-data --swiglu --normalization RMSNorm --disable-bias-linear --ffn-hidden-size 96"
GROUPED = "--group-query-attention --num-query-groups 2 --rotary-base 500"
UNTIED = "--untie-embeddings-and-output-weights"
LAYOUTS = {
    "R2 S2": f"--edit-replicas 2 {UNTIED}",
    "R2 TP2": f"--edit-replicas 2 --tensor-model-parallel-size 2 {UNTIED}",
    "TP2 PP2, tied": "--edit-replicas 1 --tensor-model-parallel-size 2 --sequence-parallel "
    "--pipeline-model-parallel-size 2",
    "PP2 interleaved S2": "--edit-replicas 1 --pipeline-model-parallel-size 2 "
    f"--num-layers-per-virtual-pipeline-stage 1 --global-batch-size 8 {UNTIED}",
}


def arguments(layout: str, folder: str, model: str = f"{LLAMA} {GROUPED}") -> Namespace:
    args = parse_args(command_line(f"{model} {layout} --save {folder}"), world_size=4)
    args.padded_vocab_size, args.sources["padded_vocab_size"] = 128, "computed"
    return args


def whole(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor that depends on the name alone; norms are about 1."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = 0.1 * torch.randn(shape, generator=generator)
    return values + 1 if len(shape) == 1 else values


def save_on_rank(args: Namespace, has_anchor: bool) -> None:
    """Fills the model from :func:`whole`, saves it, and with an anchor moves on before that."""
    args.rank = dist.get_rank()
    mesh = build_mesh(
        args.replicas,
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
    )
    model = build_model(args)
    for chunk in model:
        for local_name, parameter in chunk.named_parameters():
            name = global_name(chunk, local_name)
            if chunk.share_embeddings_and_output_weights and name == whole_model.TIED_COPY:
                name = "embedding.word_embeddings.weight"
            full = list(parameter.shape)
            if getattr(parameter, "tensor_model_parallel", False):
                full[parameter.partition_dim] *= mesh.tensor_parallel
            parameter.data.copy_(own_part(name, whole(name, tuple(full)), parameter, mesh))
    _, optimizer = get_edit_model_and_optimizer(
        model, optimizer_config(args), args.edit, mesh, samples_per_step=4
    )
    if has_anchor:
        optimizer.engine.create_anchor()
        with torch.no_grad():
            for parameter in optimizer.named_parameters().values():
                parameter.add_(1.0 + mesh.replica)
    checkpoint.save(args, mesh, optimizer, "mock")


@pytest.mark.parametrize("has_anchor", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_come_back_whole(layout: str, has_anchor: bool, tmp_path: Path) -> None:
    args = arguments(LAYOUTS[layout], str(tmp_path))
    run_ranks(save_on_rank, 4, args, has_anchor)
    run_ranks(check_whole_parameters, 1, tmp_path)


def check_whole_parameters(root: Path) -> None:
    folder = whole_model.find_checkpoint(root)
    build_mesh(1)
    model = build_model(whole_model.read_run(folder))[0]
    parameters = whole_model.whole_parameters(folder)
    assert parameters.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameters[name], whole(name, tuple(parameter.shape))), name


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_gives_the_same_logits(tied: bool, tmp_path: Path) -> None:
    layout = LAYOUTS["TP2 PP2, tied"] + ("" if tied else f" {UNTIED}")
    run_ranks(save_on_rank, 4, arguments(layout, str(tmp_path / "checkpoint")), False)
    run_ranks(check_logits, 1, tmp_path)


def check_logits(place: Path) -> None:
    from transformers import LlamaForCausalLM

    root, output = place / "checkpoint", place / "llama"
    export.export(
        Namespace(load=root, iteration=None, output=output, dtype="float32", tokenizer_model=None)
    )
    assert list(output.glob("*.safetensors"))
    tokens = torch.randint(128, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = LlamaForCausalLM.from_pretrained(output)(tokens).logits
        build_mesh(1)
        folder = whole_model.find_checkpoint(root)
        model = whole_model.load_whole_model(folder, whole_model.read_run(folder))
        ours = model(tokens, torch.arange(32).expand(2, -1), None)
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_a_model_that_is_no_llama_is_not_exported() -> None:
    run = Namespace(normalization="LayerNorm", swiglu=True, disable_bias_linear=True)
    with pytest.raises(ConfigurationError, match="normalization LayerNorm"):
        export.check_is_llama(run)


def test_names_of_transformer_engine_become_local_ones() -> None:
    names = {
        "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight": (
            "decoder.layers.3.input_layernorm.weight"
        ),
        "decoder.layers.3.mlp.linear_fc1.layer_norm_bias": (
            "decoder.layers.3.pre_mlp_layernorm.bias"
        ),
    }
    for theirs, ours in names.items():
        assert whole_model._local_name(theirs) == ours


@pytest.mark.parametrize("iteration", [None, 7])
def test_a_missing_checkpoint_is_said(iteration: int | None, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no (readable )?checkpoint"):
        whole_model.find_checkpoint(tmp_path, iteration)


def test_the_newest_checkpoint_is_found(tmp_path: Path) -> None:
    for iteration in (10, 20):
        folder = tmp_path / f"iter_{iteration:07d}"
        folder.mkdir()
        (folder / "state.json").write_text(json.dumps({}))
    (tmp_path / files.TRACKER).write_text("20")
    assert whole_model.find_checkpoint(tmp_path).name == "iter_0000020"
    assert whole_model.find_checkpoint(tmp_path, 10).name == "iter_0000010"
