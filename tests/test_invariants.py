"""What must hold of the method whatever the model, against plain torch code where there is any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from harness import (
    ADAMW,
    Case,
    Training,
    digest,
    digests,
    distance,
    learning_rate,
    loss_of,
    mesh_of,
    rank_batches,
    replica_batches,
    start,
    whole_models,
    whole_name,
)

from megatron_edit.backends.megatron.model import build_model
from megatron_edit.backends.megatron.units import local_of
from megatron_edit.replicas.peers import PeerError

SMALL = Case(layers=2, steps=6, clip_grad=0.0, edit={"warmup_steps": 1, "sync_interval": 2})
SGD_LR = 0.5
UNIFORM = {"weighting": "uniform", "weight_temperature_relative": None, "clip": None}


def whole_start(case: Case) -> dict[str, Any]:
    """Start weights of a case's whole model."""

    def weights() -> dict[str, Any]:
        model = whole_models(case, 1)[0]
        return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}

    return run_ranks(weights, 1)[0]


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    """torch's AdamW with Megatron's two groups: matrices decay, norm weights do not."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": matrices}, {"params": others, "weight_decay": 0.0}], fused=True, **ADAMW
    )


def backward(model: torch.nn.Module, case: Case, step: int) -> None:
    """Gradients of a replica of one rank, averaged over its micro-batches."""
    model.zero_grad()
    for batch in rank_batches(case, step, replica=0, shard_rank=0):
        (loss_of(model, batch).mean() / case.micro_batches).backward()


def set_lr(optimizer: torch.optim.Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step)


# --- Limits in which EDiT is something known -------------------------------------------------


def _averaged_sgd(case: Case) -> dict[str, Any]:
    """SGD on the loss averaged over all replicas; returns the final weights."""
    model = whole_models(case, 1)[0]
    sgd = torch.optim.SGD(model.parameters(), lr=SGD_LR)
    for step in range(case.steps):
        model.zero_grad()
        for replica in range(case.replicas):
            for batch in replica_batches(case, step, replica):
                share = case.replicas * case.micro_batches
                (loss_of(model, batch).mean() / share).backward()
        sgd.step()
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


def _local_sgd(
    case: Case, weights: dict[str, Any], final: dict[str, Any]
) -> tuple[float, float, int]:
    """Trains with SGD inside; distances from start and given end, and the number of rounds."""
    training = start(case, weights)
    shards = list(training.optimizer._shards.values())
    training.optimizer.optimizer = torch.optim.SGD(shards, lr=SGD_LR, fused=True)
    for step in range(case.steps):
        training.begin()
        training.forward(step)
        training.optimizer.step()
    training.engine.synchronize()
    return distance(training, weights), distance(training, final), training.engine.round


@pytest.mark.parametrize("replicas", [2, 3])
def test_tau_1_with_sgd_and_plain_averaging_is_averaged_sgd(replicas: int) -> None:
    edit = {"warmup_steps": 0, "sync_interval": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
    case = replace(SMALL, replicas=replicas, edit={**UNIFORM, **edit})
    final = run_ranks(_averaged_sgd, 1, case)[0]
    results = run_ranks(_local_sgd, case.world, case, whole_start(case), final)
    for moved, off, rounds in results:
        assert moved > 1e-2
        assert off < 1e-6
        assert rounds == case.steps


def _lookahead(case: Case) -> tuple[float, float]:
    """Distances of one replica from AdamW with slow weights moved by torch's Nesterov SGD, and of
    the slow weights from the fast ones before the last step."""
    config = case.config
    training = start(case)
    model = build_model(case.args())[0]
    fast = adamw(model)
    slow = [torch.nn.Parameter(p.detach().clone()) for p in model.parameters()]
    outer = torch.optim.SGD(slow, lr=config.outer_lr, momentum=config.outer_momentum, nesterov=True)

    def look_ahead() -> float:
        apart = 0.0
        for slow_one, parameter in zip(slow, model.parameters(), strict=True):
            slow_one.grad = slow_one.detach() - parameter.detach()
            apart = max(apart, slow_one.grad.abs().max().item())
        outer.step()
        for slow_one, parameter in zip(slow, model.parameters(), strict=True):
            parameter.data.copy_(slow_one.detach())
        return apart

    for step in range(case.steps):
        if step and step % config.sync_interval == 0:
            look_ahead()
        backward(model, case, step)
        set_lr(fast, step)
        fast.step()
        training.step()
    apart = look_ahead()
    training.engine.synchronize()
    final = {name: p.detach().numpy() for name, p in model.named_parameters()}
    return distance(training, final), apart


def test_one_replica_is_lookahead_with_a_nesterov_outer_step() -> None:
    edit = {"warmup_steps": 0, "sync_interval": 3, "clip": None}
    case = replace(SMALL, replicas=1, steps=12, edit=edit)
    off, apart = run_ranks(_lookahead, 1, case)[0]
    assert apart > 1e-3
    assert off < 1e-6


def _plain(case: Case) -> tuple[list[float], list[float], bool]:
    """Losses of one replica and of a bare loop, and whether the weights end bitwise the same."""
    training = start(case)
    model = build_model(case.args())[0]
    inner = adamw(model)
    losses: list[float] = []
    for step in range(case.steps):
        with torch.no_grad():
            batches = rank_batches(case, step, 0, 0)
            losses.append(sum(loss_of(model, b).mean().item() for b in batches) / len(batches))
        backward(model, case, step)
        if case.clip_grad > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip_grad)
        set_lr(inner, step)
        inner.step()
    own = [training.step() for _ in range(case.steps)]
    mine = training.optimizer.named_parameters()
    same = all(torch.equal(mine[name], p) for name, p in model.named_parameters())
    return own, losses, same


def test_one_replica_that_never_synchronises_is_a_plain_run() -> None:
    case = replace(SMALL, replicas=1, edit={"warmup_steps": 0, "sync_interval": 1_000_000})
    own, losses, same = run_ranks(_plain, 1, case)[0]
    assert own == pytest.approx(losses, abs=1e-6)
    assert same
    # The division of a clipped gradient rounds elsewhere.
    own, losses, _ = run_ranks(_plain, 1, replace(case, clip_grad=0.1))[0]
    assert own == pytest.approx(losses, abs=1e-5)


def _first_update(case: Case) -> dict[str, Any]:
    """The first step of the optimizer beside torch's AdamW, and how it groups parameters."""
    training = start(case)
    model = build_model(case.args())[0]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    backward(model, case, 0)
    inner = adamw(model)
    set_lr(inner, 0)
    inner.step()
    training.step()
    mine = training.optimizer.named_parameters()
    names = {id(shard): name for name, shard in training.optimizer._shards.items()}
    groups = training.optimizer.param_groups
    return {
        "same": {name: torch.equal(mine[name], p) for name, p in model.named_parameters()},
        "moved": all(not torch.equal(p, before[name]) for name, p in model.named_parameters()),
        "steps": {float(s["step"]) for s in training.optimizer.optimizer.state.values()},
        "decay": {names[id(p)]: g["weight_decay"] for g in groups for p in g["params"]},
    }


