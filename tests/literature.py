"""Numbers of the literature that tests hold the package to, as printed there.

More of them, and the sources, are in `megatron_edit.scaling.published`.
"""

from __future__ import annotations

import numpy as np

from megatron_edit.scaling.forms import Law
from megatron_edit.scaling.hoffmann import HoffmannForm

HOFFMANN_UNROUNDED = Law(
    HoffmannForm(), np.array([6.0073404, 6.0179186, 0.5267228, 0.33917084, 0.2849083])
)
"""HOFFMANN_2022 with the digits in the paper's source."""

DILOCO_METHODS = ("DP", "M1", "M2", "M4", "M8")
"""Columns of the loss table: data parallel, and DiLoCo with 1, 2, 4, 8 replicas."""
DILOCO_TOKENS_PER_PARAMETER = 20.0
DILOCO_LOSSES: dict[float, tuple[float, float, float, float, float]] = {
    35e6: (3.485, 3.482, 3.508, 3.554, 3.621),
    90e6: (3.167, 3.162, 3.182, 3.213, 3.265),
    180e6: (2.950, 2.943, 2.957, 2.981, 3.019),
    335e6: (2.784, 2.777, 2.788, 2.808, 2.841),
    550e6: (2.653, 2.645, 2.657, 2.673, 2.698),
    1.3e9: (2.460, 2.451, 2.464, 2.472, 2.493),
    2.4e9: (2.326, 2.317, 2.323, 2.332, 2.351),
}
"""DILOCO_LAWS: evaluation loss in nats by nominal parameters, at 20 tokens per parameter."""
DILOCO_EXTRAPOLATION: dict[float, tuple[float, float, float, float]] = {
    4e9: (2.224, 2.219, 2.220, 2.230),
    10e9: (2.090, 2.086, 2.086, 2.096),
}
"""DILOCO_LAWS: measured losses of DP, M1, M2, M4 beyond the sizes that were fitted."""

TABLE_6_GRID_GBPS = np.logspace(-1, 3, 50)
"""Bandwidths that the simulator of TABLE_6_GBPS tried, Gbit/s."""
TABLE_6_GBPS: dict[int, tuple[float, float, float, float, float]] = {
    1: (104.8, 184.2, 222.3, 222.3, 390.7),
    10: (16.0, 49.4, 86.8, 152.6, 222.3),
    50: (3.0, 11.0, 23.3, 41.0, 126.5),
    100: (1.4, 6.2, 13.3, 23.3, 86.8),
    300: (0.5, 2.0, 4.3, 9.1, 41.0),
}
"""DILOCO_LAWS, table 6: smallest Gbit/s for UTILISATIONS by H (1 = data parallel); 10e9 parameters,
step 0.8 s, 16 bit, two replicas."""
TABLE_6_PAYLOAD_SCALE = 0.72
"""Fitted to TABLE_6_GBPS: factor on the payload with which the closed form follows the table."""
TABLE_6_OVERLAP = 0.55
"""Fitted to TABLE_6_GBPS: step times that a synchronisation overlaps there."""

BUCKET_SIMULATOR_GBPS = (1, 10, 50, 100, 200, 400)
BUCKET_SIMULATOR_UTILISATION: dict[int, tuple[float, ...]] = {
    1: (0.62, 6.12, 28.26, 51.59, 87.83, 99.69),
    25: (13.56, 61.98, 90.78, 96.38, 99.45, 99.99),
}
"""The simulator on the web page of DiLoCo's first author, with 128 gradient buckets: utilisation in
percent by H (1 = data parallel) at BUCKET_SIMULATOR_GBPS; 10e9 parameters in bf16, step 1 s, two
replicas, 400 steps."""


def diloco_runs() -> list[tuple[str, int, float, float, float]]:
    """Returns DILOCO_LOSSES as rows (method, replicas, parameters, tokens, loss)."""
    rows = []
    for parameters, losses in DILOCO_LOSSES.items():
        tokens = DILOCO_TOKENS_PER_PARAMETER * parameters
        for column, loss in zip(DILOCO_METHODS, losses, strict=True):
            method, replicas = ("sync", 1) if column == "DP" else ("diloco", int(column[1:]))
            rows.append((method, replicas, parameters, tokens, loss))
    return rows
