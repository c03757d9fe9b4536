"""Runs pretrain_edit.py inside forked test ranks and notes what it trained on and printed."""

from __future__ import annotations

import functools
import importlib
import io
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from harness import digest
from megatron.core import tensor_parallel
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

import pretrain_edit
from megatron_edit.backends.megatron.mesh import destroy_mesh
from megatron_edit.checkpoint.checkpoint import Saver
from megatron_edit.platform.ds_compat import name_accelerator
from megatron_edit.run import trainer
from megatron_edit.run.trainer import Trainer

# pretrain_edit imports these late; forked ranks are to find them imported.
name_accelerator()
importlib.import_module("deepspeed.comm")
importlib.import_module("deepspeed.monitor.monitor")
assert importlib.import_module("deepspeed.ops").__compatible_ops__

TINY = {
    "--num-layers": "2",
    "--hidden-size": "32",
    "--ffn-hidden-size": "32",
    "--num-attention-heads": "2",
    "--seq-length": "16",
    "--max-position-embeddings": "16",
    "--normalization": "RMSNorm",
    "--attention-dropout": "0",
    "--hidden-dropout": "0",
    "--init-method-std": "0.05",
    "--make-vocab-size-divisible-by": "8",
    "--train-iters": "12",
    "--lr": "3e-3",
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": "63",
    "--num-workers": "0",
    "--split": "80,10,10",
    "--eval-iters": "0",
    "--micro-batch-size": "2",
    "--log-interval": "1",
    "--edit-replicas": "2",
    "--edit-warmup-steps": "3",
    "--edit-sync-interval": "4",
}
SWITCHES = ["--swiglu", "--disable-bias-linear"]


@functools.cache
def _folder() -> TemporaryDirectory[str]:
    """Goes away with the process."""
    return TemporaryDirectory()


@functools.cache
def tokens(seed: int = 0) -> str:
    """Prefix of 400 documents of 60 random token ids each; they end with the process."""
    prefix = f"{_folder().name}/seed{seed}"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    generator = np.random.default_rng(seed)
    for _ in range(400):
        builder.add_document(generator.integers(63, size=60), [60])
    builder.finalize(f"{prefix}.idx")
    return prefix


# Made before the forks: all ranks read the same.
tokens()


def command_line(changes: str = "", without: str = "") -> list[str]:
    """The flags of a tiny run, some of them changed, added or left out.

    Args:
        changes: Flags as on a command line, each with at most one value.
        without: Flags to leave out.
    """
    flags: dict[str, str | None] = {**TINY, **dict.fromkeys(SWITCHES), "--data-path": tokens()}
    words = changes.split()
    for i, word in enumerate(words):
        if word.startswith("--"):
            value = words[i + 1] if i + 1 < len(words) else "--"
            flags[word] = None if value.startswith("--") else value
    kept = {flag: value for flag, value in flags.items() if flag not in without.split()}
    return [word for pair in kept.items() for word in pair if word is not None]


@dataclass
class Run:
    """What one run of pretrain_edit.py did on one rank.

    Attributes:
        code: Its exit code.
        out: What it printed on stdout, ``err`` on stderr.
        losses: Per log line, the loss of each replica: exact.
        rates: Per log line, the learning rate.
        ids: Numbers of the samples of each micro-batch, in the order of their use.
        loaded: Hashes of everything that is carried from step to step, before the first step.
        state: The same at the end.
        saved: The same at every step that was saved.
        step: Steps done at the end.
    """

    code: int = 0
    out: str = ""
    err: str = ""
    losses: list[list[float]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    loaded: dict[str, str] = field(default_factory=dict)
    state: dict[str, str] = field(default_factory=dict)
    saved: dict[int, dict[str, str]] = field(default_factory=dict)
    step: int = -1


Prepare = Callable[[Trainer], None]


def pretrain(argv: list[str], prepare: Prepare | None = None) -> Run:
    """Runs one training on this rank of :func:`distributed.run_ranks`.

    Args:
        argv: The command line.
        prepare: Called with the trainer before the first step.
    """
    run = Run()
    trainers: list[Trainer] = []
    interval, init, iterator = Trainer.interval, Trainer.__init__, trainer.train_iterator
    save = Saver.save

    def noting_interval(trainer: Trainer) -> Any:
        figures = interval(trainer)
        run.losses.append(figures.losses)
        run.rates.append(figures.learning_rate)
        return figures

    def noting_init(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        init(trainer, *args, **kwargs)
        trainers.append(trainer)
        if prepare is not None:
            prepare(trainer)
        run.loaded = state_of(trainer)

    def noting_save(saver: Saver) -> Any:
        run.saved[trainers[0].iteration] = state_of(trainers[0])
        return save(saver)

    def noting_iterator(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for batch in iterator(*args, **kwargs):
            run.ids.append(batch["index"].tolist())
            yield batch

    out, err = io.StringIO(), io.StringIO()
    with (
        patch.object(Trainer, "interval", noting_interval),
        patch.object(Trainer, "__init__", noting_init),
        patch.object(Saver, "save", noting_save),
        patch.object(trainer, "train_iterator", noting_iterator),
        patch("sys.argv", ["pretrain_edit.py", *argv]),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            run.code = pretrain_edit.main()
        except SystemExit as exit_:
            run.code = int(exit_.code or 0)
        finally:
            destroy_mesh()
    run.out, run.err = out.getvalue(), err.getvalue()
    if trainers:
        run.step = trainers[0].engine.step
        run.state = state_of(trainers[0])
    return run


def state_of(trainer: Trainer) -> dict[str, str]:
    """Hashes of this rank's state, one per kind."""
    engine, optimizer = trainer.engine, trainer.optimizer
    moments = [value for _, value in sorted(optimizer.named_moments().items())]
    return {
        "parameters": digest(local for unit in engine.units for local in unit.locals),
        "moments": digest(getattr(m, "_local_tensor", m) for m in moments),
        "anchor": digest(state.anchor for state in engine.outer),
        "momentum": digest(s.momentum for s in engine.outer if s.momentum is not None),
        "detector": digest(engine.detector.state_dict().values()),
        "counters": f"{engine.step} {engine.round} {engine.steps_in_round}",
        "skipped": digest([optimizer.skipped_steps, engine.skipped_in_round]),
        "rng": digest([torch.get_rng_state(), *_tracked_generators()]),
    }


def _tracked_generators() -> list[torch.Tensor]:
    states = tensor_parallel.get_cuda_rng_tracker().get_states()
    return [state for _, state in sorted(states.items())]


def newest(folder: Path) -> int:
    """The step that a folder's tracker names."""
    return int((folder / "latest_checkpointed_iteration.txt").read_text())
