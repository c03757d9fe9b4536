"""Writes a checkpoint of any layout as a Llama model folder of transformers (safetensors).

edit-export --load DIR --output FOLDER [--dtype bfloat16]

The vocabulary stays padded as in training. The tokenizer of the run goes into the folder too.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_edit.errors import ConfigurationError, exit_on_configuration_error

if TYPE_CHECKING:
    import torch
    from transformers import LlamaConfig

DTYPES = ("float32", "bfloat16")
SAME_BUT_FOR_THE_NAME = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
}


def parse_arguments() -> Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--load", required=True, help="folder that a run wrote to with --save")
    add("--iteration", type=int, help="checkpoint to take; without it the newest")
    add("--output", required=True, help="folder to write")
    add("--dtype", default="float32", choices=DTYPES, help="of the weights written")
    add("--tokenizer-model", help="tokenizer folder; without it the run's")
    return parser.parse_args()


def check_is_llama(run: Namespace) -> None:
    """Refuses what transformers' Llama cannot express.

    Raises:
        ConfigurationError: The model differs from a Llama.
    """
    needed = {"normalization": "RMSNorm", "swiglu": True, "disable_bias_linear": True}
    for name, value in needed.items():
        if getattr(run, name) != value:
            raise ConfigurationError(
                f"--load: the model has {name} {getattr(run, name)}; a Llama has {value}"
            )


def llama_config(run: Namespace) -> LlamaConfig:
    """The configuration of the model in transformers."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=run.padded_vocab_size,
        hidden_size=run.hidden_size,
        intermediate_size=run.ffn_hidden_size,
        num_hidden_layers=run.num_layers,
        num_attention_heads=run.num_attention_heads,
        num_key_value_heads=run.num_query_groups,
        max_position_embeddings=run.max_position_embeddings,
        rms_norm_eps=run.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": float(run.rotary_base)},
        tie_word_embeddings=not run.untie_embeddings_and_output_weights,
        bos_token_id=None,
        eos_token_id=None,
    )


def llama_parameters(
    parameters: Mapping[str, torch.Tensor], run: Namespace
) -> dict[str, torch.Tensor]:
    """Megatron's whole parameters under transformers' names."""
    renamed = {
        "model.embed_tokens.weight": parameters["embedding.word_embeddings.weight"],
        "model.norm.weight": parameters["decoder.final_layernorm.weight"],
    }
    if run.untie_embeddings_and_output_weights:
        renamed["lm_head.weight"] = parameters["output_layer.weight"]
    groups, channels = run.num_query_groups, run.hidden_size // run.num_attention_heads
    for layer in range(run.num_layers):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        for name, other in SAME_BUT_FOR_THE_NAME.items():
            renamed[theirs + other] = parameters[ours + name]
        # Per group of heads: the queries of its heads, its key, its value.
        qkv = parameters[ours + "self_attention.linear_qkv.weight"]
        parts = qkv.view(groups, -1, channels, run.hidden_size)
        split = {"q": parts[:, :-2], "k": parts[:, -2], "v": parts[:, -1]}
        for name, part in split.items():
            renamed[f"{theirs}self_attn.{name}_proj.weight"] = part.reshape(-1, run.hidden_size)
        gate, up = parameters[ours + "mlp.linear_fc1.weight"].chunk(2)
        renamed |= {theirs + "mlp.gate_proj.weight": gate, theirs + "mlp.up_proj.weight": up}
    return renamed


def export(args: Namespace) -> None:
    """Writes the folder.

    Raises:
        ConfigurationError: There is no checkpoint, or it is no Llama.
    """
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    from megatron_edit.checkpoint.whole_model import find_checkpoint, read_run, whole_parameters

    folder = find_checkpoint(args.load, args.iteration)
    run = read_run(folder)
    check_is_llama(run)
    config = llama_config(run)
    tokenizer = args.tokenizer_model or run.tokenizer_model
    if tokenizer is not None and Path(tokenizer).is_dir():
        loaded = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
        config.eos_token_id = loaded.eos_token_id
        loaded.save_pretrained(args.output)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    dtype = getattr(torch, args.dtype)
    weights = {
        name: tensor.to(dtype).contiguous()
        for name, tensor in llama_parameters(whole_parameters(folder), run).items()
    }
    # Checks names and shapes; a tied head has no weights of its own.
    model.load_state_dict(weights, assign=True, strict=run.untie_embeddings_and_output_weights)
    model.tie_weights()
    model.save_pretrained(args.output)


def main() -> None:
    """Exports as the command line says."""
    args = parse_arguments()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    with exit_on_configuration_error():
        export(args)
        print(f"wrote {args.output}")
