"""Weights, contribution and clip against values worked out by hand, written here as numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_edit.engine.penalty import (
    WEIGHTINGS,
    clip_coefficient,
    contribution_,
    full_round_norms,
    weights,
)

NAN, INF = math.nan, math.inf


@dataclass(frozen=True)
class Options:
    weighting: str = "norm"
    weight_temperature: float = 1.0
    weight_temperature_relative: float | None = None


def weigh(
    values: list[float],
    cfg: Options,
    accepted: list[bool] | None = None,
    steps: list[int] | None = None,
    samples: list[int] | None = None,
) -> list[float]:
    """Returns the weights of one unit."""
    replicas = len(values)
    result = weights(
        torch.tensor(values).unsqueeze(1),
        torch.tensor(accepted or [True] * replicas).unsqueeze(1),
        torch.tensor(steps or [4] * replicas),
        torch.tensor(samples or [32] * replicas),
        cfg,
    )
    assert result.dtype == torch.float32 and result.shape == (replicas, 1)
    return result[:, 0].tolist()


@pytest.mark.parametrize(
    "cfg, norms, expected",
    [
        (Options(), [1.0, 2.0, 3.0], [0.6652410, 0.2447285, 0.0900306]),
        (Options(weight_temperature=2.0), [1.0, 3.0], [0.7310586, 0.2689414]),
        # Twice the median at t = 0.1 is e^-10 = 4.54e-5 of the others.
        (
            Options(weight_temperature_relative=0.1),
            [1.0, 1.0, 2.0],
            [0.4999886, 0.4999886, 0.0000227],
        ),
        # The same at another scale, that of one small module.
        (
            Options(weight_temperature_relative=0.1),
            [1e-9, 1e-9, 2e-9],
            [0.4999886, 0.4999886, 0.0000227],
        ),
        # Two norms: the median is 2, so the exponents differ by 2 / (1 x 2) = 1.
        (Options(weight_temperature_relative=1.0), [1.0, 3.0], [0.7310586, 0.2689414]),
        (Options(weighting="uniform"), [1.0, 2.0, 900.0], [1 / 3, 1 / 3, 1 / 3]),
        # exp(-200) is no fp32 number; only differences count.
        (Options(), [200.0, 201.0], [0.7310586, 0.2689414]),
        (Options(weight_temperature_relative=0.1), [0.0, 0.0], [0.5, 0.5]),
    ],
)
def test_weights_by_hand(cfg: Options, norms: list[float], expected: list[float]) -> None:
    assert weigh(norms, cfg) == pytest.approx(expected, abs=1e-6)


def test_weights_per_step_and_by_tokens() -> None:
    per_step = Options(weighting="norm_per_step")
    assert weigh([2.0, 4.0], per_step, steps=[2, 4]) == [0.5, 0.5]
    # Norms per step 1 and 2.
    expected = [0.7310586, 0.2689414]
    assert weigh([2.0, 8.0], per_step, steps=[2, 4]) == pytest.approx(expected, abs=1e-6)
    relative = Options(weighting="norm_per_step", weight_temperature_relative=1.0)
    # Norms per step 1 and 3, median 2.
    assert weigh([2.0, 12.0], relative, steps=[2, 4]) == pytest.approx(expected, abs=1e-6)

    tokens = Options(weighting="tokens")
    assert weigh([1.0, 9.0], tokens, samples=[30, 10]) == [0.75, 0.25]
    excluded = weigh([1.0, NAN, 1.0], tokens, [True, False, True], samples=[30, 99, 10])
    assert excluded == [0.75, 0.0, 0.25]
    assert weigh([0.0, 0.0], tokens, steps=[0, 0], samples=[0, 0]) == [0.5, 0.5]


@pytest.mark.parametrize("relative", [None, 0.5])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_a_replica_that_did_not_move_counts_only_where_nobody_did(
    weighting: str, relative: float | None
) -> None:
    cfg = Options(weighting=weighting, weight_temperature_relative=relative)
    assert weigh([2.5, 0.0, 2.5, 2.5], cfg) == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])
    # The one that moved was found out: it still does not count.
    assert weigh([2.5, 0.0, NAN, 0.0], cfg, [False, True, False, True]) == [0.0, 0.5, 0.0, 0.5]
    assert weigh([0.0] * 4, cfg) == [0.25] * 4


def test_norms_count_as_if_no_step_had_been_skipped() -> None:
    norms = torch.tensor([[2.5, 0.3], [1.25, 0.1], [0.0, 0.0], [NAN, 7.0]])
    steps, effective = torch.tensor([32.0, 32.0, 32.0, 7.0]), torch.tensor([32.0, 16.0, 0.0, 7.0])
    full = full_round_norms(norms, steps, effective)
    assert full[0].tolist() == norms[0].tolist() and full[3, 1] == 7.0
    assert full[1].tolist() == pytest.approx([2.5, 0.2])
    assert full[2].tolist() == [0.0, 0.0] and full[3, 0].isnan()
    # Half of the steps skipped at the same pace: no more weight than a peer.
    assert weigh(full[:3, 0].tolist(), Options()) == [0.5, 0.5, 0.0]


def test_norms_are_bitwise_what_they_were_where_nobody_skipped() -> None:
    norms = torch.randn(5, 300, generator=torch.Generator().manual_seed(2)).abs()
    steps = torch.tensor([1.0, 3.0, 128.0, 0.0, 77.0])
    assert torch.equal(full_round_norms(norms, steps, steps), norms)


@pytest.mark.parametrize("bad", [NAN, INF, 1000.0])
@pytest.mark.parametrize("relative", [None, 0.5])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_an_excluded_replica_does_not_move_the_others(
    weighting: str, relative: float | None, bad: float
) -> None:
    cfg = Options(weighting=weighting, weight_temperature_relative=relative)
    good, steps, samples = [1.0, 1.4, 1.2], [4, 8, 6], [32, 64, 48]
    without = weigh(good, cfg, steps=steps, samples=samples)
    accepted = [False, True, True, True]
    result = weigh([bad, *good], cfg, accepted, steps=[4, *steps], samples=[32, *samples])
    assert result == [0.0, *without]


@pytest.mark.parametrize("relative", [None, 0.1])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_weights_sum_to_one_or_are_all_zero(weighting: str, relative: float | None) -> None:
    generator = torch.Generator().manual_seed(1)
    cfg = Options(weighting=weighting, weight_temperature_relative=relative)
    for replicas in (1, 2, 3, 8):
        exponent = torch.rand(replicas, 200, generator=generator) * 60 - 30
        norms = torch.pow(10.0, exponent)
        draw = torch.rand(replicas, 200, generator=generator)
        norms = torch.where(draw < 0.1, 0.0, torch.where(draw > 0.8, NAN, norms))
        norms = torch.where(draw > 0.9, INF, norms)
        accepted = norms.isfinite() & (torch.rand(replicas, 200, generator=generator) < 0.7)
        steps = torch.randint(0, 9, (replicas,), generator=generator)
        result = weights(norms, accepted, steps, 8 * steps, cfg)
        assert (result >= 0).all()
        assert not result[~accepted].any()
        total = accepted.any(0).float()
        torch.testing.assert_close(result.sum(0), total, rtol=0, atol=1e-6)


def test_contribution_of_an_anomalous_replica_is_zeros() -> None:
    weight = torch.tensor([0.0, 0.25])
    delta = torch.tensor([NAN, INF, 3.0])
    assert contribution_(delta, weight[0]) is delta
    assert delta.tolist() == [0.0, 0.0, 0.0]
    assert contribution_(torch.tensor([8.0, -2.0]), weight[1]).tolist() == [2.0, -0.5]


def test_clip_coefficient_by_hand() -> None:
    beta = clip_coefficient(torch.tensor([40.0, 2.0, 0.0, 10.0]), 10.0)
    assert beta.tolist() == pytest.approx([0.25, 1.0, 1.0, 0.9999999], abs=1e-7)
    assert clip_coefficient(torch.tensor(1e-6), 1e-6).item() == pytest.approx(0.5)
    assert clip_coefficient(torch.tensor(1e9), None).item() == 1.0
    assert clip_coefficient(torch.tensor(40.0), 10.0).ndim == 0


def test_all_anomalous_weigh_nothing() -> None:
    for weighting in WEIGHTINGS:
        assert weigh([NAN, INF], Options(weighting), accepted=[False, False]) == [0.0, 0.0]


def test_unknown_weighting_is_refused() -> None:
    with pytest.raises(ValueError, match="weighting 'size'"):
        weigh([1.0], Options("size"))


def _weigh(cfg: Options, device: str) -> Tensor:
    norms = torch.ones(4, 3, device=device)
    accepted = norms > 0
    steps = torch.ones(4, dtype=torch.int64, device=device)
    return weights(full_round_norms(norms, steps, steps), accepted, steps, steps, cfg)


def _scale(device: str) -> Tensor:
    delta, weight, norm = (torch.ones(n, device=device) for n in ((5,), (), ()))
    return contribution_(delta, weight).mul_(clip_coefficient(norm, 10.0))


@pytest.mark.parametrize("relative", [None, 0.1])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_no_value_is_read_back_to_the_host(weighting: str, relative: float | None) -> None:
    # Fake tensors have no values: `.item()`, `if tensor` and data-dependent shapes raise.
    with FakeTensorMode():
        _weigh(Options(weighting, weight_temperature_relative=relative), "cpu")
        _scale("cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("relative", [None, 0.1])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_no_host_sync_on_cuda(weighting: str, relative: float | None) -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        _weigh(Options(weighting, weight_temperature_relative=relative), "cuda")
        _scale("cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
