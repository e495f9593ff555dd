"""What a pooling program reads about its batch: whole prompts end to end, cut out of one packed int32 array."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from pagoda.backends.jax_tpu.execution.step_input import KernelChoice
from pagoda.common.config.groups.pooler import PoolingKind
from pagoda.common.engine.pooling import PoolPlan
from pagoda.common.models.spec import Attention
from pagoda.kernels_pallas.ragged_paged_attention import ragged_paged_attention

Int32 = npt.NDArray[np.int32]

SMALLEST: Final = 64
"""Tokens of the smallest program; all are multiples of it."""
TILE: Final = 256
"""Queries, and keys, whose scores are in memory at a time."""

_LOW: Final = -1e30  # below every score, and finite: exp(-inf - _LOW) is 0 where a query has seen no key yet


@dataclass(frozen=True, slots=True, order=True)
class PackedShape:
    """The padded shape of a step: T tokens of at most S prompts, with an answer for each prompt or for each token.

    `pages`: of the longest prompt, where K and V lie in pages.
    """

    tokens: int
    seqs: int
    pages: int
    of_tokens: bool

    @property
    def size(self) -> int:
        """Length of the packed array."""
        return 4 * self.tokens + self.seqs + 1

    @property
    def tile(self) -> int:
        """Queries, and keys, at a time; they divide the tokens."""
        return TILE if self.tokens % TILE == 0 else SMALLEST


@dataclass(frozen=True, slots=True)
class PackedInput:
    """One step on the device. `starts`, `ends`: of each token's prompt; padding tokens are prompts of one token."""

    token_ids: jax.Array  # int32 [T]
    starts: jax.Array  # int32 [T]
    ends: jax.Array  # int32 [T]
    token_types: jax.Array  # int32 [T]
    query_start: jax.Array  # int32 [S+1]: where each prompt begins; the last: how many tokens are real
    page_tables: jax.Array  # int32 [S, pages]: for K and V of one layer
    kernel: KernelChoice
    shape: PackedShape

    @classmethod
    def unpack(cls, packed: jax.Array, shape: PackedShape, kernel: KernelChoice) -> PackedInput:
        """Slice int32 [shape.size]; the order is that of `pack_prompts`."""
        ids, starts, ends, types, query_start = jnp.split(packed, np.cumsum([shape.tokens] * 4))
        pages = -(-jnp.diff(query_start) // kernel.page_size)
        page_tables = (1 + jnp.cumsum(pages) - pages)[:, None] + jnp.arange(shape.pages)
        return cls(ids, starts, ends, types, query_start, page_tables, kernel, shape)

    def scratch(self, kv_heads: int, head_dim: int) -> jax.Array:
        """A cache for one layer, with a page to spare for each prompt's last tokens and one for the null block."""
        layout = self.kernel.kv_layout(kv_heads, head_dim)
        return layout.init(1, 1 + self.shape.seqs + -(-self.shape.tokens // layout.page_size))

    @property
    def positions(self) -> jax.Array:
        """int32 [T]: each token's position in its prompt."""
        return jnp.arange(self.shape.tokens, dtype=jnp.int32) - self.starts

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: jax.Array,
        place: jax.Array,
        spec: Attention,
        scales: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        """q [T, N, H] over k and v [T, K, H] of the same prompt -> [T, N, H], and the cache.

        One way: by the kernel of models that generate, over pages that every layer writes anew. Both ways: without.
        """
        if not spec.causal:
            return self._attend_both_ways(q, k, v, spec), cache
        lengths = jnp.diff(self.query_start)
        return ragged_paged_attention(
            q,
            k,
            v,
            cache,
            layout=self.kernel.kv_layout(*k.shape[1:]),
            layer=0,
            query_start=self.query_start,
            kv_len=lengths,
            page_table=self.page_tables,
            counts=jnp.stack([jnp.zeros((), jnp.int32), (lengths > 0).sum(dtype=jnp.int32)]),
            scale=spec.scale,
            softcap=spec.softcap,
            window=spec.window,
            **self.kernel.options,
        )

    def _attend_both_ways(self, q: jax.Array, k: jax.Array, v: jax.Array, spec: Attention) -> jax.Array:
        """Tiles of queries go over those tiles of keys that one of them may see.

        What a prompt costs does not depend on those beside it, and neither does the memory for scores.
        """
        tile = self.shape.tile
        first, end = self._seen(spec)
        sums = jnp.concatenate([v, jnp.ones_like(v[..., :1])], -1)  # the weights' sum is a product too

        def attend_tile(at: jax.Array) -> jax.Array:
            queries = _cut(q, at, tile).reshape(tile, k.shape[1], -1, k.shape[2])
            begins, stops = _cut(first, at, tile)[:, None], _cut(end, at, tile)[:, None]

            def add_keys(index: jax.Array, so_far: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                highest, mixed = so_far
                here = index * tile
                scores = jnp.einsum("tkgh,skh->kgts", queries, _cut(k, here, tile), preferred_element_type=jnp.float32)
                scores = scores * spec.scale
                if spec.softcap is not None:
                    scores = jnp.tanh(scores / spec.softcap) * spec.softcap
                key = here + jnp.arange(tile)
                scores = jnp.where((key >= begins) & (key < stops), scores, -jnp.inf)
                higher = jnp.maximum(highest, scores.max(-1, keepdims=True))
                weights = jnp.exp(scores - higher).astype(v.dtype)
                new = jnp.einsum("kgts,skh->kgth", weights, _cut(sums, here, tile), preferred_element_type=jnp.float32)
                return higher, mixed * jnp.exp(highest - higher) + new

            groups = queries.shape[1:3]
            nothing = jnp.full((*groups, tile, 1), _LOW), jnp.zeros((*groups, tile, sums.shape[-1]), jnp.float32)
            last = (stops[-1, 0] + tile - 1) // tile
            _, mixed = jax.lax.fori_loop(begins[0, 0] // tile, last, add_keys, nothing)
            return (mixed[..., :-1] / mixed[..., -1:]).astype(q.dtype).transpose(2, 0, 1, 3)

        return jax.lax.map(attend_tile, jnp.arange(0, len(q), tile, dtype=jnp.int32)).reshape(q.shape)

    def _seen(self, spec: Attention) -> tuple[jax.Array, jax.Array]:
        """Of each token the first that it sees, and the first after those; neither ever falls."""
        token = jnp.arange(self.shape.tokens, dtype=jnp.int32)
        first, end = self.starts, self.ends
        if spec.window is not None:
            first, end = jnp.maximum(first, token - spec.window + 1), jnp.minimum(end, token + spec.window)
        return first, end

    def answers(self, hidden: jax.Array, kind: PoolingKind) -> jax.Array:
        """Hidden [T, D] -> what is pooled, float32 [S, D]; with an answer for each token [T, D]."""
        begins, ends = self.query_start[:-1], self.query_start[1:]
        if self.shape.of_tokens:
            return hidden.astype(jnp.float32)
        if kind != "mean":
            return hidden[begins if kind == "first" else jnp.maximum(ends - 1, 0)].astype(jnp.float32)
        token = jnp.arange(len(hidden))[None]
        inside = (token >= begins[:, None]) & (token < ends[:, None])
        share = inside / jnp.maximum(ends - begins, 1)[:, None]
        return jnp.matmul(share.astype(jnp.float32), hidden.astype(jnp.float32), precision="highest")


def _cut(x: jax.Array, at: jax.Array, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, at, size)


def pack_prompts(shape: PackedShape, plan: PoolPlan) -> Int32:
    """One array for the device."""
    real, lengths = plan.num_tokens, np.diff(plan.query_start)
    tokens = np.zeros((4, shape.tokens), np.int32)
    tokens[0, :real] = plan.token_ids
    tokens[1] = np.arange(shape.tokens)
    tokens[2] = tokens[1] + 1
    tokens[1, :real] = np.repeat(plan.query_start[:-1], lengths)
    tokens[2, :real] = np.repeat(plan.query_start[1:], lengths)
    if plan.token_types is not None:
        tokens[3, :real] = plan.token_types
    query_start = np.full(shape.seqs + 1, real, np.int32)
    query_start[: plan.num_seqs] = plan.query_start[:-1]
    return np.concatenate([tokens.ravel(), query_start])
