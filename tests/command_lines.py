"""Command lines for the tests of the arguments."""

import argparse

import pytest

from megatron_edit.config.arguments import parse_args
from megatron_edit.errors import exit_on_configuration_error

REQUIRED = {
    "--num-layers": "4",
    "--hidden-size": "64",
    "--num-attention-heads": "4",
    "--seq-length": "32",
    "--max-position-embeddings": "32",
    "--micro-batch-size": "2",
    "--train-iters": "240",
    "--lr": "3e-3",
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": "100",
}
MOCK = ["--mock-data"]
SYNC = ["--edit-method", "sync"]


def command_line(extra: str | list[str] = "", without: str = "") -> list[str]:
    """Returns a valid command line with flags added, and those named in `without` left out."""
    kept = {flag: value for flag, value in REQUIRED.items() if flag not in without.split()}
    pairs = [word for pair in kept.items() for word in pair]
    return pairs + (extra.split() if isinstance(extra, str) else extra)


def parse(extra: str = "", world_size: int = 4, without: str = "") -> argparse.Namespace:
    return parse_args(command_line(f"--mock-data {extra}", without), world_size=world_size)


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str], world_size: int | None = 4) -> str:
    """Returns the one line that a run with these arguments prints before it exits with 2."""
    with pytest.raises(SystemExit) as caught, exit_on_configuration_error():
        parse_args(argv, world_size=world_size)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err
