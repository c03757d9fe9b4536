"""EDiT in the Trainer of transformers: one call before the model is made, and one callback."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from megatron_edit.config.zero_config import read_zero_run
from megatron_edit.errors import ConfigurationError
from megatron_edit.platform import ds_compat, hf_zero
from megatron_edit.run.charts import sync_events
from megatron_edit.run.zero import EDiT

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

# On import: TrainingArguments, which come before any call of ours, join the other ranks.
ds_compat.compile_nothing_for_cpu()

REFUSED = {
    "load_best_model_at_end": "the best of one replica is not the run's; save, and load it after",
    "auto_find_batch_size": "replicas would find different ones; give the batch size",
}
"""Fields of ``TrainingArguments`` that must be false -> why, and what to do instead."""


def enable_edit(args: TrainingArguments, timeout_minutes: float = 10) -> TrainerEdit:
    """Makes the replicas of a Trainer's run; to be called before the model is made.

    Args:
        args: With ``deepspeed`` naming a JSON that has an ``edit`` section.
        timeout_minutes: Bound of every wait between ranks.

    Returns:
        What holds the callback, and the run's :class:`~megatron_edit.run.zero.EDiT`.

    Raises:
        ConfigurationError: The arguments or the JSON ask for what cannot be had.
    """
    config = getattr(args, "hf_deepspeed_config", None)
    if config is None:
        raise ConfigurationError(
            "TrainingArguments.deepspeed is missing; give a DeepSpeed JSON with an edit section"
        )
    for name, reason in REFUSED.items():
        if getattr(args, name):
            raise ConfigurationError(f"TrainingArguments.{name}: {reason}")
    edit = EDiT(config.config, timeout_minutes)
    if edit.run.json["zero_optimization"]["stage"] == 3:
        hf_zero.shard_new_models_over(edit.mesh.shard_group)
    trainer_edit = TrainerEdit(edit)
    hf_zero.replace_initialize(trainer_edit.initialize)
    return trainer_edit


class TrainerEdit:
    """EDiT of a Trainer.

    Args:
        edit: The replicas.

    Attributes:
        callback: For the Trainer's ``callbacks``.
    """

    def __init__(self, edit: EDiT) -> None:
        self.edit = edit
        self.callback = EditCallback(edit)

    def initialize(self, original: hf_zero.Initialize, arguments: dict[str, Any]) -> Any:
        """Takes the place of ``deepspeed.initialize`` when Accelerate calls it."""
        # By now the Trainer has filled in what was "auto".
        self.edit.run = read_zero_run(arguments.pop("config"))
        return self.edit.initialize_with(original, **arguments)


class EditCallback(TrainerCallback):
    """Ends the training with a synchronisation, and draws the ``edit/`` charts.

    Args:
        edit: The replicas.
    """

    def __init__(self, edit: EDiT) -> None:
        self._edit = edit
        self._writer: SummaryWriter | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Opens the charts, ``<output_dir>/runs/edit``, if the Trainer reports to TensorBoard."""
        if state.is_world_process_zero and "tensorboard" in args.report_to:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(os.path.join(args.output_dir, "runs", "edit"))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Draws finished synchronisations."""
        self._draw()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Brings all replicas to one anchor, the model that is saved."""
        self._edit.synchronize()
        self._draw()
        if self._writer is not None:
            self._writer.close()

    def _draw(self) -> None:
        for record in self._edit.records():
            if self._writer is not None:
                for tag, value in sync_events(record).items():
                    self._writer.add_scalar(tag, value, record.step)
