"""A training loop of one's own for megatron-core that trains with EDiT: two calls are swapped.

torchrun --nproc_per_node 4 -m examples.megatron_loop
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from megatron_edit import EditConfig, EDiTDataParallel, build_mesh, get_edit_model_and_optimizer
from megatron_edit.platform import cpu

STEPS, MICRO_BATCHES, MICRO_BATCH, SEQUENCE, VOCABULARY = 40, 2, 4, 32, 64


def batches(seed: int) -> Iterator[torch.Tensor]:
    """Sequences in which each token follows from the one before it."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        first = torch.randint(VOCABULARY, (MICRO_BATCH, 1), generator=generator)
        yield (first + 5 * torch.arange(SEQUENCE + 1)) % VOCABULARY


def forward_step(
    data: Iterator[torch.Tensor], model: EDiTDataParallel
) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]]:
    text = next(data).to(cpu.device())
    position = torch.arange(SEQUENCE, device=text.device).expand(MICRO_BATCH, -1)
    losses = model(text[:, :-1], position, None, labels=text[:, 1:])
    return losses, lambda losses: (losses.mean(), losses.detach().mean())


def train() -> tuple[list[float], EDiTDataParallel]:
    cpu.install()  # megatron-core on a machine without a GPU; elsewhere it does nothing
    mesh = build_mesh(replicas=2)  # in the place of initialize_model_parallel(...)
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, masked_softmax_fusion=False,
        use_cpu_initialization=True,
    )  # fmt: skip
    model = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, SEQUENCE).to(cpu.device())
    # In the place of DistributedDataParallel(...) and get_megatron_optimizer(...):
    (model,), optimizer = get_edit_model_and_optimizer(
        [model],
        OptimizerConfig(lr=3e-3, min_lr=3e-4, weight_decay=0.1),
        EditConfig(replicas=2, warmup_steps=8, sync_interval=4, outer_momentum=0.6),
        mesh,
        samples_per_step=MICRO_BATCHES * MICRO_BATCH * mesh.shard,
    )
    scheduler = OptimizerParamScheduler(
        optimizer, 0.0, 3e-3, 3e-4, 4, STEPS, "cosine", 0.1, 0.1, STEPS, "constant"
    )
    data, losses = batches(seed=dist.get_rank()), []
    for step in range(STEPS):
        optimizer.zero_grad()
        results = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=data, model=model,
            num_microbatches=MICRO_BATCHES, seq_length=SEQUENCE, micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )  # fmt: skip
        optimizer.step()
        scheduler.step(1)
        losses.append(torch.stack(results).mean().item())
        if dist.get_rank() == 0 and step % 8 == 7:
            print(f"step {step + 1}: loss {losses[-1]:.4f}, {optimizer.engine.round} rounds done")
    optimizer.engine.synchronize()  # the last round, which no further step would end
    return losses, model


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    train()
    dist.destroy_process_group()
