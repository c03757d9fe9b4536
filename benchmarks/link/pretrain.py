"""pretrain_edit.py, training in turns with other runs; see ``gate``.

deepspeed ... --module benchmarks.link.pretrain, with the flags of pretrain_edit.py
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

import pretrain_edit
from benchmarks.link.gate import Gate
from megatron_edit.engine.record import SyncRecord
from megatron_edit.run import trainer
from megatron_edit.run.failure import exit_on_failure


class GatedTrainer(trainer.Trainer):
    """A trainer that asks for leave before a step and reports how long it waited for others."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._gate = Gate.from_environment(self.args.rank)
        self.engine.average_gradients = self._timed(  # type: ignore[method-assign]
            self.engine.average_gradients
        )

    def step(self) -> None:
        self._gate.before_step()
        super().step()
        self._gate.after_step()

    def records(self) -> list[SyncRecord]:
        records = super().records()
        self._gate.exposed(sum(record.exposed_ms for record in records) / 1e3)
        return records

    def synchronize(self) -> None:
        self._gate.wait()
        super().synchronize()

    def _timed(self, average: Callable[[], None]) -> Callable[[], None]:
        """The gradient average of synchronous training, which the engine keeps no record of."""

        def timed() -> None:
            if not self.engine.lockstep:
                return
            started_s = time.perf_counter()
            average()
            self._gate.exposed(time.perf_counter() - started_s)

        return timed


if __name__ == "__main__":
    trainer.Trainer = GatedTrainer  # type: ignore[assignment,misc]
    with exit_on_failure():
        code = pretrain_edit.main()
        if dist.is_initialized():
            dist.destroy_process_group()
    sys.exit(code)
