"""Models that leave a layer out of some forwards."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from torch import nn


def skip_layer(layer: int, skipped: set[int], micro_batches: int) -> Callable[[Any], None]:
    """Returns a preparation of a model by which a layer stays out of some micro-batches."""

    def prepare(model: Any) -> None:
        decoder, count = model.decoder, itertools.count()
        whole = decoder.layers
        short = nn.ModuleList(la for number, la in enumerate(whole) if number != layer)

        def before(*_: object) -> None:
            if next(count) % micro_batches in skipped:
                decoder.layers = short

        def after(*_: object) -> None:
            decoder.layers = whole

        decoder.register_forward_pre_hook(before)
        decoder.register_forward_hook(after)

    return prepare
