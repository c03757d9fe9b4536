#!/usr/bin/env python
"""Prints the perplexity of a model that knows only how frequent each token of a data set is.

python scripts/unigram_perplexity.py --data-path PREFIX

It is e to the entropy of the token frequencies: what a language model has to beat.
"""

from __future__ import annotations

import argparse
import math

import numpy as np

from megatron_edit.data.sources import open_indexed
from megatron_edit.errors import exit_on_configuration_error


def unigram_perplexity(tokens: np.ndarray) -> float:
    """exp of the entropy, in nats, of the frequencies of token ids."""
    counts = np.unique(tokens, return_counts=True)[1]
    shares = counts / counts.sum()
    return math.exp(-(shares * np.log(shares)).sum())


def main() -> None:
    """Prints the number."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-path", required=True, help="prefix of a .bin and .idx file")
    prefix = parser.parse_args().data_path
    with exit_on_configuration_error():
        data = open_indexed(prefix)
        print(f"{unigram_perplexity(np.concatenate([data[i] for i in range(len(data))])):.1f}")


if __name__ == "__main__":
    main()
