"""The arguments of one call, checked once: what the reference and the kernel both start from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp

from pagoda.kernels_pallas.ragged_paged_attention.layout import PagedKvLayout

Scalar: TypeAlias = float | int | jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RaggedBatch:
    """Where the rows of a step lie. All int32; entries beyond `counts` may hold anything.

    query_start [S + 1]: first token of each sequence in q, k, v; kv_len [S]: tokens in its cache after this step;
    page_table [S, max_pages]: its pages in order; counts [2]: decode sequences (they come first), sequences.
    """

    query_start: jax.Array
    kv_len: jax.Array
    page_table: jax.Array
    counts: jax.Array

    @property
    def max_seqs(self) -> int:
        """S, static."""
        return self.kv_len.shape[0]

    def cleaned(self) -> RaggedBatch:
        """The same batch with what lies beyond `counts` made empty: no tokens, no cache."""
        real = jnp.arange(self.max_seqs) < self.counts[1]
        ends = jnp.where(real, self.query_start[1:], self.query_start[self.counts[1]])
        starts = jnp.concatenate([self.query_start[:1], ends])
        return RaggedBatch(starts, jnp.where(real, self.kv_len, 0), self.page_table, self.counts)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Knobs:
    """The numbers that bend attention: traced values, of which only the presence is static.

    scale multiplies q k; softcap: logits become softcap * tanh(logits / softcap); window: a token sees itself and the
    window - 1 before it; sinks [N] float32: one more logit per head in the softmax's denominator; k_scale, v_scale:
    stored value * scale = true value.
    """

    scale: jax.Array
    softcap: jax.Array | None
    window: jax.Array | None
    sinks: jax.Array | None
    k_scale: jax.Array | None
    v_scale: jax.Array | None


def make_knobs(
    scale: Scalar,
    softcap: Scalar | None,
    window: Scalar | None,
    sinks: jax.Array | None,
    k_scale: Scalar | None,
    v_scale: Scalar | None,
) -> Knobs:
    """Knobs as arrays of the right type: float32, the window int32."""

    def real(x: Scalar | jax.Array | None) -> jax.Array | None:
        return None if x is None else jnp.asarray(x, jnp.float32)

    return Knobs(
        scale=jnp.asarray(scale, jnp.float32),
        softcap=real(softcap),
        window=None if window is None else jnp.asarray(window, jnp.int32),
        sinks=real(sinks),
        k_scale=real(k_scale),
        v_scale=real(v_scale),
    )


def check(
    q: jax.Array, k: jax.Array, v: jax.Array, cache: jax.Array, layout: PagedKvLayout, batch: RaggedBatch
) -> None:
    """ValueError, naming the argument, when static shapes or types do not fit together."""
    tokens, heads, width = q.shape
    expected = (tokens, layout.kv_heads, layout.head_dim)
    _same("k", k.shape, expected)
    _same("v", v.shape, expected)
    _same("head dim of q", (width,), (layout.head_dim,))
    if heads % layout.kv_heads:
        raise ValueError(f"{heads} query heads do not divide into {layout.kv_heads} KV heads")
    _same("cache", cache.shape, layout.shape(*cache.shape[:2]))
    if cache.dtype != layout.word_dtype:
        raise ValueError(f"cache holds {cache.dtype}, its layout wants {layout.word_dtype}")
    _same("query_start", batch.query_start.shape, (batch.max_seqs + 1,))
    _same("page_table", batch.page_table.shape, (batch.max_seqs, batch.page_table.shape[-1]))
    _same("counts", batch.counts.shape, (2,))
    for name, x in vars(batch).items():
        if x.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32, not {x.dtype}")


def _same(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise ValueError(f"{name} has shape {found}, expected {expected}")
