"""Reorder query and key channels of interleaved RoPE to half-split order, for backends that rotate halves.

Scores do not change when queries and keys change their channels alike, so this costs nothing per step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from pagoda.common.models.spec import ModelSpec
from pagoda.common.weights.quantization.tensors import QuantizedTensor, Value, take_rows

_NORM: Final = "_norm"
"""In the names of norms, whose channels are on the last axis."""


def half_split(spec: ModelSpec, weights: Iterable[tuple[str, Value]]) -> Iterator[tuple[str, Value]]:
    """Yield the weights with the rows of each query and key head in half-split order.

    Rotary channels 2i and 2i + 1 of a mixer with interleaved RoPE move to i and i + dim/2; nothing else changes.
    """
    moved = _moved(spec)
    for name, value in weights:
        order = moved.get(name)
        if order is None or (value.shape[-1] if _NORM in name else value.shape[0]) % len(
            order
        ):  # The loader reports wrong shapes.
            yield name, value
            continue
        if _NORM in name and not isinstance(value, QuantizedTensor):
            yield name, value.reshape(*value.shape[:-1], -1, len(order))[..., order].reshape(value.shape)
            continue
        heads = np.arange(0, value.shape[0], len(order))[:, None]
        rows = (heads + order).ravel()
        yield name, take_rows(value, rows) if isinstance(value, QuantizedTensor) else value[rows]


def _moved(spec: ModelSpec) -> dict[str, npt.NDArray[np.int64]]:
    """Return the channel order of a head for every parameter that has one."""
    return {
        f"layers.{number}.mixers.{index}.{parameter}": order
        for number, layer in enumerate(spec.layers)
        for index, mixer in enumerate(layer.mixers)
        for parameter, order in mixer.half_split_orders()
    }
