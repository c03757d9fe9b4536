"""EditConfig, its generated flags and messages, the method presets, and the error class."""

import argparse
from typing import get_args

import pytest
from pydantic import ValidationError

from megatron_edit.config.edit_config import (
    Compression,
    EditConfig,
    Method,
    flag_name,
    help_text,
    parse_flag_value,
)
from megatron_edit.config.methods import PRESETS, resolve
from megatron_edit.config.parser import build_parser
from megatron_edit.errors import (
    ConfigurationError,
    did_you_mean,
    exit_on_configuration_error,
    unknown_name,
)
from megatron_edit.replicas.encodings import ENCODINGS
from megatron_edit.scaling.cluster import COMPRESSION_FACTORS

BAD_VALUES = [
    ({"sync_interval": 0}, "edit.sync_interval: got 0; allowed: an integer >= 1"),
    ({"sync_interval": True}, "edit.sync_interval: got true; allowed: an integer >= 1"),
    ({"sync_interval": 8.0}, "edit.sync_interval: got 8.0; allowed: an integer >= 1"),
    ({"sync_interval": "8"}, "edit.sync_interval: got '8'; allowed: an integer >= 1"),
    ({"warmup_steps": -1}, "edit.warmup_steps: got -1; allowed: an integer >= 0"),
    ({"replicas": 0}, "edit.replicas: got 0; allowed: an integer >= 1, or none (null in JSON)"),
    ({"clip": 0}, "edit.clip: got 0; allowed: a number > 0, or none (null in JSON)"),
    ({"outer_lr": 0}, "edit.outer_lr: got 0; allowed: a number > 0 and <= 2"),
    ({"outer_lr": 2.5}, "edit.outer_lr: got 2.5; allowed: a number > 0 and <= 2"),
    ({"outer_lr": float("nan")}, "edit.outer_lr: got nan; allowed: a number > 0 and <= 2"),
    ({"outer_momentum": 1}, "edit.outer_momentum: got 1; allowed: a number >= 0 and < 1"),
    ({"outer_momentum": -0.1}, "edit.outer_momentum: got -0.1; allowed: a number >= 0 and < 1"),
    ({"detector_alpha": 1.0}, "edit.detector_alpha: got 1.0; allowed: a number > 0 and < 1"),
    ({"detector_threshold": 0}, "edit.detector_threshold: got 0; allowed: a number > 0"),
    ({"detector_threshold": float("inf")}, "edit.detector_threshold: got inf"),
    ({"detector_warmup": -1}, "edit.detector_warmup: got -1; allowed: an integer >= 0"),
    ({"peer_threshold": 0}, "edit.peer_threshold: got 0; allowed: a number > 0"),
    ({"peer_floor": -1}, "edit.peer_floor: got -1; allowed: a number >= 0"),
    ({"readmit_after": 0}, "edit.readmit_after: got 0; allowed: an integer >= 1"),
    ({"max_consecutive_rollbacks": 0}, "edit.max_consecutive_rollbacks: got 0; allowed: an integ"),
    ({"weight_temperature": 0}, "edit.weight_temperature: got 0; allowed: a number > 0"),
    ({"weight_temperature_relative": 0}, "edit.weight_temperature_relative: got 0; allowed: a n"),
    ({"sync_prefetch": 0}, "edit.sync_prefetch: got 0; allowed: an integer >= 1"),
    ({"outer_nesterov": None}, "edit.outer_nesterov: got null; allowed: true or false"),
    ({"detector": "pear"}, "allowed: one of none, paper, history, peer, robust; did you mean 'pe"),
    ({"sync_trigger": "step"}, "edit.sync_trigger: got 'step'; allowed: one of steps, time, never"),
    ({"eval_on": "remote"}, "edit.eval_on: got 'remote'; allowed: one of local, anchor"),
    ({"weighting": "norms"}, "did you mean 'norm'?"),
    ({"method": "edti"}, "edit.method: unknown name 'edti'; did you mean 'edit'?"),
    ({"method": "zzz"}, "edit.method: unknown name 'zzz'; allowed: sync, local_sgd"),
    ({"method": ["edit"]}, "edit.method: unknown name ['edit']; did you mean 'edit'?"),
    ({"sync_intervall": 8}, "edit.sync_intervall: unknown name 'sync_intervall'; did you mean 's"),
    ({"sync_seconds": 0}, "edit.sync_seconds: got 0; allowed: a number > 0"),
    ({"sync_seconds": -5}, "edit.sync_seconds: got -5; allowed: a number > 0"),
    ({"delay_steps": -1}, "edit.delay_steps: got -1; allowed: an integer >= 0"),
    ({"compression": "imt8"}, "allowed: one of none, bf16, int8; did you mean 'int8'?"),
    (
        {"sync_interval": 8, "delay_steps": 8},
        "edit.delay_steps: got 8; allowed: less than edit.sync_interval 8",
    ),
    (
        {"method": "a_edit", "delay_steps": 2},
        "edit.sync_trigger time and a delay (edit.delay_steps, edit.delay_round) exclude each oth",
    ),
    (
        {"method": "co2", "delay_steps": 2},
        "edit.delay_round and edit.delay_steps 2 exclude each other",
    ),
    (
        {"method": "co2", "outer_nesterov": True},
        "edit.delay_round needs edit.outer_nesterov false",
    ),
    (
        {"method": "sync", "compression": "int8"},
        "edit.compression int8: with edit.sync_trigger never (method sync)",
    ),
    (
        {"weight_temperature": 2.0, "weight_temperature_relative": 0.5},
        "edit.weight_temperature 2.0 (json) and edit.weight_temperature_relative 0.5 (json) excl",
    ),
]


