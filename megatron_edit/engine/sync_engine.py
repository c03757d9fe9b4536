"""The sync engine: replicas train apart and synchronise unit by unit inside a forward.

One synchronisation:

    step start       every unit: norm of its pseudo gradient -> one all-reduce in the replica
                     -> one all-gather over the replicas -> verdicts, weights
                     -> the first units' all-reduces start
    before unit l    the all-reduce of the next unit starts -> wait for that of unit l -> clip
                     -> outer step -> parameters := anchor -> unit l is gathered -> its forward
    after forward    any unit that the forward did not reach

With a delay the norms are on their way during the first forward; after it all all-reduces start.
They land in the same way, but in a later step's forward.
A unit "departs" when its all-reduce starts and "lands" when its result is applied.

Nothing here reads a value back to the host: what happened is copied out at the end of the step and
read when it has arrived (``sync_record``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron_edit.config.edit_config import EditConfig
from megatron_edit.engine import fingerprint, penalty
from megatron_edit.engine.backend import Backend, Unit
from megatron_edit.engine.detector_state import DetectorState
from megatron_edit.engine.first_anchor import check_first_anchor
from megatron_edit.engine.outer_state import OuterState
from megatron_edit.engine.record import COUNTS, Decided, OpenRecord, Recorder, SyncRecord
from megatron_edit.engine.rendezvous import build_rendezvous
from megatron_edit.engine.round import Round
from megatron_edit.replicas.chains import Chains
from megatron_edit.replicas.mesh import Mesh


class SyncEngine:
    """Synchronises this rank's units with the other replicas.

    A step is ``begin_step()``, the forwards and backwards, ``end_step()``. Evaluations between two
    steps are not seen.

    Args:
        backend: What trains inside this replica.
        mesh: The mesh.
        config: When and how to synchronise.
        samples_per_step: Samples this replica consumes in a step.
    """

    def __init__(
        self, backend: Backend, mesh: Mesh, config: EditConfig, samples_per_step: int
    ) -> None:
        self.config = config
        self.mesh = mesh
        self.rendezvous = build_rendezvous(config, mesh)
        self.trigger = self.rendezvous.trigger
        self.samples_per_step = samples_per_step
        self.units = backend.units
        self.unit_names = backend.unit_names
        self.device = self.units[0].locals[0].device
        self.step = 0
        self.round = 0
        self.steps_in_round = 0
        # Of these, on the device: what was skipped is not known on the host.
        self.skipped_in_round = torch.zeros((), device=self.device)
        self.outer: list[OuterState] = []
        self.flying: list[Round] = []
        self.detector = DetectorState.zeros(mesh.replicas, len(self.unit_names), self.device)
        self._chains: Chains | None = None
        if config.compression != "none":
            self._chains = Chains(self.device, config.sync_prefetch)
        self._recorder = Recorder(self.unit_names, mesh, self.device)
        self._backend = backend
        self.lands_in_forward = config.landing == "layers" or (
            config.landing == "auto" and backend.lands_in_forward
        )
        self._in_step = False
        self._landing: Round | None = None
        self._order_hash = 0
        mesh.peers.allow_for(4 * sum(unit.numel for unit in self.units))
        backend.before_each_unit(self._before_unit, self._after_forward)

    @property
    def lockstep(self) -> bool:
        """Whether the current step averages gradients over the replicas."""
        return self.trigger.lockstep(self.step)

    @property
    def together(self) -> bool:
        """Whether all replicas are known to be as far as one another in this step."""
        return self.rendezvous.together

    @property
    def landed(self) -> int:
        """Synchronisations that have been applied."""
        return self.round - len(self.flying)

    @property
    def landing(self) -> bool:
        """Whether units have yet to land in the forward that comes, or has begun."""
        return self._landing is not None and bool(self._landing.to_land)

    @property
    def replica_steps(self) -> list[int]:
        """Inner steps of each replica, as far as this one knows; exact where ``together``."""
        return self.rendezvous.replica_steps(self.step)

    @property
    def consumed_samples(self) -> int:
        """Samples of all replicas: known up to the last meeting, this replica's own times R since.
        Where the replicas are ``together`` it is the same number on all of them."""
        return self.samples_per_step * sum(self.replica_steps)

    @torch.no_grad()
    def begin_step(self) -> None:
        """Decides what this step begins with; called once, before its first micro-batch."""
        if self._in_step:
            return
        self._in_step = True
        if self.lockstep:
            self._backend.expect_average(self.mesh.peers)
        if not self.lockstep and not self.outer:
            self.create_anchor()
        if self.rendezvous.due(self.step, self.steps_in_round):
            self._open_round(self._delay())
        if self.flying and self.flying[0].lands_at == self.step:
            self._begin_landing(self.flying.pop(0))
            if not self.lands_in_forward:
                self._land_all(self.units)
                self._backend.flush()

    def average_gradients(self) -> None:
        """Averages gradients over the replicas in the lockstep phase; nothing otherwise."""
        if self.lockstep:
            self._backend.average_gradients(self.mesh.peers)

    def end_step(self, skipped: torch.Tensor | None = None) -> None:
        """Counts the step, after the inner optimizer's update.

        Args:
            skipped: 0-dim fp32 on the device, 1 if the update was left out, else 0; None if the
                inner optimizer leaves none out.
        """
        assert not self.landing, "the step ended with units that were not synchronised"
        assert all(round_.norms is None for round_ in self.flying), "the step had no forward"
        self._in_step = False
        if not self.lockstep:
            self.steps_in_round += 1
            if skipped is not None:
                self.skipped_in_round += skipped
        self.step += 1
        self._close_round()
        if self.rendezvous.by_clock and self.together:
            # Read now, not a step later, when the replicas are apart and cannot act on it together.
            self._recorder.drain()
        else:
            self._recorder.poll()

    @torch.no_grad()
    def synchronize(self) -> None:
        """Synchronises all units now, whatever the trigger says: the end of training."""
        if self.config.delay_round and self.steps_in_round > 0:
            # The last round departs before the one under way moves the anchor it is measured from.
            self._open_round(delay=1)
        while self.flying:
            self._land_now(self.flying.pop(0))
        # By the clock one replica may have done steps that count and another none.
        if self.outer and (self.steps_in_round > 0 or self.rendezvous.by_clock):
            self._open_round(delay=0, however_short=True)
            self._land_now(self.flying.pop(0))
        self._recorder.drain()

    @torch.no_grad()
    def roll_back(self) -> None:
        """Puts all replicas back on the anchor, whatever they have done in the open round. Rounds
        under way land before: nothing of a replica that failed is in them."""
        while self.flying:
            self._land_now(self.flying.pop(0))
        self._backend.release()
        for state in self.outer:
            state.unit.copy_from(state.anchor)
        self._backend.flush()
        self.steps_in_round = 0
        self.skipped_in_round.zero_()
        self.rendezvous.begin(self.step)
        self._recorder.drain()

    def records(self) -> list[SyncRecord]:
        """Synchronisations since the last call, once their numbers have reached the host."""
        return self._recorder.take()

    @contextmanager
    @torch.no_grad()
    def evaluated_parameters(self) -> Iterator[None]:
        """Context of an evaluation: puts the anchor in the parameters' place if ``eval_on`` says
        so, and takes care that nothing gathered in it outlives it."""
        kept: list[torch.Tensor] = []
        if self.config.eval_on == "anchor":
            for state in self.outer:
                kept.append(torch.empty(state.unit.numel, device=self.device))
                state.unit.copy_to(kept[-1])
                state.unit.copy_from(state.anchor)
            self._backend.flush()
        try:
            yield
        finally:
            for state, before in zip(self.outer, kept, strict=bool(kept)):
                state.unit.copy_from(before)
            self._backend.flush()
            self._backend.release()

    @torch.no_grad()
    def create_anchor(self, verify: bool = True) -> None:
        """Takes the parameters as the anchor; all replicas must agree on them bit for bit.

        Args:
            verify: False for an anchor that is about to be loaded from a checkpoint.

        Raises:
            RuntimeError: The replicas hold different parameters, or such as are not finite.
        """
        if verify:
            check_first_anchor(self.units, self.mesh, self.step)
        # A unit with parts on two stages comes first: its holders meet before the first forward.
        ordered = sorted(self.units, key=lambda unit: not unit.spans_stages)
        self.outer = [
            OuterState(unit, self.config, self.mesh.peers, self._chains) for unit in ordered
        ]
        self.rendezvous.begin(self.step)

    def _delay(self) -> int:
        return self.config.sync_interval if self.config.delay_round else self.config.delay_steps

    def _open_round(self, delay: int, however_short: bool = False) -> None:
        """Ends a round: starts to exchange its norms."""
        record = OpenRecord(self.round, self.step, len(self.unit_names), self.device)
        self._backend.release()
        with record.waiting.running():
            counts_as_round = self.rendezvous.meet(self.step)
        if not (counts_as_round or however_short):
            return
        opened = Round(
            number=self.round,
            lands_at=self.step + delay,
            keeps_progress=delay > 0 and not self.config.delay_round,
            record=record,
            states=list(self.outer),
        )
        # Those that depart at once need not be computed again.
        at_once = self.config.sync_prefetch + 1
        self._exchange_norms(opened, taken=len(self.outer) if delay > 0 else at_once)
        self.round += 1
        self.steps_in_round = 0
        self.skipped_in_round.zero_()
        self._order_hash = 0
        self.flying.append(opened)

    def _exchange_norms(self, round_: Round, taken: int) -> None:
        """Sends off G ``[U]`` and the numbers of the round (``COUNTS``).

        Args:
            round_: The round that ends.
            taken: Of so many units the pseudo gradients are kept for their departure.
        """
        squares = torch.zeros(len(self.unit_names), device=self.device)
        anchors = {}
        for position, state in enumerate(round_.states):
            with round_.record.computing.running():
                squares[state.unit.index], delta = state.measure(takes=position < taken)
            anchors[state.unit.index] = state.anchor_sum
            if delta is not None:
                round_.taken[state.unit.index] = delta
        if self.mesh.replica_size > 1:
            dist.all_reduce(squares, group=self.mesh.worker_group)
        # Filled, not copied: a copy from the host would wait for the device.
        numbers = (self.steps_in_round, self.steps_in_round, self._order_hash)
        counts = [squares.new_full((1,), float(number)) for number in numbers]
        counts[0] -= self.skipped_in_round
        anchor = fingerprint.combine([anchors[unit] for unit in sorted(anchors)])
        round_.norms = self.mesh.peers.start_all_gather(
            torch.cat([squares.sqrt(), *counts, fingerprint.as_floats(anchor)]),
            f"exchanging norms in round {round_.number}",
        )

    def _decide(self, round_: Round) -> None:
        """Reaches verdicts and weights, unless that was done. With a delay all units depart."""
        if round_.norms is None:
            return
        with round_.record.waiting.running():
            gathered = round_.norms.wait()
        round_.norms = None
        norms, counts = gathered[:, :-COUNTS], gathered[:, -COUNTS:]
        effective, steps = counts[:, 0], counts[:, 1]
        full = penalty.full_round_norms(norms, steps, effective)
        accepted, self.detector = penalty.verdicts(full, steps, self.detector, self.config)
        samples = effective * self.samples_per_step
        weights = penalty.weights(full, accepted, steps, samples, self.config)
        rollbacks = self.detector.consecutive_rollbacks.float()
        round_.record.decided = Decided(norms, weights, accepted.float(), counts, rollbacks)
        if round_.lands_at > self.step:
            self._depart_until(round_, len(round_.states) - 1)

    def _depart_until(self, round_: Round, last: int) -> None:
        """Starts all-reduces up to the unit at position ``last``, in the same order everywhere."""
        while round_.departed <= min(last, len(round_.states) - 1):
            state = round_.states[round_.departed]
            index = state.unit.index
            phase = f"synchronising {state.unit.name} in round {round_.number}"
            decision = round_.decision(self.mesh.replica, index)
            taken = round_.taken.pop(index, None)
            with round_.record.computing.running():
                round_.flights[index] = state.launch(
                    decision, phase, round_.record.behind, taken, round_.keeps_progress
                )
            round_.record.bytes += state.payload_bytes
            round_.departed += 1
            # Below 2^24: it travels to the other replicas as a float.
            self._order_hash = (self._order_hash * 131 + index + 1) % (1 << 24)
            if self._chains is not None and round_.departed == len(round_.states):
                self._chains.flush()

    def _begin_landing(self, round_: Round) -> None:
        """Has the units of a round land in the forward that comes."""
        # Parameters kept from an evaluation would be stale once their shards change.
        self._backend.release()
        self._decide(round_)
        self._landing = round_
        round_.to_land = {state.unit.index: state for state in round_.states}
        self._land_spanning_unit(round_)
        self._depart_until(round_, self.config.sync_prefetch)

    def _land_now(self, round_: Round) -> None:
        self._begin_landing(round_)
        self._land_all(self.units)
        self._backend.flush()
        self._close_round()

    def _before_unit(self, unit: Unit) -> None:
        if self._landing is not None and (state := self._landing.awaited(unit)) is not None:
            with torch.no_grad():
                self._land(self._landing, state)
            self._backend.gather(unit)

    @torch.no_grad()
    def _after_forward(self, units: Sequence[Unit]) -> None:
        self._land_all(units)
        # The forward hid the exchange of norms. A departure that keeps progress notes parameters,
        # which are still those that were measured.
        for round_ in self.flying:
            self._decide(round_)

    def _land_all(self, units: Sequence[Unit]) -> None:
        for unit in units:
            if self._landing is not None and (state := self._landing.awaited(unit)) is not None:
                self._land(self._landing, state)

    def _land_spanning_unit(self, round_: Round) -> None:
        """Stages that share a unit must meet for its norm, which they cannot do inside a forward:
        the later stage's begins when the first one's has ended."""
        if not self._backend.has_spanning_unit:
            return
        if round_.states[0].unit.spans_stages:
            self._land(round_, round_.states[0])
        elif self.config.clip is not None:
            self.mesh.sum_in_order(torch.zeros((), device=self.device), self.mesh.worker_group)

    def _land(self, round_: Round, state: OuterState) -> None:
        """Waits for one unit's all-reduce and applies it."""
        unit = state.unit
        assert not unit.is_gathered, f"{unit.name} was gathered before its synchronisation"
        self._depart_until(round_, round_.states.index(state) + self.config.sync_prefetch)
        flight = round_.flights.pop(unit.index)
        with round_.record.waiting.running():
            flight.pending.wait()
        with round_.record.computing.running():
            square = state.average(flight)
        clip_coefficient = None
        if self.config.clip is not None:
            group = self.mesh.worker_group if unit.spans_stages else self.mesh.stage_group
            norm = self.mesh.sum_in_order(square, group).sqrt()
            clip_coefficient = penalty.clip_coefficient(norm, self.config.clip)
        decision = round_.decision(self.mesh.replica, unit.index)
        with round_.record.computing.running():
            outer = state.land(flight, decision, clip_coefficient)
        round_.record.applied(unit.index, square, outer)
        del round_.to_land[unit.index]

    def _close_round(self) -> None:
        """Sends the numbers of a landed round off; not in the forward, where stages of a pipeline
        would wait for one another."""
        if self._landing is not None:
            self._recorder.close(self._landing.record, self.config.clip)
            self._landing = None
