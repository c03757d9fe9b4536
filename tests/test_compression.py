"""Compressed payloads: encodings, error feedback, and the bytes that really cross."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks

from megatron_edit.backends.megatron.mesh import build_mesh
from megatron_edit.replicas.chains import Chains
from megatron_edit.replicas.compression import Compressor
from megatron_edit.replicas.encodings import BLOCK, ENCODINGS
from megatron_edit.replicas.padding import Padding
from megatron_edit.replicas.stopwatch import Stopwatch

CPU = torch.device("cpu")


def payload_of(rank: int, numel: int, round_: int = 0) -> torch.Tensor:
    """A payload whose scale differs between its blocks."""
    generator = torch.Generator().manual_seed(100 * round_ + rank)
    return torch.randn(numel, generator=generator) * torch.linspace(0.01, 10, numel)


def encode_and_decode(values: torch.Tensor, compression: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Encodes values in two parts; returns the row and what it is decoded to."""
    encoding, half = ENCODINGS[compression], BLOCK
    row = torch.empty(encoding.row_bytes(values.numel()), dtype=torch.uint8)
    decoded = torch.empty_like(values)
    for part in (slice(half, None), slice(0, half)):
        left = values[part].clone()
        encoding.write(left, row, part.start, withheld=torch.tensor(False))
        encoding.read(row, part.start, decoded[part])
        assert torch.equal(left, values[part] - decoded[part])
    return row, decoded


def test_int8_keeps_each_block_to_half_a_step_of_its_own_scale() -> None:
    values = payload_of(0, 4 * BLOCK)
    _, decoded = encode_and_decode(values, "int8")
    step = values.unflatten(0, (-1, BLOCK)).abs().amax(1, keepdim=True) / 127
    off = (decoded - values).unflatten(0, (-1, BLOCK)).abs()
    assert (off <= step * 0.501).all()


@pytest.mark.parametrize("compression", ["bf16", "int8"])
def test_zeros_stay_zero_and_sizes_are_as_documented(compression: str) -> None:
    values = torch.zeros(2 * BLOCK)
    row, decoded = encode_and_decode(values, compression)
    assert row.shape == (4 * BLOCK if compression == "bf16" else 2 * (BLOCK + 4),)
    assert torch.equal(decoded, values)


@pytest.mark.parametrize("sizes", [[1], [300, 0, 256, 5], [70_000, 64, 70_000], [0]])
@pytest.mark.parametrize("rows", [1, 3])
def test_no_block_holds_values_of_two_parameters(sizes: list[int], rows: int) -> None:
    padding = Padding(sizes, rows, CPU)
    owner = torch.repeat_interleave(torch.arange(1.0, len(sizes) + 1), torch.tensor(sizes))
    padded, back = torch.zeros(rows * padding.numel), torch.zeros_like(owner)
    for stretch in padding.stretches:
        stretch.add(owner, padded[stretch.padded])
        stretch.scatter(padded[stretch.padded], back)
    assert torch.equal(back, owner)
    assert torch.equal(padded[padded > 0], owner)
    for block in padded.view(-1, BLOCK):
        assert len(set(block[block > 0].tolist())) < 2
    assert padding.numel % BLOCK == 0 and sum(sizes) <= rows * padding.numel
    assert rows * padding.numel < sum(sizes) + (len(sizes) + rows) * BLOCK


