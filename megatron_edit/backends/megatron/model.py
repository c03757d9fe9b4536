"""A Llama-style GPTModel of megatron-core, built from Megatron's flags."""

from __future__ import annotations

from argparse import Namespace
from contextlib import nullcontext
from functools import partial

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)

from megatron_edit.backends.megatron.sharding import (
    ShardedLayer,
    Sharding,
    embeddings_sharded_when_built,
)
from megatron_edit.platform import cpu


class TorchNorm:
    """Builds torch's RMSNorm or LayerNorm for megatron-core's local layers.

    megatron-core's own wrapper refuses sequence parallelism. All it takes is the mark on the
    weights by which their gradients are summed over the tensor-parallel ranks.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5
    ) -> torch.nn.Module:
        kind = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}[config.normalization]
        # Like megatron-core's own layers, on the device it computes on.
        norm = kind(hidden_size, eps=eps, device=cpu.device())
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def uses_transformer_engine(args: Namespace) -> bool:
    """Whether the layers come from Transformer Engine (``--transformer-impl``)."""
    return args.transformer_impl == "transformer_engine"


def transformer_config(args: Namespace) -> TransformerConfig:
    """megatron-core's configuration of the model and its pipeline.

    Parameters are kept in fp32 and gathered in ``args.params_dtype`` (see ``data_parallel``), so
    the weights are created in fp32 whatever the compute type.
    """
    on_gpu = torch.cuda.is_available()
    interleaved = args.virtual_pipeline_model_parallel_size is not None
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
        add_bias_linear=not args.disable_bias_linear,
        bias_activation_fusion=on_gpu,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        attention_dropout=args.attention_dropout,
        hidden_dropout=args.hidden_dropout,
        init_method_std=args.init_method_std,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
        recompute_granularity=args.recompute_granularity,
        recompute_method=args.recompute_method,
        recompute_num_layers=args.recompute_num_layers,
        params_dtype=torch.float32,
        bf16=args.params_dtype is torch.bfloat16,
        pipeline_dtype=args.params_dtype,
        # Interleaved pipelines with two stages give wrong gradients with batched transfers.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        deallocate_pipeline_outputs=True,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=not on_gpu,
        perform_initialization=True,
    )


def _layer_spec(args: Namespace, sharding: Sharding | None) -> ModuleSpec:
    if uses_transformer_engine(args):
        spec = get_gpt_layer_with_transformer_engine_spec()
    else:
        spec = get_gpt_layer_local_spec(normalization=args.normalization)
        spec.submodules.input_layernorm = TorchNorm
        spec.submodules.pre_mlp_layernorm = TorchNorm
    if sharding is not None:
        spec.module, spec.params = ShardedLayer, {"sharding": sharding}
    return spec


def _block_spec(
    args: Namespace, config: TransformerConfig, vp_stage: int | None, sharding: Sharding | None
) -> ModuleSpec | TransformerBlockSubmodules:
    spec = _layer_spec(args, sharding)
    if uses_transformer_engine(args):
        return spec
    layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=TorchNorm)


def build_model(
    args: Namespace, config: TransformerConfig | None = None, sharding: Sharding | None = None
) -> list[GPTModel]:
    """Builds this rank's model chunks, on the CPU or the current GPU.

    Args:
        args: Megatron's flags, with ``padded_vocab_size`` set from the tokenizer.
        config: Configuration to use instead of :func:`transformer_config`.
        sharding: How to shard each unit before the next is built, so that a rank holds its shards
            and one whole unit at most; the weights are the same. None builds chunks whole.

    Returns:
        One chunk, or one per virtual pipeline stage.
    """
    config = config or transformer_config(args)
    _seed(args.seed)
    chunks = args.virtual_pipeline_model_parallel_size
    if chunks is None:
        return [_build_chunk(args, config, None, sharding)]
    return [_build_chunk(args, config, stage, sharding) for stage in range(chunks)]


def _seed(seed: int) -> None:
    """The same weights in all replicas and shards: the seed depends on the pipeline stage (and, in
    the tensor-parallel generator, on the tensor-parallel rank) alone."""
    seed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _build_chunk(
    args: Namespace, config: TransformerConfig, vp_stage: int | None, sharding: Sharding | None
) -> GPTModel:
    edge = partial(
        parallel_state.is_pipeline_first_stage, ignore_virtual=vp_stage is None, vp_stage=vp_stage
    )
    last = partial(
        parallel_state.is_pipeline_last_stage, ignore_virtual=vp_stage is None, vp_stage=vp_stage
    )
    tied = not args.untie_embeddings_and_output_weights
    # A tied matrix is a part of what is built last, or copied to the last stage when all is built.
    early = nullcontext() if sharding is None or tied else embeddings_sharded_when_built(sharding)
    with early:
        return GPTModel(
            config=config,
            transformer_layer_spec=_block_spec(args, config, vp_stage, sharding),
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=edge(),
            post_process=last(),
            parallel_output=True,
            share_embeddings_and_output_weights=tied,
            position_embedding_type="rope",
            rotary_base=args.rotary_base,
            vp_stage=vp_stage,
        )


def count_parameters(args: Namespace) -> int:
    """Parameters of the whole model, padded vocabulary included, from its shape alone."""
    hidden, kv = args.hidden_size, args.kv_channels * args.num_query_groups
    attention = 2 * hidden * args.kv_channels * args.num_attention_heads + 2 * hidden * kv
    mlp = (3 if args.swiglu else 2) * hidden * args.ffn_hidden_size
    norms = 2 * hidden
    embeddings = args.padded_vocab_size * hidden
    heads = 1 + int(args.untie_embeddings_and_output_weights)
    return args.num_layers * (attention + mlp + norms) + heads * embeddings + hidden


def flops_per_token(args: Namespace) -> float:
    """Floating-point operations of forward and backward per token.

    6 per weight of a matrix multiplication (the embedding look-up is none), and 12 x layers x
    hidden x sequence for the attention scores, without counting the causal half.
    """
    embedding = args.padded_vocab_size * args.hidden_size
    tied = not args.untie_embeddings_and_output_weights
    matrices = count_parameters(args) - (0 if tied else embedding)
    return 6.0 * matrices + 12.0 * args.num_layers * args.hidden_size * args.seq_length
