"""RoPE and its scalings, and their frequencies in numpy float64.

Sources: RoFormer (arXiv 2104.09864); position interpolation (2306.15595); dynamic NTK (reddit, u/emozilla);
Llama 3.1's ramp (meta-llama/llama-models); YaRN (2309.00071); LongRoPE (2402.13753).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor`; infinite: the channels encode no position."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """Dynamic NTK scaling, fixed at the base of the maximum context so that cached keys stay valid."""

    factor: float
    original: int  # Trained context in tokens.


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones unchanged, a smooth ramp between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): interpolation by frequency band plus an attention factor on cos and sin."""

    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE (arXiv 2402.13753): one divisor per frequency."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]  # These apply if the served context exceeds `original` tokens.
    original: int
    attention_factor: float  # Factor of cos and sin.


@dataclass(frozen=True, slots=True)
class RotatedPairs:
    """Only the first `count` pairs of channels rotate, with the frequencies of a rotation of all."""

    count: int


RopeScaling = RotatedPairs | LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """RoPE on the first `dim` channels of each head (partial if dim < head_dim)."""

    theta: float
    dim: int
    scaling: RopeScaling | None = None
    interleaved: bool = False  # Channels 2i and 2i + 1 form a pair, instead of i and i + dim/2.

    def half_split_order(self, *, before: int = 0, after: int = 0) -> npt.NDArray[np.int64]:
        """Return the order of a head's channels that makes its rotary pairs 2i, 2i + 1 pairs i, i + dim/2.

        The rotary channels come after `before` others, which stay in place, as do the `after` ones behind them.
        """
        rotary = before + np.arange(self.dim)
        rest = before + self.dim + np.arange(after)
        return np.concatenate([np.arange(before), rotary[::2], rotary[1::2], rest])


def inverse_frequencies(rope: Rope, max_len: int) -> tuple[Float64, float]:
    """Return radians per token of each channel pair, float64 [dim/2], and the factor on cos and sin.

    `max_len`: maximum served context in tokens. It fixes the length-dependent scalings (dynamic, LongRoPE), so that
    cached keys stay valid.
    """
    match rope.scaling:
        case None:
            return _plain(rope.theta, rope.dim), 1.0
        case RotatedPairs(count):
            return _plain(rope.theta, rope.dim) * (np.arange(rope.dim // 2) < count), 1.0
        case LinearScaling(factor):
            return _plain(rope.theta, rope.dim) / factor, 1.0
        case DynamicScaling():
            return _dynamic(rope, rope.scaling, max_len), 1.0
        case Llama3Scaling():
            return _llama3(_plain(rope.theta, rope.dim), rope.scaling), 1.0
        case YarnScaling():
            return _yarn(rope, rope.scaling), rope.scaling.attention_factor
        case LongRopeScaling():
            factors = rope.scaling.long_factor if max_len > rope.scaling.original else rope.scaling.short_factor
            return _plain(rope.theta, rope.dim) / np.asarray(factors), rope.scaling.attention_factor


def cos_sin(rope: Rope, max_len: int, positions: npt.NDArray[np.integer]) -> tuple[Float64, Float64]:
    """Return cos and sin, float64 [T, dim/2] each, at integer positions [T], attention factor included."""
    frequencies, factor = inverse_frequencies(rope, max_len)
    angles = positions[:, None] * frequencies
    return np.cos(angles) * factor, np.sin(angles) * factor


def _plain(theta: float, dim: int) -> Float64:
    exponents: Float64 = np.arange(0, dim, 2, dtype=np.float64) / dim
    return 1.0 / np.float64(theta) ** exponents


def _dynamic(rope: Rope, scaling: DynamicScaling, max_len: int) -> Float64:
    length = max(max_len, scaling.original)
    stretch = scaling.factor * length / scaling.original - (scaling.factor - 1)
    return _plain(rope.theta * stretch ** (rope.dim / (rope.dim - 2)), rope.dim)


def _llama3(frequencies: Float64, scaling: Llama3Scaling) -> Float64:
    rotations = frequencies * scaling.original / (2 * math.pi)  # Rotations within the trained context.
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep: Float64 = np.clip((rotations - scaling.low_freq_factor) / span, 0.0, 1.0)
    blended: Float64 = keep * frequencies + (1 - keep) * frequencies / scaling.factor
    return blended


def _yarn(rope: Rope, scaling: YarnScaling) -> Float64:
    def pair_at(rotations: float) -> float:
        """Fractional index of the pair that makes `rotations` rotations within the trained context."""
        return rope.dim * math.log(scaling.original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = pair_at(scaling.beta_fast)
    high = pair_at(scaling.beta_slow)
    if scaling.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, rope.dim - 1)
    width = high - low if high != low else 0.001  # This avoids a division by zero.
    interpolate: Float64 = np.clip((np.arange(rope.dim // 2) - low) / width, 0.0, 1.0)
    frequencies = _plain(rope.theta, rope.dim)
    return frequencies / scaling.factor * interpolate + frequencies * (1 - interpolate)
