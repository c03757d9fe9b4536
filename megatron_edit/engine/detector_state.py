"""What the detectors remember from one synchronisation to the next."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor


@dataclass
class DetectorState:
    """The memory of the detectors; tensors only.

    The statistic is G under `paper` and ln(G / last accepted G), per inner step, under `history`
    and `robust`. It is fixed for a run, so one set of moments serves all detectors.

    Attributes:
        count: `[R, U]` int64, values in the statistics since they were last seeded.
        mean: `[R, U]` fp32, bias-corrected exponentially weighted mean of the statistic.
        var: `[R, U]` fp32, its bias-corrected exponentially weighted variance.
        last_accepted: `[R, U]` fp32, last accepted G per inner step; 0 before the first.
        flags_in_row: `[R, U]` int64, finite G flagged one after another by `paper` or `history`.
        consecutive_rollbacks: `[U]` int64, synchronisations in a row with every replica anomalous.
    """

    count: Tensor
    mean: Tensor
    var: Tensor
    last_accepted: Tensor
    flags_in_row: Tensor
    consecutive_rollbacks: Tensor

    @classmethod
    def zeros(
        cls, replicas: int, units: int, device: torch.device | str | None = None
    ) -> DetectorState:
        """Returns the state before the first synchronisation."""
        shape = (replicas, units)
        integers = partial(torch.zeros, dtype=torch.int64, device=device)
        floats = partial(torch.zeros, dtype=torch.float32, device=device)
        return cls(
            count=integers(shape),
            mean=floats(shape),
            var=floats(shape),
            last_accepted=floats(shape),
            flags_in_row=integers(shape),
            consecutive_rollbacks=integers(units),
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the tensors by name, not copied."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Copies a saved state in, onto the devices this state lives on.

        Raises:
            ValueError: A name is missing or unknown, or a shape differs.
        """
        own = self.state_dict()
        if own.keys() != state_dict.keys():
            raise ValueError(f"detector state has {sorted(state_dict)}, expected {sorted(own)}")
        for name, tensor in own.items():
            saved = state_dict[name]
            if saved.shape != tensor.shape:
                raise ValueError(
                    f"detector state '{name}' has shape {tuple(saved.shape)}, "
                    f"expected {tuple(tensor.shape)} (replicas, units)"
                )
        for name, tensor in own.items():
            setattr(self, name, state_dict[name].detach().to(tensor, copy=True))
