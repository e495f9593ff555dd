"""What a step program reads about its batch, cut out of one packed int32 array inside the program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagoda.common.engine.shapes import StepShape
from pagoda.common.engine.step import PREVIOUS, Int32
from pagoda.common.models.spec import Attention
from pagoda.kernels_pallas.chips import CHIPS, ChipInfo
from pagoda.kernels_pallas.ragged_paged_attention import PagedKvLayout, ragged_paged_attention


def packed_size(shape: StepShape) -> int:
    """Return the length of a step's packed array."""
    return shape.tokens + 3 * shape.seqs + 1 + 2 + shape.groups * shape.seqs * shape.pages


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """Whether a program uses the kernels for a chip or their references; and how the cache stores K and V."""

    page_size: int
    cache_dtype: str
    use_kernel: bool = False
    chip: ChipInfo = CHIPS["v6e"]
    interpret: bool = False

    def kv_layout(self, kv_heads: int, head_dim: int) -> PagedKvLayout:
        """The cache of so many local heads."""
        return PagedKvLayout(kv_heads, head_dim, self.cache_dtype, self.page_size)

    @property
    def scaled(self) -> bool:
        """Whether K and V are divided by a scale before they are stored: 8-bit numbers have little range."""
        return jnp.dtype(self.cache_dtype).itemsize == 1

    @property
    def options(self) -> dict[str, Any]:
        """Static arguments that every kernel takes."""
        return {"use_kernel": self.use_kernel, "interpret": self.interpret, "chip": self.chip}


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step on the device. Sequences beyond `counts[1]` and tokens beyond `query_start[-1]` are padding."""

    token_ids: jax.Array  # int32 [T], PREVIOUS where only the history knows
    query_start: jax.Array  # int32 [S+1]
    kv_len: jax.Array  # int32 [S] tokens of the sequence after this step
    rows: jax.Array  # int32 [S]
    counts: jax.Array  # int32 [2]: decode sequences, sequences
    page_tables: jax.Array  # int32 [G, S, P]
    kernel: KernelChoice
    decode_only: bool

    @classmethod
    def unpack(cls, packed: jax.Array, shape: StepShape, kernel: KernelChoice) -> StepInput:
        """Slice int32 [packed_size(shape)]; the order is that of `pack`."""
        sizes = (shape.tokens, shape.seqs + 1, shape.seqs, shape.seqs, 2)
        token_ids, query_start, kv_len, rows, counts, tables = jnp.split(packed, np.cumsum(sizes))
        tables = tables.reshape(shape.groups, shape.seqs, shape.pages)
        return cls(token_ids, query_start, kv_len, rows, counts, tables, kernel, shape.decode_only)

    @property
    def owners(self) -> jax.Array:
        """int32 [T]: the sequence of each token; padding counts to the last."""
        before = jnp.arange(self.token_ids.shape[0])[:, None] >= self.query_start[None, 1:]
        return jnp.minimum(before.sum(1), self.kv_len.shape[0] - 1)

    @property
    def positions(self) -> jax.Array:
        """int32 [T]: each token's position in its sequence; 0 for padding."""
        owners = self.owners
        ends = self.kv_len[owners] - self.query_start[owners + 1]
        tokens = jnp.arange(self.token_ids.shape[0])
        return jnp.where(tokens < self.query_start[-1], tokens + ends, 0)

    @property
    def token_types(self) -> None:
        """All are 0."""

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
        """Write K and V [T, K, H] into the stacked cache, then attend: q [T, N, H] -> [T, N, H], and the cache.

        `place` int32 [2]: block table and layer of the cache. `scales` [2]: of K and of V, where they are stored so.
        """
        k_scale, v_scale = (None, None) if scales is None else scales
        return ragged_paged_attention(
            q,
            k,
            v,
            cache,
            layout=self.kernel.kv_layout(*k.shape[1:]),
            layer=place[1],
            query_start=self.query_start,
            kv_len=self.kv_len,
            page_table=self.page_tables[place[0]],
            counts=self.counts,
            scale=spec.scale,
            softcap=spec.softcap,
            window=spec.window,
            k_scale=k_scale,
            v_scale=v_scale,
            decode_only=self.decode_only,
            **self.kernel.options,
        )

    def known_ids(self, history: jax.Array) -> jax.Array:
        """int32 [T]: token ids, those the host did not know taken from the history [rows+1, length]."""
        sampled = history[self.rows[self.owners], self.positions]
        return jnp.where(self.token_ids == PREVIOUS, sampled, self.token_ids)


def pack(
    shape: StepShape,
    token_ids: Int32,
    query_start: Int32,
    kv_len: Int32,
    rows: Int32,
    counts: tuple[int, int],
    page_tables: tuple[Int32, ...],
    empty_row: int,
) -> Int32:
    """One array for the device. Padding sequences have no tokens, hold `empty_row` and see the null block."""
    packed = np.zeros(packed_size(shape), np.int32)
    seqs, at = len(rows), 0
    packed[: len(token_ids)] = token_ids
    at = shape.tokens
    packed[at : at + seqs + 1] = query_start
    packed[at + seqs + 1 : at + shape.seqs + 1] = query_start[-1]
    at += shape.seqs + 1
    packed[at : at + seqs] = kv_len
    at += shape.seqs
    packed[at : at + shape.seqs] = empty_row
    packed[at : at + seqs] = rows
    at += shape.seqs
    packed[at : at + 2] = counts
    tables = packed[at + 2 :].reshape(shape.groups, shape.seqs, shape.pages)
    for table, pages in zip(tables, page_tables):
        table[:seqs, : pages.shape[1]] = pages
    return packed
