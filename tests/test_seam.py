"""The engine drives a backend of plain tensors: no megatron-core, no FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from torch import nn

from megatron_edit.config.edit_config import EditConfig
from megatron_edit.engine.backend import Backend, Unit
from megatron_edit.engine.reference import NaiveReference
from megatron_edit.engine.sync_engine import SyncEngine
from megatron_edit.replicas.mesh import build_mesh
from megatron_edit.replicas.peers import PeerGroup

REPLICAS, STEPS, WIDTH, LAYERS, SAMPLES = 3, 22, 8, 3, 4
ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}
SETTINGS: dict[str, dict[str, Any]] = {
    "edit": {},
    "delay": {"delay_steps": 2},
    "local SGD": {"weighting": "uniform", "detector": "none", "clip": None, "outer_momentum": 0.0},
    "co2": {
        "weighting": "uniform", "detector": "none", "clip": None, "delay_round": True,
        "outer_nesterov": False, "outer_lr": 1.0,
    },
}  # fmt: skip


def config(name: str) -> EditConfig:
    settings = {"warmup_steps": 3, "sync_interval": 4, "clip": 0.4, "outer_momentum": 0.6}
    return EditConfig(**{**settings, **SETTINGS[name]})  # type: ignore[arg-type]


def model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def batch(step: int, replica: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + replica)
    return torch.randn(SAMPLES, WIDTH, generator=generator)


def loss_of(layers: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return (layers(inputs) - inputs.roll(1, dims=1)).square().mean()


def learning_rate(step: int) -> float:
    return 3e-2 * (1 - step / 40)


@dataclass(eq=False)
class PlainUnit(Unit):
    """A module whose own parameters are the masters."""

    name: str
    index: int
    module: nn.Module

    def __post_init__(self) -> None:
        self.spans_stages = False
        named = self.module.named_parameters(prefix=str(self.index))
        self.parameters = dict(named)
        self.locals = [parameter.detach() for parameter in self.parameters.values()]
        self.counted = [True] * len(self.locals)

    @property
    def is_gathered(self) -> bool:
        return False

    def copy_from(self, flat: torch.Tensor) -> None:
        torch._foreach_copy_(self.locals, self.views(flat))


class PlainBackend:
    """A whole model on one rank, one unit a layer."""

    def __init__(self, layers: nn.Sequential, in_forward: bool) -> None:
        self._layers = layers
        self.units = [PlainUnit(f"layer{i}", i, layer) for i, layer in enumerate(layers)]
        self.unit_names = [unit.name for unit in self.units]
        self.has_spanning_unit = False
        self.lands_in_forward = in_forward
        self.calls: list[str] = []

    def before_each_unit(
        self,
        before_unit: Callable[[Unit], None],
        after_forward: Callable[[Sequence[Unit]], None],
    ) -> None:
        for unit in self.units:
            unit.module.register_forward_pre_hook(lambda *_, unit=unit: before_unit(unit))
        self._layers.register_forward_hook(lambda *_: after_forward(self.units))

    def release(self) -> None:
        self.calls.append("release")

    def gather(self, unit: Unit) -> None:
        self.calls.append(f"gather {unit.name}")

    def expect_average(self, peers: PeerGroup) -> None:
        """There is no backward to hide it behind."""

    def average_gradients(self, peers: PeerGroup) -> None:
        for parameter in self._layers.parameters():
            assert parameter.grad is not None
            peers.all_reduce(parameter.grad, "averaging").wait()
            parameter.grad.div_(peers.size)

    def flush(self) -> None:
        self.calls.append("flush")


def _train(name: str, in_forward: bool) -> dict[str, Any]:
    replica = dist.get_rank()
    layers = model()
    backend = PlainBackend(layers, in_forward)
    # The checker of types holds the class to the protocol here.
    seen: Backend = backend
    engine = SyncEngine(seen, build_mesh(REPLICAS, timeout_minutes=1), config(name), SAMPLES)
    weights = [p for n, p in layers.named_parameters() if n.endswith("weight")]
    biases = [p for n, p in layers.named_parameters() if n.endswith("bias")]
    groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0}]
    inner = torch.optim.AdamW(groups, **ADAMW)
    losses = []
    for step in range(STEPS):
        engine.begin_step()
        inner.zero_grad()
        loss = loss_of(layers, batch(step, replica))
        loss.backward()
        engine.average_gradients()
        for group in inner.param_groups:
            group["lr"] = learning_rate(step)
        inner.step()
        engine.end_step()
        losses.append(loss.item())
    engine.synchronize()
    parameters = {n: p.tolist() for n, p in layers.named_parameters()}
    return {"losses": losses, "parameters": parameters, "calls": backend.calls}


@pytest.mark.parametrize("in_forward", [True, False], ids=["in forward", "before it"])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_backend_of_plain_tensors_equals_the_reference(name: str, in_forward: bool) -> None:
    results = run_ranks(_train, REPLICAS, name, in_forward, timeout_s=60)
    replicas = [model() for _ in range(REPLICAS)]
    units = {f"layer{i}": [f"{i}.weight", f"{i}.bias"] for i in range(LAYERS)}
    reference = NaiveReference(replicas, units, loss_of, config(name), ADAMW)
    for step in range(STEPS):
        batches = [[batch(step, replica)] for replica in range(REPLICAS)]
        loss = reference.step(batches, learning_rate(step))
        # fp32 sums in another order.
        assert loss == pytest.approx(
            sum(result["losses"][step] for result in results) / REPLICAS, abs=1e-6
        )
    reference.synchronize()
    for result in results:
        assert result["parameters"] == results[0]["parameters"]
        for parameter, anchor in reference.anchor.items():
            distance = torch.tensor(result["parameters"][parameter]) - anchor
            assert distance.abs().max() < 2e-6, parameter


def test_the_engine_asks_for_what_a_sharding_backend_needs() -> None:
    calls = run_ranks(_train, REPLICAS, "edit", True, timeout_s=60)[0]["calls"]
    first = calls.index("gather layer0")
    assert calls[first - 1] == "release", "whole parameters outlive the change of their masters"
    assert calls[first : first + LAYERS] == [f"gather layer{i}" for i in range(LAYERS)]
    # The last synchronisation lands outside of a forward.
    assert calls[-1] == "flush"
