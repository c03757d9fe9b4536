"""Where transformers and Accelerate call DeepSpeed, which they give no group of ranks.

A test trains through both calls, and fails when one of them moves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

Initialize = Callable[..., tuple[Any, Any, Any, Any]]


def replace_initialize(wrapper: Callable[[Initialize, dict[str, Any]], Any]) -> None:
    """Has Accelerate's call of ``deepspeed.initialize`` end up in ``wrapper(original, arguments)``.

    Args:
        wrapper: Gets the arguments by name, the JSON among them as ``config``.
    """
    import deepspeed

    original = deepspeed.initialize

    def initialize(*args: Any, **arguments: Any) -> Any:
        assert not args, "Accelerate names the arguments of deepspeed.initialize"
        if "config_params" in arguments:
            arguments["config"] = arguments.pop("config_params")
        return wrapper(original, arguments)

    deepspeed.initialize = initialize


def shard_new_models_over(group: dist.ProcessGroup) -> None:
    """Has ``deepspeed.zero.Init``, in which transformers makes a model under ZeRO-3, shard it over
    a group of ranks instead of the world, where it is not told which."""
    import deepspeed

    original = deepspeed.zero.Init.__init__

    def init(self: Any, *args: Any, **arguments: Any) -> None:
        if len(args) < 2 and arguments.get("mpu") is None:
            arguments.setdefault("data_parallel_group", group)
        original(self, *args, **arguments)

    deepspeed.zero.Init.__init__ = init
