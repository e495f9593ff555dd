"""Reorder query and key channels of interleaved RoPE to half-split order, for backends that rotate halves.

Scores do not change when queries and keys change their channels alike, so this costs nothing per step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from pagoda.common.models.mixers import Attention, LatentAttention
from pagoda.common.models.spec import ModelSpec
from pagoda.common.weights.quantization.tensors import QuantizedTensor, Value, take_rows

_NORM: Final = "_norm"
"""In the names of norms, whose channels are on the last axis."""


def half_split(spec: ModelSpec, weights: Iterable[tuple[str, Value]]) -> Iterator[tuple[str, Value]]:
    """Yield the weights with the rows of each query and key head in half-split order.

    Rotary channels 2i and 2i + 1 of an attention with interleaved RoPE move to i and i + dim/2; nothing else changes.
    Those of `LatentAttention` are the last ones of a query head, and of the projection to latents.
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
    result: dict[str, npt.NDArray[np.int64]] = {}
    for number, layer in enumerate(spec.layers):
        for index, mixer in enumerate(layer.mixers):
            if isinstance(mixer, LatentAttention) and mixer.rope.interleaved:
                for dim, parts in ((mixer.nope_dim, ("q", "q_b")), (mixer.latent_dim, ("kv_a", "kv_a_bias"))):
                    order = np.concatenate([np.arange(dim), dim + _halves(mixer.rope.dim)])
                    result |= {f"layers.{number}.mixers.{index}.{part}": order for part in parts}
            if (
                isinstance(mixer, LatentAttention)
                and (indexer := mixer.indexer) is not None
                and indexer.rope.interleaved
            ):
                order = np.concatenate([_halves(indexer.rope.dim), np.arange(indexer.rope.dim, indexer.head_dim)])
                for part in ("q", "k", "k_norm", "k_norm_bias"):
                    result[f"layers.{number}.mixers.{index}.indexer.{part}"] = order
            if isinstance(mixer, Attention) and mixer.rope is not None and mixer.rope.interleaved:
                order = np.concatenate([_halves(mixer.rope.dim), np.arange(mixer.rope.dim, mixer.head_dim)])
                for part in ("q", "k", "q_bias", "k_bias", "q_norm", "k_norm", "q_norm_bias", "k_norm_bias"):
                    result[f"layers.{number}.mixers.{index}.{part}"] = order
    return result


def _halves(dim: int) -> npt.NDArray[np.int64]:
    """Return the even channels of `dim`, then the odd ones."""
    pairs = np.arange(dim)
    return np.concatenate([pairs[::2], pairs[1::2]])
