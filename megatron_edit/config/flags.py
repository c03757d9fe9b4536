"""The command-line flags as tables: Megatron's and DeepSpeed's, ATorch's names of the same.

Names, meanings and defaults are Megatron's where Megatron has the flag. The `--edit-*` flags are
not here: they are generated from `config.EditConfig`.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_edit.errors import did_you_mean


def integer(minimum: int = 0) -> Callable[[str], int]:
    """Returns a converter for integers not below a minimum."""

    def convert(text: str) -> int:
        allowed = f"an integer >= {minimum}"
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"got {text!r}; allowed: {allowed}") from None
        if value < minimum:
            raise argparse.ArgumentTypeError(f"got {text}; allowed: {allowed}")
        return value

    return convert


def number(text: str) -> float:
    """Converts a finite number."""
    try:
        value = float(text)
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: a finite number") from None
    return value


def one_of(*names: str) -> Callable[[str], str]:
    """Returns a converter that accepts only these names."""

    def convert(text: str) -> str:
        if text not in names:
            hint = did_you_mean(text, names)
            allowed = "only " + names[0] if len(names) == 1 else "one of " + ", ".join(names)
            raise argparse.ArgumentTypeError(f"got {text!r}; allowed: {allowed}{hint}")
        return text

    return convert


@dataclass(frozen=True)
class Flag:
    """One row of a flag table.

    Attributes:
        name: The flag.
        help: What it does.
        default: Value when it is not given.
        type: Converter of its text; None for a switch.
        nargs: As in argparse.
        metavar: Placeholder in the help.
    """

    name: str
    help: str
    default: Any = None
    type: Callable[[str], Any] | None = None
    nargs: str | None = None
    metavar: str | None = None

    @property
    def destination(self) -> str:
        """Name of the value in the namespace."""
        return self.name.lstrip("-").replace("-", "_")


def _switch(name: str, text: str) -> Flag:
    return Flag(name, text, default=False)


_positive, _natural = integer(1), integer(0)

FLAGS: dict[str, list[Flag]] = {
    "model": [
        Flag("--num-layers", "Transformer layers.", None, _positive),
        Flag("--hidden-size", "Width of the model.", None, _positive),
        Flag(
            "--ffn-hidden-size",
            "Width of the MLP; without it 4 x hidden, with --swiglu 8/3 x hidden.",
            None,
            _positive,
        ),
        Flag("--num-attention-heads", "Attention heads.", None, _positive),
        _switch("--group-query-attention", "Share keys and values among groups of heads."),
        Flag("--num-query-groups", "Groups of --group-query-attention.", 1, _positive),
        Flag("--seq-length", "Tokens of a training sequence.", None, _positive),
        Flag("--max-position-embeddings", "Longest sequence.", None, _positive),
        Flag("--position-embedding-type", "Position embedding.", "rope", one_of("rope")),
        Flag("--rotary-base", "Base of the rotary angles.", 10000, _positive),
        _switch("--swiglu", "Gated linear units with SiLU in the MLP."),
        Flag(
            "--normalization",
            "Normalization layer.",
            "LayerNorm",
            one_of("LayerNorm", "RMSNorm"),
        ),
        Flag("--norm-epsilon", "Epsilon of the normalization.", 1e-5, number),
        _switch("--disable-bias-linear", "Linear layers without bias."),
        _switch("--untie-embeddings-and-output-weights", "Output head with weights of its own."),
        Flag(
            "--make-vocab-size-divisible-by",
            "Pad the vocabulary to a multiple of this x tensor parallel size.",
            128,
            _positive,
        ),
        Flag("--attention-dropout", "Dropout of attention weights.", 0.1, number),
        Flag("--hidden-dropout", "Dropout of hidden states.", 0.1, number),
        Flag("--init-method-std", "Standard deviation of initial weights.", 0.02, number),
        Flag(
            "--transformer-impl",
            "Layer implementation; without it transformer_engine where installed on a GPU.",
            None,
            one_of("local", "transformer_engine"),
        ),
    ],
    "parallelism": [
        Flag("--tensor-model-parallel-size", "Ranks that split each layer.", 1, _positive),
        Flag("--pipeline-model-parallel-size", "Stages of layers.", 1, _positive),
        Flag(
            "--num-layers-per-virtual-pipeline-stage",
            "Layers of one model chunk: interleaved pipeline.",
            None,
            _positive,
        ),
        _switch("--sequence-parallel", "Split activations over the tensor-parallel ranks too."),
        Flag("--context-parallel-size", "Not supported above 1.", 1, _positive),
        Flag(
            "--num-distributed-optimizer-instances",
            "Replicas; says the same as --edit-replicas.",
            None,
            _positive,
        ),
        Flag(
            "--data-parallel-sharding-strategy",
            "optim_grads_params releases gathered parameters after use and reduces gradients after "
            "each micro-batch (ZeRO-3), optim_grads keeps both whole until the last one (ZeRO-2).",
            "optim_grads_params",
            one_of("optim_grads", "optim_grads_params"),
        ),
        Flag(
            "--recompute-granularity",
            "Activations computed again in the backward pass: whole layers or the attention core.",
            None,
            one_of("full", "selective"),
        ),
        Flag(
            "--recompute-method",
            "Which layers `full` recomputes.",
            None,
            one_of("uniform", "block"),
        ),
        Flag("--recompute-num-layers", "Layers of a recomputed unit.", None, _positive),
        Flag(
            "--distributed-backend",
            "Communication; without it nccl on GPUs and gloo on CPUs.",
            None,
            one_of("nccl", "gloo"),
        ),
        Flag("--distributed-timeout-minutes", "Minutes a collective may wait.", 10, _positive),
    ],
    "training": [
        Flag("--micro-batch-size", "Samples of one forward pass of one rank.", None, _positive),
        Flag("--global-batch-size", "Samples of a step over all replicas.", None, _positive),
        Flag("--train-iters", "Steps of the run.", None, _positive),
        Flag("--train-samples", "Samples of the run over all replicas.", None, _positive),
        Flag("--lr", "Peak learning rate.", None, number),
        Flag("--min-lr", "Lowest learning rate.", 0.0, number),
        Flag(
            "--lr-decay-style",
            "Shape of the decay.",
            "linear",
            one_of("constant", "linear", "cosine", "inverse-square-root"),
        ),
        Flag("--lr-decay-iters", "Steps of the decay; without it all steps.", None, _positive),
        Flag("--lr-warmup-iters", "Steps of the linear warm-up.", 0, _natural),
        Flag("--lr-warmup-fraction", "Warm-up as a fraction of the decay.", None, number),
        Flag("--weight-decay", "Decoupled weight decay.", 0.01, number),
        Flag("--clip-grad", "Largest norm of the gradient; 0 = off.", 1.0, number),
        Flag("--adam-beta1", "Decay of the first moment.", 0.9, number),
        Flag("--adam-beta2", "Decay of the second moment.", 0.999, number),
        Flag("--adam-eps", "Added to the root of the second moment.", 1e-8, number),
        Flag("--seed", "Seed of weights, dropout and data order.", 1234, _natural),
        _switch("--bf16", "Compute in bfloat16 over fp32 shards."),
        Flag("--exit-interval", "Stop after a step divisible by this.", None, _positive),
        Flag("--exit-duration-in-mins", "Stop after this many minutes.", None, _positive),
        _switch("--exit-signal-handler", "On SIGTERM save a checkpoint and stop."),
        Flag(
            "--max-nan-iterations",
            "Steps in a row with a non-finite loss or gradient from which a replica fails. The run "
            "stops where all fail, or where synchronisations do not help one.",
            10,
            _positive,
        ),
    ],
    "data": [
        Flag("--data-path", "Prefix of a data set, or w1 p1 w2 p2 ...", None, str, "+"),
        Flag("--split", "Shares of train, validation, test; default 969,30,1.", None, str),
        Flag("--train-data-path", "As --data-path, for training only.", None, str, "+"),
        Flag("--valid-data-path", "As --data-path, for validation only.", None, str, "+"),
        Flag("--test-data-path", "As --data-path, for test only.", None, str, "+"),
        Flag("--data-cache-path", "Folder of the sample indices.", None, str),
        _switch("--mock-data", "Train on synthetic tokens."),
        _switch("--override-data-path", "Accept other data than the loaded checkpoint's."),
        Flag(
            "--tokenizer-type",
            "Tokenizer.",
            None,
            one_of("HuggingFaceTokenizer", "NullTokenizer"),
        ),
        Flag("--tokenizer-model", "Tokenizer folder or hub name.", None, str),
        Flag("--vocab-size", "Vocabulary before padding; NullTokenizer needs it.", None, _positive),
        Flag("--num-workers", "Worker processes of the data loader.", 2, _natural),
    ],
    "checkpoint": [
        Flag("--save", "Folder of the checkpoints written.", None, str),
        Flag("--load", "Folder of the checkpoint to resume from.", None, str),
        Flag("--save-interval", "Steps between two checkpoints.", None, _positive),
        _switch("--no-load-optim", "Leave out the optimizer state on --load."),
        _switch("--no-load-rng", "Leave out the random state on --load."),
        _switch(
            "--override-opt_param-scheduler",
            "Go on with this run's schedule of learning rate and weight decay.",
        ),
        _switch(
            "--use-checkpoint-opt_param-scheduler",
            "Go on with the checkpoint's schedule of learning rate and weight decay.",
        ),
        _switch("--finetune", "Load the parameters alone and start at step 0."),
    ],
    "evaluation and logging": [
        Flag("--eval-interval", "Steps between two evaluations.", 1000, _positive),
        Flag("--eval-iters", "Steps of an evaluation; 0 = none.", 100, _natural),
        Flag("--log-interval", "Steps between two log lines.", 100, _positive),
        _switch("--log-throughput", "Log TFLOP/s per rank."),
        Flag("--tensorboard-dir", "Folder of the TensorBoard files.", None, str),
        Flag("--tensorboard-log-interval", "Steps between two points.", 1, _positive),
        Flag("--wandb-project", "Project on Weights & Biases.", "", str),
        Flag("--wandb-exp-name", "Run name on Weights & Biases.", "", str),
    ],
    "DeepSpeed": [
        _switch("--deepspeed", "Read --deepspeed_config."),
        Flag("--deepspeed_config", "DeepSpeed JSON file.", None, str, metavar="FILE"),
        Flag("--local_rank", "Set by launchers; LOCAL_RANK is used.", None, integer(-1)),
    ],
}


@dataclass(frozen=True)
class Alias:
    """An ATorch flag: the field it sets, and the value when it is a switch."""

    field: str
    value: object = None


ATORCH_ALIASES = {
    "--use-local-sgd": Alias("method", "edit"),
    "--local-sgd-sync-interval": Alias("sync_interval"),
    "--local-sgd-warmup-steps": Alias("warmup_steps"),
    "--local-sgd-skip-anomaly": Alias("detector", "paper"),
    "--local-sgd-ewma-alpha": Alias("detector_alpha"),
    "--local-sgd-ewma-warmup-steps": Alias("detector_warmup"),
    "--local-sgd-ewma-threshold": Alias("detector_threshold"),
    "--local-sgd-pseudo-gradnorm-reduce": Alias("weighting", "norm"),
    "--local-sgd-clip-pseudo-grad": Alias("clip"),
    "--outer-optimizer-lr": Alias("outer_lr"),
    "--outer-optimizer-momentum": Alias("outer_momentum"),
    "--outer-optimizer-nesterov": Alias("outer_nesterov", True),
}

FLAG_NAMES = {flag.destination: flag.name for flags in FLAGS.values() for flag in flags}
"""Name in the namespace -> flag."""


def default_values() -> dict[str, Any]:
    """Returns the namespace's values when no flag is given."""
    return {flag.destination: flag.default for flags in FLAGS.values() for flag in flags}
