"""A tiny Llama of transformers, trained by EDiT on DeepSpeed's engine and by the reference."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from harness import digest

from megatron_edit.config.zero_config import read_zero_run
from megatron_edit.engine.reference import NaiveReference
from megatron_edit.platform import ds_zero
from megatron_edit.platform.ds_compat import name_accelerator
from megatron_edit.run.zero import EDiT

# Imported once, in the parent of the ranks.
name_accelerator()
import deepspeed  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

SEQUENCE, VOCABULARY, LAYERS = 12, 63, 2
ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}


@dataclass(frozen=True)
class ZeroCase:
    """A layout of DeepSpeed ranks and what they train."""

    stage: int
    replicas: int = 2
    shard: int = 2
    accumulation: int = 1
    steps: int = 16
    tied: bool = False
    bf16: bool = False
    gradient_checkpointing: bool = False
    zero: dict[str, Any] = field(default_factory=dict)
    edit: dict[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.replicas * self.shard

    def json(self) -> dict[str, Any]:
        edit = {
            "replicas": self.replicas, "warmup_steps": 3, "sync_interval": 4, "clip": 0.4,
            "outer_momentum": 0.6, "weight_temperature_relative": 0.5,
        }  # fmt: skip
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.accumulation,
            "train_batch_size": self.world * self.accumulation,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": self.bf16},
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": self.stage, **self.zero},
            "edit": {**edit, **self.edit},
        }

    def model(self, vocabulary: int = VOCABULARY, positions: int = SEQUENCE) -> Any:
        torch.manual_seed(5)
        config = LlamaConfig(
            vocab_size=vocabulary, hidden_size=64, intermediate_size=97, num_hidden_layers=LAYERS,
            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=self.tied,
            max_position_embeddings=positions, initializer_range=0.05,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
        if self.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        return model


def batch(case: ZeroCase, step: int, micro: int, replica: int, shard_rank: int) -> torch.Tensor:
    """``[1, SEQUENCE]`` tokens of one rank, int64."""
    seed = ((step * 8 + micro) * 8 + replica) * 8 + shard_rank
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (1, SEQUENCE), generator=generator)


def learning_rate(step: int) -> float:
    return 3e-3 * (1 - step / 40)


def decay_groups(model: Any) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": matrices}, {"params": others, "weight_decay": 0.0}]


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


class ZeroTraining:
    """One rank."""

    def __init__(self, case: ZeroCase, model: Any = None) -> None:
        self.case = case
        self.edit = EDiT(case.json(), timeout_minutes=1)
        model = model or case.model()
        optimizer = torch.optim.AdamW(decay_groups(model), **ADAMW)
        self.engine = self.edit.initialize(model=model, optimizer=optimizer)[0]
        self.mesh = self.edit.mesh

    def step(self) -> float:
        """One step; returns this rank's mean loss."""
        step, losses = self.edit.sync.step, []
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate(step)
        for micro in range(self.case.accumulation):
            place = (self.mesh.replica, self.mesh.shard_rank)
            loss = loss_of(self.engine, batch(self.case, step, micro, *place))
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.item())
        return float(np.mean(losses))

    def evaluate(self) -> float:
        """Loss of a fixed sample."""
        self.engine.eval()
        with torch.no_grad():
            loss = loss_of(self.engine, batch(self.case, 99, 0, 0, 0)).item()
        self.engine.train()
        return loss

    def whole(self) -> dict[str, np.ndarray]:
        """Whole parameters, as the forward sees them; by all ranks together."""
        parameters = dict(self.engine.module.named_parameters())
        if self.case.stage < 3:
            return {name: p.detach().float().numpy().copy() for name, p in parameters.items()}
        with deepspeed.zero.GatheredParameters(list(parameters.values())):
            return {name: p.detach().float().numpy().copy() for name, p in parameters.items()}

    def digests(self) -> dict[str, str]:
        """Hashes of this rank's masters, computing shards, anchor and outer momentum."""
        pieces = ds_zero.pieces(self.engine)
        return {
            "masters": digest(piece.master for piece in pieces),
            "anchor": digest(state.anchor for state in self.edit.sync.outer),
            "momentum": digest(s.momentum for s in self.edit.sync.outer if s.momentum is not None),
        }


def train(case: ZeroCase, evaluate_at: int | None = 9) -> dict[str, Any]:
    """Trains a case on this rank to its end."""
    training = ZeroTraining(case)
    losses = []
    for step in range(case.steps):
        if step == evaluate_at:
            training.evaluate()
        losses.append(training.step())
    training.edit.synchronize()
    return {
        "losses": losses,
        "whole": training.whole(),
        "digests": training.digests(),
        "rounds": training.edit.sync.round,
        "records": training.edit.sync.records(),
    }


def reference(case: ZeroCase) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses and final anchor of the naive reference."""
    first = case.model()
    models = [copy.deepcopy(first) for _ in range(case.replicas)]
    units: dict[str, list[str]] = {}
    for name, _ in first.named_parameters():
        units.setdefault(_unit(name), []).append(name)
    config = read_zero_run(case.json()).edit
    naive = NaiveReference(models, units, loss_of, config, ADAMW, clip_grad=1.0)
    losses = []
    for step in range(case.steps):
        batches = [
            [
                torch.cat([batch(case, step, m, replica, s) for s in range(case.shard)])
                for m in range(case.accumulation)
            ]
            for replica in range(case.replicas)
        ]
        losses.append(naive.step(batches, learning_rate(step)))
    naive.synchronize()
    return losses, {name: p.numpy() for name, p in naive.anchor.items()}


def _unit(name: str) -> str:
    if name.startswith("model.layers."):
        return f"layers.{name.split('.')[2]}"
    return "embedding" if name.startswith("model.embed") else "head"
