"""Tokenises documents into the .bin/.idx files that Megatron's datasets read.

    edit-preprocess --input corpus.jsonl --output-prefix corpus \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model DIR --append-eod --workers 8

writes ``corpus_text_document.bin`` and ``corpus_text_document.idx``, one pair per JSON key. Texts
are tokenised without a beginning-of-text token; ``--append-eod`` ends each document with the
tokenizer's end-of-sequence token. A run that is killed leaves nothing under the final names.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from typing import Any

import numpy as np

from megatron_edit.data.corpus import (
    LINE_SUFFIXES,
    BadRowError,
    Batch,
    check_inputs,
    check_txt_document,
    read_batches,
)
from megatron_edit.data.pieces import nowhere
from megatron_edit.data.tokenizer import (
    TOKENIZER_TYPES,
    NullTokenizer,
    Tokenizer,
    build_tokenizer,
)
from megatron_edit.errors import ConfigurationError, exit_on_configuration_error

SHOWN_BAD_ROWS = 10
WHOLE = (
    "note: where long texts can be cut is not known for this tokenizer, so each document is "
    "tokenised whole; a worker needs some 200 bytes of memory for each byte of the longest"
)


@dataclass
class Encoded:
    """A tokenised batch.

    Attributes:
        ids: Per key the token ids of all documents, one after another, 1-D.
        lengths: Per key the number of tokens of each document.
        bad: Name and complaint of each row that cannot be used.
        empty: Documents without a token.
        text_bytes: UTF-8 bytes of the tokenised texts.
        input_bytes: Bytes of the rows as they stand in the source, 0 where that is not known.
    """

    ids: list[np.ndarray]
    lengths: list[list[int]]
    bad: list[str] = field(default_factory=list)
    empty: int = 0
    text_bytes: int = 0
    input_bytes: int = 0


class Encoder:
    """Turns batches of rows into token ids.

    Args:
        tokenizer: The tokenizer.
        keys: Keys that hold text.
        tail: Token ids to end each document with.
        dtype: Integer type of the token ids.
    """

    def __init__(
        self, tokenizer: Tokenizer, keys: list[str], tail: list[int], dtype: type[np.number]
    ) -> None:
        self.tokenizer = tokenizer
        self.keys = keys
        self.tail = np.array(tail, np.int32)
        self.dtype = dtype

    def __call__(self, batch: Batch) -> Encoded:
        """Tokenises one batch; rows that cannot be used are named, not raised."""
        result = Encoded(ids=[], lengths=[])
        rows: list[list[str]] = []
        for position in range(len(batch.rows)):
            try:
                rows.append(self._checked(batch.texts(position, self.keys)))
            except BadRowError as error:
                result.bad.append(f"{batch.name(position)}: {error}")
        for column in range(len(self.keys)):
            texts = [row[column] for row in rows if row[column]]
            filled = [ids for ids in self.tokenizer.tokenize_batch(texts) if ids.size]
            result.empty += len(rows) - len(filled)
            result.text_bytes += sum(len(text.encode()) for text in texts)
            result.lengths.append([ids.size + self.tail.size for ids in filled])
            parts = [part for ids in filled for part in (ids, self.tail)]
            result.ids.append(np.concatenate([self.tail[:0], *parts]).astype(self.dtype))
        if batch.kind != "columns":
            result.input_bytes = sum(map(len, batch.rows))
        return result

    def _checked(self, texts: list[str]) -> list[str]:
        if isinstance(self.tokenizer, NullTokenizer):
            for text in texts:
                try:
                    self.tokenizer.tokenize_batch([text])
                except ValueError as error:
                    raise BadRowError(str(error)) from None
        return texts


# Set in each worker by inheritance: a tokenizer is expensive to send with every batch.
_encoder: Encoder | None = None


def _encode(batch: Batch) -> Encoded:
    assert _encoder is not None
    return _encoder(batch)


def _follow_parent() -> None:
    """Ends this worker when the parent is gone, however that ended."""
    parent = parent_process()

    def wait() -> None:
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def encode_all(batches: Iterable[Batch], encoder: Encoder, workers: int) -> Iterator[Encoded]:
    """Tokenises batches, in order, in ``workers`` processes (1: in this one)."""
    global _encoder
    _encoder = encoder
    if workers == 1:
        yield from map(encoder, batches)
        return
    # Forked before anything here has started a thread; the tokenizers library refuses to run its
    # own threads after that, and one process per core needs none.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with ProcessPoolExecutor(workers, get_context("fork"), _follow_parent) as pool:
        pool.submit(int).result()
        pending: deque[Future[Encoded]] = deque()
        try:
            for batch in batches:
                pending.append(pool.submit(_encode, batch))
                # Bounded, so that a fast reader does not fill the memory.
                if len(pending) >= 4 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool:
            raise RuntimeError("a tokenising process was killed; is the memory full?") from None
        finally:
            for future in pending:
                future.cancel()


class Writer:
    """Writes one .bin/.idx pair aside and renames it when it is whole.

    Args:
        prefix: Path without suffix.
        dtype: Integer type of the token ids.
    """

    def __init__(self, prefix: str, dtype: type[np.number]) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        self.prefix = prefix
        with self._writing():
            self._builder = IndexedDatasetBuilder(self._part("bin"), dtype=dtype)
        self.documents = 0
        self.tokens = 0

    def _part(self, suffix: str) -> str:
        return f"{self.prefix}.{suffix}.part"

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigurationError(
                f"--output-prefix: cannot write {self._part('bin')!r}: {error.strerror}"
            ) from None

    def add(self, ids: np.ndarray, lengths: list[int]) -> None:
        """Appends documents that stand one after another in ``ids``.

        Raises:
            ConfigurationError: The disk is full, or another reason not to write.
        """
        start = 0
        with self._writing():
            for length in lengths:
                self._builder.add_document(ids[start : start + length], [length])
                start += length
        self.documents += len(lengths)
        self.tokens += start

    def finish(self) -> None:
        """Writes the index and gives both files their final names.

        Raises:
            ConfigurationError: The disk is full, or another reason not to write.
        """
        with self._writing():
            self._builder.finalize(self._part("idx"))
            # The old index goes first: it must never stand beside a .bin that it does not describe.
            with suppress(FileNotFoundError):
                os.remove(f"{self.prefix}.idx")
            os.replace(self._part("bin"), f"{self.prefix}.bin")
            os.replace(self._part("idx"), f"{self.prefix}.idx")

    def discard(self) -> None:
        """Removes what was written aside."""
        # Closing writes what is still buffered, which fails once more on a full disk.
        with suppress(OSError):
            self._builder.data_file.close()
        for suffix in ("bin", "idx"):
            with suppress(FileNotFoundError):
                os.remove(self._part(suffix))


@dataclass
class Totals:
    """Counts over the whole run."""

    empty: int = 0
    bad: int = 0
    text_bytes: int = 0


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    kinds = ".txt, .jsonl, .json (each also .gz, .zst), .parquet, or a data set of the hub"
    add("--input", nargs="+", required=True, help=kinds)
    add("--json-keys", nargs="+", default=["text"], help="keys or columns that hold text")
    add("--output-prefix", required=True, help="writes <prefix>_<key>_document.{bin,idx}")
    add("--tokenizer-type", default="HuggingFaceTokenizer", choices=TOKENIZER_TYPES)
    add("--tokenizer-model", help="tokenizer folder")
    add("--vocab-size", type=int, help="size for NullTokenizer")
    add("--append-eod", action="store_true", help="end each document with the end token")
    add("--workers", type=int, default=1, help="processes")
    add("--on-bad-line", choices=("stop", "skip"), default="stop")
    document = "what one document of a .txt file is; N: that many consecutive lines"
    add("--txt-document", default="line", metavar="line|paragraph|file|N", help=document)
    add("--dataset-config", help="configuration of a hub data set")
    add("--dataset-split", default="train", help="split of a hub data set")
    return parser.parse_args()


def check_arguments(args: argparse.Namespace) -> None:
    """Checks what can be known before the tokenizer is loaded.

    Raises:
        ConfigurationError: A value is out of range or given twice, an input unusable, or the
            output folder missing.
    """
    check_txt_document(args.txt_document)
    if args.workers < 1:
        raise ConfigurationError(f"--workers: got {args.workers}, at least 1 is needed")
    check_inputs(args.input, args.json_keys)
    folder = os.path.dirname(args.output_prefix) or "."
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"--output-prefix: cannot make {folder!r}: {error}") from None
    if not os.access(folder, os.W_OK):
        raise ConfigurationError(f"--output-prefix: folder {folder!r} is not writable")


def plain_size(inputs: list[str]) -> int | None:
    """Bytes of all inputs, or None where rows cannot be counted in bytes of the file."""
    if all(os.path.splitext(name)[1] in LINE_SUFFIXES for name in inputs):
        return sum(os.path.getsize(name) for name in inputs)
    return None


def write_all(results: Iterable[Encoded], writers: list[Writer], args: Any) -> Totals:
    """Writes tokenised batches, shows progress, and stops at or counts bad rows.

    Raises:
        ConfigurationError: A row cannot be used and ``--on-bad-line`` is ``stop``.
    """
    from tqdm import tqdm

    totals = Totals()
    size = plain_size(args.input)
    with tqdm(total=size, unit="B", unit_scale=True, desc="tokenising", mininterval=0.5) as bar:
        for result in results:
            for complaint in result.bad:
                if args.on_bad_line == "stop":
                    raise ConfigurationError(f"{complaint} (--on-bad-line skip goes on)")
                totals.bad += 1
                if totals.bad <= SHOWN_BAD_ROWS:
                    bar.write(f"skipped: {complaint}", file=sys.stderr)
            for writer, ids, lengths in zip(writers, result.ids, result.lengths, strict=True):
                writer.add(ids, lengths)
            totals.empty += result.empty
            totals.text_bytes += result.text_bytes
            bar.update(result.input_bytes if size is not None else result.text_bytes)
    return totals


def preprocess(args: argparse.Namespace) -> None:
    """Tokenises the input and prints what came out.

    Raises:
        ConfigurationError: A mistake in the arguments or in the input.
    """
    check_arguments(args)
    tokenizer = build_tokenizer(args)
    tail = [tokenizer.eod] if args.append_eod and tokenizer.eod is not None else []
    if args.append_eod and not tail:
        raise ConfigurationError(
            f"--append-eod: the tokenizer in {args.tokenizer_model!r} has no end-of-sequence token"
        )
    with warnings.catch_warnings():
        # megatron-core warns about optional GPU packages that play no role here.
        warnings.filterwarnings("ignore", message="Transformer Engine and Apex")
        from megatron.core.datasets.indexed_dataset import DType
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    if tokenizer.cut is nowhere:
        print(WHOLE, file=sys.stderr)
    keys = args.json_keys
    start = time.perf_counter()
    writers: list[Writer] = []
    try:
        for key in keys:
            writers.append(Writer(f"{args.output_prefix}_{key}_document", dtype))
        batches = read_batches(
            args.input, keys, args.txt_document, args.dataset_config, args.dataset_split
        )
        encoder = Encoder(tokenizer, keys, tail, dtype)
        totals = write_all(encode_all(batches, encoder, args.workers), writers, args)
        for writer in writers:
            if not writer.documents:
                raise ConfigurationError(f"--input: no document with text for {writer.prefix!r}")
        for writer in writers:
            writer.finish()
    except BaseException:
        for writer in writers:
            writer.discard()
        raise
    report(writers, totals, time.perf_counter() - start)


def report(writers: list[Writer], totals: Totals, seconds: float) -> None:
    """Prints the counts of a run."""
    for writer in writers:
        print(f"{writer.prefix}: {writer.documents} documents, {writer.tokens} tokens")
    tokens = sum(writer.tokens for writer in writers)
    print(
        f"{totals.text_bytes / tokens:.2f} bytes per token, {totals.empty} empty documents and "
        f"{totals.bad} bad rows skipped, {seconds:.1f} s, "
        f"{totals.text_bytes / seconds / 1e6:.2f} MB/s"
    )


def main() -> None:
    """Tokenises as the command line says."""
    with exit_on_configuration_error():
        preprocess(parse_arguments())
