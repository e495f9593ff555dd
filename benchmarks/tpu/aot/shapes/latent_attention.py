"""Named static shapes of calls of latent_attention, for compile tests and schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pagoda.kernels_pallas.chips import ChipInfo
from pagoda.kernels_pallas.latent_attention import latent_attention
from pagoda.kernels_pallas.latent_attention.layout import LatentLayout


@dataclass(frozen=True)
class LatentAttentionArgs:
    """One compiled shape: T tokens, S sequences, N query heads, `context` tokens of page table."""

    tokens: int
    seqs: int
    heads: int
    layout: LatentLayout
    context: int = 1024
    layers: int = 4
    pages: int = 1024
    decode_only: bool = False

    def function(self, chip: ChipInfo) -> Callable[..., Any]:
        """Return the call as a function of `arguments`, jitted with the cache donated."""

        def attend(cache: jax.Array, arrays: dict[str, Any]) -> Any:
            return latent_attention(**arrays, cache=cache, layout=self.layout, decode_only=self.decode_only, chip=chip)

        return jax.jit(attend, donate_argnums=0)

    def arguments(self, sharding: Any = None) -> tuple[Any, ...]:
        """Return the ShapeDtypeStructs for `function`."""

        def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        layout = self.layout
        ints = jnp.int32
        arrays = {
            "q": array((self.tokens, self.heads, layout.channels), layout.compute_dtype),
            "latents": array((self.tokens, layout.channels), layout.compute_dtype),
            "layer": array((), ints),
            "query_start": array((self.seqs + 1,), ints),
            "kv_len": array((self.seqs,), ints),
            "page_table": array((self.seqs, -(-self.context // layout.page_size)), ints),
            "counts": array((2,), ints),
            "scale": array((), jnp.float32),
        }
        return array(layout.shape(self.layers, self.pages), layout.word_dtype), arrays


_BF16 = LatentLayout(512, 64, "bfloat16", 128)
SPECS: dict[str, LatentAttentionArgs] = {
    "decode-128": LatentAttentionArgs(64, 64, 128, _BF16, decode_only=True),
    "decode-2": LatentAttentionArgs(64, 64, 2, _BF16, decode_only=True),
    "mixed-16": LatentAttentionArgs(256, 16, 16, _BF16),
    "mixed-128": LatentAttentionArgs(512, 8, 128, _BF16, context=2048),
    "mixed-fp32": LatentAttentionArgs(64, 8, 20, LatentLayout(48, 16, "float32", 128)),
}
