"""Named static shapes of calls of block_selection, for compile tests and schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pagoda.kernels_pallas.block_selection import BlockRule, attend_to_blocks, select_blocks
from pagoda.kernels_pallas.chips import ChipInfo
from pagoda.kernels_pallas.latent_attention.layout import LatentLayout
from pagoda.kernels_pallas.ragged_paged_attention.layout import PagedKvLayout
from pagoda.kernels_pallas.ragged_paged_attention.plan import Knobs, RaggedBatch


@dataclass(frozen=True)
class BlockAttentionArgs:
    """One compiled shape of a selection and its attention: T tokens, S sequences, G query heads of each KV head."""

    tokens: int
    seqs: int
    kv_heads: int
    group: int = 16
    page_size: int = 128
    rule: BlockRule = BlockRule(128, 16, 1)
    context: int = 8192
    layers: int = 4
    pages: int = 1024
    decode_only: bool = False

    @property
    def layouts(self) -> tuple[PagedKvLayout, LatentLayout]:
        """Return the layouts of keys and values, and of index keys."""
        size = self.page_size
        return PagedKvLayout(self.kv_heads, 128, "bfloat16", size), LatentLayout(128, 0, "bfloat16", size)

    def function(self, chip: ChipInfo) -> Callable[..., Any]:
        """Return the call as a function of `arguments`, jitted with the cache donated."""
        kv, index = self.layouts

        def attend(
            cache: jax.Array, keys: jax.Array, q: jax.Array, queries: jax.Array, layer: jax.Array, batch: RaggedBatch
        ) -> tuple[jax.Array, jax.Array]:
            shared: dict[str, Any] = {"layer": layer, "batch": batch, "rule": self.rule, "chip": chip}
            selected = select_blocks(queries, keys, layout=index, decode_only=self.decode_only, **shared)
            knobs = Knobs(jnp.float32(0.1), *(None,) * 6)
            return attend_to_blocks(q, cache, selected, layout=kv, knobs=knobs, **shared)

        return jax.jit(attend, donate_argnums=0)

    def arguments(self, sharding: Any = None) -> tuple[Any, ...]:
        """Return the ShapeDtypeStructs for `function`."""

        def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        kv, index = self.layouts
        ints = jnp.int32
        narrow = jnp.bfloat16
        table = self.seqs, -(-self.context // self.page_size)
        batch: Any = (array(size, ints) for size in ((self.seqs + 1,), (self.seqs,), table, (2,)))
        return (
            array(kv.shape(self.layers, self.pages), kv.word_dtype),
            array(index.shape(self.layers, self.pages), index.word_dtype),
            array((self.tokens, self.kv_heads * self.group, 128), narrow),
            array((self.tokens, self.kv_heads, 128), narrow),
            array((), ints),
            RaggedBatch(*batch),
        )


SPECS: dict[str, BlockAttentionArgs] = {
    "decode-1kv": BlockAttentionArgs(64, 64, 1, decode_only=True),
    "mixed-4kv": BlockAttentionArgs(512, 16, 4),
    "mixed-pages-of-256": BlockAttentionArgs(256, 16, 2, page_size=256),
}
