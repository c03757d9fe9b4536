"""The private names of FSDP2 that we read are still there and mean what we think."""

from __future__ import annotations

import torch
from distributed import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

from megatron_edit.platform.fsdp_compat import gather_begun


def _follow_a_gather() -> list[bool]:
    layer = nn.Linear(4, 4)
    fully_shard(nn.Sequential(fully_shard(layer)))
    seen = [gather_begun(layer)]
    handle = layer.unshard(async_op=True)
    seen.append(gather_begun(layer))
    assert handle is not None
    handle.wait()
    seen.append(gather_begun(layer))
    layer.reshard()
    layer(torch.ones(1, 4))
    seen.append(gather_begun(layer))
    return seen


def test_a_gather_is_seen_from_its_beginning_until_it_is_waited_for() -> None:
    for seen in run_ranks(_follow_a_gather, 2):
        assert seen == [False, True, False, False]
