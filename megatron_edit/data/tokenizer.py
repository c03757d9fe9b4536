"""Tokenizers: a transformers folder, or none at all.

megatron-core 0.16 has tokenizers of its own. They are not used here because they add special
tokens to a transformers tokenizer behind the user's back and tokenise one text at a time; what its
datasets need of a tokenizer is only ``vocab_size``, ``eod`` and ``unique_identifiers``.
"""

from __future__ import annotations

import math
import os
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from megatron_edit.data.pieces import Cut, at_white_space, cut_for, groups
from megatron_edit.errors import ConfigurationError, unknown_name

TOKENIZER_TYPES = ("HuggingFaceTokenizer", "NullTokenizer")


class Tokenizer(Protocol):
    """What the rest of the package and megatron-core's datasets use.

    There is no ``pad``: with it the datasets would mask the loss of every token of that id, also
    of those that stand in the text.
    """

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included, padding excluded."""

    @property
    def eod(self) -> int | None:
        """Id of the token that ends a document, or None if there is none."""

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        """JSON values that tell this tokenizer from others in the index cache."""

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, without beginning-of-text or end-of-document tokens."""

    @property
    def cut(self) -> Cut:
        """Where a long text can be cut so that its token ids stay the same."""

    def tokenize_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each of the texts, int32, 1-D; same as :meth:`tokenize` but faster.

        Takes a bounded amount of memory besides the ids, unless a text cannot be cut.
        """

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids."""


class HuggingFaceTokenizer:
    """A tokenizer folder of transformers.

    Args:
        folder: Folder written by ``save_pretrained`` or by ``scripts/train_tokenizer.py``.

    Raises:
        ConfigurationError: There is no such folder, or no tokenizer in it.
    """

    def __init__(self, folder: str) -> None:
        if not os.path.isdir(folder):
            raise ConfigurationError(
                f"--tokenizer-model: no such folder: {folder!r}; scripts/train_tokenizer.py makes "
                "one, or copy the tokenizer files of a model of the hub into a folder",
                per_host=True,
            )
        # Imported late: it costs seconds, which help texts and tests of other parts need not pay.
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:
            # transformers raises many unrelated types for a folder without a usable tokenizer.
            raise ConfigurationError(
                f"--tokenizer-model: no tokenizer of transformers in folder {folder!r}: "
                f"{_first_line(error)}",
                per_host=True,
            ) from error
        # A longer text than the model takes is no mistake here: documents are cut into samples.
        self._tokenizer.model_max_length = int(1e30)
        # Some vocabularies have gaps, so that their length is not the largest id plus one.
        ids = self._tokenizer.get_vocab().values()
        self._vocab_size = max(len(self._tokenizer), max(ids) + 1)
        self._cut = cut_for(getattr(self._tokenizer, "backend_tokenizer", None))

    @property
    def cut(self) -> Cut:
        """Where a long text can be cut."""
        return self._cut

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self._vocab_size

    @property
    def eod(self) -> int | None:
        """Id of the end-of-sequence token, or None."""
        return self._tokenizer.eos_token_id

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        """The class and what decides token ids; not the folder, which may be moved."""
        return OrderedDict(
            {"class": type(self).__name__, "vocab_size": self.vocab_size, "eod": self.eod}
        )

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text."""
        return self.tokenize_batch([text])[0].tolist()

    def tokenize_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each of the texts."""
        return _in_pieces(texts, self.cut, self._tokenize_at_once)

    def _tokenize_at_once(self, texts: list[str]) -> list[list[int]]:
        encoded = self._tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        return encoded["input_ids"]

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        words = [int(i) for i in ids]
        return str(self._tokenizer.decode(words, clean_up_tokenization_spaces=False))


