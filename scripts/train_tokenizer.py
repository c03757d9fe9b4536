#!/usr/bin/env python
"""Trains a byte-level BPE tokenizer on text and saves it as a transformers tokenizer folder.

python scripts/train_tokenizer.py --input data/kjv-1mb.txt --vocab-size 1024 --output DIR
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from megatron_edit.data.corpus import BadRowError, check_inputs, read_batches
from megatron_edit.data.pieces import Cut, cut_for, pieces
from megatron_edit.errors import ConfigurationError, exit_on_configuration_error

END_OF_DOCUMENT = "<|endoftext|>"
# The 256 byte values and the end-of-document token are always in the vocabulary.
SMALLEST_VOCABULARY = 257


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = ".txt, .jsonl, .json (each also .gz, .zst), .parquet"
    parser.add_argument("--input", nargs="+", required=True, help=kinds)
    parser.add_argument("--json-keys", nargs="+", default=["text"], help="keys that hold text")
    parser.add_argument("--vocab-size", type=int, default=1024, help="tokens, all included")
    parser.add_argument("--output", required=True, help="folder to write")
    return parser.parse_args()


def texts(args: argparse.Namespace, cut: Cut) -> Iterator[str]:
    """Yields every text of the input, long ones in pieces."""
    for batch in read_batches(args.input, args.json_keys):
        for position in range(len(batch.rows)):
            try:
                for text in batch.texts(position, args.json_keys):
                    yield from pieces(text, cut)
            except BadRowError as error:
                raise ConfigurationError(f"{batch.name(position)}: {error}") from None


def train(args: argparse.Namespace) -> int:
    """Trains and saves the tokenizer; returns its number of tokens.

    Raises:
        ConfigurationError: The vocabulary is too small, the input unusable, or the folder taken.
    """
    if args.vocab_size < SMALLEST_VOCABULARY:
        raise ConfigurationError(
            f"--vocab-size: got {args.vocab_size}, at least {SMALLEST_VOCABULARY} are needed"
        )
    check_inputs(args.input, args.json_keys)
    output = Path(args.output)
    if output.exists() and not (output / "tokenizer.json").exists() and any(output.iterdir()):
        raise ConfigurationError(f"--output: {args.output!r} exists and holds no tokenizer")

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=args.vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts(args, cut_for(tokenizer)), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_DOCUMENT)
    save(fast, output)
    return len(fast)


def save(tokenizer: object, output: Path) -> None:
    """Writes the folder aside and renames it, so that a killed run leaves no half of it."""
    aside = output.with_name(f"{output.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        tokenizer.save_pretrained(aside)  # type: ignore[attr-defined]
        shutil.rmtree(output, ignore_errors=True)
        os.replace(aside, output)
    except OSError as error:
        raise ConfigurationError(f"--output: cannot write {str(output)!r}: {error}") from None


def main() -> None:
    """Trains a tokenizer as the command line says."""
    with exit_on_configuration_error():
        args = parse_arguments()
        start = time.perf_counter()
        size = train(args)
        print(f"{args.output}: {size} tokens in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
