"""Sampling, on a model whose logits are known; and the perplexity of token frequencies."""

from __future__ import annotations

import itertools
from argparse import Namespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from unigram_perplexity import unigram_perplexity

from megatron_edit.commands.generate import sample

VOCABULARY, PADDED, CONTEXT = 6, 8, 4


class CountingModel(nn.Module):
    """Thinks n + 1 likeliest after n, then n + 2, and so on; and padding likelier than all."""

    def __init__(self) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(()))
        self.longest = 0

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, mask: None) -> torch.Tensor:
        assert torch.equal(positions[0], torch.arange(tokens.shape[1]))
        self.longest = max(self.longest, tokens.shape[1])
        distance = (torch.arange(PADDED) - tokens.unsqueeze(-1) - 1) % VOCABULARY
        logits = -distance.float()
        logits[..., VOCABULARY:] = 100
        return logits


def continued(length: int = 12, **changes: Any) -> tuple[list[int], CountingModel]:
    model = CountingModel()
    args = Namespace(**{"num_tokens": length, "temperature": 1.0, "top_k": 0, "seed": 1, **changes})
    return sample(model, [0], args, CONTEXT, VOCABULARY), model


def steps(ids: list[int]) -> set[int]:
    return {(b - a) % VOCABULARY for a, b in itertools.pairwise(ids)}


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"top_k": 1}, {"temperature": 0.01}])
def test_the_likeliest_token_is_taken(settings: dict[str, Any]) -> None:
    ids, model = continued(**settings)
    assert ids == [i % VOCABULARY for i in range(13)]
    assert model.longest == CONTEXT


def test_top_k_bounds_the_choice() -> None:
    assert steps(continued(200, top_k=2)[0]) == {1, 2}
    assert len(steps(continued(200, temperature=3.0)[0])) > 3


def test_padding_is_never_sampled() -> None:
    assert max(continued(200, temperature=5.0)[0]) < VOCABULARY


def test_the_seed_decides() -> None:
    assert continued(50)[0] == continued(50)[0]
    assert continued(50)[0] != continued(50, seed=2)[0]


def test_perplexity_of_token_frequencies() -> None:
    assert unigram_perplexity(np.arange(10)) == pytest.approx(10)
    assert unigram_perplexity(np.array([1, 1, 2, 3])) == pytest.approx(2**1.5)
