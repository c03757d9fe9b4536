#!/usr/bin/env python
"""Times a local step of EDiT on DeepSpeed's engine against plain DeepSpeed, side by side.

python -m benchmarks.zero_step

Two ranks shard a model under ZeRO-3. Both engines live in the same processes and take turns, block
by block, so that whatever else the machine does meets both; a ratio is the median of the blocks'.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import socket
import statistics
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

from megatron_edit.platform.ds_compat import init_distributed, name_accelerator

RANKS, LAYERS, HIDDEN, HEADS, SEQUENCE, VOCABULARY, MICRO_BATCH = 2, 6, 256, 8, 128, 1024, 4
JSON: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": MICRO_BATCH,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3},
}
# All steps are local ones.
EDIT = {"replicas": 1, "warmup_steps": 0, "sync_interval": 1_000_000}


def build() -> Any:
    """A Llama, always the same."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, max_position_embeddings=SEQUENCE,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def plain() -> Any:
    """DeepSpeed alone."""
    import deepspeed

    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=JSON)[0]


def ours() -> Any:
    """The same with replicas, of which there is one."""
    from megatron_edit import EDiT

    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return EDiT({**JSON, "edit": EDIT}).initialize(model=model, optimizer=optimizer)[0]


def block(engine: Any, steps: int) -> tuple[float, float]:
    """Milliseconds a step, by the clock and of this processor."""
    dist.barrier()
    tokens = torch.randint(VOCABULARY, (MICRO_BATCH, SEQUENCE))
    clock_s, processor_s = time.perf_counter(), time.process_time()
    for _ in range(steps):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    clock_s, processor_s = time.perf_counter() - clock_s, time.process_time() - processor_s
    return 1e3 * clock_s / steps, 1e3 * processor_s / steps


def measure(rank: int, port: int, blocks: int, steps: int) -> None:
    """One rank; the first one prints a table."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )  # fmt: skip
    torch.set_num_threads(1)
    name_accelerator()
    init_distributed("gloo", timeout_minutes=5)
    engines = {"EDiT": ours(), "DeepSpeed": plain()}
    for engine in engines.values():
        block(engine, steps)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for number in range(blocks):
        # Who is first alternates: the second finds caches warm.
        for name in sorted(engines, reverse=bool(number % 2)):
            times[name].append(block(engines[name], steps))
    if rank == 0:
        print(f"Llama of {LAYERS} layers, hidden {HIDDEN}; {blocks} blocks of {steps} steps\n")
        print("| time of | EDiT, ms | DeepSpeed, ms | ratio | quartiles of the ratio |")
        print("|---|---|---|---|---|")
        for column, label in enumerate(("clock", "processor")):
            mine, theirs = ([t[column] for t in times[name]] for name in ("EDiT", "DeepSpeed"))
            ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(
                f"| {label} | {statistics.median(mine):.1f} | {statistics.median(theirs):.1f} | "
                f"{middle:.3f} | {low:.3f} to {high:.3f} |"
            )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5, help="of a block")
    args = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    ranks = [
        context.Process(target=measure, args=(rank, port, args.blocks, args.steps))
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()


if __name__ == "__main__":
    main()
