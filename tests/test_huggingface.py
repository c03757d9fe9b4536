"""EDiT in the Trainer of transformers: train, evaluate, save, be killed, resume, export."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from dying_ranks import run_dying_ranks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from zero_training import ZeroCase

from megatron_edit.errors import ConfigurationError
from megatron_edit.run.huggingface import enable_edit

STEPS, SAVE_STEPS, KILLED_AT = 14, 5, 12
TOKENS = torch.randint(63, (64, 12), generator=torch.Generator().manual_seed(3))
ROOT = Path(__file__).resolve().parent.parent


class Killer(TrainerCallback):
    """Kills this rank at the end of a step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)


def arguments(folder: Path, stage: int, **more: Any) -> TrainingArguments:
    config = json.loads((ROOT / f"ds_configs/edit_zero{stage}_hf.json").read_text())
    config["edit"] |= {"warmup_steps": 3, "sync_interval": 4}
    settings = {
        "max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 3e-3,
        "save_steps": SAVE_STEPS, "eval_strategy": "steps", "eval_steps": 6, "logging_steps": 1,
        "report_to": ["tensorboard"], "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip
    return TrainingArguments(str(folder), deepspeed=config, **{**settings, **more})


def train(folder: str, model: str, stage: int, resume: bool, killed: bool) -> dict[str, Any]:
    args = arguments(Path(folder), stage)
    edit = enable_edit(args)
    data = [{"input_ids": row, "labels": row} for row in TOKENS]
    trainer = Trainer(
        LlamaForCausalLM.from_pretrained(model),
        args,
        train_dataset=data,
        eval_dataset=data[:4],
        callbacks=[edit.callback, *([Killer()] if killed else [])],
    )
    trainer.train(resume_from_checkpoint=resume or None)
    trainer.save_model(f"{folder}/model")
    engine = trainer.model_wrapped
    engine.eval()
    with torch.no_grad():
        logits = engine(input_ids=TOKENS[:2]).logits
    return {
        "logits": logits.tolist(),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "rounds": edit.edit.sync.round,
    }


@pytest.mark.parametrize("stage", [2, 3])
def test_a_killed_run_resumes_and_is_exported(stage: int, tmp_path: Path) -> None:
    case = ZeroCase(stage)
    first = tmp_path / "first"
    case.model().save_pretrained(first)
    whole = tmp_path / "whole"
    straight = run_ranks(train, 2, str(whole), str(first), stage, False, False)
    _, codes = run_dying_ranks(
        train, 2, {0, 1}, str(tmp_path / "killed"), str(first), stage, False, True
    )
    assert codes == {0: -signal.SIGKILL, 1: -signal.SIGKILL}
    resumed = run_ranks(train, 2, str(tmp_path / "killed"), str(first), stage, True, False)
    # After the newest checkpoint nothing is different.
    newest = KILLED_AT // SAVE_STEPS * SAVE_STEPS
    assert resumed[0]["losses"][newest:] == straight[0]["losses"][newest:]
    assert resumed[0]["logits"] == straight[0]["logits"] == straight[1]["logits"]
    assert straight[0]["rounds"] == 3
    # In plain transformers.
    exported = LlamaForCausalLM.from_pretrained(tmp_path / "killed" / "model").eval()
    with torch.no_grad():
        logits = exported(input_ids=TOKENS[:2]).logits
    assert torch.equal(logits, torch.tensor(resumed[0]["logits"]))
    # The charts of the synchronisations.
    charts = EventAccumulator(str(whole / "runs" / "edit"))
    charts.Reload()
    tags = charts.Tags()["scalars"]
    assert {"edit/pseudo-grad-norm", "edit/weight/replica-1", "edit/drift"} <= set(tags)
    assert [event.step for event in charts.Scalars("edit/drift")] == [7, 11, 14]


def _refused(folder: str, name: str) -> str:
    args = arguments(Path(folder), 2)
    setattr(args, name, True)
    try:
        enable_edit(args)
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["load_best_model_at_end", "auto_find_batch_size"])
def test_what_replicas_would_do_differently_is_refused(name: str, tmp_path: Path) -> None:
    (message,) = run_ranks(_refused, 1, str(tmp_path / "out"), name)
    assert message.startswith(f"TrainingArguments.{name}: ")


def test_trainer_without_a_json_is_refused(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(ConfigurationError, match=r"TrainingArguments\.deepspeed is missing"):
        enable_edit(args)
