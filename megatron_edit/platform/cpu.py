"""Runs megatron-core 0.16 on a machine without a GPU.

megatron-core names CUDA in places: ``torch.cuda.current_device()`` as the device of a new tensor,
``device="cuda"`` literals, the CUDA generator in its RNG tracker. Instead of patching ``torch``
itself (but for one method), :func:`install` hands the megatron-core modules in
:data:`PATCHED_MODULES` a view of ``torch`` in which these names mean the CPU. Nothing outside
megatron-core sees the view, and on a machine with a GPU nothing is patched at all.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch

# Module of megatron-core -> what in it needs the view. A test checks that each is still there.
PATCHED_MODULES: dict[str, str] = {
    "megatron.core.parallel_state": "torch.cuda.synchronize",
    "megatron.core.tensor_parallel.layers": "torch.cuda.current_device",
    "megatron.core.tensor_parallel.mappings": "torch.cuda.current_device",
    "megatron.core.tensor_parallel.random": "torch.cuda.manual_seed",
    "megatron.core.tensor_parallel.utils": "torch.cuda.current_device",
    "megatron.core.transformer.dot_product_attention": "torch.cuda.current_device",
    "megatron.core.transformer.utils": 'device="cuda"',
    "megatron.core.models.common.embeddings.rotary_pos_embedding": "torch.cuda.current_device",
    "megatron.core.pipeline_parallel.p2p_communication": "torch.cuda.current_device",
    "megatron.core.pipeline_parallel.schedules": 'device="cuda"',
    "megatron.core.utils": "torch.cuda.current_device",
}


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wraps a tensor factory so that ``device="cuda"`` means the CPU."""

    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return create


class _CudaOnCpu:
    """``torch.cuda`` as megatron-core uses it, meaning the CPU."""

    @staticmethod
    def current_device() -> str:
        return "cpu"

    @staticmethod
    def synchronize() -> None:
        """Nothing runs behind the host on a CPU."""

    manual_seed = staticmethod(torch.manual_seed)
    get_rng_state = staticmethod(torch.get_rng_state)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _TorchOnCpu:
    """``torch`` with its CUDA names meaning the CPU; everything else is passed through."""

    cuda = _CudaOnCpu()

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        if name in ("zeros", "ones", "empty", "tensor", "arange"):
            value = _on_cpu(value)
        setattr(self, name, value)
        return value


def _get_rng_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> Any:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = None, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _stay(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor


def _not_rng_warning(record: logging.LogRecord) -> bool:
    # The tracker warns when the CPU generator moves inside its CUDA context; here they are one.
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def install() -> None:
    """Gives megatron-core the CPU view of torch; a no-op when a GPU is there or on a second call.

    Raises:
        AttributeError: A patched name has moved in megatron-core.
    """
    if torch.cuda.is_available():
        return
    view = _TorchOnCpu()
    for name in PATCHED_MODULES:
        module = importlib.import_module(name)
        if not isinstance(module.torch, _TorchOnCpu):
            module.torch = view  # type: ignore[attr-defined]
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    for attribute, replacement in (
        ("_get_cuda_rng_state", _get_rng_state),
        ("_set_cuda_rng_state", _set_rng_state),
    ):
        getattr(random, attribute)
        setattr(random, attribute, replacement)
    # LanguageModule calls it on a tied embedding; without a GPU it could only raise.
    torch.Tensor.cuda = _stay  # type: ignore[method-assign]
    logging.getLogger(random.__name__).addFilter(_not_rng_warning)


def device() -> torch.device:
    """The device this process computes on: its current GPU, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def wait_for_device() -> None:
    """Returns when the GPU, if there is one, has done all it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
