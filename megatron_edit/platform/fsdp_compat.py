"""What we need to know of FSDP2 that it has no public name for."""

from __future__ import annotations

from torch.distributed.fsdp import FSDPModule


def gather_begun(module: FSDPModule) -> bool:
    """Whether a gather has read the module's shards ahead of its forward (a prefetch).

    FSDP2 shows the full parameters only in the forward itself.
    """
    group = module._get_fsdp_state()._fsdp_param_group
    return group is not None and group._all_gather_result is not None
