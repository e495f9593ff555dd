"""Read the metadata of one architecture in a GGUF file: typed values, RoPE, and what the file's tensors tell.

Strict: an unread key of the architecture is an error, as it may change the maths.
"""

from __future__ import annotations

from copy import copy
from math import log
from typing import Any, TypeVar

import numpy as np

from pagoda.common.errors import ModelError
from pagoda.common.models.hf_config import MAX_LAYERS
from pagoda.common.weights.gguf.file import GgufFile

Config = dict[str, Any]
T = TypeVar("T", int, float, str, bool)

# These do not change the computation: they repeat a tensor's shape or describe the file.
_HARMLESS = frozenset({"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"})
# How embeddings are pooled and projected, see `common.weights.sentence_modules`.
_OF_POOLING = frozenset({"pooling_type", *(f"dense_{n}_feat_{side}" for n in (2, 3) for side in ("in", "out"))})
# Zero or false: the mechanism is off.
_ABSENT_WHEN_ZERO = frozenset(
    {
        "expert_count",
        "expert_used_count",
        "expert_shared_count",
        "expert_shared_feed_forward_length",
        "attention.max_alibi_bias",
        "use_parallel_residual",
    }
)


class Metadata:
    """The keys of one architecture; `finish` rejects those that were not read."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self._prefix = f"{architecture}."
        self._read: set[str] = set()
        self._skips_zeros = False

    def of_some_layers(self) -> Metadata:
        """Return the same metadata, in whose lists 0 stands for a layer without the mechanism."""
        view = copy(self)  # The copy shares the set of keys that were read.
        view._skips_zeros = True
        return view

    def integers(self, key: str, layers: int) -> list[int]:
        """A required integer per layer; one holds for all layers."""
        self._read.add(key)
        value = self.file.metadata.get(f"{self._prefix}{key}")
        values: list[Any] = value if isinstance(value, list) else [value] * layers
        if len(values) < layers or not all(type(item) is int for item in values):
            raise ModelError(f"{self.file.path}: metadata {self._prefix}{key} is not one integer per layer")
        return values[:layers]

    def layers_with(self, key: str, layers: int) -> list[bool]:
        """Return for each layer whether its integer is not 0."""
        return [value != 0 for value in self.integers(key, layers)]

    def need(self, key: str, kind: type[T]) -> T:
        """A required value."""
        value = self._get(key, kind)
        if value is None:
            raise ModelError(f"{self.file.path}: metadata {self._prefix}{key} is missing")
        return value

    def opt(self, key: str, kind: type[T], default: T) -> T:
        """An optional value."""
        value = self._get(key, kind)
        return default if value is None else value

    def flags(self, key: str, default: list[bool]) -> list[bool]:
        """One bool per layer, or `default`."""
        self._read.add(key)
        value = self.file.metadata.get(f"{self._prefix}{key}", default)
        if not isinstance(value, list) or len(value) != len(default) or not all(type(flag) is bool for flag in value):
            raise ModelError(f"{self.file.path}: metadata {self._prefix}{key} is not one bool per layer")
        return value

    def floats(self, key: str, count: int) -> list[float]:
        """A required list of `count` numbers."""
        self._read.add(key)
        value = self.file.metadata.get(f"{self._prefix}{key}", self.file.metadata.get(key))
        if not isinstance(value, list) or len(value) != count or not all(type(item) is float for item in value):
            raise ModelError(f"{self.file.path}: metadata {self._prefix}{key} is not one number per layer")
        return value

    def has(self, key: str) -> bool:
        return f"{self._prefix}{key}" in self.file.metadata

    def ignore(self, *keys: str) -> None:
        """Mark keys as read that say nothing new."""
        self._read.update(keys)

    def _get(self, key: str, kind: type[T]) -> T | None:
        self._read.add(key)
        value = self.file.metadata.get(f"{self._prefix}{key}")
        if isinstance(value, list) and self._skips_zeros:
            value = [item for item in value if item] or [0]
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # There is one value per layer, and all are equal.
        if key == "block_count" and type(value) is int and not 0 <= value <= MAX_LAYERS:
            raise ModelError(
                f"{self.file.path}: metadata {self._prefix}{key} is {value}; it must be at most {MAX_LAYERS}"
            )
        if value is None or type(value) is kind:
            return value
        if kind is float and type(value) is int:
            return float(value)
        raise ModelError(f"{self.file.path}: metadata {self._prefix}{key} is {value!r}, expected one {kind.__name__}")

    def finish(self) -> None:
        """Raise ModelError for a key that was not read."""
        for full, value in self.file.metadata.items():
            key = full.removeprefix(self._prefix)
            if (
                key == full
                or key in self._read
                or key in _HARMLESS | _OF_POOLING
                or (key in _ABSENT_WHEN_ZERO and not value)
            ):
                continue
            raise ModelError(f"{self.file.path}: metadata {full} = {value!r} is not supported for this architecture")


def has_tensor(metadata: Metadata, tensor: str) -> bool:
    return tensor in metadata.file.tensors


def rows(metadata: Metadata, tensor: str) -> int:
    info = metadata.file.tensors.get(tensor)
    if info is None:
        raise ModelError(f"{metadata.file.path}: tensor {tensor} is missing")
    return info.shape[0]


def rope(metadata: Metadata, head_dim: int, default_theta: float = 10000.0, *, partial: bool = False) -> Config:
    """RoPE base and scaling, over whole heads or, with `partial`, over the first channels of each."""
    dim = metadata.opt("rope.dimension_count", int, head_dim)
    if dim != head_dim and not partial:
        raise ModelError(f"{metadata.file.path}: rotary positions on a part of each head are not supported here")
    scaling = _scaling(metadata)
    factors = _frequency_factors(metadata)
    if scaling and factors:
        raise ModelError(f"{metadata.file.path}: both rope.scaling and rope_freqs.weight scale the rotary positions")
    scaling = scaling or factors
    section: Config = {"rope_theta": metadata.opt("rope.freq_base", float, default_theta)}
    if partial:
        section["partial_rotary_factor"] = dim / head_dim
    return {**section, "rope_scaling": scaling} if scaling else section


def _scaling(metadata: Metadata) -> Config | None:
    linear = metadata.opt("rope.scale_linear", float, 1.0)  # This is the older spelling.
    kind = metadata.opt("rope.scaling.type", str, "none" if linear == 1.0 else "linear")
    factor = metadata.opt("rope.scaling.factor", float, linear)
    attention = metadata.opt("rope.scaling.attn_factor", float, 1.0)
    if kind != "yarn" and attention != 1.0:
        raise ModelError(f"{metadata.file.path}: metadata rope.scaling.attn_factor is not supported without yarn")
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        metadata.ignore("rope.scaling.original_context_length")
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise ModelError(f"{metadata.file.path}: rope scaling {kind} is not supported for this architecture")
    if metadata.opt("rope.scaling.yarn_ext_factor", float, 1.0) not in (1.0, -1.0):
        raise ModelError(f"{metadata.file.path}: metadata rope.scaling.yarn_ext_factor other than 1 is not supported")
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": metadata.need("rope.scaling.original_context_length", int),
        "beta_fast": metadata.opt("rope.scaling.yarn_beta_fast", float, 32.0),
        "beta_slow": metadata.opt("rope.scaling.yarn_beta_slow", float, 1.0),
    }
    attention *= metadata.opt("rope.scaling.yarn_attn_factor", float, 1.0)
    if attention != 1.0:
        scaling["attention_factor"] = attention * (0.1 * log(factor) + 1.0)
    return scaling


def _frequency_factors(metadata: Metadata) -> Config | None:
    """RoPE scaling from the frequency divisors in `rope_freqs.weight`: Llama 3.1's scaling if they match it.

    Any other divisors are expressed as LongRoPE with equal short and long factors and no attention factor.
    """
    if not has_tensor(metadata, "rope_freqs.weight"):
        return None
    factors = metadata.file.tensor("rope_freqs.weight").astype(np.float64)
    if np.all(factors == 1.0):
        return None
    theta = metadata.opt("rope.freq_base", float, 10000.0)
    for original in (8192, metadata.need("context_length", int)):
        scaling = {
            "rope_type": "llama3",
            "factor": float(factors.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original,
        }
        if np.allclose(factors, _llama3_factors(len(factors), theta, scaling), rtol=1e-5):
            return scaling
    return {
        "rope_type": "longrope",
        "short_factor": factors.tolist(),
        "long_factor": factors.tolist(),
        "original_max_position_embeddings": metadata.need("context_length", int),
        "attention_factor": 1.0,
    }


def _llama3_factors(pairs: int, theta: float, scaling: Config) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Frequency divisors that llama.cpp's converter writes for Llama 3.1's scaling, float64 [pairs]."""
    wavelength = 2 * np.pi * theta ** (np.arange(pairs) / pairs)
    low = scaling["low_freq_factor"]
    high = scaling["high_freq_factor"]
    smooth = (scaling["original_max_position_embeddings"] / wavelength - low) / (high - low)
    smooth = np.clip(smooth, 0.0, 1.0)
    result: np.ndarray[Any, np.dtype[np.float64]] = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    return result
