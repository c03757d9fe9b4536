"""Samples text from a checkpoint of any layout, in one process.

edit-generate --load DIR --prompt "In the beginning"
"""

from __future__ import annotations

import argparse
import logging
import warnings
from argparse import Namespace
from typing import Any

from megatron_edit.errors import ConfigurationError, exit_on_configuration_error


def parse_arguments() -> Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--load", required=True, help="folder that a run wrote to with --save")
    add("--iteration", type=int, help="checkpoint to take; without it the newest")
    add("--tokenizer-model", help="tokenizer folder; without it the run's")
    add("--prompt", default="", help="text to continue; without it a new document begins")
    add("--num-tokens", type=int, default=100, help="tokens to add (default: 100)")
    add("--temperature", type=float, default=0.8, help="0 = always the likeliest (default: 0.8)")
    add("--top-k", type=int, default=0, help="sample among this many likeliest; 0 = all")
    add("--seed", type=int, default=1234)
    args = parser.parse_args()
    if args.temperature < 0 or args.top_k < 0 or args.num_tokens < 0:
        parser.error("--temperature, --top-k and --num-tokens must not be negative")
    return args


def sample(model: Any, ids: list[int], args: Namespace, context: int, vocabulary: int) -> list[int]:
    """Continues token ids.

    Args:
        model: A whole GPTModel in evaluation mode.
        ids: The beginning, at least one token.
        args: ``num_tokens``, ``temperature``, ``top_k``, ``seed``.
        context: Tokens the model may look back on, its ``seq_length``.
        vocabulary: Tokens of the tokenizer; the model's vocabulary is padded.

    Returns:
        ``ids`` and the new tokens.
    """
    import torch

    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(args.seed)
    for _ in range(args.num_tokens):
        tokens = torch.tensor([ids[-context:]], device=device)
        positions = torch.arange(tokens.shape[1], device=device).unsqueeze(0)
        with torch.no_grad():
            logits = model(tokens, positions, None)[0, -1, :vocabulary].float().cpu()
        if args.temperature == 0:
            ids = [*ids, int(logits.argmax())]
            continue
        if 0 < args.top_k < vocabulary:
            logits[logits < logits.topk(args.top_k).values[-1]] = -torch.inf
        chances = torch.softmax(logits / args.temperature, dim=0)
        ids = [*ids, int(torch.multinomial(chances, 1, generator=generator))]
    return ids


def generate(args: Namespace) -> str:
    """The prompt and its continuation.

    Raises:
        ConfigurationError: There is no checkpoint or no tokenizer.
    """
    from megatron_edit.checkpoint.whole_model import (
        find_checkpoint,
        load_whole_model,
        one_rank_mesh,
        read_run,
    )
    from megatron_edit.data.tokenizer import build_tokenizer

    folder = find_checkpoint(args.load, args.iteration)
    run = read_run(folder)
    run.tokenizer_model = args.tokenizer_model or run.tokenizer_model
    tokenizer = build_tokenizer(run)
    if args.prompt:
        ids = tokenizer.tokenize(args.prompt)
    elif tokenizer.eod is not None:
        ids = [tokenizer.eod]
    else:
        raise ConfigurationError("--prompt: the tokenizer has no end-of-document token; give text")
    with one_rank_mesh():
        model = load_whole_model(folder, run)
        ids = sample(model, ids, args, run.seq_length, tokenizer.vocab_size)
    return tokenizer.detokenize(ids if args.prompt else ids[1:])


def main() -> None:
    """Prints the text."""
    args = parse_arguments()
    # What megatron-core has to say of missing GPU packages and RNG plays no role here.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    with exit_on_configuration_error():
        print(generate(args))
