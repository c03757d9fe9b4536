"""Tokenised files and cached indices mapped into memory without holding a file descriptor.

Python's ``mmap``, and with it ``numpy.memmap``, keeps a descriptor for as long as the mapping
lives: three for each pair of files and three more for each split of it, so that a blend of a few
hundred files would exceed the usual limit of 1024. The kernel needs none once a file is mapped.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pyarrow as pa
from megatron.core.datasets.indexed_dataset import IndexedDataset, get_bin_path, get_idx_path


def map_file(path: str | os.PathLike[str]) -> np.ndarray:
    """Maps a file for reading.

    Returns:
        Its bytes, uint8, 1-D, read-only; they stay mapped as long as the array or a view lives.

    Raises:
        OSError: The file cannot be opened or mapped.
    """
    with pa.memory_map(os.fspath(path)) as stream:
        return np.frombuffer(stream.read_buffer(), dtype=np.uint8)


def map_again(array: np.ndarray) -> np.ndarray:
    """The same array without a descriptor where it is one that ``numpy.load`` has mapped."""
    if not isinstance(array, np.memmap):
        return array
    assert array.filename is not None
    content = map_file(array.filename)[array.offset : array.offset + array.nbytes]
    return content.view(array.dtype).reshape(array.shape)


class _Reader:
    """Reads tokens of a mapped .bin file, as megatron-core's readers do."""

    def __init__(self, path: str) -> None:
        self._content = map_file(path)

    def read(self, dtype: Any, count: int, offset: int) -> np.ndarray:
        """``count`` numbers of a type from a byte on."""
        return np.frombuffer(self._content, dtype=dtype, count=count, offset=offset)


class MappedDataset(IndexedDataset):
    """megatron-core's IndexedDataset, holding no file descriptor."""

    def initialize(self, path_prefix: str, *settings: Any) -> None:
        """Opens the files; see IndexedDataset."""
        super().initialize(path_prefix, *settings)
        self.bin_reader = _Reader(get_bin_path(path_prefix))
        content = map_file(get_idx_path(path_prefix))
        index = self.index
        begin = index.bin_buffer_mmap.ctypes.data
        for name in ("sequence_lengths", "sequence_pointers", "document_indices"):
            part = getattr(index, name)
            moved = np.frombuffer(content, part.dtype, part.size, part.ctypes.data - begin)
            setattr(index, name, moved)
        index.bin_buffer = content.data
        # The last reference: the mapping with a descriptor ends here.
        del index.bin_buffer_mmap
