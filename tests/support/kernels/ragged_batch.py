"""Random ragged batches for the attention kernel, everything unused poisoned, and the definition in numpy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from pagoda.kernels_pallas.ragged_paged_attention import PagedKvLayout, ragged_paged_attention
from pagoda.kernels_pallas.ragged_paged_attention.plan import NO_RULES, StaticRules

STRICT = pltpu.InterpretParams(
    detect_races=True, dma_execution_mode="on_wait", uninitialized_memory="nan", out_of_bounds_reads="raise"
)
LAYERS, LAYER = 2, 1


@dataclass(frozen=True)
class Limits:
    """The static sizes of a batch: T, S, the width of the page table, P."""

    tokens: int = 48
    seqs: int = 8
    max_pages: int = 6
    pages: int = 40


@dataclass(frozen=True)
class Case:
    """One call's arrays, the sequences behind them, and what it must return."""

    arrays: dict[str, jax.Array]
    expected: np.ndarray  # [T, N, H], zero in the padding
    live: int


def make_case(
    layout: PagedKvLayout,
    group: int,
    seqs: list[tuple[int, int]],
    *,
    limits: Limits,
    seed: int,
    softcap: float | None = None,
    window: int | None = None,
    sinks: np.ndarray | None = None,
    slopes: np.ndarray | None = None,
    rules: StaticRules = NO_RULES,
) -> Case:
    """A batch of (new tokens, tokens before) per sequence, those with one new token that lead it being decode rows."""
    rng = np.random.default_rng(seed)
    decodes = next((i for i, (new, _) in enumerate(seqs) if new != 1), len(seqs))
    shapes = [(limits.tokens, layout.kv_heads, dim) for dim in (layout.head_dim, layout.value_dim)]
    dtype = layout.compute_dtype
    q = np.full((limits.tokens, layout.kv_heads * group, layout.head_dim), np.nan, np.float32)
    k, v = (np.full(shape, np.nan, np.float32) for shape in shapes)
    starts = np.full(limits.seqs + 1, 10**6, np.int32)
    starts[: len(seqs) + 1] = np.cumsum([0] + [new for new, _ in seqs])
    kv_len = np.full(limits.seqs, 10**6, np.int32)
    table = np.full((limits.seqs, limits.max_pages), 10**6, np.int32)
    free = list(rng.permutation(limits.pages))
    cache = np.array(poisoned(layout, limits.pages))
    expected = np.zeros((*q.shape[:2], layout.value_dim))
    for s, (new, before) in enumerate(seqs):
        kv_len[s] = new + before
        rows = slice(starts[s], starts[s + 1])
        q[rows] = rounded(rng.normal(size=(new, *q.shape[1:])), dtype)
        full = [rounded(rng.normal(size=(new + before, *shape[1:])), layout.dtype) for shape in shapes]
        k[rows], v[rows] = full[0][before:], full[1][before:]
        for page in range(-(-kv_len[s] // layout.page_size)):
            table[s, page] = free.pop()
        most = -(-max(map(sum, seqs)) // 64) * 64  # one program for all lengths
        padded = (jnp.asarray(np.pad(each, ((0, most - len(each)), (0, 0), (0, 0)))) for each in full)
        words = np.asarray(pack(layout, *padded))
        for t in range(before):
            cache[LAYER, table[s, t // layout.page_size], :, t % layout.page_size] = words[t]
        expected[rows] = dense(q[rows], *full, before, layout.head_dim**-0.5, softcap, window, sinks, slopes, rules)
    arrays = {
        "q": jnp.asarray(q, dtype),
        "k": jnp.asarray(k, dtype),
        "v": jnp.asarray(v, dtype),
        "cache": jnp.asarray(cache),
        "query_start": jnp.asarray(starts),
        "kv_len": jnp.asarray(kv_len),
        "page_table": jnp.asarray(table),
        "counts": jnp.asarray([decodes, len(seqs)], jnp.int32),
    }
    return Case(arrays, expected, int(starts[len(seqs)]))


def attention(layout: PagedKvLayout, **static: Any) -> Any:
    """The call, jitted: f(arrays, knobs) -> (out, cache)."""

    def run(arrays: dict[str, jax.Array], knobs: dict[str, Any]) -> Any:
        return ragged_paged_attention(
            **arrays, **knobs, layout=layout, layer=LAYER, scale=layout.head_dim**-0.5, **static
        )

    return jax.jit(run)


@partial(jax.jit, static_argnums=0)
def pack(layout: PagedKvLayout, k: jax.Array, v: jax.Array) -> jax.Array:
    return layout.pack(k, v)


def poisoned(layout: PagedKvLayout, pages: int) -> jax.Array:
    """A cache in which every element is NaN (int8 has none: its extreme value)."""
    shape, poison = (LAYERS, pages, layout.page_size, layout.kv_heads), np.nan if layout.dtype != "int8" else 127.0
    words = layout.pack(*(jnp.full((*shape, dim), poison) for dim in (layout.head_dim, layout.value_dim)))
    return jnp.moveaxis(words, 2, 3)


def rounded(x: np.ndarray, dtype: Any) -> np.ndarray:
    """x as the stored type keeps it."""
    if jnp.dtype(dtype) == jnp.int8:
        return np.clip(np.round(x * 3), -127, 127).astype(np.float32)
    return x.astype(np.float32).astype(jnp.dtype(dtype)).astype(np.float32)


def dense(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    position: int,
    scale: float,
    softcap: float | None,
    window: int | None,
    sinks: np.ndarray | None,
    slopes: np.ndarray | None,
    rules: StaticRules,
) -> np.ndarray:
    """Attention as the textbook has it, float64, one token and head at a time."""
    out = np.zeros((*q.shape[:2], v.shape[2]))
    group = q.shape[1] // k.shape[1]
    for i, h in np.ndindex(q.shape[:2]):
        end = position + i + 1
        keys = slice(0 if window is None else max(0, end - window), end)
        if rules.chunk is not None:
            keys = slice(max(0, (end - 1) // rules.chunk * rules.chunk - rules.lookback), end)
        x = k[keys, h // group].astype(np.float64) @ q[i, h] * scale
        x = x if softcap is None else softcap * np.tanh(x / softcap)
        distance = np.arange(len(x) - 1, -1, -1)
        x = x if slopes is None else x - slopes[h] * (np.sqrt(distance) if rules.alibi_root else distance)
        weights = np.exp(x - x.max())
        total = weights.sum() + (0 if sinks is None else np.exp(sinks[h] - x.max()))
        out[i, h] = weights @ v[keys, h // group] / total
    return out


def races_found() -> bool:
    """Whether the last interpreted call met a race (jax before 0.11 records it; later ones raise)."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    return bool(getattr(interpret_pallas_call.races, "races_found", False))
