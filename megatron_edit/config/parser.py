"""Builds the argument parser from the flag tables and `EditConfig`, and reads a command line."""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from megatron_edit.config.edit_config import (
    EditConfig,
    flag_name,
    help_text,
    inner_type,
    parse_flag_value,
    show,
)
from megatron_edit.config.flags import (
    ATORCH_ALIASES,
    FLAGS,
    Flag,
    one_of,
)
from megatron_edit.config.refused_flags import why_refused
from megatron_edit.errors import ConfigurationError, did_you_mean

OUTER_OPTIMIZER = "--outer-optimizer"
Tables = Mapping[str, Sequence[Flag]]


def _nowhere(flag: str) -> str | None:
    return None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(message.removeprefix("argument "))


class _SetField(argparse.Action):
    """Stores a field of `EditConfig`; refuses a second flag that sets it to something else."""

    def __init__(self, *args: Any, field_name: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.field_name = field_name

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        flag = self.option_strings[0]
        switched = self.nargs == 0
        value = self.const if switched else parse_flag_value(self.field_name, str(values), flag)
        flags_seen = namespace.edit_flags
        before = flags_seen.setdefault(self.field_name, (flag, value))
        if before[0] != flag and before[1] != value:
            raise ConfigurationError(
                f"{before[0]} {before[1]} and {flag} {value} set the same and differ; keep one"
            )
        flags_seen[self.field_name] = (flag, value)


def build_parser(tables: Tables = FLAGS) -> argparse.ArgumentParser:
    """Returns the parser of the flags of some tables, and of `EditConfig`.

    It leaves out of the namespace what is not given.
    """
    parser = _Parser(
        description="Pre-trains a language model with EDiT.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for title, flags in tables.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            _add_flag(group, flag)
    group = parser.add_argument_group("EDiT", "The keys of the JSON's `edit` section.")
    for name, info in EditConfig.model_fields.items():
        is_switch = inner_type(info.annotation)[0] is bool
        bare: dict[str, Any] = {"nargs": "?", "const": "true"} if is_switch else {}
        group.add_argument(
            flag_name(name),
            action=_SetField,
            field_name=name,
            dest=f"edit.{name}",
            help=help_text(name).replace("%", "%%"),
            metavar="VALUE",
            **bare,
        )
    _add_aliases(parser.add_argument_group("ATorch's names of the same"))
    return parser


def _add_flag(group: argparse._ArgumentGroup, flag: Flag) -> None:
    default = "" if flag.default in (None, "", False) else f" (default: {flag.default})"
    options: dict[str, Any] = {"dest": flag.destination, "help": flag.help + default}
    if flag.type is None:
        options["action"] = "store_true"
    else:
        options |= {"type": flag.type, "nargs": flag.nargs, "metavar": flag.metavar}
    group.add_argument(flag.name, **options)


def _add_aliases(group: argparse._ArgumentGroup) -> None:
    for name, alias in ATORCH_ALIASES.items():
        same_as = flag_name(alias.field)
        options: dict[str, Any] = {"help": f"Same as {same_as}."}
        if alias.value is not None:
            options = {
                "nargs": 0,
                "const": alias.value,
                "help": f"Same as {same_as} {show(alias.value)}.",
            }
        group.add_argument(
            name,
            action=_SetField,
            field_name=alias.field,
            dest=f"edit.{alias.field}",
            metavar="VALUE",
            **options,
        )
    group.add_argument(OUTER_OPTIMIZER, type=one_of("sgd"), help="Only sgd.", metavar="sgd")


def parse_flags(
    argv: Sequence[str] | None,
    tables: Tables = FLAGS,
    elsewhere: Callable[[str], str | None] = _nowhere,
) -> tuple[dict[str, Any], dict[str, object], list[str]]:
    """Parses a command line.

    Args:
        argv: The arguments; None takes them from `sys.argv`.
        tables: The flags there are.
        elsewhere: Says of a flag of another program of ours why it is none here.

    Returns:
        The values given, by their name in the namespace, those of `EditConfig` by field, and what
        is to be said of each flag that is none.

    Raises:
        ConfigurationError: A value that its flag does not allow.
    """
    parser = build_parser(tables)
    known = argparse.Namespace(edit_flags={})
    known, unknown = parser.parse_known_args(argv, known)
    given = vars(known)
    edit_values = {name: value for name, (_, value) in given.pop("edit_flags").items()}
    given.pop("outer_optimizer", None)
    return given, edit_values, unknown_arguments(unknown, tables, elsewhere)


def known_flags(tables: Tables = FLAGS) -> list[str]:
    """Returns every flag the parser accepts."""
    edit_flags = map(flag_name, EditConfig.model_fields)
    named = [flag.name for flags in tables.values() for flag in flags]
    return [*named, *edit_flags, *ATORCH_ALIASES, OUTER_OPTIMIZER]


def unknown_arguments(
    words: Sequence[str],
    tables: Tables = FLAGS,
    elsewhere: Callable[[str], str | None] = _nowhere,
) -> list[str]:
    """Returns what is to be said of the words of a command line that no flag took.

    Words that are no flags are only spoken of where no unknown flag may have brought them.
    """
    flags = dict.fromkeys(word.split("=")[0] for word in words if _looks_like_flag(word))
    if not flags:
        return [f"unexpected argument {word!r}; no flag takes it" for word in words]
    return [_unknown_flag(flag, known_flags(tables), elsewhere) for flag in flags]


def _looks_like_flag(word: str) -> bool:
    return re.match(r"--?[a-zA-Z]", word) is not None


def _unknown_flag(flag: str, known: Sequence[str], elsewhere: Callable[[str], str | None]) -> str:
    if why := elsewhere(flag):
        return f"{flag}: {why}"
    hint = did_you_mean(flag, known)
    if not hint and (why := why_refused(flag)):
        return f"{flag}: {why}"
    return f"unknown flag {flag}{hint or '; --help lists the known ones'}"
