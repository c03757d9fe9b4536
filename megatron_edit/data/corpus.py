"""Reads documents from text, JSON Lines and parquet files and from data sets of the hub.

Reading is cheap and happens in one process, in order; decoding, JSON parsing and tokenising are
done later on whole batches of rows, possibly in other processes. So a :class:`Batch` carries rows
as they stand in the source together with what is needed to name each of them to the user.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from megatron_edit.data.files import check_json_lines, lines, without_compression
from megatron_edit.errors import ConfigurationError

LINE_SUFFIXES = {".txt": "text", ".text": "text", ".jsonl": "json", ".json": "json"}
BATCH_ROWS = 512
# A batch of long rows is cut early, so that few big documents also spread over the workers.
BATCH_BYTES = 1 << 20


class BadRowError(ValueError):
    """One row of the input cannot be used; the message says why."""


@dataclass(frozen=True)
class Batch:
    """Consecutive rows of one source.

    Attributes:
        source: File name or data set name.
        kind: ``text`` and ``json`` hold raw bytes, ``columns`` holds dictionaries.
        unit: What ``first`` counts: ``line``, ``paragraph``, ``file`` or ``row``.
        first: Number of the first row, counting from 1.
        step: How many units one row takes.
        rows: The rows.
    """

    source: str
    kind: str
    unit: str
    first: int
    step: int
    rows: Sequence[Any]

    def name(self, position: int) -> str:
        """Names one row for a message, for example ``news.jsonl, line 17``."""
        return f"{self.source}, {self.unit} {self.first + position * self.step}"

    def texts(self, position: int, keys: Sequence[str]) -> list[str]:
        """The text of one row under each key; an empty string where there is none.

        Raises:
            BadRowError: The row is not what its source promises.
        """
        row = self.rows[position]
        if self.kind == "columns":
            return [_as_text(row[key], key) for key in keys]
        try:
            text = row.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadRowError(f"not valid UTF-8 (byte {error.start + 1} of the row)") from None
        if self.kind == "text":
            return [text.rstrip("\r\n")] * len(keys)
        return _parse_json(text, keys)


def read_batches(
    inputs: Sequence[str],
    keys: Sequence[str],
    txt_document: str = "line",
    dataset_config: str | None = None,
    dataset_split: str = "train",
) -> Iterator[Batch]:
    """Yields the rows of all inputs in order.

    Args:
        inputs: Files (``.txt``, ``.jsonl``/``.json`` with one object a line, each also ``.gz``
            and ``.zst``, ``.parquet``) or names of data sets on the hub.
        keys: Keys or columns that hold text.
        txt_document: What one document of a text file is: ``line``, ``paragraph`` (blank lines
            separate), ``file``, or a number of consecutive lines.
        dataset_config: Configuration of the hub data sets.
        dataset_split: Split of the hub data sets.

    Raises:
        ConfigurationError: An input does not exist or is of an unknown kind.
    """
    for name in inputs:
        kind = input_kind(name)
        if kind == "text":
            yield from _text_batches(name, txt_document)
        elif kind == "json":
            yield from _pack(name, "json", "line", 1, lines(name))
        else:
            yield from _columns(name, kind, keys, dataset_config, dataset_split)


def check_inputs(inputs: Sequence[str], keys: Sequence[str]) -> None:
    """Checks the flags ``--input`` and ``--json-keys`` before anything is read.

    Raises:
        ConfigurationError: One is given twice, an input is of no kind that can be read, or there
            are several keys for a text file.
    """
    _check_each_once("--json-keys", keys, keys)
    _check_each_once("--input", inputs, list(map(os.path.realpath, inputs)))
    for name in inputs:
        kind = input_kind(name)
        if kind == "text" and len(keys) > 1:
            raise ConfigurationError("--json-keys: a .txt input has one text, so give one key")
        if kind == "json":
            check_json_lines(name)


def _check_each_once(flag: str, given: Sequence[str], identities: Sequence[str]) -> None:
    counts = Counter(identities)
    for word, identity in zip(given, identities, strict=True):
        if counts[identity] > 1:
            raise ConfigurationError(
                f"{flag}: {word!r} is given {counts[identity]} times; give each once"
            )


def input_kind(name: str) -> str:
    """``text``, ``json``, ``parquet`` or ``hub``.

    Raises:
        ConfigurationError: It is neither a readable file of a known kind nor a data set name.
    """
    suffix = os.path.splitext(without_compression(name))[1].lower()
    if os.path.isfile(name):
        if suffix in LINE_SUFFIXES:
            return LINE_SUFFIXES[suffix]
        if name.lower().endswith(".parquet"):
            return "parquet"
        raise ConfigurationError(
            f"--input: unknown kind of file {name!r}; allowed are .txt, .jsonl and .json "
            "(each also with .gz or .zst) and .parquet"
        )
    looks_like_file = suffix in LINE_SUFFIXES or suffix == ".parquet" or os.path.exists(name)
    if looks_like_file or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise ConfigurationError(f"--input: no such file: {name!r}")
    return "hub"


def check_txt_document(value: str) -> str:
    """Validates what one document of a text file is.

    Raises:
        ConfigurationError: It is neither a known word nor a positive number.
    """
    if value in ("line", "paragraph", "file") or (value.isdecimal() and int(value) > 0):
        return value
    raise ConfigurationError(
        f"--txt-document: got {value!r}; allowed are line, paragraph, file, or a positive number "
        "of lines, for example 32"
    )


def _text_batches(path: str, txt_document: str) -> Iterator[Batch]:
    if txt_document == "file":
        yield Batch(path, "text", "file", 1, 1, [b"".join(lines(path))])
    elif txt_document == "paragraph":
        yield from _pack(path, "text", "paragraph", 1, _paragraphs(lines(path)))
    else:
        size = 1 if txt_document == "line" else int(txt_document)
        yield from _pack(path, "text", "line", size, _blocks(lines(path), size))


def _paragraphs(rows: Iterable[bytes]) -> Iterator[bytes]:
    paragraph: list[bytes] = []
    for line in rows:
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield b"".join(paragraph)
            paragraph = []
    if paragraph:
        yield b"".join(paragraph)


def _blocks(rows: Iterable[bytes], size: int) -> Iterator[bytes]:
    iterator = iter(rows)
    while block := list(islice(iterator, size)):
        yield b"".join(block)


def _pack(
    source: str,
    kind: str,
    unit: str,
    step: int,
    rows: Iterable[Any],
    size: Callable[[Any], int] = len,
) -> Iterator[Batch]:
    first, total, batch = 1, 0, []
    for row in rows:
        batch.append(row)
        total += size(row)
        if len(batch) == BATCH_ROWS or total >= BATCH_BYTES:
            yield Batch(source, kind, unit, first, step, batch)
            first, total, batch = first + len(batch) * step, 0, []
    if batch:
        yield Batch(source, kind, unit, first, step, batch)


def _columns(
    name: str, kind: str, keys: Sequence[str], config: str | None, split: str
) -> Iterator[Batch]:
    # Imported late: it costs seconds, which text and JSON Lines need not pay.
    import datasets

    try:
        # Streaming reads the source itself instead of a second copy of it in the cache.
        if kind == "parquet":
            stream = datasets.load_dataset(kind, data_files=name, split="train", streaming=True)
        else:
            stream = datasets.load_dataset(name, config, split=split, streaming=True)
        lots = stream.iter(batch_size=BATCH_ROWS)
        rows = (row for columns in lots for row in _rows(name, columns, keys))
        yield from _pack(name, "columns", "row", 1, rows, _characters)
    except ConfigurationError:
        raise
    except Exception as error:
        # The library raises a dozen unrelated types here, from its own to pyarrow's and the hub's.
        reason = str(error).strip().splitlines() or [type(error).__name__]
        known = "no readable file" if kind == "parquet" else "neither a file nor a readable hub set"
        raise ConfigurationError(f"--input: {name!r} is {known}: {reason[0]}") from error


def _rows(
    name: str, columns: dict[str, list[Any]], keys: Sequence[str]
) -> Iterator[dict[str, Any]]:
    missing = [key for key in keys if key not in columns]
    if missing:
        raise ConfigurationError(
            f"--json-keys: {name} has no column {missing[0]!r}; it has {', '.join(sorted(columns))}"
        )
    for row in zip(*(columns[key] for key in keys), strict=True):
        yield dict(zip(keys, row, strict=True))


def _characters(row: dict[str, Any]) -> int:
    return sum(len(value) for value in row.values() if isinstance(value, str))


def _parse_json(text: str, keys: Sequence[str]) -> list[str]:
    if not text.strip():
        return [""] * len(keys)
    try:
        # Without its line break, behind which an error would count as the next line.
        row = json.loads(text.rstrip("\r\n"))
    except json.JSONDecodeError as error:
        raise BadRowError(f"not valid JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        # Besides syntax errors: a number of thousands of digits, thousands of nested brackets.
        raise BadRowError(f"not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise BadRowError(
            f"not a JSON object but a {type(row).__name__}; one object a line is expected"
        )
    missing = [key for key in keys if key not in row]
    if missing:
        raise BadRowError(f"no key {missing[0]!r}; it has {', '.join(sorted(row)) or 'none'}")
    return [_as_text(row[key], key) for key in keys]


def _as_text(value: Any, key: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadRowError(f"key {key!r} holds {type(value).__name__}, not text")
    # json.loads passes lone surrogates, which no tokenizer can encode.
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRowError(f"key {key!r} holds a lone surrogate, which is not text") from None
    return value
