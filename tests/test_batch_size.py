"""Batch arithmetic: completing the numbers, and the message when they do not multiply."""

import pytest

from megatron_edit.config.batch_size import Batch, complete_batch
from megatron_edit.errors import ConfigurationError


@pytest.mark.parametrize(
    ("given", "completed"),
    [
        (Batch(2, None, None), Batch(2, 1, 8)),
        (Batch(2, 3, None), Batch(2, 3, 24)),
        (Batch(2, None, 16), Batch(2, 2, 16)),
        (Batch(None, 2, 16), Batch(2, 2, 16)),
        (Batch(2, 2, 16), Batch(2, 2, 16)),
    ],
)
def test_batch_is_completed(given: Batch, completed: Batch) -> None:
    assert complete_batch(given, shard_size=2, replicas=2, layout="") == completed


@pytest.mark.parametrize(
    ("given", "part"),
    [
        (Batch(2, None, 10), "replicas 2 = 8 (mesh); nearest that works: 8"),
        (Batch(2, None, 3), "nearest that works: 8"),
        (Batch(None, 2, 30), "accumulation 2 x shard size 2 x replicas 2 = 8 (mesh); nearest that"),
        (Batch(2, 2, 10), "accumulation 2 x shard size 2 x replicas 2 = 16 (mesh); nearest that w"),
        (Batch(2, 1, 24), "a global batch size of 8 works, or gradient_accumulation_steps 3"),
        (Batch(None, 2, None), "the micro batch size is missing"),
        (Batch(None, None, 8), "the micro batch size is missing"),
    ],
)
def test_batch_that_does_not_multiply(given: Batch, part: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        complete_batch(given, shard_size=2, replicas=2, layout="mesh")
    assert part in str(caught.value)
