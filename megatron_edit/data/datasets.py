"""Training data: datasets, the order of their samples, and the iterators over micro-batches.

Datasets are megatron-core's: documents are shuffled with the seed, laid end to end, cut into
samples of ``seq_length`` tokens, and the samples shuffled again. That gives one order for the run,
and step p uses the samples [p x GBS, (p + 1) x GBS) of it, however many replicas and shard ranks
there are. Replicas take contiguous parts of a step, the shard ranks of a replica contiguous parts
of that, micro-batches contiguous parts of that.

The order depends on the length of the run, as in Megatron: with several epochs their documents
are shuffled together, so another ``--train-iters`` is another order.

Every rank builds its own iterator, also those that read nothing of it (tensor-parallel ranks
beyond the first would be sent the same tokens, inner pipeline stages use none): iterators with the
same replica and shard rank yield the same, so nothing has to be sent.
"""

from __future__ import annotations

import os
import signal
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from torch.utils.data import DataLoader, Dataset

from megatron_edit.data.mapped import MappedDataset, map_again
from megatron_edit.data.sources import (
    SPLITS,
    Sources,
    check_splits,
    check_tokens,
    fingerprint,
    open_indexed,
    sources_from_args,
    split_tokens,
)
from megatron_edit.data.tokenizer import Tokenizer
from megatron_edit.errors import ConfigurationError

TRAIN, VALID, TEST = range(3)
MODEL_INPUTS = ("tokens", "labels", "loss_mask", "position_ids")


@dataclass
class FingerprintedConfig(GPTDatasetConfig):
    """megatron-core's dataset configuration, knowing the content of the files.

    Attributes:
        data_fingerprint: Hash of the files.
    """

    data_fingerprint: str = ""


class FingerprintedGPTDataset(GPTDataset):
    """GPTDataset without file descriptors, whose cached index is not used for changed files."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> MappedDataset:
        """Opens tokenised files."""
        return MappedDataset(dataset_path)

    def _build_document_sample_shuffle_indices(self) -> tuple[np.ndarray, ...]:
        return tuple(map(map_again, super()._build_document_sample_shuffle_indices()))

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [*GPTDataset._key_config_attributes(), "data_fingerprint"]


@dataclass(frozen=True)
class SampleOrder:
    """Which samples each rank uses in each step: arithmetic only.

    Attributes:
        global_batch_size: Samples of a step, all replicas together.
        micro_batch_size: Samples of a micro-batch of one rank.
        replicas: Number of replicas R.
        shard_size: Shard ranks S of a replica.
    """

    global_batch_size: int
    micro_batch_size: int
    replicas: int = 1
    shard_size: int = 1

    def __post_init__(self) -> None:
        unit = self.micro_batch_size * self.replicas * self.shard_size
        if self.global_batch_size % unit:
            raise ConfigurationError(
                f"--global-batch-size: {self.global_batch_size} is no multiple of micro-batch size "
                f"{self.micro_batch_size} x replicas {self.replicas} x shard group "
                f"{self.shard_size} = {unit}"
            )

    @property
    def samples_per_rank(self) -> int:
        """Samples of a step that one rank uses."""
        return self.global_batch_size // (self.replicas * self.shard_size)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of a step on one rank."""
        return self.samples_per_rank // self.micro_batch_size

    def indices(self, step: int, replica: int = 0, shard_rank: int = 0) -> list[list[int]]:
        """The sample numbers of one rank in one step.

        Args:
            step: Step of the run, counting from 0.
            replica: Replica, counting from 0.
            shard_rank: Rank in the shard group.

        Returns:
            One list of ``micro_batch_size`` numbers per micro-batch.
        """
        rank = replica * self.shard_size + shard_rank
        first = step * self.global_batch_size + rank * self.samples_per_rank
        last = first + self.samples_per_rank
        size = self.micro_batch_size
        return [list(range(i, i + size)) for i in range(first, last, size)]


