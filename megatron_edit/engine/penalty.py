"""The pseudo-gradient penalty: who is anomalous, and how much each replica counts.

Pure functions on the gathered scalars of one synchronisation, `[R, U]` for R replicas and U
units. Every rank computes them from the same numbers and so reaches the same verdicts and
weights. Nothing here reads a value back to the host: decisions are masks and `torch.where`, so
the device never waits for Python.

Source: EDiT (arXiv 2412.07210), section 3.2, with the detectors `history` and `peer` added.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, get_args

import torch
from torch import Tensor

from megatron_edit.config.edit_config import Detector, Weighting
from megatron_edit.engine.detector_state import DetectorState
from megatron_edit.replicas.masked_copy import scale_, zero_if_

# 1 / the 0.75 quantile of the normal distribution: turns a MAD into a standard deviation.
MAD_TO_SIGMA = 1.4826
# Below this share of the mean a spread is fp32 rounding, not a property of the training.
SIGMA_FLOOR = 1e-5
# With two replicas the median lies between them and neither can be told to be the odd one.
MIN_PEERS = 3
DETECTORS: tuple[str, ...] = get_args(Detector)
WEIGHTINGS: tuple[str, ...] = get_args(Weighting)


class DetectorOptions(Protocol):
    """The fields of `EditConfig` that decide who is anomalous; see there for their meaning."""

    @property
    def detector(self) -> str: ...
    @property
    def detector_alpha(self) -> float: ...
    @property
    def detector_threshold(self) -> float: ...
    @property
    def detector_warmup(self) -> int: ...
    @property
    def peer_threshold(self) -> float: ...
    @property
    def peer_floor(self) -> float: ...
    @property
    def readmit_after(self) -> int: ...
    @property
    def max_consecutive_rollbacks(self) -> int: ...


class WeightOptions(Protocol):
    """The fields of `EditConfig` that decide how much a replica counts; see there."""

    @property
    def weighting(self) -> str: ...
    @property
    def weight_temperature(self) -> float: ...
    @property
    def weight_temperature_relative(self) -> float | None: ...


def full_round_norms(norms: Tensor, steps: Tensor, effective: Tensor) -> Tensor:
    """Norms as they would be had no step been skipped: G x steps / effective steps.

    A replica that skipped steps is nearer to the anchor for that reason alone, and would count more
    than its peers. n steps of a kind move a replica at most n times as far as one.

    Args:
        norms: `[R, U]`, G of each replica's pseudo gradient; may hold NaN and Inf.
        steps: `[R]`, inner steps of each replica in this round, skipped or not.
        effective: `[R]`, those of them whose update was not skipped.

    Returns:
        fp32 `[R, U]`, bitwise G for a replica that skipped nothing.
    """
    factor = torch.where(effective > 0, steps.float() / effective.clamp(min=1), 1.0)
    return norms.float() * factor.unsqueeze(1)


def verdicts(
    norms: Tensor, steps: Tensor, state: DetectorState, cfg: DetectorOptions
) -> tuple[Tensor, DetectorState]:
    """Decides which replicas take part in the synchronisation of each unit.

    A non-finite norm is anomalous under every detector, from the first synchronisation on. A norm
    of 0 (the replica did not move) is accepted, and neither enters the statistics nor counts
    as a peer.

    Args:
        norms: `[R, U]`, G of each replica's pseudo gradient, from `full_round_norms`.
        steps: `[R]`, inner steps of each replica in this round, skipped or not.
        state: What earlier synchronisations left; it is not modified.
        cfg: The detector and its thresholds.

    Returns:
        `accepted`, bool `[R, U]`, and the state after this synchronisation.

    Raises:
        ValueError: The detector's name is unknown.
    """
    if cfg.detector not in DETECTORS:
        raise ValueError(f"unknown detector '{cfg.detector}', expected one of {DETECTORS}")
    norms = norms.float()
    finite = torch.isfinite(norms)
    norms = torch.where(finite, norms, 0.0)
    moved = norms > 0
    per_step = norms / _column(steps).clamp(min=1.0)

    accepted = finite
    outlier = torch.zeros_like(finite)
    if cfg.detector in ("peer", "robust"):
        outlier = _peer_flags(per_step, moved, cfg)
        accepted = accepted & ~outlier

    if cfg.detector in ("paper", "history", "robust"):
        value, known = _statistic(norms, per_step, moved, state, cfg)
        flagged = _z_flags(value, known, state, cfg)
        accepted = accepted & ~flagged
        following = _update_statistics(state, value, known & accepted, cfg)
        following = _update_row(following, moved, flagged)
        patience = _patience(flagged, cfg)
        reseed = flagged & ~outlier & (following.flags_in_row >= patience)
        following = _reseed(following, norms, per_step, reseed, cfg)
    else:
        following = state

    last_accepted = torch.where(accepted & moved, per_step, following.last_accepted)
    rollbacks = torch.where(accepted.any(0), 0, state.consecutive_rollbacks + 1)
    return accepted, replace(
        following, last_accepted=last_accepted, consecutive_rollbacks=rollbacks
    )


def weights(
    norms: Tensor, accepted: Tensor, steps: Tensor, samples: Tensor, cfg: WeightOptions
) -> Tensor:
    """Computes how much each replica's pseudo gradient counts.

    `norm` is the paper's w_i = softmax over the accepted replicas of -G_i / T, where T is
    `weight_temperature`, or `weight_temperature_relative` times the median of the accepted
    replicas' norms. `norm_per_step` puts G_i / steps_i in the place of G_i. Whatever the weighting,
    a replica with a norm of 0 (it did not move) counts only where no accepted replica moved.

    Args:
        norms: `[R, U]`, G of each replica's pseudo gradient, from `full_round_norms`; may hold NaN
            and Inf.
        accepted: bool `[R, U]`, from `verdicts`.
        steps: `[R]`, inner steps of each replica in this round, skipped or not.
        samples: `[R]`, samples each replica consumed in those steps of this round that were not
            skipped.
        cfg: The weighting and its temperatures.

    Returns:
        fp32 `[R, U]`: 0 for replicas that are anomalous or did not move while others did, sums to 1
        over the replicas of a unit, and all 0 where every replica is anomalous.

    Raises:
        ValueError: The weighting's name is unknown.
    """
    if cfg.weighting not in WEIGHTINGS:
        raise ValueError(f"unknown weighting '{cfg.weighting}', expected one of {WEIGHTINGS}")
    moved = accepted & (norms > 0)
    counted = torch.where(moved.any(0), moved, accepted)
    share = counted.float()
    if cfg.weighting == "tokens":
        consumed = share * _column(samples)
        # Nobody consumed anything: there is no ground to prefer one replica.
        share = torch.where(consumed.sum(0) > 0, consumed, share)
    elif cfg.weighting != "uniform":
        divisor = _column(steps).clamp(min=1.0) if cfg.weighting == "norm_per_step" else 1.0
        # Masked before any arithmetic: Inf - Inf and Inf * 0 are NaN.
        share = _softmin(torch.where(counted, norms.float(), 0.0) / divisor, counted, cfg)
    total = share.sum(0)
    return share / torch.where(total > 0, total, 1.0)


def contribution_(delta: Tensor, weight: Tensor) -> Tensor:
    """Scales a pseudo gradient by its weight, in place; weight 0 gives zeros, even for Inf and NaN.

    Args:
        delta: A replica's pseudo gradient, any shape.
        weight: 0-dim, from `weights`.

    Returns:
        `delta`.
    """
    return scale_(zero_if_(delta, weight == 0), weight)


def clip_coefficient(norm: Tensor, clip: float | None) -> Tensor:
    """Computes beta = min(1, clip / (norm + 1e-6)), the factor on the averaged pseudo gradient.

    Args:
        norm: Norm of the averaged pseudo gradient of a unit over all ranks of the replica, 0-dim
            or `[U]`.
        clip: Largest norm let through, or None for no clip.

    Returns:
        beta, shaped like `norm`.
    """
    if clip is None:
        return torch.ones_like(norm)
    return (clip / (norm + 1e-6)).clamp(max=1.0)


def masked_median(values: Tensor, mask: Tensor) -> Tensor:
    """Median over dim 0 of the values under the mask; the mean of the middle two if they are even.

    Args:
        values: `[R, U]`.
        mask: bool `[R, U]`.

    Returns:
        `[U]`; 0 where nothing is under the mask.
    """
    count = mask.sum(0, keepdim=True)
    ordered = torch.where(mask, values, torch.inf).sort(dim=0).values
    low = ordered.gather(0, (count - 1).clamp(min=0) // 2)
    high = ordered.gather(0, (count // 2).clamp(max=values.shape[0] - 1))
    # Halved before the sum, which could overflow.
    middle = 0.5 * low + 0.5 * high
    return torch.where(count > 0, middle, 0.0).squeeze(0)


def _column(per_replica: Tensor) -> Tensor:
    return per_replica.float().unsqueeze(1)


def _peer_flags(per_step: Tensor, moved: Tensor, cfg: DetectorOptions) -> Tensor:
    """Flags what lies far above the median of the replicas that moved in this round.

    Replicas that stand still are left out, since a majority of them (time-triggered rounds) would
    put the median at 0 and get every replica that worked flagged.
    """
    median = masked_median(per_step, moved)
    mad = masked_median((per_step - median).abs(), moved)
    margin = torch.maximum(cfg.peer_threshold * MAD_TO_SIGMA * mad, cfg.peer_floor * median)
    return moved & (moved.sum(0) >= MIN_PEERS) & (per_step > median + margin)


def _statistic(
    norms: Tensor, per_step: Tensor, moved: Tensor, state: DetectorState, cfg: DetectorOptions
) -> tuple[Tensor, Tensor]:
    """Returns what the z-test looks at, `[R, U]`, and where it is defined."""
    if cfg.detector == "paper":
        return norms, moved
    known = moved & (state.last_accepted > 0)
    ratio = torch.log(torch.where(known, per_step, 1.0)) - torch.log(
        torch.where(known, state.last_accepted, 1.0)
    )
    return ratio, known


def _z_flags(value: Tensor, known: Tensor, state: DetectorState, cfg: DetectorOptions) -> Tensor:
    """One-sided z-test: (value - mean) / sigma > threshold, once the statistics are warm."""
    # A log ratio needs the G before it, so the statistics of `history` lag one synchronisation.
    synchronisations = state.count if cfg.detector == "paper" else state.count + 1
    # One value has no spread, whatever the warm-up.
    warm = (synchronisations >= cfg.detector_warmup) & (state.count >= 2)
    scale = state.mean.abs() if cfg.detector == "paper" else torch.ones_like(state.mean)
    sigma = torch.maximum(state.var.sqrt(), SIGMA_FLOOR * scale)
    return known & warm & (value - state.mean > cfg.detector_threshold * sigma)


def _update_statistics(
    state: DetectorState, value: Tensor, entering: Tensor, cfg: DetectorOptions
) -> DetectorState:
    """Takes values into the moments with weight alpha / (1 - (1 - alpha)^n), n values so far.

    This is the exponentially weighted mean and variance with weights normalised to 1, so the
    first value is the mean and there is no pull to 0 (West, 1979, incremental form).
    """
    count = state.count + entering
    seen = count.clamp(min=1)
    weight = cfg.detector_alpha / (1.0 - torch.pow(1.0 - cfg.detector_alpha, seen.float()))
    # Exactly 1, not to rounding: otherwise the variance starts at a few 1e-6 of the square.
    weight = torch.where(seen == 1, 1.0, weight)
    step = value - state.mean
    mean = state.mean + weight * step
    var = (1.0 - weight) * (state.var + weight * step * step)
    return replace(
        state,
        count=count,
        mean=torch.where(entering, mean, state.mean),
        var=torch.where(entering, var, state.var),
    )


def _update_row(state: DetectorState, moved: Tensor, flagged: Tensor) -> DetectorState:
    # A NaN, or a replica that stood still, says nothing about the regime: the row goes on.
    row = torch.where(flagged, state.flags_in_row + 1, 0)
    return replace(state, flags_in_row=torch.where(moved, row, state.flags_in_row))


def _patience(flagged: Tensor, cfg: DetectorOptions) -> Tensor:
    """How many flags in a row a replica gets before its statistics start anew, `[U]`.

    Where every replica is flagged, with finite norms and by its own history alone, it is the regime
    that has changed: that must end before the rollbacks of the unit end the run.
    """
    before_the_end = max(1, min(cfg.readmit_after, cfg.max_consecutive_rollbacks - 1))
    return torch.where(flagged.all(dim=0), before_the_end, cfg.readmit_after)


def _reseed(
    state: DetectorState, norms: Tensor, per_step: Tensor, reseed: Tensor, cfg: DetectorOptions
) -> DetectorState:
    """Starts the statistics anew at the present value: the regime has changed, not the replica."""
    if cfg.detector == "paper":
        count, mean = 1, norms
    else:
        count, mean = 0, torch.zeros_like(norms)
    return replace(
        state,
        count=torch.where(reseed, count, state.count),
        mean=torch.where(reseed, mean, state.mean),
        var=torch.where(reseed, 0.0, state.var),
        last_accepted=torch.where(reseed, per_step, state.last_accepted),
        flags_in_row=torch.where(reseed, 0, state.flags_in_row),
    )


def _softmin(norms: Tensor, counted: Tensor, cfg: WeightOptions) -> Tensor:
    """Returns exp(-(G - min G) / T) of the replicas that count, 0 for the others, `[R, U]`."""
    smallest = torch.where(counted, norms, torch.inf).amin(0)
    # Shifted before the division: the smallest norm gives exactly 1 at any temperature.
    above = torch.where(counted, norms - smallest, 0.0)
    if cfg.weight_temperature_relative is None:
        scaled = above / cfg.weight_temperature
    else:
        # Of these alone, so that a flagged replica cannot move the weights of the others.
        median = masked_median(norms, counted & (norms > 0))
        temperature = cfg.weight_temperature_relative * median
        scaled = above / temperature.clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(counted, torch.exp(-scaled), 0.0)
