"""Text files, plain or compressed: their lines, and whether JSON in them is JSON Lines."""

from __future__ import annotations

import gzip
import io
import json
import shlex
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_edit.errors import ConfigurationError

# The command that decompresses a file to standard output.
COMPRESSED = {".gz": "gzip -dc", ".zst": "zstd -dc"}
# A whole array on one line may be as large as the file.
LOOKED_AT_BYTES = 1 << 20


def compression(path: str) -> str:
    """The suffix of a compressed file, lower case, or an empty string."""
    return next((suffix for suffix in COMPRESSED if path.lower().endswith(suffix)), "")


def without_compression(path: str) -> str:
    """The name of a file without the suffix that says how it is compressed."""
    return path[: len(path) - len(compression(path))]


def lines(path: str) -> Iterator[bytes]:
    """Yields the lines of a file, each with its line break.

    They are split in bytes: decoding first would lose the number of a line that is not UTF-8.

    Raises:
        ConfigurationError: The file cannot be read, or is damaged.
    """
    with _reading(path) as stream:
        yield from stream


def check_json_lines(path: str) -> None:
    """Looks at the beginning of a JSON file.

    A line that is merely wrong is left to whoever reads the lines.

    Raises:
        ConfigurationError: It holds JSON, but as an array, or as an object of several lines.
    """
    with _reading(path) as stream:
        short = iter(lambda: stream.readline(LOOKED_AT_BYTES), b"")
        filled = (line for line in short if line.strip())
        first, second = next(filled, b"").rstrip(b"\r\n"), next(filled, b"")
    if first.lstrip().startswith(b"[") and (_parsed(first) is None or not second):
        raise _not_lines(path, "one JSON array", "jq -c '.[]'")
    if first.lstrip().startswith(b"{") and len(first) < LOOKED_AT_BYTES and _goes_on(first, second):
        raise _not_lines(path, "JSON objects of several lines", "jq -c .")


def _goes_on(first: bytes, second: bytes) -> bool:
    """Whether an object that begins in one line is not whole there by intention."""
    last = first.rstrip()[-1:]
    return last in b"{[" or (last == b"," and not isinstance(_parsed(second), dict))


@contextmanager
def _reading(path: str) -> Iterator[io.BufferedIOBase]:
    try:
        with _open(path) as stream:
            yield stream
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigurationError(f"--input: cannot read {path!r}: {error}") from None


def _open(path: str) -> io.BufferedIOBase:
    kind = compression(path)
    if kind == ".gz":
        return gzip.open(path, "rb")
    if kind == ".zst":
        # Imported late: only these files need it.
        import pyarrow as pa

        return io.BufferedReader(pa.input_stream(path, compression="zstd"), 1 << 20)
    return open(path, "rb")


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _not_lines(path: str, found: str, command: str) -> ConfigurationError:
    name = shlex.quote(path)
    kind = compression(path)
    whole = f"{COMPRESSED[kind]} {name} | {command}" if kind else f"{command} {name}"
    return ConfigurationError(
        f"--input: {path!r} holds {found}; JSON Lines, one object a line, is expected: "
        f"{whole} > lines.jsonl converts it"
    )
