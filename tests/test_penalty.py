"""The detectors against values worked out by hand, which stand here as numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from megatron_edit.engine.detector_state import DetectorState
from megatron_edit.engine.penalty import (
    DETECTORS,
    masked_median,
    verdicts,
)

NAN, INF = math.nan, math.inf

# Norms of one layer of a 4-replica run, one row per round; in rounds 6 to 8 replica 1 was fed
# random tokens. Learning-rate decay makes all of them fall.
RECORDED = [
    [2.895, 2.773, 2.794, 2.844],
    [2.538, 2.486, 2.592, 2.514],
    [2.343, 2.246, 2.302, 2.343],
    [2.108, 2.041, 2.088, 2.105],
    [1.903, 1.837, 1.805, 1.839],
    [1.638, 3.103, 1.639, 1.615],
    [1.460, 2.342, 1.465, 1.426],
    [1.180, 1.613, 1.196, 1.212],
    [0.948, 1.143, 0.959, 0.960],
    [0.705, 0.714, 0.705, 0.714],
    [0.526, 0.533, 0.549, 0.549],
    [0.435, 0.412, 0.432, 0.413],
    [0.221, 0.236, 0.220, 0.221],
]


@dataclass(frozen=True)
class Options:
    detector: str = "robust"
    detector_alpha: float = 0.02
    detector_threshold: float = 3.0
    detector_warmup: int = 10
    peer_threshold: float = 10.0
    peer_floor: float = 0.3
    readmit_after: int = 5
    max_consecutive_rollbacks: int = 100


def column(values: Iterable[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float32).unsqueeze(1)


def replay(
    rounds: Iterable[Iterable[float]],
    cfg: Options,
    state: DetectorState | None = None,
    steps: list[int] | None = None,
) -> tuple[list[tuple[int, int]], DetectorState]:
    """Runs one unit through many rounds; returns (round from 1, replica) of every flag."""
    flags = []
    for number, values in enumerate(rounds, start=1):
        norms = column(values)
        replicas = norms.shape[0]
        state = state or DetectorState.zeros(replicas, 1)
        accepted, state = verdicts(norms, torch.tensor(steps or [4] * replicas), state, cfg)
        flags += [(number, i) for i in range(replicas) if not accepted[i, 0]]
    assert state is not None
    return flags, state


# --- statistics -------------------------------------------------------------------------------


def test_paper_statistics_are_the_bias_corrected_weighted_moments() -> None:
    # alpha 1/2, values 1, 3, 2: normalised weights 1/7, 2/7, 4/7, mean 15/7, variance 5 - (15/7)^2.
    _, state = replay([[1.0], [3.0], [2.0]], Options(detector="paper", detector_alpha=0.5))
    assert state.count.item() == 3
    assert state.mean.item() == pytest.approx(2.1428571, abs=1e-6)
    assert state.var.item() == pytest.approx(0.4081633, abs=1e-6)


def test_first_value_seeds_exactly() -> None:
    _, state = replay([[0.1]], Options(detector="paper"))
    assert state.mean.item() == torch.tensor(0.1).item()
    assert state.var.item() == 0.0


@pytest.mark.parametrize("detector", ["history", "robust"])
def test_history_statistics_are_of_log_ratios(detector: str) -> None:
    # ln(2/1) = 0.6931 and ln(1/2) = -0.6931 weigh 1/3 and 2/3: mean -0.2310, variance 0.4271.
    _, state = replay([[1.0], [2.0], [1.0]], Options(detector=detector, detector_alpha=0.5))
    assert state.count.item() == 2
    assert state.mean.item() == pytest.approx(-0.2310491, abs=1e-6)
    assert state.var.item() == pytest.approx(0.4270693, abs=1e-6)
    assert state.last_accepted.item() == 0.25  # 1.0 in 4 steps


@pytest.mark.parametrize("third, flagged", [(3.27, False), (3.28, True), (0.001, False)])
def test_z_test_by_hand_and_one_sided(third: float, flagged: bool) -> None:
    # After 1 and 3 at alpha 1/2: mean 7/3, variance 8/9, so one sigma ends at 3.2761.
    cfg = Options("paper", detector_alpha=0.5, detector_threshold=1.0, detector_warmup=2)
    flags, _ = replay([[1.0], [3.0], [third]], cfg)
    assert flags == ([(3, 0)] if flagged else [])


@pytest.mark.parametrize("detector", ["paper", "history"])
def test_warmup_ends_after_ten_synchronisations(detector: str) -> None:
    calm = [[1.0], [1.01]] * 5
    assert replay([*calm[:9], [50.0]], Options(detector))[0] == []
    assert replay([*calm, [50.0]], Options(detector))[0] == [(11, 0)]


@pytest.mark.parametrize("detector", ["paper", "history"])
def test_no_spread_yet_flags_rounding_neither_at_zero_warmup_nor_at_constant_norms(
    detector: str,
) -> None:
    assert replay([[1.0], [9.0]], Options(detector, detector_warmup=0))[0] == []
    constant = [[0.7]] * 30
    assert replay([*constant, [0.7000001]], Options(detector))[0] == []
    assert replay([*constant, [0.71]], Options(detector))[0] == [(31, 0)]


def test_flagged_value_does_not_enter_the_statistics() -> None:
    calm = [[1.0], [1.1]] * 6
    for detector in ("paper", "history"):
        _, before = replay(calm, Options(detector))
        flags, after = replay([[7.0]], Options(detector), before)
        assert flags == [(1, 0)]
        for name in ("count", "mean", "var", "last_accepted"):
            assert torch.equal(before.state_dict()[name], after.state_dict()[name]), name


# --- the recorded sequence --------------------------------------------------------------------

POISONED = [(6, 1), (7, 1), (8, 1)]


@pytest.mark.parametrize(
    "detector, warmup, expected",
    [
        ("peer", 10, POISONED),
        ("robust", 10, POISONED),
        ("robust", 3, POISONED),
        # Blind: the decay of G has swollen sigma, the poisoned norm is about 2 sigma up.
        ("paper", 10, []),
        ("paper", 5, []),
        # Still warming up when it happens.
        ("history", 10, []),
        # Round 8 is below the last accepted norm, three rounds back, so history alone misses it.
        ("history", 5, [(6, 1), (7, 1)]),
        ("none", 10, []),
    ],
)
def test_recorded_norms(detector: str, warmup: int, expected: list[tuple[int, int]]) -> None:
    flags, _ = replay(RECORDED, Options(detector, detector_warmup=warmup))
    assert flags == expected


def test_paper_z_of_the_poisoned_norm() -> None:
    # Mean 2.267 and sigma 0.328 of the five rounds before it, newer ones weighing slightly more.
    _, state = replay(RECORDED[:5], Options("paper"))
    assert state.mean[1, 0].item() == pytest.approx(2.2672, abs=1e-4)
    z = (3.103 - state.mean[1, 0]) / state.var[1, 0].sqrt()
    assert z.item() == pytest.approx(2.548, abs=1e-3)


# --- peers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "norms, flagged",
    [
        # Median 1.15, MAD 0.1: 1.15 + 10 x 1.4826 x 0.1 = 2.6326.
        ([1.0, 1.1, 1.2, 2.63], []),
        ([1.0, 1.1, 1.2, 2.64], [3]),
        # MAD 0: the floor decides, 1 + 0.3.
        ([1.0, 1.0, 1.0, 1.29], []),
        ([1.0, 1.0, 1.0, 1.31], [3]),
        # One-sided.
        ([1.0, 1.0, 1.0, 0.01], []),
        # Two peers cannot tell which is odd, and a NaN is no peer.
        ([1.0, 50.0], []),
        ([1.0, 50.0, NAN], [2]),
        ([1.0, 1.0, NAN, 50.0], [2, 3]),
        # Those who stand still are no peers either, else their median of 0 would flag the others.
        ([0.0, 0.0, 0.0, 1.0, 1.1], []),
    ],
)
@pytest.mark.parametrize("detector", ["peer", "robust"])
def test_peer_by_hand(detector: str, norms: list[float], flagged: list[int]) -> None:
    # Steps of 1, so that the norms are those per step.
    flags, _ = replay([norms], Options(detector), steps=[1] * len(norms))
    assert [replica for _, replica in flags] == flagged


def test_masked_median() -> None:
    values = torch.tensor([[4.0, 1.0, 5.0, NAN], [1.0, 2.0, INF, NAN], [3.0, 9.0, 7.0, 1.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 1, 0]], dtype=torch.bool)
    assert masked_median(values, mask).tolist() == [3.0, 1.5, 6.0, 0.0]
    large = torch.tensor([[3e38], [3e38]])
    assert masked_median(large, torch.ones(2, 1, dtype=torch.bool)).isfinite().all()


def test_history_and_peer_look_at_the_norm_per_step() -> None:
    # Replica 2 did four times the work of the others and moved four times as far.
    norms, steps = [[1.0, 1.05, 4.1]], [4, 4, 16]
    assert replay(norms, Options("peer"), steps=steps)[0] == []
    assert replay(norms, Options("peer"), steps=[4, 4, 4])[0] == [(1, 2)]

    calm = [[1.0], [1.1]] * 6
    _, state = replay(calm, Options("history"))
    assert replay([[4.0]], Options("history"), state, steps=[16])[0] == []
    assert replay([[4.0]], Options("history"), state, steps=[4])[0] == [(1, 0)]
    _, state = replay(calm, Options("paper"))
    assert replay([[4.0]], Options("paper"), state, steps=[16])[0] == [(1, 0)]


# --- norms that are no numbers, or 0 ----------------------------------------------------------


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("detector", DETECTORS)
def test_non_finite_is_anomalous_from_the_first_synchronisation(
    detector: str, replicas: int, bad: float
) -> None:
    good = [1.0 + 0.01 * i for i in range(replicas - 1)]
    cfg = Options(detector)
    flags, state = replay([[bad, *good]], cfg)
    assert flags == [(1, 0)]
    for tensor in state.state_dict().values():
        assert tensor.isfinite().all()
    assert state.last_accepted[0, 0].item() == 0.0

    # The next round, all well again, is as if the bad one had not been.
    flags, state = replay([[1.0, *good]], cfg, state)
    assert flags == []
    assert state.last_accepted[0, 0].item() == 0.25


@pytest.mark.parametrize("detector", DETECTORS)
def test_a_replica_that_did_not_move_is_accepted_and_leaves_the_statistics(detector: str) -> None:
    cfg = Options(detector)
    calm = [[1.0, 1.0, 1.0], [1.1, 1.1, 1.1]] * 6
    _, before = replay(calm, cfg)
    flags, after = replay([[0.0, 1.05, 1.05]], cfg, before, steps=[0, 4, 4])
    assert flags == []
    for name, tensor in after.state_dict().items():
        assert tensor.isfinite().all(), name
        if tensor.ndim == 2:
            assert tensor[0, 0] == before.state_dict()[name][0, 0], name
    # A unit that is frozen in every replica, from the start.
    flags, state = replay([[0.0, 0.0, 0.0]] * 20, cfg)
    assert flags == []
    assert state.mean.count_nonzero() == 0


def test_all_anomalous_counts_rollbacks_per_unit() -> None:
    cfg = Options("none")
    state = DetectorState.zeros(2, 3)
    steps = torch.tensor([4, 4])
    for expected in ([1, 0, 0], [2, 0, 1], [0, 0, 2]):
        first = [NAN if n else 1.0 for n in expected]
        norms = torch.tensor([first, [INF if n else 1.0 for n in expected]])
        norms[0, 1] = NAN  # one of two is no rollback
        accepted, state = verdicts(norms, steps, state, cfg)
        assert state.consecutive_rollbacks.tolist() == expected
        assert accepted.any(0).tolist() == [n == 0 for n in expected]


# --- readmission ------------------------------------------------------------------------------


@pytest.mark.parametrize("detector", ["paper", "history", "robust"])
def test_readmission_after_five_flags_in_a_row(detector: str) -> None:
    # All replicas rise alike, so the peers see nothing odd in it.
    calm = [[1.0] * 3, [1.01] * 3] * 6
    cfg = Options(detector)
    _, state = replay(calm, cfg)
    flags, state = replay([[8.0] * 3] * 4, cfg, state)
    assert len(flags) == 12
    assert state.flags_in_row[:, 0].tolist() == [4, 4, 4]
    assert state.consecutive_rollbacks.item() == 4
    # The fifth is still flagged; its value is where the statistics start anew.
    flags, state = replay([[8.0] * 3], cfg, state)
    assert len(flags) == 3
    assert state.flags_in_row.count_nonzero() == 0
    assert state.count[0, 0].item() == (1 if detector == "paper" else 0)
    assert state.mean[0, 0].item() == (8.0 if detector == "paper" else 0.0)
    assert state.last_accepted[0, 0].item() == 2.0
    flags, state = replay([[8.1] * 3] * 12, cfg, state)
    assert flags == []
    assert state.consecutive_rollbacks.item() == 0


@pytest.mark.parametrize("detector", ["paper", "history", "robust"])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_change_of_regime_does_not_end_the_run(detector: str, replicas: int) -> None:
    cfg = Options(detector, max_consecutive_rollbacks=3)
    _, state = replay([[1.0] * replicas, [1.01] * replicas] * 6, cfg)
    flags, state = replay([[8.0] * replicas] * 2, cfg, state)
    assert len(flags) == 2 * replicas
    assert state.consecutive_rollbacks.item() == 2
    flags, state = replay([[8.0] * replicas] * 3, cfg, state)
    assert flags == []
    assert state.consecutive_rollbacks.item() == 0


def test_non_finite_norms_of_all_replicas_are_no_regime() -> None:
    cfg = Options("robust", max_consecutive_rollbacks=3)
    _, state = replay([[1.0] * 2, [1.01] * 2] * 6, cfg)
    _, state = replay([[NAN, NAN]] * 4, cfg, state)
    assert state.consecutive_rollbacks.item() == 4


def test_a_row_is_broken_by_an_ordinary_value_but_not_by_nan() -> None:
    cfg = Options("paper")
    _, calm = replay([[1.0], [1.01]] * 6, cfg)
    _, state = replay([[8.0]] * 4 + [[1.0]], cfg, calm)
    assert state.flags_in_row.item() == 0
    _, state = replay([[8.0]] * 4 + [[NAN]], cfg, calm)
    assert state.flags_in_row.item() == 4
    flags, _ = replay([[8.0], [8.0]], cfg, state)
    assert flags == [(1, 0)]


def test_nan_is_never_readmitted() -> None:
    flags, _ = replay([[NAN, 1.0]] * 20, Options("paper"))
    assert flags == [(number, 0) for number in range(1, 21)]


def test_no_readmission_while_the_peers_object() -> None:
    cfg = Options("robust")
    _, state = replay([[1.0] * 4, [1.01] * 4] * 6, cfg)
    flags, state = replay([[1.0, 8.0, 1.01, 1.0]] * 7, cfg, state)
    assert flags == [(number, 1) for number in range(1, 8)]
    assert state.flags_in_row[1, 0].item() == 7
    assert state.last_accepted[1, 0].item() == pytest.approx(1.01 / 4)
    # Back with the others at once, with the statistics of before.
    assert replay([[1.0] * 4], cfg, state)[0] == []


# --- state and mistakes -----------------------------------------------------------------------


def test_state_round_trip_continues_bitwise() -> None:
    cfg = Options(detector_warmup=3)
    _, middle = replay(RECORDED[:7], cfg)
    loaded = DetectorState.zeros(4, 1)
    loaded.load_state_dict(middle.state_dict())
    assert loaded.mean.data_ptr() != middle.mean.data_ptr()
    flags, end = replay(RECORDED[7:], cfg, middle)
    again, loaded_end = replay(RECORDED[7:], cfg, loaded)
    assert flags == again
    for name, tensor in end.state_dict().items():
        assert tensor.dtype == DetectorState.zeros(4, 1).state_dict()[name].dtype, name
        assert torch.equal(tensor, loaded_end.state_dict()[name]), name


def test_verdicts_leave_the_state_they_were_given() -> None:
    state = DetectorState.zeros(4, 1)
    replay(RECORDED, Options(), state)
    assert all(not tensor.any() for tensor in state.state_dict().values())


def test_state_of_another_shape_or_version_is_refused() -> None:
    saved = DetectorState.zeros(2, 3).state_dict()
    with pytest.raises(ValueError, match=r"'count' has shape \(2, 3\), expected \(4, 3\)"):
        DetectorState.zeros(4, 3).load_state_dict(saved)
    del saved["var"]
    with pytest.raises(ValueError, match="expected"):
        DetectorState.zeros(2, 3).load_state_dict(saved)


def test_unknown_detector_is_refused() -> None:
    norms, steps = torch.ones(2, 1), torch.tensor([4, 4])
    with pytest.raises(ValueError, match="detector 'pier'"):
        verdicts(norms, steps, DetectorState.zeros(2, 1), Options("pier"))


# --- no host sync -----------------------------------------------------------------------------


def _verdicts_twice(cfg: Options, device: str) -> None:
    state = DetectorState.zeros(4, 3, device)
    norms = torch.ones(4, 3, device=device)
    steps = torch.ones(4, dtype=torch.int64, device=device)
    for _ in range(2):
        _, state = verdicts(norms, steps, state, cfg)


@pytest.mark.parametrize("detector", DETECTORS)
def test_no_value_is_read_back_to_the_host(detector: str) -> None:
    # Fake tensors have no values: `.item()`, `if tensor` and data-dependent shapes raise.
    with FakeTensorMode():
        with pytest.raises(DataDependentOutputException):
            bool(torch.ones(1) > 0)
        _verdicts_twice(Options(detector), "cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("detector", DETECTORS)
def test_no_host_sync_on_cuda(detector: str) -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        _verdicts_twice(Options(detector), "cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
