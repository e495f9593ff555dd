"""The arithmetic of one pass: online softmax over some tokens of one lane head, in two arrangements.

Rows (decode): logits [M, tokens]. With few queries and many tokens, the tokens fill the lanes.
Columns (mixed): logits [tokens, M]. The maximum runs over sublanes, which needs no cross-lane unit and leaves a state
of [8, M] instead of [M, 128]; the exponentials are the stationary operand of the second matmul. In the v6e schedule the
inner loop reaches 54 % of the matrix units' peak, against 18 % with the row arrangement.

Logits are in base 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pagoda.kernels_pallas.ragged_paged_attention.layout import LANES, PagedKvLayout, PageLayout
from pagoda.kernels_pallas.ragged_paged_attention.plan import div, rem

MASKED = -1e30  # finite: inf - inf would be NaN
SUBLANES = 8
BYTES = 4  # of a word
COLUMNS = 256  # queries of one independent chain of the column arrangement


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """The running softmax of every lane head, in VMEM. `top` repeats the maximum in all lanes (sublanes).

    Rows: top [heads, M, 128], acc [heads, M, W], total [heads, M, 128] with one partial sum per lane.
    Columns: top [heads, 8, M], acc [heads, W + 8, M] whose last 8 rows are the sum; total is None.
    """

    top: Any  # maximum logit
    acc: Any  # weighted sum of V
    total: Any = None  # sum of weights

    def clear(self, h: Any = slice(None)) -> None:
        """Reset the state of lane head `h`, by default of all."""
        self.top[h] = jnp.full_like(self.top[h], MASKED)
        self.acc[h] = jnp.zeros_like(self.acc[h])
        if self.total is not None:
            self.total[h] = jnp.zeros_like(self.total[h])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stage:
    """Logits between the two halves of a pass in the column arrangement, in VMEM.

    There are two stages: the matrix unit fills one while the vector unit consumes the other.
    """

    logits: Any  # [tokens, M]
    peak: Any  # [8, M]: maximum per sublane

    def half(self, index: int) -> Stage:
        """Return one of two stages that are stacked."""
        return Stage(self.logits.at[index], self.peak.at[index])


@dataclass(frozen=True)
class Mask:
    """The causal mask: a query attends to positions query - window < key <= query.

    With a `chunk`, to those from `lookback` before the last multiple of it on. `low` is that multiple of the first
    query, and at most `queries` of them follow each other, so that a few comparisons take the place of a division per
    query.
    """

    start: Any  # position of the pass's first token
    position: Any  # position of the first query
    queries: int  # consecutive queries per head along the M axis; 1: all are at `position`
    window: Any  # None: no lower limit
    chunk: int | None = None
    low: Any = None  # with a chunk: where that of the first query of the sequence begins
    lookback: int = 0
    quarters: bool = False  # keys are in the order of `load_float8`

    def positions(self, shape: tuple[int, ...], key_axis: int, first: int = 0) -> tuple[Any, Any]:
        """Return the positions of keys and queries of logits of `shape`; `first` is their first index on the M axis."""
        key = jax.lax.broadcasted_iota(jnp.int32, shape, key_axis)
        if self.quarters:
            key = rem(key, BYTES) * (shape[key_axis] // BYTES) + div(key, BYTES)
        key = key + self.start
        query = self.position
        if self.queries > 1:
            index = jax.lax.broadcasted_iota(jnp.int32, shape, 1 - key_axis) + first
            query = query + rem(index, self.queries)
        return key, query

    def apply(self, logits: jax.Array, key_axis: int, first: int = 0) -> jax.Array:
        """Mask logits."""
        key, query = self.positions(logits.shape, key_axis, first)
        visible = key <= query
        if self.window is not None:
            visible = jnp.logical_and(visible, key > query - self.window)
        if self.chunk is not None:
            key = key + self.lookback if self.lookback else key
            visible = jnp.logical_and(visible, key >= self.low)
            for begun in range(1, (self.queries - 2 + self.chunk) // self.chunk + 1):
                begin = self.low + begun * self.chunk
                visible = jnp.logical_and(visible, jnp.logical_or(query < begin, key >= begin))
        return jnp.where(visible, logits, MASKED)


@dataclass(frozen=True)
class Alibi:
    """The slopes of a lane head's rows, laid out as its part of `State.top`, and where its logits are."""

    slopes: Any
    mask: Mask
    root: bool  # of the distances

    def apply_rows(self, logits: jax.Array) -> jax.Array:
        """Lower logits [M, tokens] by the distances."""
        return logits + widen_lanes(self.slopes[...], logits.shape[1]) * self._behind(logits.shape, 1)

    def apply_columns(self, logits: jax.Array, first: int) -> jax.Array:
        """Lower logits [tokens, n] by the distances; `first` is their first index on the M axis."""
        return logits + self.slopes[:1, pl.ds(first, logits.shape[1])] * self._behind(logits.shape, 0, first)

    def _behind(self, shape: tuple[int, ...], key_axis: int, first: int = 0) -> jax.Array:
        """Return minus the distances of queries and keys, or minus their roots; arguments as of `Mask.positions`."""
        key, query = self.mask.positions(shape, key_axis, first)
        if self.root:
            return -jnp.sqrt(jnp.maximum(query - key, 0).astype(jnp.float32))
        return (key - query).astype(jnp.float32)


