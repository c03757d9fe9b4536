"""EDiT in one process on plain tensors: the oracle of the tests, and the method to read.

R whole replicas live side by side, every step and every synchronisation is written out, and there
is not one process group. The engine must give the same losses and parameters in every layout.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatron_edit.config.edit_config import EditConfig


class NaiveReference:
    """R replicas of a model, trained and synchronised the obvious way.

    Args:
        replicas: R copies of the whole model.
        units: Unit name -> names of its parameters.
        loss: Mean loss of a micro-batch: ``loss(model, micro_batch) -> 0-dim tensor``.
        config: ``weighting`` norm or uniform; ``detector`` none, peer, or robust for as long as
            its history test has not warmed up.
        optimizer: Keyword arguments of torch's AdamW.
        clip_grad: Largest gradient norm of a replica; 0 is no limit.
    """

    def __init__(
        self,
        replicas: Sequence[nn.Module],
        units: Mapping[str, Sequence[str]],
        loss: Callable[[nn.Module, Any], torch.Tensor],
        config: EditConfig,
        optimizer: Mapping[str, Any],
        clip_grad: float = 0.0,
    ) -> None:
        self.replicas = replicas
        self.units, self.loss, self.config, self.clip_grad = units, loss, config, clip_grad
        self.inner = [
            torch.optim.AdamW(_decay_groups(replica), **optimizer) for replica in self.replicas
        ]
        self.steps = 0
        self.rounds = 0
        # Of the round: its steps, and for each replica those whose update was not skipped.
        self.round_steps = 0
        self.effective = [0] * len(self.replicas)
        self.anchor: dict[str, torch.Tensor] = {}
        self.momentum: dict[str, torch.Tensor] = {}
        # What is under way: for each unit the averaged pseudo gradient (None: the anchor stays) and
        # who takes part; where every replica was at the departure, and who had moved by then.
        self.under_way: dict[str, tuple[dict[str, torch.Tensor] | None, list[int]]] = {}
        self.departure: list[dict[str, torch.Tensor]] = []
        self.moved: dict[str, list[int]] = {}

    def step(self, batches: Sequence[Sequence[Any]], lr: float) -> float:
        """One inner step of every replica.

        Args:
            batches: For each replica its micro-batches.
            lr: Inner learning rate.

        Returns:
            Loss before the step, averaged over micro-batches and replicas.
        """
        local_steps = self.steps - self.config.warmup_steps
        synchronous = self.config.sync_trigger == "never" or local_steps < 0
        if local_steps == 0 and not synchronous:
            self.anchor = {n: p.detach().clone() for n, p in self.replicas[0].named_parameters()}
            self.momentum = {n: torch.zeros_like(p) for n, p in self.anchor.items()}
        tau, delay = self.config.sync_interval, self.config.delay_steps
        if not synchronous and local_steps > 0:
            if local_steps % tau == 0 and self.config.delay_round:
                self.synchronize_a_round_later()
            elif local_steps % tau == 0:
                self.depart()
            if self.under_way and not self.config.delay_round and local_steps % tau == delay:
                self.land()
        losses = [self._backward(i, micro_batches) for i, micro_batches in enumerate(batches)]
        if synchronous:
            self._average_gradients()
        self.round_steps += not synchronous
        for i, (replica, inner) in enumerate(zip(self.replicas, self.inner, strict=True)):
            limit = self.clip_grad if self.clip_grad > 0 else math.inf
            norm = nn.utils.clip_grad_norm_(replica.parameters(), limit)
            if not norm.isfinite():
                continue
            for group in inner.param_groups:
                group["lr"] = lr
            inner.step()
            self.effective[i] += not synchronous
        self.steps += 1
        return statistics.fmean(losses)

    def synchronize(self) -> None:
        """Brings all replicas to one anchor: the end of training."""
        if self.config.delay_round:
            self.synchronize_a_round_later()
            self._co2_step(self.departure, self.moved)
            self._follow_anchor()
            return
        if self.under_way:
            self.land()
        self.depart()
        self.departure = []
        self.land()

    @torch.no_grad()
    def depart(self) -> None:
        """Every unit: pseudo gradients, verdicts, weights, average."""
        replicas = self._parameters()
        self.departure = [{n: p.clone() for n, p in replica.items()} for replica in replicas]
        for unit, names in self.units.items():
            deltas = [{n: self.anchor[n] - replica[n] for n in names} for replica in replicas]
            norms = [_norm(delta) * self._unskipped(i) for i, delta in enumerate(deltas)]
            good = self._good(norms)
            # Who did not move has no say, and where nobody moved the anchor stays.
            movers = [i for i in good if norms[i] > 0]
            average = None
            if movers:
                weights = self._weights([norms[i] for i in movers])
                average = {
                    n: sum(w * deltas[i][n] for w, i in zip(weights, movers, strict=True))
                    for n in names
                }
            self.under_way[unit] = (average, good)
        self._begin_round()

    @torch.no_grad()
    def land(self) -> None:
        """Every unit: clip, outer step, and the anchor to all; with a delay plus what each replica
        has learned since the departure."""
        for unit, (average, good) in self.under_way.items():
            if average is not None:
                self._outer_step(average)
            for i, replica in enumerate(self._parameters()):
                for n in self.units[unit]:
                    progress = torch.zeros_like(self.anchor[n])
                    if self.config.delay_steps and self.departure and i in good:
                        progress = replica[n] - self.departure[i][n]
                    replica[n].copy_(self.anchor[n] + progress)
        self.under_way = {}

    @torch.no_grad()
    def synchronize_a_round_later(self) -> None:
        """CO2: the mean of a round's parameters is applied at the end of the next one."""
        arrived, moved = self.departure, self.moved
        self.departure = [{n: p.clone() for n, p in r.items()} for r in self._parameters()]
        self.moved = {
            unit: [
                i
                for i, replica in enumerate(self.departure)
                if any(not torch.equal(replica[n], self.anchor[n]) for n in names)
            ]
            for unit, names in self.units.items()
        }
        if arrived:
            self._co2_step(arrived, moved)
            self._follow_anchor()
        self._begin_round()

    def _begin_round(self) -> None:
        self.rounds += 1
        self.round_steps, self.effective = 0, [0] * len(self.replicas)

    def _unskipped(self, replica: int) -> float:
        """What a replica's norm is multiplied by, so that a skipped step is no advantage."""
        return self.round_steps / max(self.effective[replica], 1)

    def _co2_step(
        self, arrived: list[dict[str, torch.Tensor]], moved: dict[str, list[int]]
    ) -> None:
        config = self.config
        for n, movers in ((n, moved[unit]) for unit, names in self.units.items() for n in names):
            if not movers:
                continue
            anchor = self.anchor[n]
            gap = anchor - sum(arrived[i][n] for i in movers) / len(movers)
            b = config.outer_momentum * self.momentum[n] + gap / config.staleness_gap_penalty
            if config.outer_momentum_clip is not None:
                b = b.clamp(-config.outer_momentum_clip, config.outer_momentum_clip)
            self.momentum[n] = b
            self.anchor[n] = anchor - config.outer_lr * b

    @torch.no_grad()
    def _follow_anchor(self) -> None:
        for replica in self._parameters():
            for n, parameter in replica.items():
                parameter.copy_(self.anchor[n])

    def _parameters(self) -> list[dict[str, nn.Parameter]]:
        return [dict(replica.named_parameters()) for replica in self.replicas]

    def _backward(self, index: int, micro_batches: Sequence[Any]) -> float:
        self.inner[index].zero_grad()
        total = 0.0
        for micro_batch in micro_batches:
            loss = self.loss(self.replicas[index], micro_batch) / len(micro_batches)
            loss.backward()
            total += loss.item()
        return total

    def _average_gradients(self) -> None:
        for same in zip(*(replica.parameters() for replica in self.replicas), strict=True):
            mean = sum(parameter.grad for parameter in same) / len(same)
            for parameter in same:
                parameter.grad = mean.clone()

    def _good(self, norms: list[float]) -> list[int]:
        """Replicas that take part."""
        finite = [i for i, norm in enumerate(norms) if math.isfinite(norm)]
        moved = [norms[i] for i in finite if norms[i] > 0]
        if self.config.detector == "none" or len(moved) < 3:
            return finite
        if self.config.detector == "robust" and self.rounds >= self.config.detector_warmup:
            raise ValueError("the reference has no history test")
        median = statistics.median(moved)
        mad = statistics.median(abs(norm - median) for norm in moved)
        limit = median + max(
            self.config.peer_threshold * 1.4826 * mad, self.config.peer_floor * median
        )
        return [i for i in finite if norms[i] <= limit]

    def _weights(self, norms: list[float]) -> list[float]:
        if self.config.weighting == "uniform":
            return [1 / len(norms)] * len(norms)
        temperature = self.config.weight_temperature
        if self.config.weight_temperature_relative is not None:
            temperature = self.config.weight_temperature_relative * statistics.median(norms)
        powers = [math.exp((min(norms) - norm) / temperature) for norm in norms]
        return [power / sum(powers) for power in powers]

    def _outer_step(self, average: dict[str, torch.Tensor]) -> None:
        beta = 1.0
        if self.config.clip is not None:
            beta = min(1.0, self.config.clip / (_norm(average) + 1e-6))
        mu = self.config.outer_momentum
        for name, delta in average.items():
            gradient = beta * delta
            self.momentum[name] = mu * self.momentum[name] + gradient
            ahead = gradient + mu * self.momentum[name]
            direction = ahead if self.config.outer_nesterov else self.momentum[name]
            self.anchor[name] = self.anchor[name] - self.config.outer_lr * direction


def _norm(tensors: Mapping[str, torch.Tensor]) -> float:
    return math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors.values()))


def _decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, biases and norm weights do not, as Megatron has it."""
    matrices = [p for n, p in model.named_parameters() if p.dim() > 1 and not n.endswith("bias")]
    others = [p for n, p in model.named_parameters() if p.dim() <= 1 or n.endswith("bias")]
    return [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
