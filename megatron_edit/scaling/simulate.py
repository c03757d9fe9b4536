"""Discrete-event simulation of a run: replicas that compute, meet, and share one slow link."""

from collections.abc import Callable, Sequence

import numpy as np

from megatron_edit.scaling.closed_forms import BACKWARD_SHARE, FORWARD_SHARE
from megatron_edit.scaling.events import Clock, Event, Process
from megatron_edit.scaling.scenario import KINDS, Outcome, Scenario, Span

MOST_SPANS = 50_000
"""Spans kept for the timeline; a picture shows the first of a long run anyway."""
NEVER = float("inf")

Key = tuple[int, int]
"""Names a collective: fragment, and step or round."""


class Collective:
    """One all-reduce over the replicas that are alive.

    Attributes:
        arrived: Release times of the payload's buckets by member.
        launched: Happens when the last member has arrived.
        complete: When the last member has released its last bucket.
        done: Happens when the payload has travelled.
    """

    def __init__(self) -> None:
        self.arrived: dict[int, Sequence[float]] = {}
        self.launched = Event()
        self.complete = NEVER
        self.done = Event()
        self._last: bool | None = None

    def ends_run(self, outcome: Outcome, target: int) -> bool:
        """Decides once, for all members, whether enough steps have been done."""
        if self._last is None:
            self._last = sum(outcome.steps) >= target
        return self._last


Deadlines = dict[int, list[Collective]]
"""Step -> collectives that must have ended before or after it."""


class Link:
    """The slow link: what is released first travels first."""

    def __init__(self, scenario: Scenario, outcome: Outcome) -> None:
        self._scenario, self._outcome = scenario, outcome
        self._free = 0.0

    def transfer(self, payload: float, releases: Sequence[float]) -> float:
        """Sends a payload in equal buckets.

        Args:
            payload: Bytes.
            releases: When each bucket may start, ascending.

        Returns:
            When the last bucket has arrived.
        """
        each = payload / len(releases) / self._scenario.bandwidth
        start = max(self._free, releases[0])
        time = self._free
        for release in releases:
            time = max(time, release) + each
        self._free = time + self._scenario.latency
        self._outcome.link_busy += payload / self._scenario.bandwidth + self._scenario.latency
        self._outcome.transferred += payload
        if len(self._outcome.spans) < MOST_SPANS:
            self._outcome.spans.append(Span(-1, start, self._free, "transfer"))
        return self._free


class Group:
    """The sync group: who is alive, and which collectives are under way."""

    def __init__(self, clock: Clock, link: Link, scenario: Scenario, outcome: Outcome) -> None:
        self._clock, self._link, self._outcome = clock, link, outcome
        self._payload = scenario.payload / scenario.fragments
        self.alive = set(range(scenario.replicas))
        self.pending: dict[Key, Collective] = {}
        self.launched: dict[Key, Collective] = {}
        self.over = False
        self.last_done: Key = (0, 0)
        self.next_done = Event()

    def join(self, key: Key, member: int, releases: Sequence[float]) -> Collective:
        """Enters a collective; it starts when everybody alive has.

        A member that comes back finds what the others have launched without it.
        """
        if key in self.launched:
            return self.launched[key]
        collective = self.pending.setdefault(key, Collective())
        collective.arrived[member] = releases
        self._launch_if_complete(key)
        return collective

    def leave(self, member: int) -> None:
        """Takes a failed member out; those who wait for it only may go on."""
        self.alive.discard(member)
        for key in list(self.pending):
            self._launch_if_complete(key)

    def retire(self, member: int) -> None:
        """Takes out a member that has ended its training; the last one ends the group."""
        self.alive.discard(member)
        if not self.alive:
            self.over = True
            self._announce()

    def _launch_if_complete(self, key: Key) -> None:
        collective = self.pending[key]
        if not self.alive or not self.alive <= collective.arrived.keys():
            return
        self.launched[key] = self.pending.pop(key)
        now = self._clock.now
        present = [collective.arrived[member] for member in sorted(self.alive)]
        releases = [max(now, *times) for times in zip(*present, strict=True)]
        collective.arrived.clear()
        collective.complete = releases[-1]
        finish = self._link.transfer(self._payload, releases)
        self._outcome.synchronisations += 1
        collective.launched.happen()
        self._clock.at(finish, lambda: self._finish(key, collective))

    def _finish(self, key: Key, collective: Collective) -> None:
        self.last_done = key
        collective.done.happen()
        self._announce()

    def _announce(self) -> None:
        waiting, self.next_done = self.next_done, Event()
        waiting.happen()


