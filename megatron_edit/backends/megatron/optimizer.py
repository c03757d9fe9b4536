"""EDiTDistributedOptimizer: AdamW on this rank's shards, with the step's begin and end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import nn

from megatron_edit.backends.megatron.data_parallel import EDiTDataParallel
from megatron_edit.backends.megatron.units import like_parameter, local_of
from megatron_edit.engine.sync_engine import SyncEngine
from megatron_edit.replicas.mesh import Mesh


class EDiTDistributedOptimizer(MegatronOptimizer):
    """The inner optimizer of a replica, and the clock of the sync engine.

    ``zero_grad()`` begins a step (all replicas decide there whether it synchronises) and ``step()``
    ends it, as in any loop written for megatron-core.

    A step whose gradient norm is not finite changes neither parameters nor moments, without a
    look at the value from the host; ``skipped_steps`` counts them.

    Args:
        chunks: This rank's wrapped model chunks.
        engine: The sync engine of these chunks.
        mesh: The mesh.
        config: Learning rate, weight decay, betas, eps and ``clip_grad`` are used.
    """

    def __init__(
        self,
        chunks: Sequence[EDiTDataParallel],
        engine: SyncEngine,
        mesh: Mesh,
        config: OptimizerConfig,
    ) -> None:
        self.engine = engine
        self.mesh = mesh
        units = [unit for chunk in chunks for unit in chunk.units]
        self._sources = {name: p for unit in units for name, p in unit.parameters.items()}
        # Local tensors share the storage of FSDP2's shards and spare DTensor's dispatch.
        self._shards = {
            name: nn.Parameter(local)
            for unit in units
            for name, local in zip(unit.parameters, unit.locals, strict=True)
        }
        counted = [float(flag) for unit in units for flag in unit.counted]
        self._counted = torch.tensor(counted, device=engine.device)
        self.skipped_steps = torch.zeros((), device=engine.device)
        inner = torch.optim.AdamW(
            _parameter_groups(self._shards, self._sources, config),
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            fused=True,
        )
        super().__init__(inner, config)
        self.is_stub_optimizer = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients and begins the step."""
        self._drop_gradients()
        self.engine.begin_step()

    def prepare_grads(self) -> bool:
        """Hands the gradient shards to the inner optimizer. Non-finite ones are dealt with on the
        device, so this never reports any."""
        for name, shard in self._shards.items():
            gradient = self._sources[name].grad
            shard.grad = None if gradient is None else local_of(gradient)
        return False

    @torch.no_grad()
    def get_grad_norm(self) -> torch.Tensor:
        """Norm of the gradient over all ranks of the replica, copies counted once; 0-dim fp32."""
        zero = torch.zeros((), device=self.engine.device)
        gradients = [zero if shard.grad is None else shard.grad for shard in self._shards.values()]
        norms = torch.stack(torch._foreach_norm(gradients))
        total = (norms.square() * self._counted).sum()
        return self.mesh.sum_in_order(total, self.mesh.worker_group).sqrt()

    def step_with_ready_grads(self) -> bool:
        """Updates the parameters from the gradients handed over."""
        self.optimizer.step()
        return True

    @torch.no_grad()
    def step(self) -> tuple[bool, torch.Tensor, None]:
        """Clips, updates, drops the gradients and ends the step.

        Returns:
            True (whether the update was skipped is only known on the device, see
            ``skipped_steps``), the gradient norm before clipping (0-dim, on the device), and None
            for the count of zeros, which is not made.
        """
        self.prepare_grads()
        norm = self.get_grad_norm()
        skip = (~torch.isfinite(norm)).float()
        self.skipped_steps += skip
        # The fused kernel divides by grad_scale and does nothing if found_inf: no further pass.
        self.optimizer.found_inf = skip
        if self.config.clip_grad > 0:
            self.optimizer.grad_scale = ((norm + 1e-6) / self.config.clip_grad).clamp(min=1.0)
        self.step_with_ready_grads()
        # The next forward and backward need their memory.
        self._drop_gradients()
        self.engine.end_step(skip)
        return True, norm, None

    def _drop_gradients(self) -> None:
        for parameter in (*self._sources.values(), *self._shards.values()):
            parameter.grad = None

    def get_loss_scale(self) -> torch.Tensor:
        """1: neither fp32 nor bf16 training scales its loss."""
        return torch.ones(1, device=self.engine.device)

    def reload_model_params(self, state_dict: Mapping[str, Any] | None = None) -> None:
        """Nothing to do: the optimizer updates the parameters themselves, not a copy."""

    def named_moments(self) -> dict[str, torch.Tensor]:
        """AdamW's state: ``exp_avg.<name>``, ``exp_avg_sq.<name>`` and ``step.<name>``.

        Moments have the type and sharding of the parameter. Zeros, as AdamW creates them, stand
        for state that no step has made yet.
        """
        named: dict[str, torch.Tensor] = {}
        for name, shard in self._shards.items():
            state = self.optimizer.state[shard]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=shard.device)
                state["exp_avg"] = torch.zeros_like(shard)
                state["exp_avg_sq"] = torch.zeros_like(shard)
            named[f"step.{name}"] = state["step"]
            for key in ("exp_avg", "exp_avg_sq"):
                named[f"{key}.{name}"] = like_parameter(state[key], self._sources[name])
        return named

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Name in the whole model -> parameter, a DTensor where it is sharded."""
        return self._sources

    def state_dict(self) -> dict[str, Any]:
        """This rank's shards of the moments, and the parameter groups."""
        return dict(self.optimizer.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` returned on the same layout."""
        self.optimizer.load_state_dict(state_dict)

    def sharded_state_dict(
        self,
        model_sharded_state_dict: Mapping[str, Any],
        is_loading: bool = False,
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The moments as DTensors, for torch.distributed.checkpoint; see :meth:`named_moments`."""
        return dict(self.named_moments())


def _parameter_groups(
    shards: Mapping[str, nn.Parameter],
    sources: Mapping[str, nn.Parameter],
    config: OptimizerConfig,
) -> list[dict[str, Any]]:
    """Two groups: matrices decay; biases and norm weights do not. The keys are those that
    megatron-core's OptimizerParamScheduler reads."""
    decayed = [name for name, p in sources.items() if p.dim() > 1 and not name.endswith(".bias")]
    plain = [name for name in sources if name not in set(decayed)]
    groups = []
    for names, wd_mult in ((decayed, 1.0), (plain, 0.0)):
        if names:
            groups.append(
                {
                    "params": [shards[name] for name in names],
                    "weight_decay": config.weight_decay * wd_mult,
                    "wd_mult": wd_mult,
                    "lr_mult": 1.0,
                    "is_decoupled_lr": False,
                    "default_config": True,
                    "max_lr": config.lr,
                    "min_lr": config.min_lr,
                }
            )
    return groups
