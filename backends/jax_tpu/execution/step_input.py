"""The batch of a generation step: packed into one int32 array on the host, split inside the program."""

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
    """Which kernels a program uses, and the layout of its KV cache."""

    page_size: int  # tokens
    cache_dtype: str
    use_kernel: bool = False  # False: the jnp references
    chip: ChipInfo = CHIPS["v6e"]
    interpret: bool = False

    def kv_layout(self, kv_heads: int, head_dim: int) -> PagedKvLayout:
        """Return the cache layout for `kv_heads` heads on one device."""
        return PagedKvLayout(kv_heads, head_dim, self.cache_dtype, self.page_size)

    @property
    def scaled(self) -> bool:
        """True if K and V are divided by a scale before they are stored (8-bit caches)."""
        return jnp.dtype(self.cache_dtype).itemsize == 1

    @property
    def options(self) -> dict[str, Any]:
        """Return the static arguments of every kernel."""
        return {"use_kernel": self.use_kernel, "interpret": self.interpret, "chip": self.chip}


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step on the device. Sequences beyond `counts[1]` and tokens beyond `query_start[-1]` are padding."""

    token_ids: jax.Array  # int32 [T]; PREVIOUS: the token sampled in the previous step, read from the history
    query_start: jax.Array  # int32 [S+1]: first token of each sequence
    kv_len: jax.Array  # int32 [S]: tokens of the sequence after this step
    rows: jax.Array  # int32 [S]: row of the history
    counts: jax.Array  # int32 [2]: decode sequences, all sequences
    page_tables: jax.Array  # int32 [G, S, P]
    kernel: KernelChoice
    decode_only: bool

    @classmethod
    def unpack(cls, packed: jax.Array, shape: StepShape, kernel: KernelChoice) -> StepInput:
        """Split int32 [packed_size(shape)] in the order of `pack`."""
        sizes = (shape.tokens, shape.seqs + 1, shape.seqs, shape.seqs, 2)
        token_ids, query_start, kv_len, rows, counts, tables = jnp.split(packed, np.cumsum(sizes))
        tables = tables.reshape(shape.groups, shape.seqs, shape.pages)
        return cls(token_ids, query_start, kv_len, rows, counts, tables, kernel, shape.decode_only)

    @property
    def seq_ids(self) -> jax.Array:
        """Return the sequence of each token, int32 [T]; padding tokens map to the last."""
        before = jnp.arange(self.token_ids.shape[0])[:, None] >= self.query_start[None, 1:]
        return jnp.minimum(before.sum(1), self.kv_len.shape[0] - 1)

    @property
    def positions(self) -> jax.Array:
        """Return each token's position in its sequence, int32 [T]; 0 for padding."""
        seq_ids = self.seq_ids
        offsets = self.kv_len[seq_ids] - self.query_start[seq_ids + 1]
        tokens = jnp.arange(self.token_ids.shape[0])
        return jnp.where(tokens < self.query_start[-1], tokens + offsets, 0)

    @property
    def token_types(self) -> None:
        """Return None: all token types are 0."""

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: jax.Array,
        cache_index: jax.Array,
        spec: Attention,
        scales: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        """Write K and V [T, K, H] into the stacked cache, then attend: q [T, N, H] -> [T, N, H], and the cache.

        `cache_index` int32 [2]: block table, layer of the stacked cache. `scales` [2]: of K and V in a scaled cache.
        """
        k_scale, v_scale = (None, None) if scales is None else scales
        return ragged_paged_attention(
            q,
            k,
            v,
            cache,
            layout=self.kernel.kv_layout(*k.shape[1:]),
            layer=cache_index[1],
            query_start=self.query_start,
            kv_len=self.kv_len,
            page_table=self.page_tables[cache_index[0]],
            counts=self.counts,
            scale=spec.scale,
            softcap=spec.softcap,
            window=spec.window,
            k_scale=k_scale,
            v_scale=v_scale,
            decode_only=self.decode_only,
            **self.kernel.options,
        )

    def resolve_ids(self, history: jax.Array) -> jax.Array:
        """Return token ids int32 [T] with PREVIOUS replaced from the history [rows+1, length]."""
        sampled = history[self.rows[self.seq_ids], self.positions]
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
    """Pack a step: int32 [packed_size(shape)]. Padding sequences have no tokens, row `empty_row`, the null block."""
    packed = np.zeros(packed_size(shape), np.int32)
    seqs, start = len(rows), shape.tokens
    packed[: len(token_ids)] = token_ids
    packed[start : start + seqs + 1] = query_start
    packed[start + seqs + 1 : start + shape.seqs + 1] = query_start[-1]
    start += shape.seqs + 1
    packed[start : start + seqs] = kv_len
    start += shape.seqs
    packed[start : start + shape.seqs] = empty_row
    packed[start : start + seqs] = rows
    start += shape.seqs
    packed[start : start + 2] = counts
    tables = packed[start + 2 :].reshape(shape.groups, shape.seqs, shape.pages)
    for table, pages in zip(tables, page_tables):
        table[:seqs, : pages.shape[1]] = pages
    return packed
