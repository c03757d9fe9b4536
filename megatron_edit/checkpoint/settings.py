"""The settings of a run that goes on from a checkpoint, against those of the run that wrote it.

Most settings may change, and the user is told. Those of the learning-rate schedule may not without
being asked for: a resumed run would go on at a rate that nobody chose, as when it is longer and the
decay, which by default is as long as the run, with it. Megatron has the same two flags for it, but
finds out when the model has been built.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_edit.checkpoint.files import CONFIG, read_json, refusing_damage
from megatron_edit.config import schedule
from megatron_edit.config.arguments import as_dict, as_text
from megatron_edit.errors import ConfigurationError

# They are about the start, not the run.
OF_THE_START = {
    "rank", "local_rank", "load", "no_load_optim", "no_load_rng", "override_data_path",
    "override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler",
}  # fmt: skip


def settle_settings(args: Namespace, folder: Path) -> None:
    """Tells what differs from the checkpoint's run, and settles the schedule.

    Cheap, and to be called before a model is built.

    Args:
        args: The arguments of the run. With ``--use-checkpoint-opt_param-scheduler`` their schedule
            becomes that of the checkpoint.
        folder: The checkpoint.

    Raises:
        ConfigurationError: The schedule differs, and no flag says which one to take; or the file
            is damaged.
    """
    with refusing_damage(folder.parent):
        saved = _saved_settings(folder / CONFIG)
    changes = _changes(saved, json.loads(json.dumps(as_dict(args)["values"])))
    if changes and args.rank == 0:
        print(_table(changes), flush=True)
    if args.use_checkpoint_opt_param_scheduler:
        _take_over(args, saved)
    elif not args.override_opt_param_scheduler:
        _refuse_other_schedule(args, saved)


def _saved_settings(path: Path) -> dict[str, Any]:
    values = read_json(path, ["values"])["values"]
    for name in (*schedule.SETTINGS, "global_batch_size"):
        if name not in values:
            raise ValueError(f"{path} is damaged: {name} is missing")
    return dict(values)


def _changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Name -> text before and now, of what both know and see differently."""
    return {
        name: (as_text(saved[name]), as_text(value))
        for name, value in now.items()
        if name in saved and name not in OF_THE_START and saved[name] != value
    }


def _table(changes: Mapping[str, tuple[str, str]]) -> str:
    width = max(map(len, changes))
    lines = [f"  {name:<{width}}  {before} -> {now}" for name, (before, now) in changes.items()]
    return "\n".join(["settings that differ from the checkpoint's (saved -> now)", *lines])


def _refuse_other_schedule(args: Namespace, saved: Mapping[str, Any]) -> None:
    before, now = schedule.schedule(saved), schedule.schedule(vars(args))
    differing = [
        f"{name} {as_text(before[name])} -> {as_text(now[name])}"
        for name in now
        if before[name] != now[name]
    ]
    if not differing:
        return
    decays = before["lr_decay_samples"] != now["lr_decay_samples"]
    of_length = decays and args.sources["lr_decay_iters"] == "computed"
    hint = " (without --lr-decay-iters the decay is as long as the run)" if of_length else ""
    raise ConfigurationError(
        f"--load: this run would leave the schedule of the checkpoint in {args.load}: "
        f"{', '.join(differing)}{hint}; allowed: the same values; "
        "--override-opt_param-scheduler to take the new ones, "
        "--use-checkpoint-opt_param-scheduler to keep the checkpoint's; or --finetune"
    )


def _take_over(args: Namespace, saved: Mapping[str, Any]) -> None:
    """Gives this run the checkpoint's schedule; steps of another size become as many samples."""
    taken = {name: saved[name] for name in schedule.SETTINGS}
    for name in ("lr_decay_iters", "lr_warmup_iters"):
        samples = saved[name] * saved["global_batch_size"]
        if samples % args.global_batch_size:
            raise ConfigurationError(
                f"--use-checkpoint-opt_param-scheduler: {name} of the checkpoint in {args.load} "
                f"are {samples} samples, not divisible by the global batch size "
                f"{args.global_batch_size}; allowed: --override-opt_param-scheduler"
            )
        taken[name] = samples // args.global_batch_size
    for name, value in taken.items():
        setattr(args, name, value)
        args.sources[name] = "checkpoint"