@pytest.mark.parametrize(("section", "message"), BAD_VALUES)
def test_bad_value_of_the_section_is_named(section: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve(None, section, {})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_value_of_a_flag_names_the_flag() -> None:
    with pytest.raises(ConfigurationError, match="--edit-sync-interval: got 0; allowed"):
        resolve(None, {"sync_interval": 8}, {"sync_interval": 0})
    with pytest.raises(ConfigurationError, match="--edit-method: unknown name 'edt'"):
        resolve(None, {}, {"method": "edt"})


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("sync_interval", "8", 8),
        ("outer_lr", "1e-1", 0.1),
        ("outer_lr", "1", 1.0),
        ("clip", "none", None),
        ("clip", "5", 5.0),
        ("replicas", "None", None),
        ("weight_temperature_relative", "none", None),
        ("outer_nesterov", "true", True),
        ("outer_nesterov", "False", False),
        ("detector", "none", "none"),
        ("detector", "peer", "peer"),
    ],
)
def test_flag_text_becomes_a_value(field: str, text: str, value: object) -> None:
    parsed = parse_flag_value(field, text, flag_name(field))
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("field", "text", "allowed"),
    [
        ("sync_interval", "8.5", "an integer >= 1"),
        ("sync_interval", "none", "an integer >= 1"),
        ("outer_lr", "fast", "a number > 0 and <= 2"),
        ("outer_nesterov", "yes", "true or false"),
        ("clip", "off", "a number > 0, or none"),
    ],
)
def test_flag_text_of_another_type_is_refused(field: str, text: str, allowed: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_flag_value(field, text, "--the-flag")
    assert str(caught.value).startswith(f"--the-flag: got {text!r}; allowed: {allowed}")


def test_every_field_has_a_docstring_and_a_flag_with_it_as_help() -> None:
    actions = {name: action for action in build_parser()._actions for name in action.option_strings}
    for field, info in EditConfig.model_fields.items():
        assert info.description, field
        action = actions[flag_name(field)]
        assert isinstance(action, argparse.Action)
        assert action.help == help_text(field).replace("%", "%%")
        assert info.description.split()[0] in str(action.help)


def test_defaults_are_those_of_the_method() -> None:
    config, _ = resolve("edit", {}, {})
    assert config == EditConfig()


def test_config_is_frozen_and_forbids_extra_fields() -> None:
    field = "sync_interval"
    with pytest.raises(ValidationError):
        setattr(EditConfig(), field, 3)
    with pytest.raises(ValidationError):
        EditConfig.model_validate({"unknown": 1})


def test_presets_are_rows_of_known_fields_and_cover_the_methods() -> None:
    assert set(PRESETS) == set(get_args(Method))
    for method, overrides in PRESETS.items():
        assert set(overrides) <= set(EditConfig.model_fields), method
        resolve(method, {}, {})


def test_every_compression_has_its_encoding_and_its_factor() -> None:
    names = set(get_args(Compression))
    assert set(ENCODINGS) == names - {"none"}
    assert set(COMPRESSION_FACTORS) == names


def test_flag_beats_json_beats_method_beats_default() -> None:
    json_values = {"method": "edit", "sync_interval": 8, "outer_lr": 0.5}
    config, sources = resolve(None, json_values, {"sync_interval": 4})
    assert (config.sync_interval, sources["sync_interval"]) == (4, "flag")
    assert (config.outer_lr, sources["outer_lr"]) == (0.5, "json")
    assert (config.clip, sources["clip"]) == (10.0, "method edit")
    assert (config.readmit_after, sources["readmit_after"]) == (5, "default")
    assert sources["method"] == "json"
    assert set(sources) == set(EditConfig.model_fields)


def test_flag_chooses_the_preset_over_the_section() -> None:
    config, sources = resolve(None, {"method": "edit"}, {"method": "sync"})
    assert (config.method, config.sync_trigger) == ("sync", "never")
    assert sources["sync_trigger"] == "method sync"


def test_null_and_none_switch_the_clip_off() -> None:
    assert resolve(None, {"clip": None}, {})[0].clip is None
    assert resolve(None, {"clip": 5.0}, {"clip": None})[0].clip is None


def test_relative_temperature_of_the_section_is_switched_off_by_flag() -> None:
    section = {"weight_temperature_relative": 1.0}
    flags = {"weight_temperature_relative": None, "weight_temperature": 2.0}
    assert resolve(None, section, flags)[0].weight_temperature == 2.0


def test_did_you_mean_knows_when_nothing_is_close() -> None:
    assert did_you_mean("sync_intervl", ["sync_interval", "clip"]) == (
        "; did you mean 'sync_interval'?"
    )
    assert did_you_mean("zzz", ["sync_interval", "clip"]) == ""
    assert str(unknown_name("x", "zzz", ["a", "b"])) == "x: unknown name 'zzz'; allowed: a, b"


def test_message_is_one_line() -> None:
    assert str(ConfigurationError("two\n  lines")) == "two lines"


@pytest.mark.parametrize(
    ("rank", "local_rank", "per_host", "printed"),
    [
        (None, None, False, True),
        ("0", "0", False, True),
        ("1", "1", False, False),
        ("8", "0", False, False),
        ("8", "0", True, True),
        ("9", "1", True, False),
        (None, "1", False, False),
    ],
)
def test_error_is_printed_by_one_rank_and_exits_with_2(
    rank: str | None,
    local_rank: str | None,
    per_host: bool,
    printed: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("megatron_edit.errors.REPORT_WITHIN_S", 0.1)
    for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as caught, exit_on_configuration_error():
        raise ConfigurationError("clip: got 0", per_host=per_host)
    assert caught.value.code == 2
    assert capsys.readouterr().err == ("error: clip: got 0\n" if printed else "")
