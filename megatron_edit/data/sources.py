"""Which tokenised files a run reads, and whether they can be read.

Everything a user can get wrong about the data is found here, before megatron-core builds its
indices: there an empty split is an endless loop and a missing file an assertion.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import struct
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_edit.errors import ConfigurationError

SPLITS = ("train", "valid", "test")
DEFAULT_SPLIT = "969,30,1"
# Bounds what each rank reads of a large file when it looks for the largest token id.
SCANNED_CHUNKS = 16
CHUNK_TOKENS = 1 << 20
FINGERPRINT_BYTES = 1 << 20


@dataclass(frozen=True)
class Blend:
    """Prefixes of tokenised files and the share of each; without weights, one pass over all."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None

    def for_megatron(self) -> tuple[list[str], list[float] | None]:
        """The form megatron-core's dataset configuration takes."""
        return list(self.prefixes), list(self.weights) if self.weights else None


@dataclass(frozen=True)
class Sources:
    """The data of a run: one blend cut into splits, or a blend per split, or none (mock).

    Attributes:
        common: The blend that ``split`` cuts, or None.
        split: Shares of train, valid and test as given; used with ``common`` only.
        per_split: A blend or None for each of train, valid, test; used without ``common``.
    """

    common: Blend | None = None
    split: str | None = None
    per_split: tuple[Blend | None, Blend | None, Blend | None] = (None, None, None)

    @property
    def blends(self) -> list[Blend | None]:
        """The common blend and that of each split."""
        return [self.common, *self.per_split]

    @property
    def prefixes(self) -> list[str]:
        """All prefixes, each once, in order."""
        return list(dict.fromkeys(p for blend in self.blends if blend for p in blend.prefixes))

    @property
    def mock(self) -> bool:
        """Whether there is no real data."""
        return not self.prefixes

    def blend(self, split: int) -> Blend | None:
        """The blend that feeds a split (0 train, 1 valid, 2 test)."""
        return self.common or self.per_split[split]

    def bounds(self, split: int, documents: int) -> tuple[int, int]:
        """First and last + 1 of the documents of a file that belong to a split."""
        if self.split is None:
            return 0, documents
        bounds = self._matrix()[split]
        if bounds is None:
            return 0, 0
        return round(bounds[0] * float(documents)), round(bounds[1] * float(documents))

    def _matrix(self) -> list[tuple[float, float] | None]:
        # megatron-core's own functions, so that a document never falls on the other side there.
        from megatron.core.datasets.blended_megatron_dataset_config import (
            convert_split_vector_to_split_matrix,
            parse_and_normalize_split,
        )

        assert self.split is not None
        return convert_split_vector_to_split_matrix(parse_and_normalize_split(self.split))


def sources_from_args(args: Namespace) -> Sources:
    """Reads the data flags.

    Args:
        args: ``data_path``, ``split``, ``train_data_path``, ``valid_data_path``,
            ``test_data_path``, ``mock_data``.

    Raises:
        ConfigurationError: No data, data given twice, or a malformed blend or split.
    """
    separate = [getattr(args, f"{split}_data_path", None) for split in SPLITS]
    common = getattr(args, "data_path", None)
    if getattr(args, "mock_data", False):
        if common or any(separate):
            raise ConfigurationError("--mock-data: cannot be given together with a data path")
        return Sources()
    if any(separate):
        if common or getattr(args, "split", None):
            raise ConfigurationError(
                "--train-data-path, --valid-data-path and --test-data-path cannot be given "
                "together with --data-path or --split"
            )
        if not separate[0]:
            raise ConfigurationError("--train-data-path: missing; the other splits have paths")
        train, valid, test = (
            parse_blend(f"--{split}-data-path", words) if words else None
            for split, words in zip(SPLITS, separate, strict=True)
        )
        return Sources(per_split=(train, valid, test))
    if not common:
        raise ConfigurationError(
            "--data-path: missing; give the prefix that edit-preprocess wrote, or --mock-data"
        )
    return Sources(parse_blend("--data-path", common), parse_split(getattr(args, "split", None)))


def parse_blend(flag: str, words: Sequence[str]) -> Blend:
    """Reads ``p1 p2 ...`` or ``w1 p1 w2 p2 ...``.

    Raises:
        ConfigurationError: Weights and prefixes do not alternate, or a weight is not positive.
    """
    numbers = [_number(word) for word in words]
    if all(number is None for number in numbers):
        return Blend(tuple(words))
    alternate = len(words) % 2 == 0 and all(
        (number is None) == (position % 2 == 1) for position, number in enumerate(numbers)
    )
    if not alternate:
        raise ConfigurationError(
            f"{flag}: got {' '.join(words)!r}; allowed are prefixes alone, or a weight before "
            "each prefix: w1 p1 w2 p2"
        )
    weights = tuple(number for number in numbers if number is not None)
    wrong = [weight for weight in weights if not (math.isfinite(weight) and weight > 0)]
    if wrong:
        raise ConfigurationError(
            f"{flag}: weight {wrong[0]:g} is not positive; leave that data out"
        )
    return Blend(tuple(words[1::2]), weights)