def _sum_rounds(compression: str, numel: int, rounds: int) -> dict[str, Any]:
    """Sums payloads over all ranks for a few rounds and counts the bytes this rank sends."""
    world = dist.get_world_size()
    mesh = build_mesh(world)
    compressor = Compressor(compression, [numel], mesh.peers, Chains(CPU), CPU)
    sent = []
    original = dist.all_to_all_single, dist.all_gather_single

    def all_to_all(output: torch.Tensor, data: torch.Tensor, **kwargs: Any) -> Any:
        sent.append(data.numel() * data.element_size() * (world - 1) / world)
        return original[0](output, data, **kwargs)

    def all_gather(output: torch.Tensor, data: torch.Tensor, **kwargs: Any) -> Any:
        sent.append(data.numel() * data.element_size() * (world - 1))
        return original[1](output, data, **kwargs)

    dist.all_to_all_single, dist.all_gather_single = all_to_all, all_gather
    yes = torch.tensor(True)
    sums, exact = [], []
    for round_ in range(rounds):
        payload = payload_of(dist.get_rank(), numel, round_)
        compressor.all_reduce(payload, yes, yes, "test", Stopwatch(CPU)).wait()
        sums.append(payload.numpy().copy())
        exact.append(sum(payload_of(rank, numel, round_) for rank in range(world)).numpy())
    return {
        "sums": sums,
        "exact": exact,
        "sent": sum(sent) / rounds,
        "said": compressor.payload_bytes,
    }


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("numel", [1, 300, 5 * BLOCK * 12 + 7])
def test_sum_is_the_same_on_all_replicas_and_close(world: int, numel: int) -> None:
    results = run_ranks(_sum_rounds, world, "int8", numel, 1)
    for result in results[1:]:
        np.testing.assert_array_equal(result["sums"][0], results[0]["sums"][0])
    exact = results[0]["exact"][0]
    assert np.abs(results[0]["sums"][0] - exact).max() < 0.03 * np.abs(exact).max() + 0.05


@pytest.mark.parametrize(("compression", "share"), [("bf16", 0.5), ("int8", (1 + 4 / BLOCK) / 4)])
def test_bytes_shrink_as_documented(compression: str, share: float) -> None:
    numel = 64 * BLOCK
    result = run_ranks(_sum_rounds, 2, compression, numel, 2)[0]
    plain = numel * 4 * 2 * (2 - 1) / 2
    assert result["sent"] == pytest.approx(share * plain)
    assert result["said"] * 2 * (2 - 1) / 2 == pytest.approx(result["sent"])


@pytest.mark.parametrize("compression", ["bf16", "int8"])
def test_error_feedback_loses_nothing_over_many_rounds(compression: str) -> None:
    result = run_ranks(_sum_rounds, 2, compression, 600, 24)[0]
    one = np.abs(result["sums"][0] - result["exact"][0]).max()
    # Without feedback the errors of 24 rounds would add up.
    total = np.abs(np.sum(result["sums"], axis=0) - np.sum(result["exact"], axis=0)).max()
    assert 0 < total < 3 * one


def _excluded() -> dict[str, Any]:
    """Rank 1 is excluded in a round, then nobody takes part, then all do."""
    rank, numel = dist.get_rank(), 2 * BLOCK
    mesh = build_mesh(2)
    compressor = Compressor("int8", [numel], mesh.peers, Chains(CPU), CPU)
    yes, no = torch.tensor(True), torch.tensor(False)
    first = payload_of(rank, numel)
    compressor.all_reduce(first, yes, yes, "test", Stopwatch(CPU)).wait()
    kept = compressor.error.clone(), compressor.sum_error.clone()
    second = payload_of(0, numel, 1) if rank == 0 else torch.zeros(numel)
    compressor.all_reduce(second, torch.tensor(rank == 0), yes, "test", Stopwatch(CPU)).wait()
    own_kept = torch.equal(compressor.error, kept[0])
    kept = compressor.error.clone(), compressor.sum_error.clone()
    nothing = torch.zeros(numel)
    compressor.all_reduce(nothing, no, no, "test", Stopwatch(CPU)).wait()
    all_kept = torch.equal(compressor.error, kept[0]) and torch.equal(compressor.sum_error, kept[1])
    sent = payload_of(0, numel, 1)
    steps_off = (second - sent).abs().max() / (sent.abs().max() / 127)
    return {"own_kept": own_kept, "all_kept": all_kept, "steps_off": steps_off.item()}


def test_errors_wait_for_a_round_in_which_they_are_sent() -> None:
    taking_part, excluded = run_ranks(_excluded, 2)
    assert excluded["own_kept"] and not taking_part["own_kept"]
    assert excluded["all_kept"] and taking_part["all_kept"]
    # Half a step by the payload's encoding, half by the sum's, and rank 0's two errors of before,
    # whose steps were larger. Rank 1's payload would be off by a hundred.
    assert taking_part["steps_off"] < 3
