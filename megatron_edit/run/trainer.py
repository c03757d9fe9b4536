"""The parts of the training loop: one step, an evaluation, the figures of a log line."""

from __future__ import annotations

import math
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_edit.backends.megatron.data_parallel import EDiTDataParallel
from megatron_edit.backends.megatron.model import flops_per_token
from megatron_edit.backends.megatron.optimizer import EDiTDistributedOptimizer
from megatron_edit.config.schedule import schedule
from megatron_edit.data.datasets import train_iterator, validation_iterator, validation_order
from megatron_edit.engine.record import SyncRecord
from megatron_edit.platform import cpu
from megatron_edit.replicas.mesh import Mesh
from megatron_edit.run.faults import Injection
from megatron_edit.run.interval import Interval, Totals
from megatron_edit.run.nan_rows import NanRow, NanRows
from megatron_edit.run.step_clock import StepClock

Batches = Iterator[dict[str, torch.Tensor]]


def optimizer_config(args: Namespace) -> OptimizerConfig:
    """megatron-core's optimizer configuration."""
    return OptimizerConfig(
        lr=args.lr,
        min_lr=args.min_lr,
        weight_decay=args.weight_decay,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_eps=args.adam_eps,
        clip_grad=args.clip_grad,
    )


def build_scheduler(
    args: Namespace, optimizer: EDiTDistributedOptimizer
) -> OptimizerParamScheduler:
    """Megatron's learning-rate schedule, counted in samples of all replicas."""
    plan = schedule(vars(args))
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=plan["lr"],
        min_lr=plan["min_lr"],
        lr_warmup_steps=plan["lr_warmup_samples"],
        lr_decay_steps=plan["lr_decay_samples"],
        lr_decay_style=plan["lr_decay_style"],
        start_wd=plan["weight_decay"],
        end_wd=plan["weight_decay"],
        wd_incr_steps=args.train_iters * args.global_batch_size,
        wd_incr_style="constant",
    )


def forward_step(batches: Batches | None, model: Any) -> tuple[torch.Tensor, Any]:
    """megatron-core's ``forward_step_func``: the output of a chunk and how to make a loss of it."""
    if batches is None:
        return model(None, None, None), partial(_mean_loss, None)
    batch = {
        name: tensor.to(cpu.device(), non_blocking=True) for name, tensor in next(batches).items()
    }
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(_mean_loss, batch["loss_mask"])