class NullTokenizer:
    """Texts are numbers separated by blanks; for synthetic data and for benchmarks.

    As in Megatron the end-of-document token comes on top of the given size.

    Args:
        size: Number of token ids before the end-of-document token.
    """

    def __init__(self, size: int) -> None:
        self._size = size

    @property
    def vocab_size(self) -> int:
        """The given size plus one."""
        return self._size + 1

    @property
    def eod(self) -> int:
        """The last token id."""
        return self._size

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        """The class and the size."""
        return OrderedDict({"class": type(self).__name__, "vocab_size": self.vocab_size})

    def tokenize(self, text: str) -> list[int]:
        """The numbers in the text.

        Raises:
            ValueError: A word is no number or lies outside the vocabulary.
        """
        ids = [int(word) for word in text.split()]
        outside = [i for i in ids if not 0 <= i < self.vocab_size]
        if outside:
            raise ValueError(f"token id {outside[0]} outside the vocabulary of {self.vocab_size}")
        return ids

    @property
    def cut(self) -> Cut:
        """Where a long text can be cut: between any two numbers."""
        return at_white_space

    def tokenize_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The numbers in each of the texts."""
        return _in_pieces(texts, self.cut, lambda parts: list(map(self.tokenize, parts)))

    def detokenize(self, ids: Sequence[int]) -> str:
        """The ids as text."""
        return " ".join(str(int(i)) for i in ids)


def _in_pieces(
    texts: Sequence[str], cut: Cut, tokenize: Callable[[list[str]], list[list[int]]]
) -> list[np.ndarray]:
    """Tokenises pieces of texts and puts their ids together: one int32 array for each text."""
    parts = [[np.empty(0, np.int32)] for _ in texts]
    for group in groups(texts, cut):
        numbers, pieces = zip(*group, strict=True)
        for number, ids in zip(numbers, tokenize(list(pieces)), strict=True):
            parts[number].append(np.array(ids, np.int32))
    return list(map(np.concatenate, parts))


def build_tokenizer(args: Namespace) -> Tokenizer:
    """Builds the tokenizer that the arguments name.

    Args:
        args: ``tokenizer_type``, ``tokenizer_model`` and, for the null tokenizer, ``vocab_size``
            (its size may also be given as ``--tokenizer-model``).

    Raises:
        ConfigurationError: Unknown type, folder missing, or size missing.
    """
    model = getattr(args, "tokenizer_model", None)
    if args.tokenizer_type == "HuggingFaceTokenizer":
        if not model:
            raise ConfigurationError("--tokenizer-model: HuggingFaceTokenizer needs a folder")
        return HuggingFaceTokenizer(str(model))
    if args.tokenizer_type == "NullTokenizer":
        size = getattr(args, "vocab_size", None) or model
        if size is None or not str(size).isdecimal() or int(size) < 1:
            raise ConfigurationError(
                f"--vocab-size: NullTokenizer needs a positive number, got {size!r}"
            )
        return NullTokenizer(int(size))
    raise unknown_name("--tokenizer-type", args.tokenizer_type, TOKENIZER_TYPES)


def padded_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel: int) -> int:
    """Rounds a vocabulary up to a multiple of ``divisible_by`` x ``tensor_parallel``."""
    multiple = divisible_by * tensor_parallel
    return math.ceil(vocab_size / multiple) * multiple


def model_vocab_size(args: Namespace, tokenizer: Tokenizer) -> int:
    """The padded vocabulary of the model: ``--vocab-size`` where given, else the tokenizer's.

    Args:
        args: ``vocab_size``, ``make_vocab_size_divisible_by``, ``tensor_model_parallel_size``.
        tokenizer: The tokenizer in use.

    Raises:
        ConfigurationError: The tokenizer has more tokens than the model would have.
    """
    size = tokenizer.vocab_size
    given = getattr(args, "vocab_size", None)
    if given and args.tokenizer_type != "NullTokenizer":
        if size > given:
            raise ConfigurationError(
                f"--vocab-size: the tokenizer has {size} tokens, more than the model's {given}; "
                f"give at least {size} or leave the flag away"
            )
        size = given
    return padded_vocab_size(
        size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
