"""The sync engine: replicas train apart and synchronise unit by unit inside the next forward.

One synchronisation:

    step start       every unit: norm of its pseudo gradient -> one all-reduce in the replica
                     -> one all-gather over the replicas -> verdicts, weights
                     -> the first units' all-reduces start
    before unit l    wait for its all-reduce -> clip -> outer step -> parameters := anchor
                     -> the all-reduce of unit l+1 starts -> FSDP2 gathers unit l -> its forward
    after forward    any unit that the forward did not reach

Nothing here reads a value back to the host: what happened is copied out at the end of the step and
read when it has arrived (``sync_record``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from megatron_edit import penalty
from megatron_edit.config import EditConfig
from megatron_edit.data_parallel import EDiTDataParallel
from megatron_edit.gradients import average_over_replicas
from megatron_edit.mesh import Mesh
from megatron_edit.outer_state import OuterState
from megatron_edit.sync_record import Recorder, SyncRecord
from megatron_edit.trigger import build_trigger
from megatron_edit.units import Unit, unit_names


class SyncEngine:
    """Synchronises the units of this rank's model chunks with the other replicas.

    A step is ``begin_step()``, the forwards and backwards, ``end_step()``. Evaluations between two
    steps are not seen.

    Args:
        chunks: This rank's model chunks, in the order of their forward.
        mesh: The mesh.
        config: When and how to synchronise.
        samples_per_step: Samples this replica consumes in a step.
    """

    def __init__(
        self, chunks: list[EDiTDataParallel], mesh: Mesh, config: EditConfig, samples_per_step: int
    ) -> None:
        self.config = config
        self.mesh = mesh
        self.trigger = build_trigger(config)
        self.samples_per_step = samples_per_step
        self.units = [unit for chunk in chunks for unit in chunk.units]
        model = chunks[0].module
        self.unit_names = unit_names(
            model.config.num_layers, model.share_embeddings_and_output_weights
        )
        self.device = self.units[0].locals[0].device
        self.step = 0
        self.round = 0
        self.steps_in_round = 0
        self.outer: list[OuterState] = []
        self.detector = penalty.DetectorState.zeros(
            mesh.replicas, len(self.unit_names), self.device
        )
        self.recorder = Recorder(self.unit_names, mesh, self.device)
        self._spans_stages = mesh.pipeline_parallel > 1 and len(self.unit_names) == (
            model.config.num_layers + 1
        )
        self._chunks = chunks
        self._in_step = False
        self._launched = 0
        self._order_hash = 0
        self._waiting: dict[int, OuterState] = {}
        for chunk in chunks:
            chunk.before_each_unit(self._before_unit, self._after_forward)

    @property
    def synchronous(self) -> bool:
        """Whether the current step averages gradients over the replicas."""
        return self.trigger.synchronous(self.step)

    @torch.no_grad()
    def begin_step(self) -> None:
        """Decides what this step begins with; called once, before its first micro-batch."""
        if self._in_step:
            return
        self._in_step = True
        if not self.synchronous and not self.outer:
            self.create_anchor()
        if self.trigger.due(self.step):
            self._start_synchronisation()

    def average_gradients(self) -> None:
        """Averages gradients over the replicas in the synchronous phase; nothing otherwise."""
        if self.synchronous:
            average_over_replicas(self.units, self.mesh.sync)

    def end_step(self) -> None:
        """Counts the step, after the inner optimizer's update."""
        assert not self._waiting, "the step ended with units that were not synchronised"
        self._in_step = False
        if not self.synchronous:
            self.steps_in_round += 1
        self.step += 1
        self.recorder.finish(self.config.clip)
        self.recorder.poll()

    @torch.no_grad()
    def synchronize(self) -> None:
        """Synchronises all units now, whatever the trigger says: the end of training."""
        if self.outer and self.steps_in_round > 0:
            self._start_synchronisation()
            self._synchronise_waiting(self.units)
            self.recorder.finish(self.config.clip)
        self.recorder.drain()

    def records(self) -> list[SyncRecord]:
        """Synchronisations since the last call, once their numbers have reached the host."""
        return self.recorder.take()

    @contextmanager
    @torch.no_grad()
    def evaluated_parameters(self) -> Iterator[None]:
        """Context of an evaluation: puts the anchor in the parameters' place if ``eval_on`` says
        so, and takes care that nothing gathered in it outlives it."""
        kept = None
        if self.config.eval_on == "anchor" and self.outer:
            kept = [[local.clone() for local in state.unit.locals] for state in self.outer]
            for state in self.outer:
                state.unit.copy_from(state.anchor)
        try:
            yield
        finally:
            for state, locals_ in zip(self.outer, kept or [], strict=kept is not None):
                torch._foreach_copy_(state.unit.locals, locals_)
            for chunk in self._chunks:
                chunk.release()

    @torch.no_grad()
    def create_anchor(self) -> None:
        """Takes the parameters as the anchor; all replicas must agree on them bit for bit.

        Raises:
            RuntimeError: The replicas hold different parameters.
        """
        self.check_replicas_agree()
        has_momentum = self.config.outer_momentum > 0
        # A unit with parts on two stages comes first: its holders meet before the first forward.
        ordered = sorted(self.units, key=lambda unit: not unit.spans_stages)
        self.outer = [
            OuterState(unit, has_momentum, self.config.offload_outer_state) for unit in ordered
        ]

    def check_replicas_agree(self) -> None:
        """Compares a hash of the parameters over the replicas, on the host.

        Raises:
            RuntimeError: The replicas differ. Raised on every rank, since those whose own shards
                agree would wait for the others in their next collective.
        """
        hashes = torch.stack([_hash(local) for unit in self.units for local in unit.locals])
        gathered = self.mesh.sync.all_gather(hashes, "comparing the parameters of the replicas")
        differ = (gathered != gathered[0]).any().int()
        dist.all_reduce(differ, dist.ReduceOp.MAX, group=self.mesh.worker_group)
        if bool(differ):
            raise RuntimeError(
                f"the replicas hold different parameters at step {self.step}, where they should "
                "agree: same seed and checkpoint on all of them?"
            )

    def _start_synchronisation(self) -> None:
        self.recorder.start(self.round, self.step)
        for chunk in self._chunks:
            # Parameters kept from an evaluation would be stale once their shards change.
            chunk.release()
        with self.recorder.exposed():
            norms, counts = self._exchange_norms()
        steps, samples, orders = counts.unbind(dim=1)
        accepted, self.detector = penalty.verdicts(norms, steps, self.detector, self.config)
        weights = penalty.weights(norms, accepted, steps, samples, self.config)
        self.recorder.decided(norms, weights, accepted, steps, orders, self.detector)
        self._own_weights = weights[self.mesh.replica]
        self._any_accepted = accepted.any(dim=0)
        self._waiting = {state.unit.index: state for state in self.outer}
        self._launched = 0
        self._order_hash = 0
        self.round += 1
        self.steps_in_round = 0
        self._synchronise_spanning_unit()
        self._launch_until(self.config.sync_prefetch)

    def _exchange_norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns G ``[R, U]`` and steps, samples and order hash of the round ``[R, 3]``."""
        squares = torch.zeros(len(self.unit_names), device=self.device)
        for state in self.outer:
            squares[state.unit.index] = state.squared_norm(state.pseudo_gradient())
        if self.mesh.replica_size > 1:
            dist.all_reduce(squares, group=self.mesh.worker_group)
        samples = self.steps_in_round * self.samples_per_step
        counts = squares.new_tensor([self.steps_in_round, samples, self._order_hash])
        gathered = self.mesh.sync.all_gather(
            torch.cat([squares.sqrt(), counts]), f"exchanging norms in round {self.round}"
        )
        return gathered[:, :-3], gathered[:, -3:]

    def _launch_until(self, last: int) -> None:
        """Starts all-reduces up to the unit at position ``last``, in the same order everywhere."""
        while self._launched <= min(last, len(self.outer) - 1):
            self._launch(self.outer[self._launched])
            self._launched += 1

    def _launch(self, state: OuterState) -> None:
        unit = state.unit
        payload = penalty.contribution_(state.prepare_payload(), self._own_weights[unit.index])
        phase = f"synchronising {unit.name} in round {self.round - 1}"
        state.pending = self.mesh.sync.all_reduce(payload, phase)
        self.recorder.sent(payload)
        # Below 2^24: it travels to the other replicas as a float.
        self._order_hash = (self._order_hash * 131 + unit.index + 1) % (1 << 24)

    def _before_unit(self, unit: Unit) -> None:
        state = self._waiting.get(unit.index)
        if state is not None and state.unit is unit:
            with torch.no_grad():
                self._synchronise(state)
            _gather(unit)

    def _after_forward(self, units: list[Unit]) -> None:
        if self._waiting:
            with torch.no_grad():
                self._synchronise_waiting(units)

    def _synchronise_waiting(self, units: list[Unit]) -> None:
        for unit in units:
            state = self._waiting.get(unit.index)
            if state is not None and state.unit is unit:
                self._synchronise(state)

    def _synchronise_spanning_unit(self) -> None:
        """Stages that share a unit must meet for its norm, which they cannot do inside a forward:
        the later stage's begins when the first one's has ended."""
        if not self._spans_stages:
            return
        if self.outer[0].unit.spans_stages:
            self._synchronise(self.outer[0])
        elif self.config.clip is not None:
            self._sum_in_order(torch.zeros((), device=self.device), self.mesh.worker_group)

    def _synchronise(self, state: OuterState) -> None:
        """Waits for one unit's all-reduce and applies it."""
        unit = state.unit
        assert not unit.is_gathered, f"{unit.name} was gathered before its synchronisation"
        position = self.outer.index(state)
        self._launch_until(position)
        with self.recorder.exposed():
            delta = state.wait()
        square = state.squared_norm(delta)
        if self.config.clip is not None:
            group = self.mesh.worker_group if unit.spans_stages else self.mesh.stage_group
            norm = self._sum_in_order(square, group).sqrt()
            delta.mul_(penalty.clip_coefficient(norm, self.config.clip))
        outer_squares = state.step(
            self.config.outer_lr,
            self.config.outer_momentum,
            self.config.outer_nesterov,
            self._any_accepted[unit.index],
        )
        del self._waiting[unit.index]
        self.recorder.applied(unit.index, square, outer_squares)
        self._launch_until(position + self.config.sync_prefetch)

    def _sum_in_order(self, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Sums a 0-dim value over ranks of the replica, in an order that all replicas share: an
        all-reduce may choose another order in another replica, and the anchors would part."""
        if group.size() == 1:
            return value
        gathered = value.new_empty(group.size())
        dist.all_gather_into_tensor(gathered, value.reshape(1), group=group)
        return gathered.sum()


def _gather(unit: Unit) -> None:
    """Starts FSDP2's gather behind the synchronisation on the current stream.

    Left to itself FSDP2 gathers on a stream of its own, which waits for the optimizer at the start
    of the step but not for what happens to the shards later.
    """
    module = unit.modules[0]
    if isinstance(module, FSDPModule) and unit.locals[0].is_cuda:
        module.unshard(async_op=True)


def _hash(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of a fp32 tensor's bits, each weighted by its position; int64, wraps around."""
    bits = tensor.contiguous().view(torch.int32).reshape(-1).long()
    return (bits * (torch.arange(bits.numel(), device=bits.device) % 65521 + 1)).sum()