def _mean_loss(
    mask: torch.Tensor | None, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean over the tokens of a micro-batch that count; the second value is for the log."""
    assert mask is not None, "the last pipeline stage reads no data"
    loss = (losses.float() * mask).sum() / mask.sum().clamp(min=1.0)
    return loss, loss.detach().clone()


class Trainer:
    """One rank's training: what happens in a step and around it.

    Args:
        args: The arguments of the run.
        mesh: The mesh.
        chunks: This rank's wrapped model chunks.
        optimizer: Their optimizer.
        datasets: Train, validation and test dataset; the last two may be None.

    Attributes:
        iteration: Global batches that all replicas together have trained on, as of the last step
            in which they knew of one another. Without the time trigger that is every step.
        phase: What this rank is doing, for the message when it fails.
        clock: Measures steps.
    """

    def __init__(
        self,
        args: Namespace,
        mesh: Mesh,
        chunks: list[EDiTDataParallel],
        optimizer: EDiTDistributedOptimizer,
        datasets: Sequence[Any],
    ) -> None:
        self.args, self.mesh, self.chunks, self.optimizer = args, mesh, chunks, optimizer
        self.engine = optimizer.engine
        self.scheduler = build_scheduler(args, optimizer)
        self.train_data, self.valid_data, self.test_data = datasets
        self.injection = Injection(args.edit, mesh)
        self.iteration = self._before = self._iteration()
        self.phase = "start"
        self.clock = StepClock(cpu.wait_for_device)
        self._learning_rate = 0.0
        self._grad_norm = torch.zeros((), device=self.engine.device)
        delay_steps = args.edit.delay_steps
        self._nan_rows = NanRows(args.max_nan_iterations, delay_steps, self.engine.device)
        self._totals = self._new_totals()

    def start(self) -> None:
        """Takes up data and learning rate at the engine's step."""
        self.scheduler.step(self.engine.consumed_samples)
        self.iteration = self._iteration()
        self._batches = [
            self._train_batches() if self._reads_data(chunk) else None for chunk in self.chunks
        ]
        self._totals = self._new_totals()
        self.clock.restart()

    def _train_batches(self) -> Batches:
        batches = train_iterator(
            self.train_data,
            self.args,
            self.mesh.replica,
            self.mesh.shard_rank,
            self.engine.step,
        )
        return self.injection.spoil(batches, self.engine, self.args.padded_vocab_size)

    def step(self) -> None:
        """One inner step of this replica; it may begin with a synchronisation."""
        self.phase = "forward and backward"
        lockstep, landed = self.engine.lockstep, self.engine.landed
        self.injection.before_step(self.engine)
        self.optimizer.zero_grad()
        self.injection.settle()
        started_s = time.perf_counter()
        for chunk in self.chunks:
            chunk.train()
        losses = self._forward_backward(self._batches, self.args.num_microbatches)
        self.phase = "optimizer step"
        self._learning_rate = self.optimizer.param_groups[0]["lr"]
        _, self._grad_norm, _ = self.optimizer.step()
        self.scheduler.step(self.engine.consumed_samples - self.scheduler.num_steps)
        loss = _mean(losses, self.engine.device)
        bad = ~(torch.isfinite(loss) & torch.isfinite(self._grad_norm))
        self._totals.add(loss, bad)
        self._nan_rows.add(bad, lockstep, synchronised=self.engine.landed > landed)
        self.injection.settle()
        self.injection.after_step(time.perf_counter() - started_s)
        if self.engine.together:
            self._before, self.iteration = self.iteration, self._iteration()

    def _iteration(self) -> int:
        return self.engine.consumed_samples // self.args.global_batch_size

    def passed(self, interval: int) -> bool:
        """Whether the last step that all replicas know of passed a multiple of ``interval``."""
        return self.iteration // interval > self._before // interval

    @property
    def finished(self) -> bool:
        """Whether the run has had its samples; all replicas find out in the same step."""
        return self.engine.together and self.iteration >= self.args.train_iters

    def _forward_backward(
        self, batches: list[Batches | None], micro_batches: int, forward_only: bool = False
    ) -> list[torch.Tensor]:
        """Runs the pipeline schedule; returns the micro-batches' losses on the last stage."""
        one = len(self.chunks) == 1
        losses: list[torch.Tensor] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches[0] if one else batches,
            model=self.chunks[0] if one else self.chunks,
            num_microbatches=micro_batches,
            seq_length=self.args.seq_length,
            micro_batch_size=self.args.micro_batch_size,
            forward_only=forward_only,
        )
        return losses

    def _reads_data(self, chunk: EDiTDataParallel) -> bool:
        return bool(chunk.module.pre_process or chunk.module.post_process)

    @torch.no_grad()
    def evaluate(self, dataset: Any) -> list[float]:
        """Mean loss of each replica on the same samples; changes nothing that training sees."""
        with self.outside_of_steps("evaluation"):
            return self._evaluate(dataset)

    def _evaluate(self, dataset: Any) -> list[float]:
        for chunk in self.chunks:
            chunk.eval()
        batches = [
            validation_iterator(dataset, self.args, self.mesh.shard_rank)
            if self._reads_data(chunk)
            else None
            for chunk in self.chunks
        ]
        micro_batches = validation_order(self.args).num_microbatches
        losses: list[torch.Tensor] = []
        with self.engine.evaluated_parameters():
            for _ in range(self.args.eval_iters):
                losses += self._forward_backward(batches, micro_batches, forward_only=True)
        for chunk in self.chunks:
            chunk.train()
        sums = self._per_replica(_mean(losses, self.engine.device).reshape(1))
        return [float(row[0]) for row in sums]

    def interval(self) -> Interval:
        """Figures since the last call, of all replicas; called by all ranks at the same step."""
        self.phase = "log line"
        totals, engine, rows = self._totals, self.engine, self._nan_rows
        sums = [totals.loss, totals.finite_losses, totals.nan_iterations]
        counters = [rows.steps, rows.lockstep_steps, rows.synchronisations]
        gathered = self._per_replica(torch.stack([*sums, *counters]))
        loss, finite, nans, *_ = gathered.unbind(dim=1)
        skipped = self.optimizer.skipped_steps - totals.skipped_before
        counts = self.mesh.peers.all_gather(
            torch.stack([skipped, self._grad_norm]), "gathering the log line"
        )
        # A replica without a finite step in the interval has no loss to report.
        losses = torch.where(finite > 0, loss / finite, torch.nan)
        step_s = self.clock.seconds() / max(totals.steps, 1)
        tokens_per_rank = self.args.global_batch_size * self.args.seq_length / self.args.world_size
        result = Interval(
            iteration=self.iteration,
            consumed_samples=engine.consumed_samples,
            step_ms=1e3 * step_s,
            learning_rate=self._learning_rate,
            losses=losses.tolist(),
            grad_norm=float(counts[0, 1]),
            skipped=int(counts[:, 0].sum()),
            nan_iterations=sum(map(_whole, nans.tolist())),
            nan_rows=[NanRow(*map(_whole, row)) for row in gathered[:, 3:].tolist()],
            sync_round=engine.round,
            exposed_ms=totals.exposed_ms / max(totals.steps, 1),
            tflops=flops_per_token(self.args) * tokens_per_rank / step_s / 1e12,
        )
        self._totals = self._new_totals()
        self._nan_rows.restart()
        self.clock.restart()
        return result

    @contextmanager
    def outside_of_steps(self, phase: str) -> Iterator[None]:
        """Context of what a loop does between steps; its time is not counted as theirs."""
        self.phase = phase
        with self.clock.paused():
            yield

    def synchronize(self) -> None:
        """Synchronises the replicas now: the end of training."""
        self.phase = "last synchronisation"
        self.engine.synchronize()

    def roll_back(self) -> None:
        """Puts all replicas back on the anchor."""
        self.phase = "going back to the anchor"
        self.engine.roll_back()

    def records(self) -> list[SyncRecord]:
        """Synchronisations finished since the last call."""
        records = self.engine.records()
        self._totals.exposed_ms += sum(record.exposed_ms for record in records)
        return records

    @property
    def whereabouts(self) -> str:
        """Step and phase, for the message when this rank fails."""
        return f"step {self.engine.step}, {self.phase}"

    def _per_replica(self, own: torch.Tensor) -> torch.Tensor:
        """Averages ``[n]`` values of the ranks that compute a loss, per replica: ``[R, n]``."""
        counts = self.mesh.is_last_stage and self.mesh.tensor_rank == 0
        own = own * (float(counts) / self.mesh.shard)
        if self.mesh.replica_size > 1:
            dist.all_reduce(own, group=self.mesh.worker_group)
        return self.mesh.peers.all_gather(own, "gathering the log line")

    def _new_totals(self) -> Totals:
        zero = torch.zeros((), device=self.engine.device)
        return Totals(
            loss=zero.clone(),
            finite_losses=zero.clone(),
            nan_iterations=zero.clone(),
            skipped_before=self.optimizer.skipped_steps.clone(),
        )


def _whole(count: float) -> int:
    """A count that is a mean over the S ranks of a replica: a rounding less, then up."""
    return math.ceil(count - 1e-3)


def _mean(losses: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """0-dim mean; 0 on a stage without losses."""
    if not losses:
        return torch.zeros((), device=device)
    return torch.stack(losses).mean()
