"""Pre-trains a Llama-style model with EDiT: Megatron's flags, DeepSpeed's launcher and JSON.

deepspeed --num_accelerators 4 pretrain_edit.py ... --deepspeed --deepspeed_config FILE
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from megatron_edit.config.arguments import parse_args
from megatron_edit.errors import exit_on_configuration_error
from megatron_edit.run.exit_agreement import build_agreement
from megatron_edit.run.failure import HostPeers, exit_on_failure, located, watching
from megatron_edit.run.stop import Stop, StopConditions, nan_limit, rollback_limit

if TYPE_CHECKING:
    from megatron_edit.checkpoint.checkpoint import Saver
    from megatron_edit.run.monitor import Monitor
    from megatron_edit.run.trainer import Trainer


def main() -> int:
    """Runs the training of this rank; returns the exit code."""
    with exit_on_configuration_error():
        args = parse_args()
        return pretrain(args)


def pretrain(args: Namespace) -> int:
    """From arguments to a trained model; returns the exit code."""
    # Not at the top of the file: megatron-core takes seconds, which a mistyped flag should not.
    from megatron_edit.backends.megatron.build import get_edit_model_and_optimizer
    from megatron_edit.backends.megatron.model import build_model, count_parameters
    from megatron_edit.backends.megatron.sharding import Sharding
    from megatron_edit.checkpoint import checkpoint
    from megatron_edit.checkpoint.settings import settle_settings
    from megatron_edit.checkpoint.state import check_data, read_state
    from megatron_edit.data.datasets import build_datasets, data_identity
    from megatron_edit.data.tokenizer import build_tokenizer, model_vocab_size
    from megatron_edit.platform import cpu
    from megatron_edit.run.monitor import Monitor
    from megatron_edit.run.set_up import set_up
    from megatron_edit.run.trainer import Trainer, optimizer_config

    tokenizer = build_tokenizer(args)
    args.padded_vocab_size = model_vocab_size(args, tokenizer)
    args.sources["padded_vocab_size"] = "computed"
    state = read_state(args)
    if state is not None and not args.finetune:
        settle_settings(args, Path(state["folder"]))
    first_step = 0 if state is None or args.finetune else state["step"]

    mesh = set_up(args)
    peers = HostPeers(cpu.device())
    who = f"rank {args.rank} (replica {mesh.replica})"
    with located(lambda: f"{who}, setting up", peers):
        datasets = build_datasets(args, tokenizer)
        identity = data_identity(args)
        check_data(args, state, identity)
        monitor = Monitor(args, first_step)
        keeps_gathered = args.data_parallel_sharding_strategy == "optim_grads"
        sharding = Sharding(mesh, args.params_dtype, reshard_after_forward=not keeps_gathered)
        chunks, optimizer = get_edit_model_and_optimizer(
            build_model(args, sharding=sharding),
            optimizer_config(args),
            args.edit,
            mesh,
            samples_per_step=args.global_batch_size // args.replicas,
            sharding=sharding,
        )
        consolidated = state is not None and checkpoint.load(args, mesh, optimizer, state)
        trainer = Trainer(args, mesh, chunks, optimizer, datasets)
        saver = checkpoint.Saver(args, mesh, optimizer, identity)
        conditions = StopConditions(args, build_agreement(args, first_step), first_step)
        monitor.say(f"parameters: {count_parameters(args):,}; starts at step {first_step}")

    def where() -> str:
        return f"{who}, {trainer.whereabouts}"

    with watching(where, mesh.peers.watch, peers), located(where, peers):
        if consolidated and trainer.finished:
            monitor.finished_before(trainer.iteration)
            evaluate_result(args, trainer, monitor)
            return 0
        stop = train(args, trainer, monitor, conditions, saver)
        if stop is None:
            stop = finish(args, trainer, monitor, saver)
        else:
            monitor.stopped(trainer.iteration, stop)
            if stop.rolls_back:
                trainer.roll_back()
            if stop.save:
                save(args, trainer, monitor, saver)
    return 1 if stop is not None and stop.failed else 0


def train(
    args: Namespace, trainer: Trainer, monitor: Monitor, conditions: StopConditions, saver: Saver
) -> Stop | None:
    """The loop. Returns why it ended early, or None."""
    engine = trainer.engine
    trainer.start()
    while not trainer.finished:
        if (stop := conditions.check(trainer)) is not None:
            return stop
        # Warm-up: gradients averaged over all replicas. Then tau steps apart, and every tau steps
        # the units synchronise one by one inside the forward of the next.
        trainer.step()
        if not engine.together:
            # Replicas that run by the clock log, evaluate, save and stop only where they meet.
            continue
        if (stop := report(args, trainer, monitor)) is not None:
            return stop
        step = trainer.iteration
        if trainer.passed(args.log_interval):
            figures = trainer.interval()
            monitor.interval(figures)
            if (stop := nan_limit(figures.nan_rows, args)) is not None:
                return stop
        if args.eval_iters and trainer.passed(args.eval_interval):
            monitor.validation(step, trainer.evaluate(trainer.valid_data))
        # The last step is saved by finish(), with the replicas consolidated.
        if args.save_interval and trainer.passed(args.save_interval) and not trainer.finished:
            save(args, trainer, monitor, saver)
    return None


def report(args: Namespace, trainer: Trainer, monitor: Monitor) -> Stop | None:
    """Logs finished synchronisations; stops where one unit failed too often in a row."""
    records = trainer.records()
    monitor.synchronised(records)
    return rollback_limit(records, args.edit.max_consecutive_rollbacks)


def finish(args: Namespace, trainer: Trainer, monitor: Monitor, saver: Saver) -> Stop | None:
    """Consolidates the replicas at the end of training, evaluates and saves the result."""
    from megatron_edit.platform import ds_compat

    trainer.synchronize()
    stop = report(args, trainer, monitor)
    if stop is not None:
        monitor.stopped(trainer.iteration, stop)
    evaluate_result(args, trainer, monitor)
    save(args, trainer, monitor, saver)
    sent_mb = trainer.mesh.peers.sent_bytes / 1e6
    monitor.say(f"sent to other replicas by rank 0: {sent_mb:.1f} MB")
    if trainer.mesh.peers.on_collective is not None:
        ds_compat.print_comms_summary()
    return stop


def evaluate_result(args: Namespace, trainer: Trainer, monitor: Monitor) -> None:
    """Evaluates the model that a run ends with."""
    if not args.eval_iters:
        return
    step = trainer.iteration
    monitor.validation(step, trainer.evaluate(trainer.valid_data), "on validation set")
    if trainer.test_data is not None:
        monitor.validation(step, trainer.evaluate(trainer.test_data), "on test set", chart=False)


def save(args: Namespace, trainer: Trainer, monitor: Monitor, saver: Saver) -> None:
    """Writes a checkpoint, if the run keeps any."""
    if args.save is None:
        return
    with trainer.outside_of_steps("saving a checkpoint"):
        if (folder := saver.save()) is not None:
            monitor.say(f"saved {folder}")


if __name__ == "__main__":
    with exit_on_failure():
        code = main()
        if dist.is_initialized():
            dist.destroy_process_group()
    sys.exit(code)
