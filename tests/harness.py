"""A tiny model on random tokens, trained by the engine in any layout and by the naive reference."""

from __future__ import annotations

import hashlib
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_edit.backends.megatron.build import get_edit_model_and_optimizer
from megatron_edit.backends.megatron.mesh import build_mesh
from megatron_edit.backends.megatron.model import build_model
from megatron_edit.backends.megatron.optimizer import EDiTDistributedOptimizer
from megatron_edit.backends.megatron.sharding import Sharding
from megatron_edit.backends.megatron.units import global_name, unit_names
from megatron_edit.config.edit_config import EditConfig
from megatron_edit.engine.reference import NaiveReference
from megatron_edit.replicas.mesh import Mesh

SEQUENCE = 16
VOCABULARY = 64
ADAMW = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}


@dataclass(frozen=True)
class Case:
    """A layout and what is trained in it."""

    replicas: int = 2
    shard: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    layers: int = 4
    micro_batches: int = 2
    steps: int = 24
    tied: bool = False
    recompute: bool = False
    keep_gathered: bool = False
    bf16: bool = False
    clip_grad: float = 1.0
    sequence_parallel: bool = True
    edit: dict[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.replicas * self.shard * self.tp * self.pp

    @property
    def config(self) -> EditConfig:
        settings: dict[str, Any] = {
            "replicas": self.replicas,
            "warmup_steps": 3,
            "sync_interval": 4,
            "weight_temperature_relative": 0.5,
            "clip": 0.4,
            "outer_momentum": 0.6,
        }
        return EditConfig(**{**settings, **self.edit})

    @property
    def samples_per_replica(self) -> int:
        """A fixed number per step, however many ranks share it."""
        return 6 * self.micro_batches if self.shard == 3 else 4 * self.micro_batches

    def args(self) -> Namespace:
        """Megatron's flags of the model."""
        return Namespace(
            num_layers=self.layers, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4,
            num_query_groups=2, kv_channels=16, normalization="RMSNorm", norm_epsilon=1e-5,
            swiglu=True, disable_bias_linear=True, attention_dropout=0.0, hidden_dropout=0.0,
            init_method_std=0.05, tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp, virtual_pipeline_model_parallel_size=self.vpp,
            sequence_parallel=self.tp > 1 and self.sequence_parallel,
            recompute_granularity="full" if self.recompute else None,
            recompute_method="uniform" if self.recompute else None,
            recompute_num_layers=1 if self.recompute else None,
            params_dtype=torch.bfloat16 if self.bf16 else torch.float32,
            transformer_impl="local", seed=11, padded_vocab_size=VOCABULARY,
            max_position_embeddings=SEQUENCE, rotary_base=10000,
            untie_embeddings_and_output_weights=not self.tied,
        )  # fmt: skip


def samples(step: int, count: int) -> torch.Tensor:
    """``[count, SEQUENCE + 1]`` random tokens of a step, int64."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(VOCABULARY, (count, SEQUENCE + 1), generator=generator)


def learning_rate(step: int) -> float:
    """A schedule that moves, so that a wrong step counter shows."""
    return 3e-3 * (1 - step / 40)


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """Losses of ``[n, SEQUENCE + 1]`` tokens."""
    position = torch.arange(SEQUENCE).expand(len(batch), -1)
    return model(batch[:, :-1], position, None, labels=batch[:, 1:])


def bf16_loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The same with bf16 copies of the fp32 parameters, made anew at every use."""

    def with_copies(*args: Any, **kwargs: Any) -> torch.Tensor:
        copies = {name: p.bfloat16() for name, p in model.named_parameters()}
        return torch.func.functional_call(model, copies, args, kwargs)

    return loss_of(with_copies, batch)


@dataclass
class Training:
    """A rank of the engine at work."""

    case: Case
    mesh: Mesh
    chunks: list[Any]
    optimizer: EDiTDistributedOptimizer

    @property
    def engine(self) -> Any:
        return self.optimizer.engine

    def step(self) -> float:
        """One step; returns the mean loss of this rank's samples (0 off the last stage)."""
        self.begin()
        losses = self.forward(self.engine.step)
        self.finish()
        return losses

    def begin(self) -> None:
        """What a loop does before the first micro-batch of a step."""
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def finish(self) -> float:
        """What a loop does after the last backward of a step; returns the gradient norm."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.engine.step)
        return float(self.optimizer.step()[1])

    def evaluate(self, step: int) -> float:
        """Mean loss of this rank's samples of a step, forward only."""
        for chunk in self.chunks:
            chunk.eval()
        with torch.no_grad():
            return self.forward(step, only=True)

    def forward(self, step: int, only: bool = False) -> float:
        """Forward (and backward) of this rank's micro-batches of a step."""
        micro_batches = rank_batches(self.case, step, self.mesh.replica, self.mesh.shard_rank)
        iterators = [iter(micro_batches) for _ in self.chunks]
        reduced = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=self.case.micro_batches,
            seq_length=SEQUENCE,
            micro_batch_size=len(micro_batches[0]),
            forward_only=only,
        )
        return float(np.mean([loss.item() for loss in reduced])) if reduced else 0.0


