"""How much of a buffer is worked on at a time.

Arithmetic on a long buffer is as slow as the memory, and each operation reads all of it anew. On a
CPU several operations in turn on a part that fits into the cache read the memory once. A GPU is
given whole buffers: it takes longer to be told of many parts.
"""

from __future__ import annotations

import torch

# Elements; five fp32 buffers of so many, 5 MB, are worked on together. They fit into a cache of the
# last level, and each operation still takes much longer than its call.
CHUNK = 1 << 18


def chunks(start: int, end: int, device: torch.device) -> list[slice]:
    """Cuts a range of a buffer into parts, from the first element on.

    Args:
        start: First element.
        end: The element after the last.
        device: Where the buffer is.

    Returns:
        Slices of at most :data:`CHUNK` elements on a CPU, one slice elsewhere, none of an empty
        range.
    """
    step = CHUNK if device.type == "cpu" else max(end - start, 1)
    return [slice(first, min(first + step, end)) for first in range(start, end, step)]
