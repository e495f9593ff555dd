"""Quantised weights of the grouped matmul: how they are stored, and how the kernel and its reference widen them.

Inputs are rows of the stored arrays, outputs columns, so that a scale of a group of inputs is a row. Eight numbers of 4
bits are a word: of the inputs 8 r to 8 r + 7, the first in the lowest bits. Nibbles c and c + 4 of a word are in its
two halves, hence a shift and a mask give packed pairs: inputs are widened in the order c, c + 4, c + 8 ... for each c
below 4, and the columns of the rows are put into the same order beforehand (`ordered`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

Numbers: TypeAlias = Literal["int4", "e2m1", "int8", "float8_e4m3fn", "float8_e4m3b11fnuz"]

CODES: Final = ("int4", "e2m1")
"""Numbers of 4 bits. int4: unsigned, minus 8; e2m1: a sign and 0, 0.5, 1, 1.5, 2, 3, 4 or 6."""

PER_WORD: Final = 8
QUARTERS: Final = 4
_E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
ZERO: Final = {"int4": 136}
"""What `widened` numbers have more than those that are meant."""

_MAGIC: Final = 0x4300  # bits of 128 in bfloat16, whose last bits count ones
_HALF: Final = 0x3F00  # bits of 0.5


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedWeights:
    """Stacked matrices of quantised numbers: (number + shift) * scale."""

    numbers: Any  # [L, E, parts, I, O]; of 4 bits uint32 [L, E, parts, I / 8, O]
    scales: Any  # float32 [L, E, parts, G, O], one per `group` inputs; further rows are padding
    shifts: Any  # float32 whole numbers, as scales; None: 0
    kind: Numbers = field(metadata={"static": True})
    group: int = field(metadata={"static": True})

    @property
    def inner(self) -> int:
        """Return the number of inputs I."""
        rows: int = self.numbers.shape[3]
        return rows * PER_WORD if self.kind in CODES else rows

    def values(self, layer: Any) -> jax.Array:
        """Return the matrices of a layer, float32 [E, parts, I, O]."""
        numbers = _unpacked(self.numbers[layer], self.kind)
        groups = self.inner // self.group
        numbers = numbers.reshape(*numbers.shape[:2], groups, -1, numbers.shape[3])
        if self.shifts is not None:
            numbers = numbers + self.shifts[layer][:, :, :groups, None]
        scaled = numbers * self.scales[layer][:, :, :groups, None]
        return scaled.reshape(*scaled.shape[:2], -1, scaled.shape[4])


def _unpacked(numbers: jax.Array, kind: Numbers) -> jax.Array:
    """Return numbers [E, parts, I, O] in float32."""
    if kind not in CODES:
        return numbers.astype(jnp.float32)
    nibbles = (numbers[:, :, :, None] >> (4 * jnp.arange(PER_WORD, dtype=jnp.uint32))[:, None]) & 15
    codes = nibbles.reshape(*numbers.shape[:2], -1, numbers.shape[3]).astype(jnp.int32)
    if kind == "int4":
        return (codes - 8).astype(jnp.float32)
    return jnp.asarray([*_E2M1, *(-x for x in _E2M1)], jnp.float32)[codes]


def packed(codes: jax.Array) -> jax.Array:
    """Return the words of codes [..., I, O] of 4 bits, uint32 [..., I / 8, O]."""
    nibbles = codes.astype(jnp.uint32).reshape(*codes.shape[:-2], -1, PER_WORD, codes.shape[-1])
    shifts = (4 * jnp.arange(PER_WORD, dtype=jnp.uint32))[:, None]
    return (nibbles << shifts).sum(-2, dtype=jnp.uint32)


def ordered(rows: jax.Array, span: int) -> jax.Array:
    """Return rows [M, I] with each `span` columns in the order in which `widened` returns them."""
    quarters = rows.reshape(len(rows), -1, span // QUARTERS, QUARTERS)
    return quarters.swapaxes(2, 3).reshape(rows.shape)


def widened(numbers: jax.Array, kind: Numbers, zero: jax.Array | int, dtype: Any) -> jax.Array:
    """Return stored rows (inputs) of numbers in `dtype`, minus `zero`; of 4 bits in the order of `ordered`.

    int4 are 128 more than the stored numbers, and `zero`, if an array, has a row per row of a quarter.
    """
    if kind in CODES:
        quarters = [_quarter(numbers, c, kind, zero) for c in range(QUARTERS)]
        return jnp.concatenate(quarters, axis=0).astype(dtype)
    if isinstance(zero, int):
        return numbers.astype(dtype)
    return (numbers.astype(jnp.float32) - zero).astype(dtype)


def spread_rows(values: jax.Array, times: int, dtype: Any) -> jax.Array:
    """Return float32 [n, O] with each row repeated, [n * times, O] of `dtype`."""

    def repeated(rows: jax.Array, times: int) -> jax.Array:
        wide = jnp.broadcast_to(rows[:, None], (len(rows), times, rows.shape[1]))
        return wide.reshape(-1, rows.shape[1])

    if dtype != jnp.bfloat16 or times % 16:
        return repeated(values, times).astype(dtype)
    # two equal rows are a row of words: rounded once, then only copied
    bits = pltpu.bitcast(values.astype(jnp.bfloat16).astype(jnp.float32), jnp.uint32)
    return pltpu.bitcast(repeated(bits | bits >> 16, times // 2), jnp.bfloat16)


def _quarter(words: jax.Array, c: int, kind: Numbers, zero: jax.Array | int) -> jax.Array:
    """Return nibbles c and c + 4 of words [n, O] as bfloat16 [2 n, O]."""
    if kind == "int4":
        bits = (_moved(words, 4 * c) & _both(0xF)) | _both(_MAGIC)
        values = pltpu.bitcast(bits, jnp.bfloat16)
        return values if isinstance(zero, int) and zero == 0 else values - jnp.asarray(zero, jnp.bfloat16)
    # exponent and mantissa to those of bfloat16: right but for y = 0.5 and 0.75, which stand for 0 and 0.5
    bits = (_moved(words, 4 * c - 6) & _both(0x1C0)) + _both(_HALF)
    y = pltpu.bitcast(bits, jnp.bfloat16)
    value = jnp.minimum(y, y + (y - jnp.bfloat16(1)))
    sign = _moved(words, 4 * c - 12) & _both(0x8000)
    return pltpu.bitcast(pltpu.bitcast(value, jnp.uint32) | sign, jnp.bfloat16)


def _moved(words: jax.Array, right: int) -> jax.Array:
    """Shift words right, or left by a negative number."""
    return words >> right if right > 0 else words << -right if right < 0 else words


def _both(bits: int) -> jax.Array:
    """Return 16 bits in both halves of a word."""
    return jnp.uint32(bits << 16 | bits)
