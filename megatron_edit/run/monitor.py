"""What a run says: the log line, validation lines and TensorBoard (through DeepSpeed)."""

from __future__ import annotations

import datetime
import math
import sys
from argparse import Namespace
from typing import TextIO

from megatron_edit.backends.megatron.units import unit_names
from megatron_edit.engine.record import SyncRecord
from megatron_edit.errors import ConfigurationError
from megatron_edit.platform import ds_compat
from megatron_edit.run.charts import chart_layout, sync_events, training_events
from megatron_edit.run.interval import Interval
from megatron_edit.run.stop import Stop


class Monitor:
    """Prints on rank 0 and writes TensorBoard, csv and wandb through DeepSpeed's MonitorMaster.

    Args:
        args: The arguments of the run.
        first_step: Steps done before this run.

    Raises:
        ConfigurationError: A folder cannot be written; on rank 0 alone, which writes.
    """

    def __init__(self, args: Namespace, first_step: int) -> None:
        self._args = args
        self._charted = first_step
        self._last_norm = 0.0
        self._anomalies = 0
        try:
            self._master = ds_compat.monitor_master(args.ds_config, args.wandb_exp_name)
        except OSError as error:
            raise ConfigurationError(
                f"--tensorboard-dir (or csv_monitor.output_path): cannot write to "
                f"{error.filename}: {error.strerror}; give a writable folder"
            ) from None
        if args.rank == 0 and self._master.tb_monitor is not None:
            units = unit_names(args.num_layers, not args.untie_embeddings_and_output_weights)
            writer = self._master.tb_monitor.summary_writer
            writer.add_custom_scalars(chart_layout(args.replicas, units))

    def synchronised(self, records: list[SyncRecord]) -> None:
        """Writes the ``edit/`` charts of synchronisations and warns of rollbacks."""
        for record in records:
            self._last_norm = record.pseudo_grad_norm
            self._anomalies += record.anomalies
            self._write(sync_events(record), record.step)
            for unit in record.rolled_back:
                column = record.units.index(unit)
                norms = ", ".join(f"{row[column]:.4g}" for row in record.norms)
                self.say(
                    f"warning: round {record.round}: every replica of unit {unit} was anomalous "
                    f"(norms {norms}); it went back to the anchor, "
                    f"{record.consecutive_rollbacks[column]} time(s) in a row"
                )

    def interval(self, interval: Interval) -> None:
        """Prints the log line and writes Megatron's training charts."""
        self.say(self.log_line(interval))
        # The first log line at or after each multiple of --tensorboard-log-interval: the figures
        # are gathered for log lines alone.
        every, step = self._args.tensorboard_log_interval, interval.iteration
        if step // every > self._charted // every:
            self._write(training_events(interval, self._args), step)
            self._charted = step
        self._anomalies = 0

    def log_line(self, interval: Interval) -> str:
        """Megatron's log line, with the fields of the synchronisation at its end."""
        now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")
        total = self._args.train_iters
        fields = [
            f" [{now}] iteration {interval.iteration:8d}/{total:8d}",
            f"consumed samples: {interval.consumed_samples:12d}",
            f"elapsed time per iteration (ms): {interval.step_ms:.1f}",
            *self._throughput(interval),
            f"learning rate: {interval.learning_rate:.6E}",
            f"global batch size: {self._args.global_batch_size:5d}",
            f"lm loss: {interval.loss:.6E}",
            "loss scale: 1.0",
            f"grad norm: {interval.grad_norm:.3f}",
            f"number of skipped iterations: {interval.skipped:3d}",
            f"number of nan iterations: {interval.nan_iterations:3d}",
            f"sync round: {interval.sync_round:4d}",
            f"pseudo grad norm: {self._last_norm:.3f}",
            f"anomalies: {self._anomalies:3d}",
            f"exposed sync (ms): {interval.exposed_ms:.1f}",
        ]
        return " | ".join(fields) + " |"

    def _throughput(self, interval: Interval) -> list[str]:
        if not self._args.log_throughput:
            return []
        return [f"throughput per GPU (TFLOP/s/GPU): {interval.tflops:.3f}"]

    def validation(
        self, iteration: int, losses: list[float], where: str = "", chart: bool = True
    ) -> None:
        """Prints and writes a validation result.

        Args:
            iteration: Steps done.
            losses: Mean loss of each replica on the same samples.
            where: Said after the iteration, e.g. ``on test set``.
            chart: Whether it is a point of the validation charts.
        """
        loss = sum(losses) / len(losses)
        perplexity = math.exp(min(20.0, loss))
        head = f" validation loss at iteration {iteration}{where and ' ' + where}"
        line = f"{head} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity:.6E} |"
        if len(losses) > 1:
            line += f" spread over replicas: {max(losses) - min(losses):.3E} |"
        rule = "-" * len(line)
        self.say(f"{rule}\n{line}\n{rule}")
        if chart:
            events = {"lm loss validation": loss, "lm loss validation ppl": perplexity}
            self._write(events, iteration)

    def stopped(self, step: int, stop: Stop) -> None:
        """Says why the run ends early."""
        if stop.failed:
            self.say(f"error: stopped at step {step}: {stop.reason}", sys.stderr)
        else:
            self.say(f"stopped at step {step}: {stop.reason}")

    def finished_before(self, step: int) -> None:
        """Says that the checkpoint which was loaded is the end of its run."""
        self.say(
            f"the run in {self._args.load} is finished, step {step} of {self._args.train_iters}: "
            "nothing is trained, nothing is saved"
        )

    def say(self, text: str, file: TextIO | None = None) -> None:
        """Prints on rank 0."""
        if self._args.rank == 0:
            print(text, file=file, flush=True)

    def _write(self, events: dict[str, float], iteration: int) -> None:
        self._master.write_events([(tag, value, iteration) for tag, value in events.items()])