def _forward_step(batches: Any, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    output = loss_of(model, next(batches))

    def mean(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = losses.float().mean()
        return loss, loss.detach().clone()

    return output, mean


def rank_batches(case: Case, step: int, replica: int, shard_rank: int) -> list[torch.Tensor]:
    """Micro-batches of one rank: replicas, and in them shard ranks, take contiguous parts."""
    everything = samples(step, case.replicas * case.samples_per_replica)
    own = everything.chunk(case.replicas)[replica].chunk(case.shard)[shard_rank]
    return list(own.chunk(case.micro_batches))


def replica_batches(case: Case, step: int, replica: int) -> list[torch.Tensor]:
    """Micro-batches of a replica: those of its shard ranks, put together."""
    ranks = [rank_batches(case, step, replica, rank) for rank in range(case.shard)]
    return [torch.cat(same) for same in zip(*ranks, strict=True)]


def mesh_of(case: Case) -> Mesh:
    """The mesh of a case; one per process."""
    return build_mesh(case.replicas, case.tp, case.pp, case.vpp, timeout_minutes=1)


def start(
    case: Case, weights: dict[str, np.ndarray] | None = None, mesh: Mesh | None = None
) -> Training:
    """Builds the model, with the given whole weights or its own, and the engine on this rank.

    A mesh is given when this process has built it before.
    """
    mesh = mesh or mesh_of(case)
    sharding = Sharding(mesh, case.args().params_dtype, not case.keep_gathered)
    model = build_model(case.args(), sharding=sharding if weights is None else None)
    if weights is not None:
        for chunk in model:
            for name, parameter in chunk.named_parameters():
                whole = torch.from_numpy(weights[whole_name(global_name(chunk, name), case)])
                parameter.data.copy_(own_part(name, whole, parameter, mesh))
    chunks, optimizer = get_edit_model_and_optimizer(
        model,
        OptimizerConfig(
            lr=ADAMW["lr"],
            min_lr=0.0,
            weight_decay=ADAMW["weight_decay"],
            adam_beta1=0.9,
            adam_beta2=0.95,
            adam_eps=ADAMW["eps"],
            clip_grad=case.clip_grad,
        ),
        case.config,
        mesh,
        case.samples_per_replica,
        sharding,
    )
    return Training(case, mesh, chunks, optimizer)


def whole_name(name: str, case: Case) -> str:
    """The last stage's copy of a tied embedding goes by another name."""
    if case.tied and name == "output_layer.weight":
        return "embedding.word_embeddings.weight"
    return name


def own_part(name: str, whole: torch.Tensor, part: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Cuts a tensor-parallel rank's part out of a whole parameter."""
    if not getattr(part, "tensor_model_parallel", False):
        return whole
    dimension = part.partition_dim
    # Gate and up projection are stacked, and each is split by itself.
    stacked = whole.chunk(2, dim=0) if "linear_fc1" in name else (whole,)
    return torch.cat([s.chunk(mesh.tensor_parallel, dimension)[mesh.tensor_rank] for s in stacked])


def whole_models(case: Case, count: int) -> list[Any]:
    """Equal copies of the model of a case in one process; needs a world of one rank."""
    build_mesh(1)
    whole = replace(case, tp=1, pp=1, vpp=None, recompute=False)
    return [build_model(whole.args())[0] for _ in range(count)]


def run_reference(
    case: Case, prepare: Callable[[Any], None] | None = None
) -> tuple[dict[str, Any], list[float], dict[str, Any]]:
    """Start weights, losses and final anchor of the naive reference; needs a world of one rank.

    ``prepare`` is called with every model before the first step.
    """
    models = whole_models(case, case.replicas)
    if prepare is not None:
        for model in models:
            prepare(model)
    units: dict[str, list[str]] = {name: [] for name in unit_names(case.layers, case.tied)}
    for name, _ in models[0].named_parameters():
        units[_unit_of(name, case.tied)].append(name)
    weights = {name: p.detach().numpy().copy() for name, p in models[0].named_parameters()}
    losses_of = bf16_loss_of if case.bf16 else loss_of
    reference = NaiveReference(
        models,
        units,
        lambda m, b: losses_of(m, b).float().mean(),
        case.config,
        ADAMW,
        case.clip_grad,
    )
    losses = []
    for step in range(case.steps):
        batches = [replica_batches(case, step, replica) for replica in range(case.replicas)]
        losses.append(reference.step(batches, learning_rate(step)))
    reference.synchronize()
    assert reference.rounds >= 5
    return weights, losses, {name: p.numpy() for name, p in reference.anchor.items()}


def _unit_of(name: str, tied: bool) -> str:
    if name.startswith("decoder.layers."):
        return f"layers.{name.split('.')[2]}"
    return "embedding" if tied or name.startswith("embedding") else "head"


def run_engine(
    case: Case,
    weights: dict[str, Any],
    final: dict[str, Any],
    prepare: Callable[[Any], None] | None = None,
) -> dict[str, Any]:
    """Trains a case on this rank; returns its losses and the distance from the final anchor."""
    training = start(case, weights)
    if prepare is not None:
        for chunk in training.chunks:
            prepare(chunk.module)
    losses = [training.step() for _ in range(case.steps)]
    training.engine.synchronize()
    return {
        "losses": losses if training.mesh.is_last_stage else None,
        "distance": distance(training, final),
        "records": training.engine.records(),
    }


def distance(training: Training, whole: dict[str, Any]) -> float:
    """Largest absolute difference of this rank's parameters from a whole model's."""
    worst = 0.0
    for name, parameter in training.optimizer.named_parameters().items():
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.data
        for mark, value in vars(parameter).items():
            setattr(full, mark, value)
        own = own_part(
            name, torch.from_numpy(whole[whole_name(name, training.case)]), full, training.mesh
        )
        worst = max(worst, (full - own).abs().max().item())
    return worst


def mean_losses(results: list[dict[str, Any]]) -> list[float]:
    """Per-step loss averaged over all ranks that compute one."""
    rows = [result["losses"] for result in results if result["losses"] is not None]
    return list(np.mean(rows, axis=0))


def barrier() -> None:
    """Waits for all ranks of the test."""
    dist.barrier()


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """A hash of the bits of some tensors."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().contiguous().numpy().tobytes())
    return sha.hexdigest()


def digests(training: Training) -> dict[str, str]:
    """Hashes of this rank's parameters, AdamW moments, anchor and outer momentum."""
    engine = training.engine
    state = training.optimizer.optimizer.state
    inner = [state.get(shard, {}) for shard in training.optimizer._shards.values()]
    return {
        "parameters": digest(local for unit in engine.units for local in unit.locals),
        "moments": digest(moments[key] for moments in inner for key in sorted(moments)),
        "anchor": digest(state.anchor for state in engine.outer),
        "momentum": digest(s.momentum for s in engine.outer if s.momentum is not None),
    }


@dataclass(frozen=True)
class Collective:
    """A collective, or one end of a transfer, that this rank took part in."""

    name: str
    ranks: tuple[int, ...]
    sent: int
    """Bytes of the tensors this rank put in."""


class CollectiveLog(TorchDispatchMode):
    """Records every collective in its block, whichever way it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Collective] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            # The group is the first script object; a reduction's operator is another.
            group = next(a for a in args if isinstance(a, torch.ScriptObject))
            ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))
            name = func.overloadpacket.__name__
            tensor = args[1] if name.startswith(("_allgather", "_reduce_scatter")) else args[0]
            tensors = tensor if isinstance(tensor, list) else [tensor]
            sent = sum(t.numel() * t.element_size() for t in tensors)
            self.entries.append(Collective(name, tuple(ranks), sent))
        return func(*args, **(kwargs or {}))

    def across_replicas(self, replica_size: int) -> list[Collective]:
        """Those whose group has ranks of two replicas."""
        return [e for e in self.entries if len({r // replica_size for r in e.ranks}) > 1]
