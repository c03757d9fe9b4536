"""Units of a model of any make: what comes before its layers, each layer, what comes after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from megatron_edit.engine.backend import Unit
from megatron_edit.errors import ConfigurationError
from megatron_edit.platform.ds_zero import Piece, is_whole


@dataclass(eq=False)
class ZeroUnit(Unit):
    """The part of one unit that this rank holds.

    Attributes:
        whole: Tells of a parameter whether ZeRO holds it whole while only shards may be.
        modules: Modules that own its parameters, in the order of the model.
        pieces: This rank's pieces, in the order of :attr:`parameters`.
    """

    name: str
    index: int
    whole: Callable[[nn.Parameter], bool]
    modules: list[nn.Module] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    spans_stages: bool = False

    @property
    def parameters(self) -> dict[str, nn.Parameter]:  # type: ignore[override]
        """Name -> parameter."""
        return {piece.name: piece.parameter for piece in self.pieces}

    @property
    def locals(self) -> list[torch.Tensor]:  # type: ignore[override]
        """fp32 masters, ``[n]`` each."""
        return [piece.master for piece in self.pieces]

    @property
    def counted(self) -> list[bool]:  # type: ignore[override]
        """Every element is held by one rank of the replica."""
        return [True] * len(self.pieces)

    @property
    def is_gathered(self) -> bool:
        return any(self.whole(piece.parameter) for piece in self.pieces)

    def copy_from(self, flat: torch.Tensor) -> None:
        torch._foreach_copy_(self.locals, self.views(flat))
        torch._foreach_copy_([piece.compute for piece in self.pieces], self.locals)


def split_into_units(
    model: nn.Module, pieces: Sequence[Piece], sharded: bool
) -> tuple[list[ZeroUnit], list[str]]:
    """Cuts a model at its layers.

    Args:
        model: The model. Its layers are the longest ``ModuleList`` in it.
        pieces: What this rank holds of each of its parameters.
        sharded: Whether whole parameters come and go (ZeRO-3).

    Returns:
        The units, ``embedding``, ``layers.<n>``, ``head``, those without a parameter left out, and
        their names. A parameter that is used at both ends belongs to the first.
    """
    prefix, layers = _layers(model)
    names = ["embedding", *(f"layers.{number}" for number in range(len(layers))), "head"]
    whole = is_whole if sharded else _never
    units = {name: ZeroUnit(name, 0, whole) for name in names}
    behind = False
    for piece in pieces:
        if piece.name.startswith(prefix):
            number = int(piece.name.removeprefix(prefix).split(".", 1)[0])
            units[f"layers.{number}"].pieces.append(piece)
            behind = True
        else:
            units["head" if behind else "embedding"].pieces.append(piece)
    kept = [unit for unit in units.values() if unit.pieces]
    for index, unit in enumerate(kept):
        unit.index = index
    owner = {id(p.parameter): unit for unit in kept for p in unit.pieces}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            unit = owner[id(parameter)]
            if not unit.modules or unit.modules[-1] is not module:
                unit.modules.append(module)
    return kept, [unit.name for unit in kept]


def _never(parameter: nn.Parameter) -> bool:
    return False


def _layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The longest list of modules and the prefix of its parameters' names."""
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    if not lists:
        raise ConfigurationError(
            f"model: {type(model).__name__} has no ModuleList; allowed: a model whose layers are "
            "in one, as in transformers, so that it can be cut into units"
        )
    name, layers = max(lists, key=lambda item: len(item[1]))
    return f"{name}.", layers
