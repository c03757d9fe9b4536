"""JSON that a user hands to a command: whatever is wrong with it is told in one line, code 2."""

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
from command_lines import command_line, refusal

from megatron_edit.checkpoint import files
from megatron_edit.config.json_file import DEEPEST, parse_json, read_json
from megatron_edit.data.corpus import BadRowError, _parse_json
from megatron_edit.errors import ConfigurationError

CLUSTER = Path(__file__).parent.parent / "examples" / "clusters" / "one_cluster_8x8_h100.yaml"
LEVELS = (DEEPEST + 1, 900, 990, 100_000)


def _nested(levels: int) -> str:
    """An object that nests arrays so that there are so many levels in all."""
    return '{"laws": ' + "[" * (levels - 1) + "]" * (levels - 1) + "}"


@pytest.mark.parametrize("levels", LEVELS)
def test_a_deeply_nested_file_is_refused(levels: int, tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text(_nested(levels))
    with pytest.raises(ConfigurationError) as caught:
        read_json(path)
    assert str(caught.value) == f"{path}: nested deeper than {DEEPEST} levels"


def test_as_many_levels_as_allowed_are_read(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text(_nested(DEEPEST))
    assert list(read_json(path)) == ["laws"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("9" * 5000, "malformed JSON: Exceeds the limit"),
        ('{"a": }', "x.json:1:7: malformed JSON: Expecting value"),
    ],
)
def test_malformed_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_json(text, "x.json")


def test_a_long_value_that_is_no_object_is_not_shown_whole(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text(json.dumps(["word"] * 1000))
    with pytest.raises(ConfigurationError, match="allowed: an object") as caught:
        read_json(path)
    assert len(str(caught.value)) < len(str(path)) + 130


@pytest.mark.parametrize("levels", LEVELS)
def test_a_deep_deepspeed_json_ends_a_run(
    levels: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(_nested(levels))
    line = refusal(command_line(f"--mock-data --deepspeed --deepspeed_config {path}"), capsys)
    assert line == f"error: {path}: nested deeper than {DEEPEST} levels\n"


# (command, arguments with {} for the file, part of the message)
COMMANDS = [
    ("plan", ["--links", "{}", str(CLUSTER)], "nested deeper than"),
    ("plan", ["--laws", "{}", str(CLUSTER)], "nested deeper than"),
    ("plan", ["{}"], "effective_config.json: "),
    ("fit", ["--logs", "{}"], "nested deeper than"),
]


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize(("command", "arguments", "message"), COMMANDS)
def test_deep_json_ends_a_command_in_one_line(
    command: str,
    arguments: list[str],
    message: str,
    levels: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # The file of the fitting command is beside the log.
    path = tmp_path / "effective_config.json"
    path.write_text(_nested(levels))
    monkeypatch.setattr(sys, "argv", [command, *(word.format(path) for word in arguments)])
    main: Callable[[], None] = import_module(f"megatron_edit.commands.{command}").main
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("laws", "message"),
    [
        ([], "laws: got []"),
        ({"laws": {"sync": 3}}, "laws.sync: got 3"),
        ({"laws": {"sync": {"form": "power", "variable": "x", "theta": [1, 2]}}}, "variable: got"),
        (
            {"laws": {"sync": {"form": "power", "variable": "tokens", "theta": [1]}}},
            "needs a power law of sync",
        ),
    ],
)
def test_laws_of_another_shape_are_refused(
    laws: object,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "laws.json"
    path.write_text(json.dumps(laws if isinstance(laws, dict) else {"laws": laws}))
    monkeypatch.setattr(sys, "argv", ["plan", str(CLUSTER), "--laws", str(path)])
    with pytest.raises(SystemExit) as stopped:
        import_module("megatron_edit.commands.plan").main()
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("levels", LEVELS[1:])
def test_a_deep_row_of_a_corpus_is_a_bad_row(levels: int) -> None:
    with pytest.raises(BadRowError):
        _parse_json(_nested(levels), ["text"])


def test_a_deep_file_of_a_checkpoint_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text(_nested(100_000))
    with pytest.raises(ValueError, match=r"state\.json is damaged: maximum recursion depth"):
        files.read_json(path, ["step"])
