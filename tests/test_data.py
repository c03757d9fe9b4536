"""Datasets, the sample order, the iterators, and data that cannot be used."""

import itertools
import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_edit.config.edit_config import EditConfig
from megatron_edit.data.datasets import (
    SampleOrder,
    build_datasets,
    data_identity,
    train_iterator,
    validation_iterator,
    validation_order,
)
from megatron_edit.data.sources import CHUNK_TOKENS, largest_token, parse_blend, parse_split
from megatron_edit.data.tokenizer import NullTokenizer
from megatron_edit.errors import ConfigurationError

SEQ = 16
TOKENIZER = NullTokenizer(999)


def write(prefix: Path | str, documents: int, lengths: int = 40, first: int = 0) -> str:
    """Writes documents whose tokens count up from ``first``, so that text identifies itself."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for i in range(documents):
        start = first + i * lengths
        builder.add_document(np.arange(start, start + lengths) % 999, [lengths])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write(tmp_path / "data", 20)


def arguments(*paths: str, **changes: Any) -> Namespace:
    values = {
        "data_path": list(paths) or None,
        "split": "80,20",
        "train_data_path": None,
        "valid_data_path": None,
        "test_data_path": None,
        "data_cache_path": None,
        "mock_data": False,
        "seq_length": SEQ,
        "seed": 1,
        "micro_batch_size": 2,
        "global_batch_size": 24,
        "replicas": 1,
        "shard_size": 1,
        "train_iters": 5,
        "train_samples": None,
        "eval_iters": 2,
        "num_workers": 0,
        "edit": EditConfig(),
    }
    return Namespace(**(values | changes))


def layout(args: Namespace, replicas: int, shard_size: int) -> Namespace:
    return Namespace(**(vars(args) | {"replicas": replicas, "shard_size": shard_size}))


def ids(iterator: Iterator[dict[str, torch.Tensor]], batches: int | None = None) -> list[list[int]]:
    return [batch["index"].tolist() for batch in itertools.islice(iterator, batches)]


# --- the order, arithmetic only


@pytest.mark.parametrize(
    ("gbs", "mbs", "replicas", "shard_size", "step", "replica", "shard_rank", "expected"),
    [
        (8, 2, 1, 1, 0, 0, 0, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (8, 2, 2, 1, 0, 1, 0, [[4, 5], [6, 7]]),
        (8, 2, 2, 2, 3, 1, 0, [[28, 29]]),
        (8, 1, 2, 2, 3, 1, 1, [[30], [31]]),
        (12, 2, 3, 2, 1, 2, 1, [[22, 23]]),
    ],
)
def test_indices(
    gbs: int,
    mbs: int,
    replicas: int,
    shard_size: int,
    step: int,
    replica: int,
    shard_rank: int,
    expected: Any,
) -> None:
    order = SampleOrder(gbs, mbs, replicas, shard_size)
    assert order.indices(step, replica, shard_rank) == expected
    assert order.num_microbatches == len(expected)


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("shard_size", [1, 2, 3])
def test_a_step_uses_the_same_samples_in_every_layout(replicas: int, shard_size: int) -> None:
    order = SampleOrder(144, 2, replicas, shard_size)
    for step in (0, 1, 7):
        used = [
            index
            for replica in range(replicas)
            for shard_rank in range(shard_size)
            for batch in order.indices(step, replica, shard_rank)
            for index in batch
        ]
        assert used == list(range(step * 144, (step + 1) * 144))


def test_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"--global-batch-size: 10 .* 2 x .* 2 x .* 2 = 8"):
        SampleOrder(10, 2, 2, 2)


# --- datasets and iterators


def test_micro_batches_have_the_promised_shapes_and_shifted_labels(prefix: str) -> None:
    args = arguments(prefix)
    train, valid, test = build_datasets(args, TOKENIZER)
    assert test is None
    assert len(train) >= 5 * 24
    assert len(valid) >= 2 * 24
    batch = next(train_iterator(train, args, 0, 0))
    for key, dtype in {
        "tokens": torch.int64,
        "labels": torch.int64,
        "loss_mask": torch.float32,
        "position_ids": torch.int64,
    }.items():
        assert batch[key].shape == (2, SEQ)
        assert batch[key].dtype == dtype
    assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    assert torch.equal(batch["position_ids"], torch.arange(SEQ).expand(2, SEQ))
    assert batch["loss_mask"].all()


@pytest.mark.parametrize(("replicas", "shard_size"), [(1, 2), (2, 1), (2, 3), (3, 2), (4, 1)])
def test_tokens_of_a_step_do_not_depend_on_the_layout(
    prefix: str, replicas: int, shard_size: int
) -> None:
    args = arguments(prefix)
    train, _, _ = build_datasets(args, TOKENIZER)
    whole = torch.cat(
        [b["tokens"] for b in itertools.islice(train_iterator(train, args, 0, 0), 12)]
    )
    split = layout(args, replicas, shard_size)
    train, _, _ = build_datasets(split, TOKENIZER)
    parts = [
        batch["tokens"]
        for replica in range(replicas)
        for rank in range(shard_size)
        for batch in itertools.islice(
            train_iterator(train, split, replica, rank), 12 // replicas // shard_size
        )
    ]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resumed_iterator_goes_on_bit_for_bit(prefix: str, num_workers: int) -> None:
    args = arguments(prefix, replicas=2, num_workers=num_workers)
    train, _, _ = build_datasets(args, TOKENIZER)
    whole = list(train_iterator(train, arguments(prefix, replicas=2), 1, 0))
    resumed = list(train_iterator(train, args, 1, 0, start_step=3))
    assert len(resumed) == len(whole) - 3 * 6
    for expected, found in zip(whole[3 * 6 :], resumed, strict=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_seed_decides_the_order(prefix: str) -> None:
    def first(seed: int) -> torch.Tensor:
        args = arguments(prefix, seed=seed)
        train, _, _ = build_datasets(args, TOKENIZER)
        return next(train_iterator(train, args, 0, 0))["tokens"]

    assert torch.equal(first(1), first(1))
    assert not torch.equal(first(1), first(2))


def test_validation_is_the_same_each_time_and_for_every_layout(prefix: str) -> None:
    args = arguments(prefix)
    _, valid, _ = build_datasets(args, TOKENIZER)
    whole = ids(validation_iterator(valid, args, 0))
    assert whole == ids(validation_iterator(valid, args, 0))
    assert list(itertools.chain(*whole)) == list(range(48))
    split = layout(args, 2, 3)
    parts = [ids(validation_iterator(valid, split, rank)) for rank in range(3)]
    size = validation_order(split).num_microbatches
    assert size == 4
    again = [part[step * size : (step + 1) * size] for step in range(2) for part in parts]
    assert list(itertools.chain(*again)) == whole


@pytest.mark.parametrize("num_workers", [0, 1])
def test_iterators_move_no_global_generator(prefix: str, num_workers: int) -> None:
    args = arguments(prefix, num_workers=num_workers)
    train, valid, _ = build_datasets(args, TOKENIZER)
    torch_before, numpy_before = torch.get_rng_state(), str(np.random.get_state())
    next(train_iterator(train, args, 0, 0))
    list(validation_iterator(valid, args, 0))
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert str(np.random.get_state()) == numpy_before


def test_train_and_validation_do_not_share_documents(prefix: str) -> None:
    args = arguments(prefix, train_iters=20)
    train, valid, _ = build_datasets(args, TOKENIZER)
    seen = {int(t) for i in range(len(train)) for t in train[i]["tokens"]}
    held_out = {int(t) for i in range(len(valid)) for t in valid[i]["tokens"]}
    assert seen == set(range(640))
    assert held_out == set(range(640, 800))


@pytest.mark.parametrize(
    ("weights", "share"), [(("3", "1"), 0.75), (("0.5", "0.5"), 0.5), (None, 0.5)]
)
def test_blends(tmp_path: Path, weights: Any, share: float) -> None:
    low, high = write(tmp_path / "low", 12), write(tmp_path / "high", 12, first=500)
    words = [weights[0], low, weights[1], high] if weights else [low, high]
    args = arguments(*words, global_batch_size=8)
    train, valid, _ = build_datasets(args, TOKENIZER)
    used = [train[i]["tokens"][0] < 500 for i in range(40)]
    assert sum(used) / 40 == pytest.approx(share, abs=0.051)
    assert len(ids(validation_iterator(valid, args, 0))) == 8


def test_paths_per_split(tmp_path: Path) -> None:
    paths = {
        f"{split}_data_path": [write(tmp_path / split, 5, first=200 * i)]
        for i, split in enumerate(("train", "valid", "test"))
    }
    datasets = build_datasets(arguments(split=None, **paths), TOKENIZER)
    for i, dataset in enumerate(datasets):
        tokens = torch.cat([dataset[j]["tokens"] for j in range(len(dataset))])
        assert (tokens.min(), tokens.max()) == (200 * i, 200 * i + 199)


def test_mock_data() -> None:
    args = arguments(mock_data=True, split=None)
    train, valid, test = build_datasets(args, TOKENIZER)
    assert len(train) >= 120
    assert valid is not None
    assert test is not None
    assert next(train_iterator(train, args, 0, 0))["tokens"].max() < TOKENIZER.vocab_size


def test_without_evaluation_only_training_data_are_needed(tmp_path: Path) -> None:
    args = arguments(write(tmp_path / "one", 1, 500), split="100,0,0", eval_iters=0)
    _, valid, test = build_datasets(args, TOKENIZER)
    assert valid is None
    assert test is None


def test_cached_index_is_not_used_for_files_written_anew(tmp_path: Path) -> None:
    args = arguments(str(tmp_path / "data"), data_cache_path=str(tmp_path / "cache"))
    write(tmp_path / "data", 20)
    build_datasets(args, TOKENIZER)
    files = set(os.listdir(tmp_path / "cache"))
    build_datasets(args, TOKENIZER)
    assert set(os.listdir(tmp_path / "cache")) == files
    identity = data_identity(args)
    write(tmp_path / "data", 10, 80)
    train, _, _ = build_datasets(args, TOKENIZER)
    assert set(os.listdir(tmp_path / "cache")) > files
    assert data_identity(args) != identity
    assert {int(t) for i in range(len(train)) for t in train[i]["tokens"]} == set(range(640))


def test_identity_does_not_depend_on_where_the_files_lie(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", 20), write(tmp_path / "b", 20)
    assert data_identity(arguments(a)) == data_identity(arguments(b))
    assert data_identity(arguments(a)) != data_identity(arguments(a, split="70,30"))


def _rank(rank: int, args: Namespace, folder: str, words: str) -> None:
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", store, rank=rank, world_size=2)
    train, _, _ = build_datasets(args, TOKENIZER)
    tokens = [b["tokens"] for b in itertools.islice(train_iterator(train, args, rank, 0), 3)]
    torch.save(torch.stack(tokens), f"{folder}/{words}-{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("blend", [False, True])
def test_ranks_agree_and_share_the_cache(tmp_path: Path, blend: bool) -> None:
    a, b = write(tmp_path / "a", 20), write(tmp_path / "b", 20, first=500)
    words = ["1", a, "2", b] if blend else [a]
    args = arguments(*words, data_cache_path=str(tmp_path / "cache"), replicas=2)
    mp.start_processes(_rank, (args, str(tmp_path), "out"), 2, start_method="fork")
    alone = Namespace(**(vars(args) | {"data_cache_path": None}))
    train, _, _ = build_datasets(alone, TOKENIZER)
    for rank in range(2):
        batches = itertools.islice(train_iterator(train, alone, rank, 0), 3)
        expected = torch.stack([batch["tokens"] for batch in batches])
        assert torch.equal(torch.load(tmp_path / f"out-{rank}.pt"), expected)


# --- data that cannot be used


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_path": None}, "--data-path: missing"),
        ({"data_path": ["nowhere"]}, "no such file: nowhere.idx"),
        ({"data_path": ["d.bin"]}, "give the path without .bin"),
        ({"data_path": ["d"]}, "did you mean d_text_document?"),
        ({"data_path": ["0.5", "d_text_document", "x"]}, "w1 p1 w2 p2"),
        ({"data_path": ["0", "d_text_document"]}, "weight 0 is not positive"),
        ({"data_path": ["cut"]}, "cut.bin has 100 bytes, its index describes 1600"),
        ({"data_path": ["bad"]}, "'bad': not readable as Megatron data"),
        ({"split": "100,0,0"}, "the valid split of 'd_text_document' (20 documents) is empty"),
        ({"split": "99,1,0"}, "the valid split of 'd_text_document' (20 documents) is empty"),
        ({"split": "1,99,0"}, "the train split of 'd_text_document' (20 documents) is empty"),
        ({"split": "0,1"}, "--split: got '0,1'"),
        ({"split": "9,x"}, "--split: got '9,x'"),
        ({"split": "9,1e-3"}, "--split: got '9,1e-3'"),
        ({"train_data_path": ["d_text_document"]}, "cannot be given together"),
        ({"mock_data": True}, "--mock-data: cannot be given together"),
        (
            {"data_path": None, "split": None, "train_data_path": ["d_text_document"]},
            "--valid-data-path: the valid split is empty",
        ),
        (
            {"data_path": None, "split": None, "valid_data_path": ["d"]},
            "--train-data-path: missing",
        ),
        ({"data_path": ["d_text_document"] * 2, "train_iters": 99}, "samples, the run needs 2376"),
        ({"data_path": ["d_text_document"] * 2, "seq_length": 900}, "tokens, a sample has 900"),
        ({"data_path": ["big"]}, "'big': holds token id 998, but the tokenizer has 900"),
    ],
)
def test_mistakes_are_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write("d_text_document", 20)
    write("big", 25)
    write("cut", 20)
    os.truncate("cut.bin", 100)
    write("bad", 1)
    os.truncate("bad.idx", 12)
    with pytest.raises(ConfigurationError) as caught:
        build_datasets(
            arguments(**({"data_path": ["d_text_document"]} | changes)), NullTokenizer(899)
        )
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("words", "weights"), [(["a"], None), (["a", "b"], None), (["2", "a", "3", "b"], (2.0, 3.0))]
)
def test_parse_blend(words: Any, weights: Any) -> None:
    blend = parse_blend("--data-path", words)
    assert blend.weights == weights
    assert blend.prefixes[0] == "a"


@pytest.mark.parametrize(
    ("text", "expected"), [(None, "969,30,1"), ("9", "9,0,0"), ("0.9, .1", "0.9,.1,0")]
)
def test_parse_split(text: str | None, expected: Any) -> None:
    assert parse_split(text) == expected


@pytest.mark.parametrize("size", [1, CHUNK_TOKENS - 1, CHUNK_TOKENS + 1, 40 * CHUNK_TOKENS + 7])
def test_largest_token_looks_at_both_ends(tmp_path: Path, size: int) -> None:
    ids = np.memmap(tmp_path / "x.bin", dtype=np.uint16, mode="w+", shape=(size,))
    for position in (0, size - 1):
        ids[position] = 7
        ids.flush()
        assert largest_token(str(tmp_path / "x"), np.uint16) == 7
        ids[position] = 0


def test_by_the_clock_every_replica_could_do_the_whole_run(prefix: str) -> None:
    by_clock = EditConfig(sync_trigger="time")
    usual, timed = (
        build_datasets(arguments("1", prefix, replicas=2, **changes), TOKENIZER)[0]
        for changes in ({}, {"edit": by_clock})
    )
    assert len(timed) >= 2 * 5 * 24 > len(usual) >= 5 * 24
