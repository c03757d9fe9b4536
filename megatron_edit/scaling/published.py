"""Numbers of the literature, as printed there, each with its source.

Nothing here is fitted by this project, and nothing here stems from arXiv 2409.13198 ("Exploring
Scaling Laws for Local SGD"), whose fitted constants were not at hand: only its questions are used.
"""

import math

import numpy as np

from megatron_edit.scaling.forms import Law, PowerForm, ReplicaForm
from megatron_edit.scaling.hoffmann import HoffmannForm

HOFFMANN_2022 = "Hoffmann et al. 2022, approach 3"
EPOCH_2024 = "Besiroglu et al. 2024 (Epoch), replication of Hoffmann's approach 3"
DILOCO_LAWS = "Scaling Laws for DiLoCo, arXiv 2503.09799"
STREAMING_DILOCO = "Streaming DiLoCo, arXiv 2501.18512"


def _hoffmann(a: float, b: float, e: float, alpha: float, beta: float) -> Law:
    return Law(HoffmannForm(), np.array([a, b, e, alpha, beta]))


def _power(coefficient: float, exponent: float) -> Law:
    return Law(PowerForm(), np.array([math.log(coefficient), exponent]))


HOFFMANN_ROUNDED = _hoffmann(math.log(406.4), math.log(410.7), math.log(1.69), 0.34, 0.28)
"""HOFFMANN_2022 as printed in the paper."""
EPOCH = _hoffmann(math.log(482.01), math.log(2085.43), math.log(1.8169), 0.3478, 0.3658)
"""EPOCH_2024."""

DILOCO_INTERVAL = 30
"""H, inner steps of a round, in the runs that DILOCO_FITS were fitted to."""
DILOCO_FITS: dict[str, Law] = {
    "DP": _power(18.129, -0.0953),
    "M1": _power(18.363, -0.0961),
    "M2": _power(18.768, -0.0969),
    "M4": _power(19.762, -0.0992),
    "M8": _power(21.051, -0.1018),
}
"""DILOCO_LAWS: L = A N^a of each column."""
DILOCO_JOINT = Law(ReplicaForm(), np.array([math.log(19.226), -0.0985, 0.0116]))
"""DILOCO_LAWS: L = A N^a M^b of the columns M1 to M8."""


def diloco_inner_lr(parameters: float, replicas: float) -> float:
    """Returns the best inner learning rate of DiLoCo (2503.09799, joint law)."""
    return 22256 * parameters**-0.8827 * replicas**0.2929


def diloco_batch_tokens(parameters: float, replicas: float) -> float:
    """Returns the best batch of DiLoCo over all replicas, in tokens (2503.09799, joint law)."""
    return 14.521 * parameters**0.4695 * replicas**0.3399


UTILISATIONS = (0.50, 0.80, 0.90, 0.95, 0.99)
