"""What a simulated run looks like: the input of `simulate`, and its result."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from megatron_edit.scaling.closed_forms import BACKWARD_SHARE, FORWARD_SHARE, Round

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]

KINDS = ("compute", "wait", "link", "lost", "down")
"""What a replica's time goes to: useful steps, waiting for other replicas, waiting for the slow
link, steps that a failure destroyed, repair."""


class Scenario(BaseModel):
    """A run to simulate. Times in seconds, payloads in bytes, rates in bytes/s."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    method: Literal["sync", "edit", "a_edit", "streaming"] = "edit"
    """`sync` averages gradients at every step, `edit` synchronises after a number of steps,
    `a_edit` after a time, `streaming` one fragment of the model after another."""
    replicas: Count = 2
    """R."""
    steps: Count = 256
    """Inner steps of each replica; for a_edit their mean over the replicas."""
    step: Positive = 1.0
    """T, compute time of one step of an undisturbed replica."""
    payload: NotNegative = 0.0
    """S_eff, bytes that a replica's link carries for all parameters once."""
    bandwidth: Positive = 1.25e9
    """W of the slow link."""
    latency: NotNegative = 0.0
    """eps, time of a collective that does not depend on its payload."""
    interval: Count = 64
    """H, inner steps of a round (edit, streaming)."""
    sync_seconds: Positive = 600.0
    """Time from one synchronisation to the next (a_edit)."""
    overlap: Annotated[float, Field(ge=0, le=1)] = FORWARD_SHARE
    """omega, share of the synchronising step that runs beside an undelayed synchronisation."""
    delay: Annotated[int, Field(ge=0)] = 0
    """d, steps after which a synchronisation's result is applied."""
    fragments: Count = 1
    """Parts in which `streaming` synchronises the model, spread evenly over a round."""
    release: Literal["step", "backward"] = "step"
    """When a payload may travel: as a whole when the step after the round starts (this project's
    engine), or in buckets during the backward of the round's last step (gradients of `sync`)."""
    buckets: Count = 128
    """Buckets of a payload that is released during the backward."""
    jitter: NotNegative = 0.0
    """Standard deviation of the log of a step's time."""
    speed_spread: NotNegative = 0.0
    """Standard deviation of the log of a replica's speed, drawn once."""
    slow: dict[int, Positive] = Field(default_factory=dict)
    """Replica (from 0) -> factor on its step time."""
    mean_time_to_failure: Positive | None = None
    """Mean time between failures of one replica; none = they never fail."""
    repair: NotNegative = 0.0
    """Time from a failure until the replica trains again."""
    on_failure: Literal["wait", "drop"] = "wait"
    """Whether the others wait for a failed replica, or go on without it until it is back."""
    restart_timer: Literal["after", "before"] = "after"
    """Whether the a_edit timer restarts after the rendezvous, or (wrongly) with the time read
    before a replica blocked in it."""
    seed: int = 0
    """Seed of jitter, speeds and failures."""

    @model_validator(mode="after")
    def _consistent(self) -> "Scenario":
        if self.method in ("edit", "streaming") and self.delay >= self.interval:
            raise ValueError(f"delay {self.delay} must be below interval {self.interval}")
        if self.fragments > self.interval:
            raise ValueError(f"fragments {self.fragments} exceed interval {self.interval}")
        if self.fragments > 1 and self.method != "streaming":
            raise ValueError("fragments > 1 needs method streaming")
        if self.delay and self.method in ("sync", "a_edit"):
            raise ValueError(f"method {self.method} knows no delay")
        missing = [index for index in self.slow if not 0 <= index < self.replicas]
        if missing:
            raise ValueError(f"slow replica {missing[0]} is not one of 0..{self.replicas - 1}")
        return self

    def closed_form(self) -> float | None:
        """Returns the utilisation of the closed forms, or None where they do not hold."""
        undisturbed = not (self.jitter or self.speed_spread or self.slow)
        if not undisturbed or self.mean_time_to_failure or self.method == "a_edit":
            return None
        if self.fragments > 1:
            return None
        if self.method == "sync" or self.release == "backward":
            return self._bucket_closed_form()
        omega = self.delay if self.delay else self.overlap
        return Round(self.interval, self.step, self.payload, self.latency, omega).utilisation(
            self.bandwidth
        )

    def _bucket_closed_form(self) -> float | None:
        """Returns u with stall = max(T/3 + 2T/(3 n) + c, T + c/n) + eps - T, n buckets, c = S/W."""
        if self.delay:
            return None
        wire = self.payload / self.bandwidth
        spacing = BACKWARD_SHARE * self.step / self.buckets
        # Either the link is never idle after the first bucket, or it keeps up with the backward.
        queued = FORWARD_SHARE * self.step + spacing + wire
        keeping_up = self.step + wire / self.buckets
        stall = max(queued, keeping_up) + self.latency - self.step
        busy = (1 if self.method == "sync" else self.interval) * self.step
        return busy / (busy + stall)


@dataclass(frozen=True)
class Span:
    """A stretch of time on one lane of the timeline.

    Attributes:
        lane: Replica, or -1 for the slow link.
        start: Seconds from the start of the run.
        end: Seconds from the start of the run.
        kind: One of KINDS, or `transfer` on the link.
    """

    lane: int
    start: float
    end: float
    kind: str


@dataclass
class Outcome:
    """What a simulated run did.

    Attributes:
        scenario: Its input.
        elapsed: Seconds until the last replica ended.
        seconds: Per replica the seconds of each of KINDS.
        steps: Useful steps of each replica.
        synchronisations: Collectives on the slow link.
        transferred: Bytes on a replica's link.
        link_busy: Seconds in which the link carried something.
        idle: Per rendezvous the time each replica waited there for the others.
        spans: The timeline.
    """

    scenario: Scenario
    elapsed: float = 0.0
    seconds: list[dict[str, float]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    synchronisations: int = 0
    transferred: float = 0.0
    link_busy: float = 0.0
    idle: dict[int, dict[int, float]] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    @property
    def utilisation(self) -> float:
        """Share of all replicas' time that went into useful steps."""
        return self.share("compute")

    def share(self, kind: str) -> float:
        """Returns the share of all replicas' time that went into one of KINDS."""
        total = self.elapsed * len(self.seconds)
        return sum(s[kind] for s in self.seconds) / total if total else 0.0

    def idle_seconds(self) -> list[float]:
        """Returns the longest wait of each rendezvous."""
        return [max(waits.values(), default=0.0) for waits in self.idle.values()]

    def summary(self) -> dict[str, object]:
        """Returns the figures for a table or JSON."""
        idle = self.idle_seconds()
        return {
            "elapsed_s": self.elapsed,
            "utilisation": self.utilisation,
            "closed_form_utilisation": self.scenario.closed_form(),
            "shares": {kind: self.share(kind) for kind in KINDS},
            "steps": _spread(self.steps),
            "steps_per_s": sum(self.steps) / self.elapsed if self.elapsed else 0.0,
            "synchronisations": self.synchronisations,
            "bytes_per_link": self.transferred,
            "link_busy_share": self.link_busy / self.elapsed if self.elapsed else 0.0,
            "idle_per_rendezvous_s": {
                "mean": sum(idle) / len(idle) if idle else 0.0,
                "max": max(idle, default=0.0),
            },
        }


def _spread(values: Iterable[int]) -> dict[str, float]:
    numbers = list(values)
    return {"min": min(numbers), "mean": sum(numbers) / len(numbers), "max": max(numbers)}
