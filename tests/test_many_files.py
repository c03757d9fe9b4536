"""A blend of many files needs no descriptor for each of them."""

import itertools
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import test_data
import torch
from distributed import run_ranks
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_edit.data.datasets import build_datasets, train_iterator
from megatron_edit.data.mapped import MappedDataset, map_file

FILES = 60


def _read(args: Any, spare: int) -> list[list[int]]:
    """Builds the datasets and reads of each with ``spare`` descriptors beyond those now open."""
    before = len(os.listdir("/proc/self/fd"))
    limit = before + spare
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    for _ in range(2):
        # The second time all indices are read from the cache on every rank.
        datasets = build_datasets(args, test_data.TOKENIZER)
    batches = itertools.islice(train_iterator(datasets[0], args, 0, 0), 4)
    tokens = torch.cat([batch["tokens"] for batch in batches])
    return [tokens.flatten().tolist(), *(d[len(d) - 1]["tokens"].tolist() for d in datasets[1:])]


@pytest.mark.parametrize("kind", ["weighted", "plain", "per split"])
def test_many_files_open_under_a_low_limit(tmp_path: Path, kind: str) -> None:
    prefixes = [
        test_data.write(tmp_path / f"d{i}", 10, lengths=60, first=i * 7) for i in range(FILES)
    ]
    shares: dict[str, Any] = {"split": "60,20,20", "data_path": prefixes}
    if kind == "weighted":
        shares["data_path"] = [word for i, p in enumerate(prefixes) for word in (str(i % 3 + 1), p)]
    elif kind == "per split":
        third = FILES // 3
        shares = {
            "split": None,
            "train_data_path": prefixes[:third],
            "valid_data_path": prefixes[third : 2 * third],
            "test_data_path": prefixes[2 * third :],
        }
    args = test_data.arguments(data_cache_path=str(tmp_path / "cache"), num_workers=1, **shares)
    few, many = run_ranks(_read, 2, args, 45), run_ranks(_read, 2, args, 2000)
    assert few == many
    assert few[0] == few[1]


def test_mapped_data_are_what_megatron_core_reads(tmp_path: Path) -> None:
    prefix = test_data.write(tmp_path / "d", 20)
    before = len(os.listdir("/proc/self/fd"))
    mapped = MappedDataset(prefix)
    assert len(os.listdir("/proc/self/fd")) == before
    usual = IndexedDataset(prefix)
    assert [mapped[i].tolist() for i in range(20)] == [usual[i].tolist() for i in range(20)]
    assert mapped.get(3, offset=5, length=7).tolist() == usual.get(3, offset=5, length=7).tolist()
    for name in ("sequence_lengths", "document_indices"):
        assert getattr(mapped, name).tolist() == getattr(usual, name).tolist()


def test_a_mapping_outlives_its_file_name_and_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    mapped = map_file(tmp_path / "x")
    (tmp_path / "x").unlink()
    assert mapped.tobytes() == b"abc"
    with pytest.raises(ValueError, match="read-only"):
        mapped[0] = 1
