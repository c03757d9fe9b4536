"""What the engine asks of the code that trains inside a replica: the seam between the two.

A backend holds the parameters of this rank, cut into units, and runs their forwards. The engine
moves the parameters of a unit, just before the unit is used, and knows nothing else of the model,
its sharding or its optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from megatron_edit.replicas.peers import PeerGroup


class Unit(Protocol):
    """The part of one unit that this rank holds; implementations inherit the methods with a body.

    Attributes:
        name: Its name among those of the replica.
        index: Its number among the units of the whole replica.
        spans_stages: Whether another pipeline stage holds a part of it, too.
        locals: This rank's fp32 masters; they keep their storage for good.
        parameters: Name in the whole model -> parameter of the backend, in the order of
            :attr:`locals`; a DTensor where it is sharded as one.
        counted: For each of them whether this rank counts it in a norm over the replica; of copies
            that several ranks hold, one is counted.
    """

    name: str
    index: int
    spans_stages: bool
    parameters: dict[str, torch.nn.Parameter]
    locals: list[torch.Tensor]
    counted: list[bool]

    @property
    def is_gathered(self) -> bool:
        """Whether the backend holds, or gathers, whole parameters made of the masters."""

    def copy_from(self, flat: torch.Tensor) -> None:
        """Copies a flat ``[numel]`` fp32 buffer into the masters, and through to what the next
        gather reads, see :meth:`Backend.flush`."""

    @property
    def numel(self) -> int:
        """Elements of this rank's masters."""
        return sum(local.numel() for local in self.locals)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Cuts a flat ``[numel]`` buffer into views shaped like :attr:`locals`."""
        pieces = flat.split([local.numel() for local in self.locals])
        return [piece.view(local.shape) for piece, local in zip(pieces, self.locals, strict=True)]

    def copy_to(self, flat: torch.Tensor) -> None:
        """Copies the masters into a flat ``[numel]`` buffer."""
        torch._foreach_copy_(self.views(flat), self.locals)


class Backend(Protocol):
    """This rank's part of a replica.

    Attributes:
        unit_names: Names of all units of the replica, in the order of their index.
        has_spanning_unit: Whether a unit of the replica has parts on two pipeline stages (tied
            embeddings), the same on all its ranks.
        lands_in_forward: Whether units land one by one in a forward, each just before its gather,
            unless ``edit.landing`` says otherwise. Else all land before the step's first forward.
    """

    unit_names: list[str]
    has_spanning_unit: bool
    lands_in_forward: bool

    @property
    def units(self) -> Sequence[Unit]:
        """The units this rank has a part of, in the order of their forward."""

    def before_each_unit(
        self,
        before_unit: Callable[[Unit], None],
        after_forward: Callable[[Sequence[Unit]], None],
    ) -> None:
        """Has the engine called around every forward, also in recomputation and evaluation.

        Args:
            before_unit: To be called with a unit before each of its forwards, ahead of its gather.
            after_forward: To be called after each forward of the model, or of a chunk of it, with
                the units that could have run in it.
        """

    def release(self) -> None:
        """Frees gathered parameters: they would be stale once the masters change."""

    def gather(self, unit: Unit) -> None:
        """Starts the gather of a unit behind what the current stream does to its masters, where
        the gather would not otherwise wait for it."""

    def expect_average(self, peers: PeerGroup) -> None:
        """Begins a step whose gradients :meth:`average_gradients` averages: what the last backward
        has made may cross while it goes on, in an order that all replicas share."""

    def average_gradients(self, peers: PeerGroup) -> None:
        """Averages the gradients of the step over the replicas, once they are complete in this
        one."""

    def flush(self) -> None:
        """Makes what :meth:`Unit.copy_from` wrote since the last call visible to the next forward,
        where that takes more than the writing; called outside of forwards, by all ranks of the
        replica together."""
