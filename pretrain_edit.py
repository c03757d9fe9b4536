"""Pre-trains a Llama-style model with EDiT: Megatron's flags, DeepSpeed's launcher and JSON.

deepspeed --num_accelerators 4 pretrain_edit.py ... --deepspeed --deepspeed_config FILE
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_edit import checkpoint, cpu, ds_compat
from megatron_edit.arguments import describe, parse_args
from megatron_edit.data import build_datasets, data_identity
from megatron_edit.errors import exit_on_configuration_error
from megatron_edit.exit_agreement import ExitAgreement
from megatron_edit.factory import get_edit_model_and_optimizer
from megatron_edit.mesh import Mesh, build_mesh
from megatron_edit.model import build_model, count_parameters
from megatron_edit.monitor import Monitor
from megatron_edit.tokenizer import build_tokenizer, model_vocab_size
from megatron_edit.training import (
    StopConditions,
    TooManyNansError,
    Trainer,
    optimizer_config,
)

Save = Callable[[], None]


def main() -> int:
    """Runs the training of this rank; returns the exit code."""
    with exit_on_configuration_error():
        args = parse_args()
        tokenizer = build_tokenizer(args)
        args.padded_vocab_size = model_vocab_size(args, tokenizer)
        args.sources["padded_vocab_size"] = "computed"
        state = checkpoint.read_state(args)
        mesh = set_up(args)
        datasets = build_datasets(args, tokenizer)
        identity = data_identity(args)
        checkpoint.check_data(args, state, identity)

    chunks, optimizer = get_edit_model_and_optimizer(
        build_model(args),
        optimizer_config(args),
        args.edit,
        mesh,
        samples_per_step=args.global_batch_size // args.replicas,
        compute_dtype=args.params_dtype,
        reshard_after_forward=args.data_parallel_sharding_strategy == "optim_grads_params",
    )
    engine = optimizer.engine
    if state is not None:
        checkpoint.load(args, mesh, optimizer, state)
    monitor = Monitor(args, engine.unit_names)
    monitor.say(f"parameters: {count_parameters(args):,}; starts at step {engine.step}")
    trainer = Trainer(args, mesh, chunks, optimizer, datasets)
    stop = StopConditions(args, agreement(args))

    def save() -> None:
        monitor.say(f"saved {checkpoint.save(args, mesh, optimizer, identity)}")

    try:
        reason = train(args, trainer, monitor, stop, save)
    except TooManyNansError as error:
        monitor.say(f"error: {error}")
        return 1
    if reason is not None:
        monitor.say(f"stopped at step {engine.step}: {reason}")
        if args.save:
            save()
        return 1 if reason.startswith("error") else 0
    finish(args, trainer, monitor, save)
    return 0


def set_up(args: Namespace) -> Mesh:
    """Joins the other ranks and says what runs where."""
    if torch.cuda.is_available():
        torch.cuda.set_device(args.local_rank)
    cpu.install()
    ds_compat.init_distributed(args.distributed_backend, args.distributed_timeout_minutes)
    mesh = build_mesh(
        args.replicas,
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        args.distributed_timeout_minutes,
    )
    if ds_compat.configure_comms_logger(args.ds_config):
        mesh.sync.on_collective = ds_compat.log_collective
    if args.rank == 0:
        print(mesh.describe(), flush=True)
        print(describe(args), flush=True)
    return mesh


def agreement(args: Namespace) -> ExitAgreement | None:
    """How ranks agree to stop, where something may stop them."""
    if not args.exit_signal_handler and args.exit_duration_in_mins is None:
        return None
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    return ExitAgreement(ds_compat.default_store(), args.rank, args.world_size, timeout)


def train(
    args: Namespace, trainer: Trainer, monitor: Monitor, stop: StopConditions, save: Save
) -> str | None:
    """The loop. Returns why it ended early, or None."""
    engine = trainer.engine
    trainer.start()
    while engine.step < args.train_iters:
        if (reason := stop.reason(engine.step)) is not None:
            return reason
        # Warm-up: gradients averaged over all replicas. Then tau steps apart, and every tau steps
        # the units synchronise one by one inside the forward of the next.
        trainer.step()
        if (failure := report(trainer, monitor)) is not None:
            return failure
        step = engine.step
        if step % args.log_interval == 0:
            monitor.interval(trainer.interval())
        if args.eval_iters and step % args.eval_interval == 0:
            monitor.validation(step, trainer.evaluate(trainer.valid_data))
        if args.save and args.save_interval and step % args.save_interval == 0:
            save()
    return None


def report(trainer: Trainer, monitor: Monitor) -> str | None:
    """Logs finished synchronisations; returns an error if one unit failed too often in a row."""
    engine = trainer.engine
    records = engine.records()
    monitor.synchronised(records)
    limit = engine.config.max_consecutive_rollbacks
    for record in records:
        trainer.add_exposed(record.exposed_ms)
        worst = max(record.consecutive_rollbacks)
        if worst >= limit:
            unit = record.units[record.consecutive_rollbacks.index(worst)]
            return (
                f"error: every replica of unit {unit} was anomalous in {worst} synchronisations in "
                f"a row, edit.max_consecutive_rollbacks {limit}"
            )
    return None


def finish(args: Namespace, trainer: Trainer, monitor: Monitor, save: Save) -> None:
    """Consolidates the replicas at the end of training, evaluates and saves the result."""
    engine = trainer.engine
    engine.synchronize()
    report(trainer, monitor)
    if args.eval_iters:
        monitor.validation(engine.step, trainer.evaluate(trainer.valid_data), "on validation set")
        if trainer.test_data is not None:
            monitor.validation(engine.step, trainer.evaluate(trainer.test_data), "on test set")
    if args.save:
        save()
    if trainer.mesh.sync.on_collective is not None:
        ds_compat.print_comms_summary()


if __name__ == "__main__":
    code = main()
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(code)
