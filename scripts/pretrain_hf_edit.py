#!/usr/bin/env python
"""Continues the pre-training of a transformers model with EDiT in a Trainer, by Megatron's flags.

deepspeed --num_gpus 8 scripts/pretrain_hf_edit.py --hf-model MODEL --data-path PREFIX \
    --seq-length 2048 --micro-batch-size 2 --train-iters 1000 --lr 1e-5 --save OUT \
    --deepspeed --deepspeed_config ds_configs/edit_zero3_hf.json

Data are Megatron's, made by edit-preprocess with the model's tokenizer. A run that finds a
checkpoint in OUT goes on from it. At the end OUT/hf is the model that the replicas agree on.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_edit.config.hf_arguments import SCHEDULES, parse_hf_args
from megatron_edit.errors import exit_on_configuration_error

if TYPE_CHECKING:
    import torch
    from transformers import TrainingArguments


def main() -> None:
    """Trains as the command line says."""
    with exit_on_configuration_error():
        pretrain(parse_hf_args())


def pretrain(args: Namespace) -> None:
    """From arguments to a model folder."""
    # Not at the top of the file: they take seconds, which a mistyped flag should not.
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer
    from transformers.trainer_utils import get_last_checkpoint

    from megatron_edit import enable_edit
    from megatron_edit.data.datasets import build_datasets
    from megatron_edit.data.tokenizer import build_tokenizer

    training_args = trainer_arguments(args)
    edit = enable_edit(training_args, args.distributed_timeout_minutes)
    train, valid, _ = build_datasets(args, build_tokenizer(args))
    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(args.hf_model),
        training_args,
        train_dataset=Samples(train, args.train_samples),
        eval_dataset=None if valid is None else Samples(valid, len(valid)),
        callbacks=[edit.callback],
    )
    newest = get_last_checkpoint(args.save) if Path(args.save).is_dir() else None
    trainer.train(resume_from_checkpoint=newest)
    if valid is not None:
        trainer.log_metrics("eval", trainer.evaluate())
    trainer.save_model(f"{args.save}/hf")
    if trainer.is_world_process_zero():
        AutoTokenizer.from_pretrained(args.tokenizer_model).save_pretrained(f"{args.save}/hf")
        print(f"saved {args.save}/hf", flush=True)


def trainer_arguments(args: Namespace) -> TrainingArguments:
    """The Trainer's names for Megatron's flags."""
    import torch
    from transformers import TrainingArguments

    # Imported before TrainingArguments join the ranks.
    import megatron_edit.run.huggingface  # noqa: F401

    return TrainingArguments(
        args.save,
        deepspeed=args.ds_config,
        max_steps=args.train_iters,
        per_device_train_batch_size=args.micro_batch_size,
        per_device_eval_batch_size=args.micro_batch_size,
        gradient_accumulation_steps=args.num_microbatches,
        learning_rate=args.lr,
        lr_scheduler_type=SCHEDULES[args.lr_decay_style],
        warmup_steps=args.lr_warmup_iters,
        weight_decay=args.weight_decay,
        max_grad_norm=args.clip_grad,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_epsilon=args.adam_eps,
        bf16=args.bf16,
        seed=args.seed,
        logging_steps=args.log_interval,
        save_strategy="no" if args.save_interval is None else "steps",
        save_steps=args.save_interval or args.train_iters,
        eval_strategy="no" if args.eval_iters == 0 else "steps",
        eval_steps=args.eval_interval,
        dataloader_num_workers=args.num_workers,
        report_to=["tensorboard"],
        use_cpu=not torch.cuda.is_available(),
    )


class Samples:
    """megatron-core's samples as a Trainer reads them.

    Args:
        dataset: Of :func:`megatron_edit.data.datasets.build_datasets`.
        length: How many there are to read.
    """

    def __init__(self, dataset: Any, length: int) -> None:
        self._dataset, self._length = dataset, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self._dataset[index]["tokens"]
        # transformers shifts the labels itself.
        return {"input_ids": tokens, "labels": tokens.clone()}


if __name__ == "__main__":
    main()
    sys.exit(0)
