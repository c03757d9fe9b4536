"""The average of gradients over the replicas, in the lockstep phase, behind the backward.

last backward    a unit's gradients are made -> its all-reduce starts, after those of the units
                 that come after it in the model
after it         sums inside the replica -> all-reduce of the gradients that were summed
                 -> waits, and copies of parameters get the gradient of the copy that crossed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from megatron_edit.backends.megatron.data_parallel import EDiTDataParallel
from megatron_edit.backends.megatron.gradients import (
    hand_on_to_copies,
    is_summed,
    local_gradients,
)
from megatron_edit.backends.megatron.units import like_parameter, local_of
from megatron_edit.replicas.mesh import Mesh
from megatron_edit.replicas.peers import PeerGroup, Pending

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class _Bundle:
    """Parameters whose gradients cross in one all-reduce.

    Attributes:
        name: For the message when it fails.
        parameters: At least one.
        awaited: Those whose gradients the last backward has yet to make.
        flat: Their gradients over the number of replicas, ``[n]``, while they are under way.
        pending: The all-reduce of ``flat``.
    """

    name: str
    parameters: list[nn.Parameter]
    awaited: set[nn.Parameter] = field(default_factory=set)
    flat: torch.Tensor | None = None
    pending: Pending | None = None


class ReplicaAverage:
    """Averages the gradients of this rank's chunks over the replicas.

    All replicas start their all-reduces in one order, that of the model backwards: a unit whose
    gradients are there early waits for those before it.

    Of copies that ranks of a replica hold of a parameter one crosses and is handed on to the
    others: groups of ranks may add in different orders, and the copies would part.

    Args:
        chunks: This rank's wrapped model chunks, in the order of their forward.
        mesh: The mesh.
        dtype: Type in which gradients cross, ``fp32`` or ``bf16``.
    """

    def __init__(self, chunks: Sequence[EDiTDataParallel], mesh: Mesh, dtype: str) -> None:
        self._mesh = mesh
        self._dtype = DTYPES[dtype]
        self._all = [
            p for chunk in chunks for unit in chunk.units for p in unit.parameters.values()
        ]
        self._bundles: list[_Bundle] = []
        self._summed: list[nn.Parameter] = []
        self._peers: PeerGroup | None = None
        self._started = 0
        if mesh.replicas > 1:
            for chunk in reversed(chunks):
                self._bundle(chunk)

    def _bundle(self, chunk: EDiTDataParallel) -> None:
        for unit in reversed(chunk.units):
            flags = zip(unit.parameters.values(), unit.counted, strict=True)
            counted = [parameter for parameter, is_counted in flags if is_counted]
            self._summed += [p for p in counted if is_summed(p, self._mesh)]
            if complete := [p for p in counted if not is_summed(p, self._mesh)]:
                bundle = _Bundle(unit.name, complete)
                self._bundles.append(bundle)
                arrived = partial(self._arrived, chunk, bundle)
                for parameter in complete:
                    # FSDP2 calls it when it has put the reduced gradient in its place.
                    parameter.register_post_accumulate_grad_hook(arrived)

    def expect(self, peers: PeerGroup) -> None:
        """Begins a step whose gradients are averaged over ``peers``."""
        self._peers = peers
        self._started = 0
        for bundle in self._bundles:
            bundle.awaited = set(bundle.parameters)

    @torch.no_grad()
    def _arrived(self, chunk: EDiTDataParallel, bundle: _Bundle, parameter: nn.Parameter) -> None:
        if self._peers is None or chunk.accumulates:
            return
        if bundle.flat is not None:
            raise RuntimeError(
                f"a gradient of {bundle.name} was made after its average over the replicas began: "
                "all micro-batches of a step but the last belong in no_sync()"
            )
        bundle.awaited.discard(parameter)
        while self._started < len(self._bundles) and not self._bundles[self._started].awaited:
            self._start(self._bundles[self._started], self._peers)
            self._started += 1

    def _start(self, bundle: _Bundle, peers: PeerGroup) -> None:
        """Starts an all-reduce. What is under way is nowhere else: one copy in memory."""
        gradients = local_gradients(bundle.parameters)
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        for parameter in bundle.parameters:
            parameter.grad = None
        bundle.flat = flat.div_(peers.size).to(self._dtype)
        phase = f"averaging the gradients of {bundle.name}"
        bundle.pending = peers.all_reduce(bundle.flat, phase)

    @torch.no_grad()
    def finish(self, peers: PeerGroup) -> None:
        """Averages what is not under way yet, and waits for everything; called when gradients are
        complete inside the replica."""
        self._peers = None
        if peers.size == 1:
            return
        # A part of the model that no backward reached may be reached in another replica.
        bundles = list(self._bundles)
        if self._summed:
            bundles.append(_Bundle("parameters that are summed in a replica", self._summed))
        for bundle in bundles[self._started :]:
            self._start(bundle, peers)
        for bundle in bundles:
            self._land(bundle)
        hand_on_to_copies(self._all, self._mesh)

    def _land(self, bundle: _Bundle) -> None:
        assert bundle.pending is not None and bundle.flat is not None
        bundle.pending.wait()
        pieces = bundle.flat.float().split([local_of(p).numel() for p in bundle.parameters])
        for parameter, piece in zip(bundle.parameters, pieces, strict=True):
            shape = local_of(parameter).shape
            parameter.grad = like_parameter(piece.view(shape), parameter)
        bundle.flat = bundle.pending = None
