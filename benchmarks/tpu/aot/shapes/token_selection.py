"""Named static shapes of calls of token_selection, for compile tests and schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pagoda.kernels_pallas.chips import ChipInfo
from pagoda.kernels_pallas.latent_attention.layout import LatentLayout
from pagoda.kernels_pallas.ragged_paged_attention.plan import RaggedBatch
from pagoda.kernels_pallas.token_selection import select_tokens


@dataclass(frozen=True)
class TokenSelectionArgs:
    """One compiled shape: T tokens, S sequences, N index heads, `context` tokens of page table."""

    tokens: int
    seqs: int
    heads: int = 64
    layout: LatentLayout = LatentLayout(128, 0, "bfloat16", 128)
    top: int = 2048
    context: int = 4096
    layers: int = 4
    pages: int = 1024
    decode_only: bool = False

    def function(self, chip: ChipInfo) -> Callable[..., Any]:
        """Return the call as a function of `arguments`, jitted."""

        def select(cache: jax.Array, arrays: dict[str, Any]) -> Any:
            return select_tokens(
                **arrays, cache=cache, layout=self.layout, top=self.top, decode_only=self.decode_only, chip=chip
            )

        return jax.jit(select)

    def arguments(self, sharding: Any = None) -> tuple[Any, ...]:
        """Return the ShapeDtypeStructs for `function`."""

        def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        layout = self.layout
        ints = jnp.int32
        pages = -(-self.context // layout.page_size)
        batch: Any = (array(size, ints) for size in ((self.seqs + 1,), (self.seqs,), (self.seqs, pages), (2,)))
        arrays = {
            "q": array((self.tokens, self.heads, layout.channels), layout.compute_dtype),
            "weights": array((self.tokens, self.heads), jnp.float32),
            "layer": array((), ints),
            "batch": RaggedBatch(*batch),
        }
        return array(layout.shape(self.layers, self.pages), layout.word_dtype), arrays


SPECS: dict[str, TokenSelectionArgs] = {
    "decode-64": TokenSelectionArgs(64, 64, decode_only=True),
    "decode-long": TokenSelectionArgs(8, 8, context=163840, pages=2048, decode_only=True),
    "mixed-64": TokenSelectionArgs(256, 16),
    "mixed-32": TokenSelectionArgs(256, 16, heads=32),
    "mixed-fp32": TokenSelectionArgs(64, 8, 8, LatentLayout(64, 0, "float32", 128), top=1024),
}