class _Samples(Dataset[dict[str, torch.Tensor]]):
    """Samples of a megatron-core dataset, numbered, and without what the model does not use."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = self._dataset[index]
        return {key: sample[key] for key in MODEL_INPUTS} | {"index": torch.tensor(index)}


def train_iterator(
    dataset: Any, args: Namespace, replica: int, shard_rank: int, start_step: int = 0
) -> Iterator[dict[str, torch.Tensor]]:
    """Yields the micro-batches of one rank from a step on; it ends with the dataset.

    Started at step k it yields bit for bit what one started at step 0 yields from step k on, and
    it moves no global random number generator. Under interleaved pipeline parallelism each model
    chunk needs an iterator of its own.

    Args:
        dataset: Training dataset of :func:`build_datasets`.
        args: ``global_batch_size``, ``micro_batch_size``, ``replicas``, ``shard_size``,
            ``num_workers``.
        replica: This rank's replica.
        shard_rank: This rank's place in its shard group.
        start_step: First step, counting from 0.

    Yields:
        ``tokens``, ``labels``, ``position_ids`` (int64) and ``loss_mask`` (float32), each
        [micro_batch_size, seq_length], on the CPU, and ``index`` (int64, [micro_batch_size]), the
        numbers of the samples in the order of the run.
    """
    order = SampleOrder(
        args.global_batch_size, args.micro_batch_size, args.replicas, args.shard_size
    )
    steps = range(start_step, len(dataset) // order.global_batch_size)
    batches = (batch for step in steps for batch in order.indices(step, replica, shard_rank))
    return _load(dataset, batches, args)


def validation_order(args: Namespace) -> SampleOrder:
    """The order of validation samples: split over the shard group, not over replicas.

    So every replica sees the same ``eval_iters`` x GBS samples, which makes replicas comparable
    with one another and runs with different R and S too. The price is that an iteration of
    evaluation has R times the micro-batches of a training step: ``num_microbatches`` of this.
    """
    return SampleOrder(args.global_batch_size, args.micro_batch_size, 1, args.shard_size)


def validation_iterator(
    dataset: Any, args: Namespace, shard_rank: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yields the micro-batches of one rank for one evaluation, the same at each evaluation.

    Megatron goes on through the validation set from one evaluation to the next; starting over
    makes evaluations comparable and needs no position in the checkpoint.

    Args:
        dataset: Validation or test dataset of :func:`build_datasets`.
        args: As for :func:`train_iterator`, and ``eval_iters``.
        shard_rank: This rank's place in its shard group.

    Yields:
        ``eval_iters`` times ``validation_order(args).num_microbatches`` micro-batches, as
        :func:`train_iterator`. Samples are repeated where the dataset has fewer.
    """
    order = validation_order(args)
    size = len(dataset)
    batches = (
        [index % size for index in batch]
        for step in range(args.eval_iters)
        for batch in order.indices(step, 0, shard_rank)
    )
    return _load(dataset, batches, args)


def _load(
    dataset: Any, batches: Iterable[list[int]], args: Namespace
) -> Iterator[dict[str, torch.Tensor]]:
    loader = DataLoader(
        _Samples(dataset),
        batch_sampler=batches,  # type: ignore[arg-type]
        num_workers=args.num_workers,
        worker_init_fn=_ignore_sigterm if getattr(args, "exit_signal_handler", False) else None,
        pin_memory=torch.cuda.is_available(),
        # Without one of its own the loader draws a seed from the global generator, and evaluating
        # would change the dropout of the steps after it.
        generator=torch.Generator(),
    )
    return iter(loader)


