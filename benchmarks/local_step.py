#!/usr/bin/env python
"""Times a local step of EDiT against the same model trained by a bare loop, side by side.

python benchmarks/local_step.py

One rank: our wrapper, megatron-core's schedule and our optimizer, against forward, backward, clip
and torch's fused AdamW on the bare GPTModel. Two ranks that shard the model: the same against
FSDP2 on the same units. Both loops live in the same process and take turns, block by block, so
that whatever else the machine does meets both; a ratio is the median of the blocks' ratios. Besides
the time on the clock it tells the processor time of rank 0, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from megatron_edit.config.edit_config import EditConfig
from megatron_edit.platform import cpu

if TYPE_CHECKING:
    from megatron_edit.engine.sync_engine import SyncEngine

LAYERS, HIDDEN, HEADS, SEQUENCE, VOCABULARY, MICRO_BATCH = 6, 256, 8, 128, 1024, 4
LR, CLIP, WEIGHT_DECAY = 3e-4, 1.0, 0.1


def batches() -> Iterator[torch.Tensor]:
    """Random tokens, ``[MICRO_BATCH, SEQUENCE + 1]``."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    while True:
        shape = (MICRO_BATCH, SEQUENCE + 1)
        yield torch.randint(VOCABULARY, shape, generator=generator).to(cpu.device())


def loss_of(model: Any, text: torch.Tensor) -> torch.Tensor:
    """Losses of all tokens."""
    position = torch.arange(SEQUENCE, device=text.device).expand(MICRO_BATCH, -1)
    return model(text[:, :-1], position, None, labels=text[:, 1:])


def build() -> Any:
    """The model, always the same."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, hidden_dropout=0.0,
        attention_dropout=0.0, masked_softmax_fusion=False, use_cpu_initialization=True,
    )  # fmt: skip
    return GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, SEQUENCE).to(cpu.device())


def our_step(mesh: Any, config: EditConfig) -> tuple[Callable[[], None], SyncEngine]:
    """A step of EDiT, and the engine that synchronises in it."""
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_edit.backends.megatron.build import get_edit_model_and_optimizer

    (model,), optimizer = get_edit_model_and_optimizer(
        [build()],
        OptimizerConfig(lr=LR, min_lr=LR, weight_decay=WEIGHT_DECAY, clip_grad=CLIP),
        config,
        mesh,
        samples_per_step=MICRO_BATCH * mesh.shard,
    )
    data = batches()
    schedule = get_forward_backward_func()

    def forward_step(data: Any, model: Any) -> Any:
        return loss_of(model, next(data)), lambda x: (x.mean(), x.detach().mean())

    def step() -> None:
        optimizer.zero_grad()
        schedule(
            forward_step_func=forward_step, data_iterator=data, model=model, num_microbatches=1,
            seq_length=SEQUENCE, micro_batch_size=MICRO_BATCH, forward_only=False,
        )  # fmt: skip
        optimizer.step()

    return step, optimizer.engine


def bare_step(mesh: Any) -> Callable[[], None]:
    """A plain loop on the bare model; with two ranks FSDP2 shards the same units."""
    model = build()
    if mesh.shard > 1:
        group = DeviceMesh.from_group(mesh.shard_group, cpu.device().type)
        head = [model.decoder.final_layernorm, model.output_layer]
        for unit in (model.embedding, *model.decoder.layers, head):
            fully_shard(unit, mesh=group)
        fully_shard(model, mesh=group, reshard_after_forward=False)
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, fused=True)
    data = batches()

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, next(data)).mean().backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()

    return step


class Times(NamedTuple):
    """Milliseconds of a step."""

    clock: float
    processor: float


def timed(step: Callable[[], None], steps: int) -> Times:
    """Means over some steps."""
    dist.barrier()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    clock_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    return Times(1e3 * clock_s / steps, 1e3 * cpu_s / steps)


def measure(rank: int, world: int, port: int, blocks: int, steps: int, results: Any) -> None:
    """One rank of a comparison; rank 0 hands in the times of all blocks of both loops."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    cpu.install()
    dist.init_process_group("gloo", rank=rank, world_size=world)
    from megatron_edit.backends.megatron.mesh import build_mesh

    mesh = build_mesh(1)
    # One replica, and no synchronisation in sight.
    ours, _ = our_step(mesh, EditConfig(replicas=1, warmup_steps=0, sync_interval=1 << 30))
    bare = bare_step(mesh)
    for step in (ours, bare):
        timed(step, 3)
    times = []
    for block in range(blocks):
        order = (ours, bare) if block % 2 == 0 else (bare, ours)
        pair = {step: timed(step, steps) for step in order}
        times.append((pair[ours], pair[bare]))
    if rank == 0:
        results.put(times)
    dist.destroy_process_group()


def ranks(measure: Callable[..., None], world: int, blocks: int, steps: int) -> Any:
    """Runs ``measure`` on some ranks; returns what one of them puts into its queue."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=measure, args=(rank, world, port, blocks, steps, results))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    result = results.get(timeout=1200)
    for process in processes:
        process.join()
    return result


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5, help="of a block")
    args = parser.parse_args()
    print(
        f"GPTModel of {LAYERS} layers, hidden {HIDDEN}, sequence {SEQUENCE}, micro-batch "
        f"{MICRO_BATCH}; {args.blocks} blocks of {args.steps} steps\n"
    )
    print("| ranks | against | time of | ours, ms | bare, ms | ratio | quartiles of the ratio |")
    print("|---|---|---|---|---|---|---|")
    for world, against in ((1, "bare loop"), (2, "FSDP2")):
        blocks: list[tuple[Times, Times]] = ranks(measure, world, args.blocks, args.steps)
        for kind in Times._fields:
            pairs = [(getattr(ours, kind), getattr(bare, kind)) for ours, bare in blocks]
            low, ratio, high = statistics.quantiles((ours / bare for ours, bare in pairs), n=4)
            ours, bare = (statistics.median(column) for column in zip(*pairs, strict=True))
            print(
                f"| {world} | {against} | {kind} | {ours:.1f} | {bare:.1f} | {ratio:.3f} | "
                f"{low:.3f} to {high:.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