class Dropped(Exception):
    """A failed replica is back after the others went on without it."""


class Replica:
    """One replica as a process: computes steps, fails, and meets the others."""

    def __init__(
        self, index: int, scenario: Scenario, clock: Clock, group: Group, outcome: Outcome
    ) -> None:
        self.index, self._scenario, self._clock = index, scenario, clock
        self._group, self._outcome = group, outcome
        self._rng = np.random.default_rng([scenario.seed, index])
        speed = float(np.exp(scenario.speed_spread * self._rng.standard_normal()))
        self._step = scenario.step * scenario.slow.get(index, 1.0) * speed
        self._next_failure = self._draw_failure()

    def process(self) -> Process:
        """Returns the replica's life as a process of the clock."""
        if self._scenario.method == "a_edit":
            yield from self._by_time()
        elif self._scenario.method == "sync" or self._scenario.release == "backward":
            yield from self._by_steps(self._step_with_buckets)
        else:
            yield from self._by_steps(self._step_with_forward)
        self._group.retire(self.index)

    # Time, and what it is spent on.

    def _draw_failure(self) -> float:
        mean = self._scenario.mean_time_to_failure
        return self._clock.now + float(self._rng.exponential(mean)) if mean else NEVER

    def _draw_step(self) -> float:
        if not self._scenario.jitter:
            return self._step
        return self._step * float(np.exp(self._scenario.jitter * self._rng.standard_normal()))

    def _book(self, kind: str, start: float, end: float) -> None:
        self._outcome.seconds[self.index][kind] += end - start
        if end > start and len(self._outcome.spans) < MOST_SPANS:
            self._outcome.spans.append(Span(self.index, start, end, kind))

    def _compute(self, duration: float) -> Process:
        """Computes for a time; a failure destroys what was computed, and it starts anew."""
        while self._clock.now + duration > self._next_failure:
            start = self._clock.now
            yield max(0.0, self._next_failure - start)
            self._book("lost", start, self._clock.now)
            yield from self._repair()
        start = self._clock.now
        yield duration
        self._book("compute", start, self._clock.now)

    def _repair(self) -> Process:
        """Is down for the repair time, and where failures drop a replica, until it is let in.

        Raises:
            Dropped: The others have gone on.
        """
        scenario, start = self._scenario, self._clock.now
        drop = scenario.on_failure == "drop"
        if drop:
            self._group.leave(self.index)
        yield scenario.repair
        if drop and self._group.alive:
            yield self._group.next_done
        self._book("down", start, self._clock.now)
        self._next_failure = self._draw_failure()
        if drop:
            self._group.alive.add(self.index)
            raise Dropped

    def _await(self, collective: Collective) -> Process:
        """Waits for a collective: first for the other replicas, then for the link."""
        start = self._clock.now
        yield collective.done
        met = min(max(collective.complete, start), self._clock.now)
        self._book("wait", start, met)
        self._book("link", met, self._clock.now)

    def _meet(self, collective: Collective, number: int) -> Process:
        """Waits until all replicas are at the same synchronisation."""
        start = self._clock.now
        yield collective.launched
        self._book("wait", start, self._clock.now)
        self._outcome.idle.setdefault(number, {})[self.index] = self._clock.now - start

    def _overlapped_step(self, collective: Collective) -> Process:
        """Computes a step whose first part runs beside the collective."""
        duration = self._draw_step()
        yield from self._compute(self._scenario.overlap * duration)
        yield from self._await(collective)
        yield from self._compute((1.0 - self._scenario.overlap) * duration)

    # Methods that synchronise after a number of steps.

    def _by_steps(self, step: Callable[[int, Deadlines], Process]) -> Process:
        """Runs all steps, each by the given process, and a last synchronisation."""
        scenario, position = self._scenario, 0
        deadlines: Deadlines = {}
        while position < scenario.steps:
            try:
                yield from step(position, deadlines)
                position += 1
                self._outcome.steps[self.index] += 1
            except Dropped:
                deadlines.clear()
                position = scenario.steps if self._group.over else self._group.last_done[1]
        in_backward = scenario.method == "sync" or scenario.release == "backward"
        last = [] if in_backward else self._join_last()
        for collective in [*(c for due in deadlines.values() for c in due), *last]:
            yield from self._await(collective)

    def _join_last(self) -> list[Collective]:
        """Enters the synchronisation that ends training."""
        scenario = self._scenario
        if self._group.over:
            return []
        keys = [(fragment, scenario.steps) for fragment in range(scenario.fragments)]
        return [self._group.join(key, self.index, [self._clock.now]) for key in keys]

    def _step_with_forward(self, position: int, deadlines: Deadlines) -> Process:
        """`edit` and `streaming`: the payload travels once the next step has begun."""
        scenario = self._scenario
        due = [f for f in range(scenario.fragments) if self._due(position, f)]
        joined = [self._group.join((f, position), self.index, [self._clock.now]) for f in due]
        for collective in deadlines.pop(position, []):
            yield from self._await(collective)
        if joined and not scenario.delay:
            yield from self._meet(joined[0], position)
            yield from self._overlapped_step(joined[0])
            return
        if joined:
            deadlines[position + scenario.delay] = joined
        yield from self._compute(self._draw_step())

    def _due(self, position: int, fragment: int) -> bool:
        """Whether a fragment is synchronised when this step begins; at most one is."""
        interval = self._scenario.interval
        offset = fragment * interval // self._scenario.fragments
        return position > 0 and (position - offset) % interval == 0

    def _step_with_buckets(self, position: int, deadlines: Deadlines) -> Process:
        """`sync`, and rounds whose payload travels in buckets during their last backward."""
        scenario, duration = self._scenario, self._draw_step()
        interval = 1 if scenario.method == "sync" else scenario.interval
        yield from self._compute(FORWARD_SHARE * duration)
        backward = BACKWARD_SHARE * duration
        if (position + 1) % interval == 0:
            each, now = backward / scenario.buckets, self._clock.now
            releases = [now + each * (k + 1) for k in range(scenario.buckets)]
            collective = self._group.join((0, position + 1), self.index, releases)
            deadlines[position + scenario.delay] = [collective]
        yield from self._compute(backward)
        for collective in deadlines.pop(position, []):
            yield from self._await(collective)

    # The method that synchronises after a time.

    def _by_time(self) -> Process:
        """`a_edit`: synchronises when a time has passed; the end is decided at a meeting."""
        scenario, outcome, number = self._scenario, self._outcome, 0
        target = scenario.steps * scenario.replicas
        last = self._clock.now
        while True:
            try:
                if self._clock.now - last < scenario.sync_seconds:
                    yield from self._compute(self._draw_step())
                    outcome.steps[self.index] += 1
                    continue
                read = self._clock.now
                collective = self._group.join((0, number), self.index, [read])
                yield from self._meet(collective, number)
                number += 1
                last = self._clock.now if scenario.restart_timer == "after" else read
                if collective.ends_run(outcome, target):
                    yield from self._await(collective)
                    return
                yield from self._overlapped_step(collective)
                outcome.steps[self.index] += 1
            except Dropped:
                if self._group.over:
                    return
                last, number = self._clock.now, self._group.last_done[1] + 1


def simulate(scenario: Scenario) -> Outcome:
    """Runs a scenario to its end.

    Args:
        scenario: The run.

    Returns:
        Where the time of every replica went, and the timeline.
    """
    outcome = Outcome(scenario)
    outcome.seconds = [dict.fromkeys(KINDS, 0.0) for _ in range(scenario.replicas)]
    outcome.steps = [0] * scenario.replicas
    clock = Clock()
    group = Group(clock, Link(scenario, outcome), scenario, outcome)
    for index in range(scenario.replicas):
        clock.start(Replica(index, scenario, clock, group, outcome).process())
    clock.run()
    if not group.over:
        raise RuntimeError("the simulated run stalled: some replica waits for ever")
    outcome.elapsed = clock.now
    for seconds in outcome.seconds:
        # A replica that ended first waits for the last one.
        seconds["wait"] += max(0.0, outcome.elapsed - sum(seconds.values()))
    return outcome