def _ignore_sigterm(worker: int) -> None:
    """Launchers send SIGTERM to all children of a rank, which has a last step to do with them."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def build_datasets(args: Namespace, tokenizer: Tokenizer) -> tuple[Any, Any, Any]:
    """Builds the datasets of a run; to be called on all ranks at once.

    Rank 0 of the world builds the indices and writes them to ``--data-cache-path`` (by default a
    folder beside the data), the others read them after a barrier, so that folder must be shared by
    all hosts. It works without a process group too.

    Args:
        args: The data flags, ``seq_length``, ``seed``, ``global_batch_size``, ``train_iters`` or
            ``train_samples``, ``eval_iters``.
        tokenizer: The tokenizer the data were made with.

    Returns:
        Train, validation and test dataset. The last two are None with ``eval_iters`` 0, the test
        dataset also where its split is empty.

    Raises:
        ConfigurationError: Data are missing, damaged, too few, or made with another tokenizer.
    """
    sources = sources_from_args(args)
    opened = {prefix: open_indexed(prefix) for prefix in sources.prefixes}
    wanted = _wanted_splits(args, sources, opened)
    if not sources.mock:
        check_splits(sources, opened, [i for i in wanted if i != TEST], args.seq_length)
        check_tokens(opened, tokenizer.vocab_size)
    elif tokenizer.eod is None:
        raise ConfigurationError("--mock-data: needs a tokenizer with an end-of-sequence token")
    config = _dataset_config(args, tokenizer, sources, wanted)
    sizes = [_train_samples(args), *[args.eval_iters * args.global_batch_size] * 2]
    datasets = BlendedMegatronDatasetBuilder(
        MockGPTDataset if sources.mock else FingerprintedGPTDataset,
        [size if split in wanted else 0 for split, size in enumerate(sizes)],
        lambda: True,
        config,
    ).build()
    train: Any
    train, valid, test = (d if i in wanted else None for i, d in enumerate(datasets))
    if len(train) < sizes[TRAIN]:
        raise ConfigurationError(
            f"--data-path: the training data hold {len(train)} samples, the run needs "
            f"{sizes[TRAIN]}; give a weight before each prefix to have them repeated"
        )
    return train, valid, test


def data_identity(args: Namespace) -> str:
    """A text that changes when the samples of the run would: to be kept in a checkpoint.

    Covers the content of the files, weights, split, sequence length and seed, not where the files
    lie, and not the length of the run.
    """
    sources = sources_from_args(args)
    content = "mock" if sources.mock else fingerprint(sources.prefixes)
    blends = [blend and (len(blend.prefixes), blend.weights) for blend in sources.blends]
    return f"{content} {blends} split {sources.split} seq {args.seq_length} seed {args.seed}"


def _train_samples(args: Namespace) -> int:
    samples = getattr(args, "train_samples", None) or args.train_iters * args.global_batch_size
    # By the clock one replica may do nearly all steps of a run, each with its own part of the
    # samples of a step.
    by_clock = args.edit.sync_trigger == "time"
    return samples * (args.replicas if by_clock else 1)


def _wanted_splits(args: Namespace, sources: Sources, opened: dict[str, Any]) -> list[int]:
    if not args.eval_iters:
        return [TRAIN]
    test = sources.blend(TEST)
    filled = test is not None and all(
        split_tokens(sources, opened[prefix], TEST) > args.seq_length for prefix in test.prefixes
    )
    return [TRAIN, VALID, TEST] if filled or sources.mock else [TRAIN, VALID]


def _dataset_config(
    args: Namespace, tokenizer: Tokenizer, sources: Sources, wanted: list[int]
) -> FingerprintedConfig:
    common, separate = sources.common, [sources.blend(split) for split in range(len(SPLITS))]
    config = FingerprintedConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=common.for_megatron() if common else None,
        blend_per_split=(
            None
            if common or sources.mock
            else [b.for_megatron() if b and i in wanted else None for i, b in enumerate(separate)]
        ),
        split=sources.split,
        path_to_cache=_cache_folder(args, sources),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        data_fingerprint="" if sources.mock else fingerprint(sources.prefixes),
    )
    if config.split_matrix is not None:
        # A split that nobody reads may be empty, over which megatron-core would loop for ever.
        matrix = enumerate(config.split_matrix)
        config.split_matrix = [bounds if i in wanted else None for i, bounds in matrix]
    return config


def _cache_folder(args: Namespace, sources: Sources) -> str | None:
    folder = getattr(args, "data_cache_path", None)
    if sources.mock or not folder:
        return None
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"--data-cache-path: cannot make {folder!r}: {error}", per_host=True
        ) from None
    if not os.access(folder, os.W_OK):
        raise ConfigurationError(f"--data-cache-path: {folder!r} is not writable", per_host=True)
    blended = any(b and (len(b.prefixes) > 1 or b.weights) for b in sources.blends)
    if blended and not torch.distributed.is_initialized():
        # megatron-core asks for a rank before it caches a blend.
        return None
    return str(folder)
