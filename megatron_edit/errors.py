"""The error of a user's mistake: one line, printed once, exit code 2."""

import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
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


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, as when the disk is full: exit code 1.

    Every rank raises the same; the message is one line that names step, folder and cause.
    """


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Returns `"; did you mean 'x'?"` for the known name that was misspelt, or an empty string.

    Only slips of the pen count: a name in which a word is another, or one more, means another
    thing, however alike the letters are.
    """
    slips = {name: _slips(str(given), name) for name in known}
    near = {name: count for name, count in slips.items() if count is not None}
    return f"; did you mean {min(near, key=lambda name: near[name])!r}?" if near else ""


def _slips(given: str, known: str) -> int | None:
    """Returns how many slips of the pen lie between two names; None if they differ by more.

    A slip is a letter left out, added, changed or swapped with the next. A word may have one in
    three letters, two in seven, but none in its digits or at its start. Case and separators do not
    count.
    """
    ours, theirs = _words(given), _words(known)
    if "".join(ours) == "".join(theirs):
        return 0
    if len(ours) != len(theirs):
        return None
    total = 0
    for word, right in zip(ours, theirs, strict=True):
        most = (len(right) + 1) // 4
        same = word[:1] == right[:1] and _digits(word) == _digits(right)
        if not same or abs(len(word) - len(right)) > most:
            return None
        slips = _distance(word, right)
        if slips > most:
            return None
        total += slips
    return total


def _words(name: str) -> list[str]:
    return re.findall(r"[^\W_]+", name.lower())


def _digits(word: str) -> str:
    return "".join(filter(str.isdigit, word))


def _distance(a: str, b: str) -> int:
    """Returns the fewest letters to leave out, add, change or swap that make one word another."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a):
        two_before, before, row = before, row, [i + 1]
        for j, other in enumerate(b):
            cost = min(before[j] + (letter != other), before[j + 1] + 1, row[j] + 1)
            if i and j and letter == b[j - 1] and a[i - 1] == other:
                cost = min(cost, two_before[j - 1] + 1)
            row.append(cost)
    return row[-1]


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


def together(mistakes: Sequence[str]) -> str:
    """Returns several mistakes as one line."""
    return " | ".join(mistakes)


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