def load(
    kv: Any, layout: PagedKvLayout, tokens: int, pass_index: Any, head: Any, part: int
) -> tuple[jax.Array, jax.Array]:
    """Load K [tokens, W] and V [tokens, V] of lane head `head + part` for one pass, from pages kv [.., R, B, 128]."""
    chunks = layout.width // LANES
    values = layout.value_width // LANES
    rows = partial(load_rows, kv, layout, tokens, pass_index)

    def join(parts: list[jax.Array]) -> jax.Array:
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)

    if layout.packing == 1:
        row = (head + part) * (chunks + values)
        both = [rows(row + c, 0, 1) for c in range(chunks + values)]
        return join(both[:chunks]), join(both[chunks:])
    row = (head + part if layout.packing == 2 else div(jnp.int32(head), 2) + part // 2) * chunks
    even, odd = ([rows(row + c, i, 2) for c in range(chunks)] for i in (0, 1))
    if layout.packing == 4:
        pairs = [high_halves(a, b) if part % 2 else low_halves(a, b) for a, b in zip(even, odd)]
        k = [widen(x, 0, layout.dtype) for x in pairs]
        v = [widen(x, 1, layout.dtype) for x in pairs[:values]]
        return join(k), join(v)
    k = [pltpu.bitcast(low_halves(a, b), jnp.bfloat16) for a, b in zip(even, odd)]
    v = [pltpu.bitcast(high_halves(a, b), jnp.bfloat16) for a, b in zip(even[:values], odd)]
    return join(k), join(v)


def load_float8(
    kv: Any, layout: PagedKvLayout, tokens: int, pass_index: Any, head: Any, part: int
) -> tuple[jax.Array, jax.Array]:
    """Load as `load` does, K and V as they are stored: the matrix unit takes float8 for its stationary operand.

    Only bytes move: a word of the four quarters of the pass each becomes a word of K and one of V. Key p is token
    p % 4 * tokens / 4 + p // 4 of the pass.
    """
    chunks = layout.width // LANES
    values = layout.value_width // LANES
    row = (div(jnp.int32(head), 2) + part // 2) * chunks
    parts = [load_rows(kv, layout, tokens, pass_index, row + c) for c in range(chunks)]
    halves = [quarter_halves(words, high=part % 2 == 1) for words in parts]
    low = jnp.uint32(0x00FF00FF)
    high = jnp.uint32(0xFF00FF00)
    k = [(a & low) | ((b & low) << 8) for a, b in halves]
    v = [((a >> 8) & low) | (b & high) for a, b in halves[:values]]

    def join(words: list[jax.Array]) -> jax.Array:
        both = [pltpu.bitcast(x, jnp.dtype(layout.dtype)) for x in words]
        return both[0] if len(both) == 1 else jnp.concatenate(both, axis=-1)

    return join(k), join(v)


def quarter_halves(words: jax.Array, *, high: bool) -> tuple[jax.Array, jax.Array]:
    """Pack a half of the words [4 n, 128] of the first and third quarter, and of the second and fourth: [n, 128]."""
    size = words.shape[0] // BYTES
    a, b, c, d = (words[i * size : (i + 1) * size] for i in range(BYTES))
    pack = high_halves if high else low_halves
    return pack(a, c), pack(b, d)


def load_rows(
    kv: Any, layout: PageLayout, tokens: int, pass_index: Any, row: Any, start: int = 0, step: int = 1
) -> jax.Array:
    """Load a row of every `step`-th token of a pass, which covers several pages or a part of one."""
    size = layout.page_size
    if tokens <= size:
        per_page = size // tokens
        page = div(pass_index, per_page)
        first = (pass_index - div(pass_index, per_page) * per_page) * tokens
        words: jax.Array = kv[page, row, pl.ds(first + start, tokens // step, step), :]
        return words
    pages = tokens // size
    parts = [kv[pass_index * pages + i, row, pl.ds(start, size // step, step), :] for i in range(pages)]
    return jnp.concatenate(parts, axis=0)


def attend_rows(
    q: Any, k: jax.Array, v: jax.Array, state: State, h: Any, softcap: Any, alibi: Alibi | None, mask: Mask
) -> None:
    """Update the state of lane head `h` with q [M, W] (a ref), k and v [tokens, W]."""
    logits = apply_softcap(dot(q[...], k, ((1,), (1,))), softcap)
    logits = logits if alibi is None else alibi.apply_rows(logits)
    logits = mask.apply(logits, key_axis=1)
    old = state.top[h]
    new = jnp.maximum(old, jnp.max(logits, axis=1, keepdims=True))
    weights = jnp.exp2(logits - widen_lanes(new, logits.shape[1]))
    decay = jnp.exp2(old - new)
    state.top[h] = new
    state.total[h] = state.total[h] * decay + sum_lanes(weights)
    state.acc[h] = state.acc[h] * widen_lanes(decay, v.shape[1]) + dot(weights.astype(q.dtype), v, ((1,), (0,)))


@dataclass(frozen=True)
class ColumnLogits:
    """First half of a pass of the column arrangement, chain by chain: logits over k [tokens, W], and their maximum."""

    q: Any  # [parts, W, n], a ref
    k: jax.Array
    stage: Stage  # to write to
    softcap: Any
    alibi: Alibi | None
    mask: Mask | None

    def run(self, first: int) -> None:
        """Compute the chain that begins with column `first`."""
        width = column_width(self.stage.logits.shape[1])
        chain = pl.ds(first, width)
        x = apply_softcap(dot(self.k, columns(self.q, first, width), ((1,), (0,))), self.softcap)
        x = x if self.alibi is None else self.alibi.apply_columns(x, first)
        x = x if self.mask is None else self.mask.apply(x, key_axis=0, first=first)
        self.stage.logits[:, chain] = x
        self.stage.peak[:, chain] = fold_max(x)


def columns(parts: Any, first: int, count: int) -> jax.Array:
    """Load columns first .. first + count of a ref [parts, W, n], as if its parts lay side by side -> [W, count]."""
    size = min(count, parts.shape[2])
    loaded = [parts[i // parts.shape[2], :, pl.ds(i % parts.shape[2], size)] for i in range(first, first + count, size)]
    return loaded[0] if len(loaded) == 1 else jnp.concatenate(loaded, axis=1)


@dataclass(frozen=True)
class ColumnSoftmax:
    """Second half of a pass, chain by chain: update the state of lane head `h` with the logits of `stage`.

    Rows of ones below the transposed V make the matrix unit, which has spare time, sum the weights.
    """

    left: jax.Array  # transposed V with these rows [W + 16, tokens]
    stage: Stage
    state: State
    h: Any

    @classmethod
    def of(cls, v: jax.Array, stage: Stage, state: State, h: Any) -> ColumnSoftmax:
        """Return it for v [tokens, W]."""
        return cls(jnp.concatenate([v.T, jnp.ones((2 * SUBLANES, v.shape[0]), v.dtype)], axis=0), stage, state, h)

    def run(self, first: int) -> None:
        """Compute the chain that begins with column `first`."""
        stage = self.stage
        state = self.state
        h = self.h
        chain = pl.ds(first, column_width(stage.logits.shape[1]))
        old = state.top[h, :, chain]
        new = jnp.maximum(old, jnp.max(stage.peak[:, chain], axis=0, keepdims=True))
        weights = jnp.exp2(stage.logits[:, chain] - new[:1]).astype(self.left.dtype)
        decay = jnp.exp2(old - new)
        state.top[h, :, chain] = new
        added = dot(self.left, weights, ((1,), (0,)))[: state.acc.shape[1]]
        state.acc[h, :, chain] = state.acc[h, :, chain] * decay[:1] + added


def column_chains(count: int) -> range:
    """Return the first columns of the independent chains of `count` queries."""
    return range(0, count, column_width(count))


def column_width(count: int) -> int:
    """Return how many of `count` queries form one chain."""
    return next((width for width in (COLUMNS, LANES) if count % width == 0), count)


def dot(a: jax.Array, b: jax.Array, dims: tuple[tuple[int, ...], tuple[int, ...]]) -> jax.Array:
    """Multiply on the MXU with float32 results; float32 operands at full precision."""
    precision = "highest" if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, (dims, ((), ())), precision=precision, preferred_element_type=jnp.float32)


def apply_softcap(logits: jax.Array, softcap: Any) -> jax.Array:
    """Return softcap * tanh(logits): the queries are already divided by the cap; `softcap` is in base 2."""
    return logits if softcap is None else jnp.tanh(logits) * softcap


def widen_lanes(x: jax.Array, width: int) -> jax.Array:
    """Repeat [M, 128], equal in all lanes -> [M, width], without a cross-lane move."""
    if width % LANES:
        return jnp.broadcast_to(x[:, :1], (x.shape[0], width))
    return x if width == LANES else jnp.concatenate([x] * (width // LANES), axis=1)


def sum_lanes(x: jax.Array) -> jax.Array:
    """Reduce [M, n * 128] -> [M, 128] partial sums, one per lane."""
    if x.shape[1] % LANES:
        lane = jax.lax.broadcasted_iota(jnp.int32, (x.shape[0], LANES), 1)
        return jnp.where(lane == 0, jnp.sum(x, axis=1, keepdims=True), 0)
    return sum(x[:, i : i + LANES] for i in range(0, x.shape[1], LANES))  # type: ignore[return-value]


def fold_max(x: jax.Array) -> jax.Array:
    """Reduce [n * 8, M] -> [8, M], one maximum per sublane, in a few independent chains."""
    units = x.shape[0] // SUBLANES
    chains = next(n for n in (4, 2, 1) if units % n == 0)
    return x.reshape(chains, units // chains, SUBLANES, x.shape[1]).max(axis=1).max(axis=0)


def low_halves(even: jax.Array, odd: jax.Array) -> jax.Array:
    """Pack the low 16 bits of the words of two tokens into one word: the sublane pair of a 16-bit type."""
    return (even & 0xFFFF) | (odd << 16)


def high_halves(even: jax.Array, odd: jax.Array) -> jax.Array:
    """Pack the high 16 bits of the words of two tokens into one word."""
    return (even >> 16) | (odd & jnp.uint32(0xFFFF0000))


def widen(words: jax.Array, byte: int, dtype: str) -> jax.Array:
    """Convert byte `byte` (0 or 1) of both halves of uint32 words [n, 128] from `dtype` to bfloat16 [2 n, 128].

    Exact, both halves at once. A float8 differs from a bfloat16 in the exponent's bias and position: an integer
    addition rebiases all normal numbers, but turns a subnormal f * 2^e into y = (1 + f) * 2^(e-1). Its value is
    2 y - 2^e, which for normal numbers is at least y, so the minimum of both is correct. An int8 is its low seven bits
    added to 128, minus 128 or 256. Infinities and NaN become finite.
    """
    if dtype == "int8":
        words = words >> 8 if byte else words
        bits = (words & jnp.uint32(0x007F007F)) | jnp.uint32(0x43004300)
        offset = (words & jnp.uint32(0x00800080)) + jnp.uint32(0x43004300)
        return pltpu.bitcast(bits, jnp.bfloat16) - pltpu.bitcast(offset, jnp.bfloat16)
    words = words if byte else words << 8
    shift, min_exponent = (4, -6) if dtype == "float8_e4m3fn" else (3, -14)
    bias = (127 + min_exponent - 1) << 7
    bits = ((words & jnp.uint32(0x7F007F00)) >> shift) + jnp.uint32(bias << 16 | bias)
    value = pltpu.bitcast(bits, jnp.bfloat16)
    value = jnp.minimum(value, value + (value - jnp.bfloat16(2.0**min_exponent)))
    return pltpu.bitcast(pltpu.bitcast(value, jnp.uint32) | words & jnp.uint32(0x80008000), jnp.bfloat16)
