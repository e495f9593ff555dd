"""The checked arguments of one call, shared by reference and kernel."""

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
    """The sequences of a step. All int32; entries beyond `counts` are undefined."""

    query_start: jax.Array  # [S + 1]: first token of each sequence in q, k, v
    kv_len: jax.Array  # [S]: tokens of each sequence after this step
    page_table: jax.Array  # [S, max_pages]
    counts: jax.Array  # [2]: decode sequences (which come first), all sequences

    @property
    def max_seqs(self) -> int:
        """Return S, which is static."""
        return self.kv_len.shape[0]

    def cleaned(self) -> RaggedBatch:
        """Return the batch with empty sequences (no tokens, no cache) beyond `counts`."""
        real = jnp.arange(self.max_seqs) < self.counts[1]
        ends = jnp.where(real, self.query_start[1:], self.query_start[self.counts[1]])
        starts = jnp.concatenate([self.query_start[:1], ends])
        return RaggedBatch(starts, jnp.where(real, self.kv_len, 0), self.page_table, self.counts)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Knobs:
    """Numeric options of attention. Values are traced; only which of them are None is static."""

    scale: jax.Array  # multiplies q k
    softcap: jax.Array | None  # logits become softcap * tanh(logits / softcap)
    window: jax.Array | None  # sliding window: a token attends to itself and the window - 1 tokens before it
    sinks: jax.Array | None  # float32 [N]: an extra logit per head in the softmax's denominator
    k_scale: jax.Array | None  # K = stored value * k_scale
    v_scale: jax.Array | None  # V = stored value * v_scale


def make_knobs(
    scale: Scalar,
    softcap: Scalar | None,
    window: Scalar | None,
    sinks: jax.Array | None,
    k_scale: Scalar | None,
    v_scale: Scalar | None,
) -> Knobs:
    """Convert to arrays: float32, the window int32."""

    def float32(x: Scalar | jax.Array | None) -> jax.Array | None:
        return None if x is None else jnp.asarray(x, jnp.float32)

    return Knobs(
        scale=jnp.asarray(scale, jnp.float32),
        softcap=float32(softcap),
        window=None if window is None else jnp.asarray(window, jnp.int32),
        sinks=float32(sinks),
        k_scale=float32(k_scale),
        v_scale=float32(v_scale),
    )


def divided(x: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Divide K or V by its scale before it is stored."""
    return x if scale is None else x.astype(jnp.float32) / scale


def check(
    q: jax.Array, k: jax.Array, v: jax.Array, cache: jax.Array, layout: PagedKvLayout, batch: RaggedBatch
) -> None:
    """Raise ValueError naming the argument whose static shape or dtype is invalid."""
    tokens, heads, width = q.shape
    expected = (tokens, layout.kv_heads, layout.head_dim)
    _check_shape("k", k.shape, expected)
    _check_shape("v", v.shape, expected)
    _check_shape("head dim of q", (width,), (layout.head_dim,))
    if heads % layout.kv_heads:
        raise ValueError(f"{heads} query heads are not a multiple of {layout.kv_heads} KV heads")
    _check_shape("cache", cache.shape, layout.shape(*cache.shape[:2]))
    if cache.dtype != layout.word_dtype:
        raise ValueError(f"cache is {cache.dtype}, its layout needs {layout.word_dtype}")
    _check_shape("query_start", batch.query_start.shape, (batch.max_seqs + 1,))
    _check_shape("page_table", batch.page_table.shape, (batch.max_seqs, batch.page_table.shape[-1]))
    _check_shape("counts", batch.counts.shape, (2,))
    for name, x in vars(batch).items():
        if x.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32, not {x.dtype}")


def _check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise ValueError(f"{name} has shape {shape}, expected {expected}")