def parse_split(text: str | None) -> str:
    """Checks ``949,50,1``: shares of train, validation and test, of which the last may be missing.

    Raises:
        ConfigurationError: Not one to three numbers >= 0, or no share for training.
    """
    words = [word.strip() for word in (text or DEFAULT_SPLIT).split(",")]
    # Plain decimals only: megatron-core would read 1e-3 as two shares.
    plain = all(re.fullmatch(r"\d+\.?\d*|\.\d+", word) for word in words)
    if not plain or len(words) > len(SPLITS) or float(words[0]) == 0:
        raise ConfigurationError(
            f"--split: got {text!r}; allowed are one to three shares for train, validation and "
            "test, the first positive, for example 949,50,1"
        )
    return ",".join(words + ["0"] * (len(SPLITS) - len(words)))


def open_indexed(prefix: str) -> Any:
    """Opens tokenised files and checks that index and data belong together.

    Returns:
        megatron-core's IndexedDataset, without a file descriptor.

    Raises:
        ConfigurationError: A file is missing, damaged or cut short.
    """
    from megatron_edit.data.mapped import MappedDataset

    for suffix in (".idx", ".bin"):
        if not os.path.isfile(prefix + suffix):
            hint = ""
            if prefix.endswith((".bin", ".idx")):
                hint = "; give the path without .bin"
            elif os.path.isfile(f"{prefix}_text_document.idx"):
                hint = f"; did you mean {prefix}_text_document?"
            raise ConfigurationError(
                f"data path {prefix!r}: no such file: {prefix}{suffix}{hint}", per_host=True
            )
    try:
        data = MappedDataset(prefix)
        tokens = int(data.sequence_lengths.sum(dtype=np.int64))
        size = os.path.getsize(f"{prefix}.bin")
    except (AssertionError, ValueError, OSError, struct.error) as error:
        raise ConfigurationError(
            f"data path {prefix!r}: not readable as Megatron data: {error}", per_host=True
        ) from error
    expected = tokens * np.dtype(data.index.dtype).itemsize
    if size != expected:
        raise ConfigurationError(
            f"data path {prefix!r}: {prefix}.bin has {size} bytes, its index describes {expected}; "
            "preprocess the data again",
            per_host=True,
        )
    return data


def check_splits(sources: Sources, opened: dict[str, Any], wanted: Sequence[int], seq: int) -> None:
    """Checks that each wanted split has tokens in each of its files.

    Args:
        sources: The data of the run.
        opened: The opened files by prefix.
        wanted: Splits that are needed (0 train, 1 valid, 2 test).
        seq: Tokens of a sample.

    Raises:
        ConfigurationError: A split is empty, or too short where data are not repeated.
    """
    for split in wanted:
        blend = sources.blend(split)
        if blend is None:
            raise ConfigurationError(
                f"--{SPLITS[split]}-data-path: the {SPLITS[split]} split is empty, but "
                "--eval-iters asks for it; give a path, or --eval-iters 0"
            )
        # A single file, or weighted ones, are repeated as often as needed; others are read once.
        repeated = len(blend.prefixes) == 1 or blend.weights is not None
        for prefix in blend.prefixes:
            tokens = split_tokens(sources, opened[prefix], split)
            if tokens > (0 if repeated else seq):
                continue
            documents = len(opened[prefix])
            what = "is empty" if tokens == 0 else f"has only {tokens} tokens, a sample has {seq}"
            advice = "give it a larger share, or cut the text into more documents"
            if split == 1:
                advice += ", or --eval-iters 0"
            raise ConfigurationError(
                f"--split: the {SPLITS[split]} split of {prefix!r} ({documents} documents) {what}; "
                f"{advice}"
            )


def split_tokens(sources: Sources, data: Any, split: int) -> int:
    """Number of tokens of a file that belong to a split."""
    begin, end = sources.bounds(split, len(data))
    return int(data.sequence_lengths[begin:end].sum(dtype=np.int64))


def largest_token(prefix: str, dtype: Any) -> int:
    """The largest token id of a file; of a large one, of evenly spread parts of it."""
    ids = np.memmap(f"{prefix}.bin", dtype=dtype, mode="r")
    chunks = math.ceil(ids.size / CHUNK_TOKENS)
    stride = max(1, chunks / SCANNED_CHUNKS)
    starts = {int(i * stride) for i in range(min(chunks, SCANNED_CHUNKS))} | {chunks - 1}
    return max(int(ids[s * CHUNK_TOKENS : (s + 1) * CHUNK_TOKENS].max()) for s in starts)


def check_tokens(opened: dict[str, Any], vocab_size: int) -> None:
    """Checks that the files hold no token the tokenizer does not know.

    Raises:
        ConfigurationError: One of them does.
    """
    for prefix, data in opened.items():
        largest = largest_token(prefix, data.index.dtype)
        if largest >= vocab_size:
            raise ConfigurationError(
                f"data path {prefix!r}: holds token id {largest}, but the tokenizer has "
                f"{vocab_size} tokens; was it tokenised with another --tokenizer-model?"
            )


def fingerprint(prefixes: Sequence[str]) -> str:
    """A hash that changes when the files of the prefixes do; their place does not matter."""
    digest = hashlib.sha256()
    for prefix in prefixes:
        for suffix in (".idx", ".bin"):
            size = os.path.getsize(prefix + suffix)
            digest.update(size.to_bytes(8, "little"))
            with open(prefix + suffix, "rb") as stream:
                digest.update(stream.read(FINGERPRINT_BYTES))
                stream.seek(max(0, size - FINGERPRINT_BYTES))
                digest.update(stream.read(FINGERPRINT_BYTES))
    return digest.hexdigest()[:32]


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
