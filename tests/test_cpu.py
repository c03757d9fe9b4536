"""The CPU view of torch for megatron-core: what it names is there, and it stays inside."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks

from megatron_edit.platform import cpu

RANDOM = "megatron.core.tensor_parallel.random"

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is patched on a GPU")


def source_of(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text()


@pytest.mark.parametrize("module", cpu.PATCHED_MODULES)
def test_a_patched_module_still_names_what_is_patched(module: str) -> None:
    source = source_of(module)
    name = cpu.PATCHED_MODULES[module]
    assert name in source or name.replace('"', "'") in source
    # The view is put in the place of this name.
    assert "\nimport torch\n" in source


@pytest.mark.parametrize(
    ("private", "ours"),
    [("_get_cuda_rng_state", cpu._get_rng_state), ("_set_cuda_rng_state", cpu._set_rng_state)],
)
def test_replaced_private_functions_have_the_same_parameters(private: str, ours: Any) -> None:
    functions = {
        node.name: [argument.arg for argument in node.args.args]
        for node in ast.parse(source_of(RANDOM)).body
        if isinstance(node, ast.FunctionDef)
    }
    assert list(inspect.signature(ours).parameters) == functions[private]


def test_the_one_patched_method_is_still_called() -> None:
    assert ".cuda()" in source_of("megatron.core.models.common.language_module.language_module")


def _install_again() -> dict[str, Any]:
    def patched() -> list[int]:
        random = importlib.import_module(RANDOM)
        views = [id(importlib.import_module(name).torch) for name in cpu.PATCHED_MODULES]
        functions = [id(random._get_cuda_rng_state), id(random._set_cuda_rng_state)]
        return [*views, *functions, id(torch.Tensor.cuda), len(logging.getLogger(RANDOM).filters)]

    before = patched()
    cpu.install()
    inside = importlib.import_module("megatron.core.parallel_state").torch
    raised = []
    for outside in (
        lambda: torch.zeros(1, device="cuda"),
        lambda: torch.tensor([1], device="cuda"),
        torch.cuda.current_device,
        torch.cuda.synchronize,
        torch.cuda.get_rng_state,
        lambda: torch.nn.Linear(1, 1).to("cuda"),
    ):
        try:
            outside()
            raised.append(False)
        except (AssertionError, RuntimeError):
            raised.append(True)
    return {
        "idempotent": before == patched(),
        "raised": raised,
        "inside": str(inside.zeros(1, device="cuda").device),
        "current": inside.cuda.current_device(),
        "same functions": inside.matmul is torch.matmul and inside.nn is torch.nn,
        "unpatched modules": importlib.import_module("megatron.core.model_parallel_config").torch
        is torch,
    }


def test_installing_twice_changes_nothing_and_nothing_outside() -> None:
    result = run_ranks(_install_again, 1)[0]
    assert result["idempotent"]
    assert result["raised"] == [True] * 6
    assert result["inside"] == "cpu"
    assert result["current"] == "cpu"
    assert result["same functions"]
    assert result["unpatched modules"]


def test_the_device_is_the_cpu() -> None:
    assert cpu.device() == torch.device("cpu")
