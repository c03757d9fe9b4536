"""The error of a user's mistake: one line, printed once, exit code 2."""

import difflib
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

EXIT_BAD_CONFIGURATION = 2
# A launcher ends all ranks as soon as one has ended, and the one that reports may not be there yet.
REPORT_WITHIN_S = 15.0


class ConfigurationError(ValueError):
    """A mistake in the arguments or the configuration, told in one line.

    The message names the field, what was given, what is allowed and, where there is one, a
    suggestion.

    Args:
        message: The text; line breaks in it become spaces.
        per_host: The mistake may exist on one host only (a missing file), so one rank of every
            host reports it. Otherwise rank 0 alone does.
    """

    def __init__(self, message: str, per_host: bool = False) -> None:
        super().__init__(" ".join(message.split()))
        self.per_host = per_host


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Returns `"; did you mean 'x'?"` for the closest known name, or an empty string."""
    close = difflib.get_close_matches(str(given), list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def unknown_name(what: str, given: object, known: Iterable[str]) -> ConfigurationError:
    """Returns the error for a name that is none of the known ones.

    Args:
        what: What was named, as the user wrote it (`edit.method`, `key 'foo' of edit`).
        given: The unknown name.
        known: The names allowed, listed in the message unless one of them is close.
    """
    names = list(known)
    hint = did_you_mean(given, names) or f"; allowed: {', '.join(names)}"
    return ConfigurationError(f"{what}: unknown name {given!r}{hint}")


@contextmanager
def exit_on_configuration_error() -> Iterator[None]:
    """Turns a `ConfigurationError` of the block into one line on stderr and exit code 2."""
    try:
        yield
    except ConfigurationError as error:
        if _reports(error):
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(REPORT_WITHIN_S)
        raise SystemExit(EXIT_BAD_CONFIGURATION) from None


def _reports(error: ConfigurationError) -> bool:
    """Whether this rank is the one that prints the error."""
    local_rank = os.environ.get("LOCAL_RANK", "0")
    rank = os.environ.get("RANK", local_rank)
    return (local_rank if error.per_host else rank) == "0"
