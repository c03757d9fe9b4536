"""What the three commands share: one-line errors for flags and for unwritable files."""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from megatron_edit.errors import ConfigurationError


class Parser(argparse.ArgumentParser):
    """An argument parser whose help is the script's docstring and whose errors are one line."""

    def __init__(self, description: str | None, argument_default: object = None) -> None:
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            argument_default=argument_default,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Refuses a command line."""
        raise ConfigurationError(message.removeprefix("argument "))


def write(path: Path, text: str, flag: str) -> None:
    """Writes a text and a line break to a file, or to stdout if the file is `-`.

    Args:
        path: The file.
        text: What to write.
        flag: The flag that named the file, for the error message.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    if str(path) == "-":
        sys.stdout.write(text + "\n")
        return
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{flag} {path}: cannot be written ({error})") from None
