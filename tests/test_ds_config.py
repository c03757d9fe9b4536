"""The DeepSpeed JSON: what is honoured, what is refused, and how the message reads."""

import json
from pathlib import Path

import pytest

from megatron_edit.config.ds_config import NOT_HONOURED, load_ds_config
from megatron_edit.config.methods import PRESETS
from megatron_edit.errors import ConfigurationError

SHIPPED = sorted((Path(__file__).parent.parent / "ds_configs").glob("*.json"))

BAD_TEXTS = [
    ('{"train_batch_size": 8,\n "bf16" true}', ":2:9: malformed JSON: Expecting ':' delimiter"),
    ("", ":1:1: malformed JSON: Expecting value"),
    ("[1]", "got [1]; allowed: an object {...}"),
    ('{"steps_per_print": 1, "steps_per_print": 2}', "duplicate key 'steps_per_print', given as 1"),
    ('{"edit": {"clip": 1.0, "clip": null}}', "duplicate key 'clip', given as 1.0 and as null"),
    ('{"gradient_clipping": NaN}', "got NaN; allowed: finite numbers"),
    ('{"edit": {"clip": -Infinity}}', "got -Infinity; allowed: finite numbers"),
]

BAD_CONFIGS: list[tuple[dict[str, object], str]] = [
    ({"train_batch_sise": 8}, "unknown name 'train_batch_sise'; did you mean 'train_batch_size'?"),
    ({"edti": {}}, "top-level key: unknown name 'edti'; did you mean 'edit'?"),
    ({"zzz": 1}, "top-level key: unknown name 'zzz'; allowed: train_batch_size, "),
    ({"edit": {"sync_intervall": 8}}, "edit.sync_intervall: unknown name 'sync_intervall'; did y"),
    ({"edit": 3}, "edit: got 3; allowed: an object {...}"),
    ({"edit": None}, "edit: got null; allowed: an object {...}"),
    ({"bf16": True}, "bf16: got true; allowed: an object {...}"),
    ({"bf16": {"enable": True}}, "bf16.enable: unknown name 'enable'; did you mean 'enabled'?"),
    ({"bf16": {"enabled": 1}}, "bf16.enabled: got 1; allowed: true or false"),
    ({"zero_optimization": {"stage": 1}}, "zero_optimization.stage: got 1; allowed: one of 2, 3"),
    ({"zero_optimization": {"overlap_comm": True}}, "zero_optimization.overlap_comm: unknown nam"),
    ({"train_batch_size": 0}, "train_batch_size: got 0; allowed: an integer >= 1, or 'auto'"),
    ({"train_micro_batch_size_per_gpu": "2"}, "train_micro_batch_size_per_gpu: got '2'; allowed"),
    ({"gradient_accumulation_steps": 1.5}, "gradient_accumulation_steps: got 1.5; allowed: an in"),
    ({"gradient_clipping": -1}, "gradient_clipping: got -1; allowed: a number >= 0"),
    ({"steps_per_print": "auto"}, "steps_per_print: got 'auto'; allowed: an integer >= 1"),
    ({"tensorboard": {"enabled": "ye"}}, "tensorboard.enabled: got 'ye'; allowed: true or false"),
    ({"tensorboard": {"outputpath": "x"}}, "unknown name 'outputpath'; did you mean 'output_path"),
    ({"csv_monitor": {"job_name": 3}}, "csv_monitor.job_name: got 3; allowed: text"),
    ({"wandb": {"projet": "x"}}, "wandb.projet: unknown name 'projet'; did you mean 'project'?"),
    ({"comms_logger": {"prof_ops": 3}}, "comms_logger.prof_ops: got 3; allowed: a list"),
    ({"comms_logger": {"verbos": True}}, "did you mean 'verbose'?"),
    ({"optimizer": {"type": "Adam"}}, "optimizer: a DeepSpeed key that is not honoured here; the"),
    ({"scheduler": {"type": "WarmupLR"}}, "use --lr-decay-style"),
    ({"fp16": {"enabled": True}}, "fp16: a DeepSpeed key that is not honoured here; use bf16"),
    ({"wall_clock_breakdown": True}, "use --log-throughput"),
    ({"activation_checkpointing": {}}, "use --recompute-granularity"),
]


def _write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "ds.json"
    path.write_text(text, encoding="utf-8")
    return str(path)


def _refusal(path: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_ds_config(path)
    message = str(caught.value)
    assert "\n" not in message
    assert path in message
    return message


@pytest.mark.parametrize(("text", "message"), BAD_TEXTS)
def test_bad_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    assert message in _refusal(_write(tmp_path, text))


@pytest.mark.parametrize(("config", "message"), BAD_CONFIGS)
def test_bad_key_or_value_is_refused(
    config: dict[str, object], message: str, tmp_path: Path
) -> None:
    assert message in _refusal(_write(tmp_path, json.dumps(config)))


def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    assert "No such file" in _refusal(str(tmp_path / "missing.json"))
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8 text" in _refusal(str(binary))


@pytest.mark.parametrize("key", NOT_HONOURED)
def test_every_key_not_honoured_says_what_to_use(key: str, tmp_path: Path) -> None:
    assert _refusal(_write(tmp_path, json.dumps({key: True}))).endswith(NOT_HONOURED[key])


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"fp16": {"enabled": False}},
        {"wall_clock_breakdown": False},
        {"train_batch_size": "auto", "gradient_accumulation_steps": "auto"},
        {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
        {"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["all_reduce"]}},
        {"gradient_clipping": 1, "edit": {"clip": None}},
    ],
)
def test_honoured_configuration_is_returned_as_it_is(
    config: dict[str, object], tmp_path: Path
) -> None:
    assert load_ds_config(_write(tmp_path, json.dumps(config))) == config


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_file_loads(path: Path) -> None:
    assert load_ds_config(str(path))["edit"]["method"] in PRESETS


def test_files_are_shipped() -> None:
    names = {path.name for path in SHIPPED}
    assert {"edit_tiny_cpu.json", "sync_tiny_cpu.json", "edit_7b.json"} <= names
