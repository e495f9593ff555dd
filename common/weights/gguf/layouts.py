"""Tensors of which llama.cpp's converter changes more than the name, and the way back to the parameters' layout.

https://github.com/ggml-org/llama.cpp/tree/master/conversion: interleaved rotary pairs (Llama), decay rates as A =
-exp(rate), axes of one element left out, value heads of the delta rule in another order, latent projections apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pagoda.common.errors import WeightError
from pagoda.common.weights.dtypes import to_float32
from pagoda.common.weights.quantization.tensors import QuantizedTensor

Array = npt.NDArray[np.generic]
Change = Callable[[Array, Mapping[str, Any]], Array]
"""A tensor as GGUF stores it, and the Hugging Face config -> the tensor in the layout of the parameter."""


@dataclass(frozen=True, slots=True)
class RowChange:
    """A `Change` that keeps rows whole, so that it applies to rows of blocks [..., O, bytes], too."""

    change: Change

    def __call__(self, array: Array, config: Mapping[str, Any]) -> Array:
        return self.change(array, config)

    def apply(self, tensor: QuantizedTensor, config: Mapping[str, Any]) -> QuantizedTensor:
        """Return the changed blocks."""
        return replace(tensor, data=self.change(tensor.data, config))


def _half_split(heads_key: str) -> RowChange:
    """Reorder the rows of each head from interleaved to half-split rotary pairs, [N*H, ...]."""

    def change(array: Array, config: Mapping[str, Any]) -> Array:
        heads = config[heads_key]
        if len(array) % (2 * heads):
            raise WeightError(f"{len(array)} rows of a rotary projection do not divide into {heads} heads of pairs")
        pairs = array.reshape(heads, -1, 2, *array.shape[1:])
        return pairs.swapaxes(1, 2).reshape(array.shape)

    return RowChange(change)


def _as_row(array: Array, config: Mapping[str, Any]) -> Array:
    return array.reshape(1, -1) if array.ndim == 1 else array


def _as_label(array: Array, config: Mapping[str, Any]) -> Array:
    """The weight of a single label is a vector."""
    return array[None] if array.shape == (config["hidden_size"],) else array


def _flat(array: Array, config: Mapping[str, Any]) -> Array:
    return array.reshape(-1)


def _log_rate(array: Array, config: Mapping[str, Any]) -> Array:
    """A = -exp(rate) -> rate. Axes of one element do not count if A is a vector."""
    rates = np.log(-to_float32(array))
    return rates.reshape(-1) if rates.size == max(rates.shape) else rates


def _taps(array: Array, config: Mapping[str, Any]) -> Array:
    """Taps of a convolution [C, K], perhaps with axes of one element -> [C, 1, K]. A bias [C] stays."""
    return array.reshape(-1, 1, array.shape[-1]) if array.ndim > 1 else array


def _regrouped(axis: int, channels_key: str | None) -> Change:
    """Value heads in turns over the key heads -> those of a key head together.

    `channels_key`: key in the config of a head's channels along the axis; None: one.
    """

    def change(array: Array, config: Mapping[str, Any]) -> Array:
        channels = 1 if channels_key is None else config[channels_key]
        return _regroup(array, config, axis=axis, channels=channels)

    return RowChange(change) if axis == 0 else change


def _regroup(array: Array, config: Mapping[str, Any], *, axis: int, channels: int) -> Array:
    keys = config["linear_num_key_heads"]
    shape = array.shape
    in_turns = array.reshape(*shape[:axis], -1, keys, channels, *shape[axis + 1 :])
    return in_turns.swapaxes(axis, axis + 1).reshape(shape)


@RowChange
def _regrouped_after_keys(array: Array, config: Mapping[str, Any]) -> Array:
    """Rows of q, k and v, of which v is reordered."""
    begin = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = _regroup(array[begin:], config, axis=0, channels=config["linear_value_head_dim"])
    return np.concatenate([array[:begin], values])


def _chain(first: Change, second: Change) -> Change:
    def change(array: Array, config: Mapping[str, Any]) -> Array:
        return second(first(array, config), config)

    return change


_COMMON: Final[Mapping[str, Change]] = {
    "cls.output": _as_label,
    "token_types": _as_row,
    "ffn_gate_inp_shexp": _as_row,
    "shortconv.conv": _taps,
    "ssm_a": _log_rate,
    "ssm_conv1d": _taps,
    **{f"ssm_conv1d_{part}": _taps for part in "qkv"},
    "ssm_d": _flat,
    "ssm_norm": _flat,
}
"""Stem after `blk.N.` -> its change."""

_ROTARY_PAIRS: Final[Mapping[str, Change]] = {
    "attn_q": _half_split("num_attention_heads"),
    "attn_k": _half_split("num_key_value_heads"),
}
_VALUE_HEADS: Final[Mapping[str, Change]] = {
    "attn_qkv": _regrouped_after_keys,
    "attn_gate": _regrouped(0, "linear_value_head_dim"),
    "ssm_beta": _regrouped(0, None),
    "ssm_alpha": _regrouped(0, None),
    "ssm_dt": _regrouped(0, None),
    "ssm_a": _chain(_log_rate, _regrouped(0, None)),
    "ssm_conv1d": _chain(_regrouped_after_keys, _taps),
    "ssm_out": _regrouped(1, "linear_value_head_dim"),
}
_BY_ARCHITECTURE: Final[Mapping[str, Mapping[str, Change]]] = {
    **dict.fromkeys(("llama", "mistral3", "xverse", "internlm2", "baichuan", "smollm3", "arcee"), _ROTARY_PAIRS),
    **dict.fromkeys(("granite", "granitemoe", "granitehybrid", "minicpm", "olmo"), _ROTARY_PAIRS),
    **dict.fromkeys(("deepseek", "arctic", "bailingmoe"), _ROTARY_PAIRS),
    **dict.fromkeys(("qwen35", "qwen35moe"), _VALUE_HEADS),
}


def changes(architecture: str) -> Mapping[str, Change]:
    """Return the changes of an architecture's tensors by stem, without `blk.N.` and the suffix."""
    return {**_COMMON, **_BY_ARCHITECTURE.get(architecture, {})}


def latent_heads(keys: Array, values: Array) -> Array:
    """Keys [N, L, C] and values [N, V, L] of latents, stored apart -> rows of all heads [N*(C+V), L]."""
    heads = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
    return heads.reshape(-1, heads.shape[-1])
