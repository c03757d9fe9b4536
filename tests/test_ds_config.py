"""The DeepSpeed JSON: what is honoured, what is refused, and how the message reads."""

import json
from pathlib import Path

import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from megatron_edit.config.ds_config import load_ds_config
from megatron_edit.config.ds_keys import REFUSED, WITHOUT_EFFECT, without_effect
from megatron_edit.config.methods import PRESETS
from megatron_edit.errors import ConfigurationError

# Those for DeepSpeed's own engine, edit_zero*_hf.json, are read by that.
SHIPPED = [
    path
    for path in sorted((Path(__file__).parent.parent / "ds_configs").glob("*.json"))
    if not path.stem.endswith("_hf")
]

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
    ({"zero_optimization": {"stage": 0}}, "give 2, and as many edit.replicas as ranks"),
    ({"zero_optimization": {"stage": "3"}}, "zero_optimization.stage: got '3'; allowed: one of 2"),
    ({"zero_optimization": {"overlap": True}}, "zero_optimization: unknown name 'overlap'; allow"),
    ({"zero_optimization": False}, "zero_optimization: got false; allowed: an object {...}"),
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
    ({"fp16": {"enabled": True}}, "fp16: a DeepSpeed key that is not honoured here; the sh"),
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16: a DeepSpeed key that is not"),
    ({"communication_data_type": "fp16"}, "gradients are reduced in fp32; leave the key out"),
    ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types: a DeepSpeed key that is not hono"),
    ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "edit.offload_outer_state"),
    ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "shard a replica over more ran"),
    ({"zero_optimization": {"cpu_offload": True}}, "--recompute-granularity full keeps fewer"),
    ({"zero_optimization": {"mics_shard_size": 8}}, "use edit.replicas"),
    ({"optimizer": {"type": "Lamb", "params": {"lr": "auto"}}}, "optimizer: a DeepSpeed key that"),
    ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, "or make them all 'auto'"),
    (
        {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "adam_w_mode": False}}},
        "the inner optimizer is AdamW",
    ),
    ({"optimizer": {"type": ["AdamW"], "params": 3}}, "optimizer: a DeepSpeed key that is not"),
    ({"scheduler": {"type": "OneCycle", "params": {}}}, "scheduler: a DeepSpeed key that is not"),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}},
        "or make its numbers all 'auto'",
    ),
    ({"scheduler": {"type": {}}}, "scheduler: a DeepSpeed key that is not honoured here"),
    ({"compression_training": {"weight_quantization": {}}}, "the whole model is trained"),
    ({"tensor_parallel": {"autotp_size": 2}}, "use --tensor-model-parallel-size"),
    ({"gradient_clipping": "atuo"}, "gradient_clipping: got 'atuo'; allowed: a number >= 0, or 'a"),
    ({"bf16": {"enabled": "on"}}, "bf16.enabled: got 'on'; allowed: true or false, or 'auto'"),
    ({"bf16": {"bf16_optimizer_states": True}}, "the optimizer's state is fp32"),
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


def _nested(key: str, value: object) -> dict[str, object]:
    section, _, name = key.partition(".")
    return {section: {name: value}} if name else {key: value}


@pytest.mark.parametrize("key", REFUSED)
def test_every_refused_key_says_the_way_round(key: str, tmp_path: Path) -> None:
    line = _refusal(_write(tmp_path, json.dumps(_nested(key, "on"))))
    assert line.endswith(f"{key}: a DeepSpeed key that is not honoured here; {REFUSED[key]}")
    for off in (False, None, "auto"):
        config = _nested(key, off)
        assert load_ds_config(_write(tmp_path, json.dumps(config))) == config
        assert without_effect(config) == ""


@pytest.mark.parametrize("key", WITHOUT_EFFECT)
def test_a_key_that_does_nothing_is_accepted_and_said_so(key: str, tmp_path: Path) -> None:
    config = _nested(key, True)
    assert load_ds_config(_write(tmp_path, json.dumps(config))) == config
    assert without_effect(config) == f"without effect here: {key} ({WITHOUT_EFFECT[key]})"


def test_a_key_is_either_refused_or_without_effect() -> None:
    assert set(REFUSED) & set(WITHOUT_EFFECT) == set()


def test_every_key_of_deepspeeds_zero_section_is_known() -> None:
    fields = DeepSpeedZeroConfig.model_fields.items()
    names = {str(field.alias or name) for name, field in fields} - {"stage"}
    known = {key.partition(".")[2] for key in [*WITHOUT_EFFECT, *REFUSED]}
    assert names - known == set()


# The sections that public trainings have most often, with values of our own.
AUTO_BATCH: dict[str, object] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
}
FP16_AUTO = {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 12, "hysteresis": 2}
PUBLIC: dict[str, tuple[dict[str, object], list[str]]] = {
    "stage 2 of transformers": (
        {
            **AUTO_BATCH,
            "fp16": FP16_AUTO,
            "zero_optimization": {
                "stage": 2,
                "allgather_partitions": True,
                "allgather_bucket_size": 1e8,
                "overlap_comm": True,
                "reduce_scatter": True,
                "reduce_bucket_size": "auto",
                "contiguous_gradients": True,
            },
        },
        [
            "zero_optimization.allgather_partitions, zero_optimization.allgather_bucket_size, "
            "zero_optimization.overlap_comm, zero_optimization.reduce_scatter, "
            "zero_optimization.contiguous_gradients (FSDP2 "
        ],
    ),
    "stage 3 of transformers, optimizer and schedule auto": (
        {
            **AUTO_BATCH,
            "fp16": FP16_AUTO,
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
            },
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"},
            },
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "none", "pin_memory": True},
                "sub_group_size": 1e8,
                "stage3_prefetch_bucket_size": "auto",
                "stage3_max_live_parameters": 1e8,
                "stage3_gather_16bit_weights_on_model_save": True,
            },
            "steps_per_print": 50,
            "wall_clock_breakdown": False,
        },
        [
            "zero_optimization.sub_group_size, zero_optimization.stage3_max_live_parameters (FSDP2",
            "; zero_optimization.stage3_gather_16bit_weights_on_model_save (checkpoints are",
        ],
    ),
    "Megatron-DeepSpeed": (
        {
            "train_batch_size": 64,
            "bf16": {"enabled": True},
            "fp16": {"enabled": False, "loss_scale": 0},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
            "prescale_gradients": True,
            "zero_allow_untested_optimizer": True,
            "activation_checkpointing": {"partition_activations": True, "profile": False},
            "flops_profiler": {"enabled": False, "profile_step": 4},
            "compression_training": {"enabled": False},
            "tensor_parallel": {"autotp_size": 1},
        },
        [
            "prescale_gradients (gradients are averaged in fp32); ",
            "activation_checkpointing (use --recompute-granularity, --recompute-method)",
        ],
    ),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_what_public_configurations_hold_is_accepted(name: str, tmp_path: Path) -> None:
    config, parts = PUBLIC[name]
    assert load_ds_config(_write(tmp_path, json.dumps(config))) == config
    line = without_effect(config)
    assert "\n" not in line
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"fp16": {"enabled": False}},
        {"wall_clock_breakdown": False},
        {"gradient_clipping": "auto", "bf16": {"enabled": "auto"}},
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
