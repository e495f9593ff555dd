"""Named static shapes of calls of selected_attention, for compile tests and schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pagoda.kernels_pallas.chips import CHIPS, ChipInfo
from pagoda.kernels_pallas.latent_attention.layout import LatentLayout
from pagoda.kernels_pallas.latent_attention.selected import selected_attention
from pagoda.kernels_pallas.ragged_paged_attention.plan import Knobs, RaggedBatch
from pagoda.kernels_pallas.token_selection.marks import DECODE_TILE, MIXED_TILE, SelectedTokens, padded_context


@dataclass(frozen=True)
class SelectedAttentionArgs:
    """One compiled shape: T tokens, S sequences, N query heads, `context` tokens of page table."""

    tokens: int
    seqs: int
    heads: int
    layout: LatentLayout = LatentLayout(512, 64, "bfloat16", 128)
    context: int = 4096
    layers: int = 4
    pages: int = 1024
    decode_only: bool = False

    def function(self, chip: ChipInfo = CHIPS["v6e"]) -> Callable[..., Any]:
        """Return the call as a function of `arguments`, jitted."""
        options: dict[str, Any] = {"layout": self.layout, "decode_only": self.decode_only, "chip": chip}
        return jax.jit(partial(selected_attention, use_kernel=True, interpret=False, **options))

    def arguments(self, sharding: Any = None) -> tuple[Any, ...]:
        """Return the ShapeDtypeStructs for `function`."""

        def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        def words(tokens: int, tile: int) -> Any:
            return array((-(-tokens // tile), 1, padded_context(pages, layout.page_size)), jnp.int32)

        layout = self.layout
        ints = jnp.int32
        pages = -(-self.context // layout.page_size)
        batch: Any = (array(size, ints) for size in ((self.seqs + 1,), (self.seqs,), (self.seqs, pages), (2,)))
        knobs: Any = (array((), jnp.float32), *(None,) * 6)
        return (
            array((self.tokens, self.heads, layout.channels), layout.compute_dtype),
            array(layout.shape(self.layers, self.pages), layout.word_dtype),
            array((), ints),
            RaggedBatch(*batch),
            Knobs(*knobs),
            SelectedTokens(words(self.seqs, DECODE_TILE), None if self.decode_only else words(self.tokens, MIXED_TILE)),
        )


SPECS: dict[str, SelectedAttentionArgs] = {
    "decode-128": SelectedAttentionArgs(64, 64, 128, decode_only=True),
    "decode-16": SelectedAttentionArgs(64, 64, 16, decode_only=True),
    "mixed-128": SelectedAttentionArgs(256, 16, 128),
    "mixed-16": SelectedAttentionArgs(256, 16, 16),
    "mixed-fp32": SelectedAttentionArgs(64, 8, 20, LatentLayout(48, 16, "float32", 128)),
}
