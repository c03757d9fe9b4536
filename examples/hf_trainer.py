"""Continues the pre-training of a transformers model on a text, with Trainer and EDiT.

deepspeed --num_gpus 8 examples/hf_trainer.py MODEL TEXT OUT [ds_configs/edit_zero3_hf.json]
"""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from megatron_edit import enable_edit

SEQUENCE = 128


def main(model: str, text: str, out: str, config: str = "ds_configs/edit_zero3_hf.json") -> None:
    """Trains, and writes the model that the replicas agree on to ``<out>/model``."""
    args = TrainingArguments(
        out, deepspeed=config, num_train_epochs=1, per_device_train_batch_size=4,
        learning_rate=1e-3, lr_scheduler_type="cosine", logging_steps=10, save_steps=20,
        report_to=["tensorboard"], use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    edit = enable_edit(args)
    tokenizer = AutoTokenizer.from_pretrained(model)

    def samples(rows: dict[str, Any]) -> dict[str, Any]:
        tokens = [*chain(*tokenizer(rows["text"])["input_ids"])]
        whole = range(0, len(tokens) - SEQUENCE, SEQUENCE)
        cut = [tokens[first : first + SEQUENCE] for first in whole]
        return {"input_ids": cut, "labels": cut}

    rows = load_dataset("text", data_files=text, split="train")
    data = rows.map(samples, batched=True, remove_columns=["text"])
    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(model),
        args,
        train_dataset=data,
        callbacks=[edit.callback],
    )
    newest = get_last_checkpoint(out) if Path(out).is_dir() else None
    trainer.train(resume_from_checkpoint=newest)
    trainer.save_model(f"{out}/model")
    if trainer.is_world_process_zero():
        tokenizer.save_pretrained(f"{out}/model")


if __name__ == "__main__":
    main(*[argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")])