def test_first_update_is_that_of_torch_adamw() -> None:
    result = run_ranks(_first_update, 1, replace(SMALL, replicas=1))[0]
    assert all(result["same"].values()), result["same"]
    assert result["moved"]
    assert result["steps"] == {1.0}
    for name, decay in result["decay"].items():
        assert decay == (0.0 if "norm" in name else ADAMW["weight_decay"]), name
    assert len(set(result["decay"].values())) == 2


# --- Replicas agree --------------------------------------------------------------------------


def _state_around_a_synchronisation(case: Case) -> dict[str, Any]:
    """Hashes of parameters, anchor and momentum per unit before and after, on this rank."""
    training = start(case)

    def state() -> dict[str, tuple[str, ...]]:
        return {
            outer.unit.name: (
                digest(outer.unit.locals),
                digest([outer.anchor]),
                digest([outer.momentum]),
            )
            for outer in training.engine.outer
        }

    while not training.engine.trigger.due(training.engine.step):
        training.step()
    # A unit that spans stages is synchronised in here, the others in the forward.
    training.begin()
    before = state()
    training.forward(training.engine.step)
    return {"before": before, "after": state()}


LAYOUTS = {
    "S2": replace(SMALL, shard=2),
    "TP2": replace(SMALL, tp=2),
    "R3": replace(SMALL, replicas=3),
    "PP2 tied": replace(SMALL, pp=2, tied=True),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_replicas_are_bitwise_the_same_after_a_synchronisation(name: str) -> None:
    case = LAYOUTS[name]
    results = run_ranks(_state_around_a_synchronisation, case.world, case)
    size = case.world // case.replicas
    for rank in range(size):
        replicas = [results[rank + replica * size] for replica in range(case.replicas)]
        for unit, after in replicas[0]["after"].items():
            parts = [replica["after"][unit] for replica in replicas]
            assert len(set(parts)) == 1, unit
            if not (case.tied and unit == "embedding"):
                apart = {replica["before"][unit][0] for replica in replicas}
                assert len(apart) == case.replicas, unit
                assert after[1] != replicas[0]["before"][unit][1], unit


def _start_apart(case: Case) -> str:
    """Replica 1 has one weight changed in its last bit, on one of its ranks."""
    training = start(case)
    if dist.get_rank() == case.world // case.replicas:
        weight = training.engine.units[1].locals[0].view(-1)
        weight[:1] = torch.nextafter(weight[:1], torch.full((1,), 2.0))
    try:
        training.step()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("shard", [1, 2])
def test_replicas_that_start_apart_are_refused(shard: int) -> None:
    case = replace(SMALL, shard=shard, edit={"warmup_steps": 0, "sync_interval": 2})
    messages = run_ranks(_start_apart, case.world, case, timeout_s=60)
    for message in messages:
        assert "replicas hold different parameters at step 0" in message


def _launch_in_another_order(case: Case) -> str:
    """Replica 1 swaps the all-reduces of two layers, which have the same size."""
    training = start(case)
    for _ in range(2):
        training.step()
    if training.mesh.replica == 1:
        outer = training.engine.outer
        outer[1], outer[2] = outer[2], outer[1]
    try:
        for _ in range(4):
            training.step()
    except PeerError as error:
        return str(error)
    return ""


def test_another_order_of_all_reduces_in_one_replica_is_noticed() -> None:
    for message in run_ranks(_launch_in_another_order, 2, SMALL):
        assert "synchronised their units in different orders" in message


class _Finished:
    """A collective that has ended."""

    def wait(self) -> None:
        """Its result is there."""


def round_all_reduces_by_group() -> None:
    """Gives the all-reduces of this rank roundings that depend on the group, as they do where
    every group adds in an order of its own."""
    exact = dist.all_reduce

    def rounded(tensor: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        exact(tensor, *args, **kwargs)
        if tensor.is_floating_point():
            tensor.mul_(1 + 1e-6 * dist.get_process_group_ranks(kwargs.get("group"))[0])
        return _Finished() if async_op else None

    dist.all_reduce = rounded


def _warm_up_with_roundings(case: Case) -> dict[str, str]:
    """Hashes of the parameters of which several ranks of a replica hold copies."""
    training = start(case)
    round_all_reduces_by_group()
    # The step after the warm-up compares the replicas.
    for _ in range(case.config.warmup_steps + 1):
        copies = {
            whole_name(name, case): digest([local_of(parameter)])
            for name, parameter in training.optimizer.named_parameters().items()
            if not getattr(parameter, "tensor_model_parallel", False)
            or hasattr(parameter, "shared_embedding")
        }
        training.step()
    return copies


COPIED = {
    "TP2 SP": replace(SMALL, tp=2),
    "TP2": replace(SMALL, tp=2, sequence_parallel=False),
    "PP2 tied": replace(SMALL, pp=2, tied=True),
}


@pytest.mark.parametrize("name", COPIED)
def test_replicas_and_copies_agree_whatever_order_a_group_adds_in(name: str) -> None:
    case = replace(COPIED[name], edit={"warmup_steps": 3, "sync_interval": 2})
    copies = run_ranks(_warm_up_with_roundings, case.world, case)
    shared = copies[0].keys() & copies[1].keys()
    assert shared
    for one in shared:
        assert len({rank[one] for rank in copies}) == 1, one


# --- Looking changes nothing -----------------------------------------------------------------


def _train_watched(case: Case, watched: bool, mesh: Any) -> tuple[list[float], dict[str, str]]:
    training = start(case, mesh=mesh)
    losses = []
    for step in range(case.steps):
        if watched:
            read_everything(training)
            training.evaluate(90 + step)
        losses.append(training.step())
        if watched:
            training.evaluate(80 + step)
            read_everything(training)
    training.engine.synchronize()
    return losses, digests(training)


def read_everything(training: Training) -> None:
    """What logging and saving read."""
    training.engine.records()
    training.optimizer.named_moments()
    training.optimizer.sharded_state_dict({})
    training.optimizer.state_dict()
    training.engine.detector.state_dict()
    for chunk in training.chunks:
        chunk.state_dict()


def _watched_and_not() -> list[tuple[Any, ...]]:
    sharded = replace(SMALL, shard=2)
    mesh = mesh_of(sharded)
    cases = [
        sharded,
        replace(sharded, keep_gathered=True, edit={**sharded.edit, "offload_outer_state": True}),
    ]
    return [
        tuple(_train_watched(case, watched, mesh) for watched in (False, True)) for case in cases
    ]


def test_reading_records_and_states_and_evaluating_changes_nothing() -> None:
    for rank in run_ranks(_watched_and_not, 4):
        for plain, watched in rank:
            assert plain == watched


# --- Gradients -------------------------------------------------------------------------------


def _gradient_norms(case: Case, weights: dict[str, Any]) -> list[float]:
    training = start(case, weights)
    norms = []
    for step in range(2):
        training.begin()
        training.forward(step)
        norms.append(training.finish())
    return norms


def _reference_norms(case: Case) -> list[float]:
    model = whole_models(case, 1)[0]
    inner = adamw(model)
    norms = []
    for step in range(2):
        backward(model, case, step)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
        set_lr(inner, step)
        inner.step()
    return norms


NORM_LAYOUTS = {
    "TP2 SP": Case(replicas=1, layers=2, tp=2, clip_grad=0.0),
    "TP2": Case(replicas=1, layers=2, tp=2, sequence_parallel=False, clip_grad=0.0),
    "PP2 tied": Case(replicas=1, layers=2, pp=2, tied=True, clip_grad=0.0),
    "S2 tied": Case(replicas=1, layers=2, shard=2, tied=True, clip_grad=0.0),
}


@pytest.mark.parametrize("name", NORM_LAYOUTS)
def test_gradient_norm_counts_every_copy_once(name: str) -> None:
    case = NORM_LAYOUTS[name]
    plain = replace(case, tp=1, pp=1, shard=1)
    expected = run_ranks(_reference_norms, 1, plain)[0]
    for norms in run_ranks(_gradient_norms, case.world, case, whole_start(plain)):
        assert norms == pytest.approx(expected, rel=2e-5)


def poison_gradient(training: Training, value: float) -> Callable[[], None]:
    """Has the backward of this rank's first layer begin from a gradient with one bad element;
    returns the undo."""

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        spoiled = gradient.clone()
        spoiled.view(-1)[0] = value
        return spoiled

    def after_forward(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        output[0].register_hook(poison)

    hook = training.engine.units[1].modules[0].register_forward_hook(after_forward)
    return hook.remove


def _step_with_bad_gradient(case: Case, value: float) -> dict[str, Any]:
    """Step 0 (synchronous) and step 2 (local) with bad gradients on one rank of replica 1."""
    training = start(case)
    size = case.world // case.replicas
    result: dict[Any, Any] = {"replica": training.mesh.replica}
    for step in range(4):
        undo = None
        if step in (0, 2) and dist.get_rank() == size:
            undo = poison_gradient(training, value)
        before = digests(training)
        training.step()
        if undo is not None:
            undo()
        after = digests(training)
        same = before["parameters"] == after["parameters"]
        moments = before["moments"] == after["moments"]
        result[step] = (same, moments or step == 0, float(training.optimizer.skipped_steps))
    states = training.optimizer.optimizer.state.values()
    result["finite"] = all(bool(v.isfinite().all()) for s in states for v in s.values())
    result["adam steps"] = {float(state["step"]) for state in states}
    return result


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_with_a_bad_gradient_is_skipped_by_its_whole_replica(value: float) -> None:
    case = replace(SMALL, shard=2, clip_grad=1.0)
    for result in run_ranks(_step_with_bad_gradient, case.world, case, value):
        bad = result["replica"] == 1
        # Averaged over the replicas, it is bad in both.
        assert result[0] == (True, True, 1.0)
        assert result[1] == (False, False, 1.0)
        assert result[2] == ((True, True, 2.0) if bad else (False, False, 1.0))
        assert result[3][0] is False
        assert result["finite"]
        assert result["adam steps"] == {2.0 if bad else 3.0}
