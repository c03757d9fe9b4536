"""`post_local_sgd` trains like torch's PostLocalSGDOptimizer with a PeriodicModelAverager."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from distributed import run_ranks
from harness import ADAMW, Case, learning_rate, loss_of, rank_batches, run_engine
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local_sgd
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from megatron_edit.backends.megatron.mesh import build_mesh
from megatron_edit.backends.megatron.model import build_model
from megatron_edit.config.methods import PRESETS
from megatron_edit.engine.reference import _decay_groups

WARMUP, TAU = 3, 4
CASE = Case(
    micro_batches=1,
    clip_grad=0.0,
    edit={
        **PRESETS["post_local_sgd"],
        "method": "post_local_sgd",
        "warmup_steps": WARMUP,
        "sync_interval": TAU,
        "weight_temperature_relative": None,
    },
)


def torch_training(case: Case) -> dict[str, Any]:
    """A rank of torch's own local SGD; returns losses, start weights and final parameters."""
    build_mesh(2)
    model = build_model(case.args())[0]
    weights = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    parallel = DistributedDataParallel(model)
    state = post_local_sgd.PostLocalSGDState(None, alone, start_localSGD_iter=WARMUP)
    parallel.register_comm_hook(state, post_local_sgd.post_localSGD_hook)
    inner = torch.optim.AdamW(_decay_groups(model), **ADAMW, fused=True)
    # torch averages after a step, counted from 0; we before the step that follows it.
    averager = PeriodicModelAverager(period=TAU, warmup_steps=WARMUP + TAU - 1)
    optimizer = PostLocalSGDOptimizer(inner, averager)
    losses = []
    for step in range(case.steps):
        optimizer.zero_grad()
        loss = loss_of(parallel, rank_batches(case, step, dist.get_rank(), 0)[0]).mean()
        loss.backward()
        for group in inner.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.step()
        losses.append(loss.item())
    final = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in final.values():
        dist.all_reduce(parameter)
        parameter /= 2
    return {
        "losses": losses,
        "weights": weights,
        "final": {name: p.numpy() for name, p in final.items()},
    }


def test_losses_and_parameters_are_torchs() -> None:
    theirs = run_ranks(torch_training, 2, CASE)
    ours = run_ranks(run_engine, 2, CASE, theirs[0]["weights"], theirs[0]["final"])
    for their, our in zip(theirs, ours, strict=True):
        np.testing.assert_allclose(our["losses"], their["losses"], rtol=0, atol=1e-6)
        # Ours adds the mean difference to the anchor, torch takes the mean: one rounding apart,
        # which the steps after it carry on.
        assert our["distance"] < 2e-6
