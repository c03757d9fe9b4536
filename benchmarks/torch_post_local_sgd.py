"""torch's PostLocalSGDOptimizer on the model, data and batch of pretrain_edit.py, to compare with.

deepspeed --num_accelerators 2 --module benchmarks.torch_post_local_sgd, with the flags of
pretrain_edit.py for as many replicas as ranks. ``edit.sync_interval`` is the period,
``edit.warmup_steps`` the steps before the first averaging, ``--log-interval`` is honoured.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from benchmarks.link.gate import Gate
from megatron_edit.backends.megatron.mesh import build_mesh
from megatron_edit.backends.megatron.model import build_model, count_parameters
from megatron_edit.config.arguments import parse_args
from megatron_edit.data.datasets import build_datasets, train_iterator
from megatron_edit.data.tokenizer import build_tokenizer, model_vocab_size
from megatron_edit.errors import ConfigurationError, exit_on_configuration_error
from megatron_edit.platform import cpu, ds_compat
from megatron_edit.run.failure import exit_on_failure
from megatron_edit.run.trainer import forward_step


class TimedAverager(PeriodicModelAverager):
    """Also adds up the seconds it takes."""

    seconds = 0.0

    def average_parameters(self, params: Iterable[Any]) -> None:
        started_s = time.perf_counter()
        super().average_parameters(params)
        self.seconds += time.perf_counter() - started_s

    def take_seconds(self) -> float:
        """The seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def train(args: Namespace) -> None:
    """Trains as the arguments say."""
    tokenizer = build_tokenizer(args)
    args.padded_vocab_size = model_vocab_size(args, tokenizer)
    if torch.cuda.is_available():
        torch.cuda.set_device(args.local_rank)
    cpu.install()
    ds_compat.init_distributed(args.distributed_backend, args.distributed_timeout_minutes)
    if args.replicas != args.world_size:
        raise ConfigurationError(f"--edit-replicas: got {args.replicas}; allowed: one per rank")
    build_mesh(args.replicas)
    dataset, *_ = build_datasets(args, tokenizer)
    (model,) = build_model(args)
    inner = torch.optim.AdamW(
        model.parameters(),
        lr=args.lr,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_eps,
        weight_decay=args.weight_decay,
        fused=True,
    )
    averager = TimedAverager(args.edit.sync_interval, args.edit.warmup_steps)
    optimizer = PostLocalSGDOptimizer(inner, averager)
    if args.rank == 0:
        print(f"parameters: {count_parameters(args):,}", flush=True)

    gate = Gate.from_environment(args.rank)
    batches = train_iterator(dataset, args, args.rank, 0, 0)
    for step in range(1, args.train_iters + 1):
        gate.before_step()
        started_s = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros(())
        for _ in range(args.num_microbatches):
            output, mean_loss = forward_step(batches, model)
            loss, _ = mean_loss(output)
            (loss / args.num_microbatches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
        optimizer.step()
        averaging_s = averager.take_seconds()
        gate.exposed(averaging_s)
        gate.after_step()
        if args.rank == 0 and step % args.log_interval == 0:
            step_ms = 1e3 * (time.perf_counter() - started_s)
            print(
                f" iteration {step:8d}/{args.train_iters:8d} | elapsed time (ms): {step_ms:.1f} | "
                f"averaging (ms): {1e3 * averaging_s:.1f} | lm loss: {loss.item():.6E} |",
                flush=True,
            )
    gate.wait()


def main() -> int:
    """Trains as the command line says; returns the exit code."""
    with exit_on_configuration_error():
        train(parse_args())
    return 0


if __name__ == "__main__":
    with exit_on_failure():
        code = main()
        if dist.is_initialized():
            dist.destroy_process_group()
    sys.exit(code)
