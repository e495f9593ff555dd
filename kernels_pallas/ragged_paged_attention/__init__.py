"""Ragged paged attention: prefill and decode in one call that also writes K and V to the paged cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from pagoda.kernels_pallas.chips import CHIPS, ChipInfo
from pagoda.kernels_pallas.ragged_paged_attention.call import attention_kernel
from pagoda.kernels_pallas.ragged_paged_attention.layout import PagedKvLayout
from pagoda.kernels_pallas.ragged_paged_attention.plan import (
    NO_RULES,
    RaggedBatch,
    Scalar,
    StaticRules,
    check,
    make_knobs,
)
from pagoda.kernels_pallas.ragged_paged_attention.reference import attention_reference

__all__ = ["PagedKvLayout", "ragged_paged_attention"]


def ragged_paged_attention(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    cache: jax.Array,
    *,
    layout: PagedKvLayout,
    layer: jax.Array | int,
    query_start: jax.Array,
    kv_len: jax.Array,
    page_table: jax.Array,
    counts: jax.Array,
    scale: Scalar,
    softcap: Scalar | None = None,
    window: Scalar | None = None,
    rules: StaticRules = NO_RULES,
    sinks: jax.Array | None = None,
    slopes: jax.Array | None = None,
    k_scale: Scalar | None = None,
    v_scale: Scalar | None = None,
    decode_only: bool = False,
    batch_invariant: bool = False,
    use_kernel: bool = True,
    interpret: Any = False,
    chip: ChipInfo = CHIPS["v6e"],
) -> tuple[jax.Array, jax.Array]:
    """Write k and v into the cache, then attend causally: every token to its sequence up to itself.

    q: [T, N, H]; k: [T, K, H], v: [T, K, V], this step's tokens, sequence by sequence. k and v None: the cache has them
    already.
    cache: [L, P, R, B, 128], of `layout.shape`, updated in place if donated. layer: int32 [], which of the L to use.
    query_start: int32 [S + 1], first token of each sequence; query_start[0] is 0.
    kv_len: int32 [S], tokens of each sequence after this step. Its tokens have positions kv_len - q_len .. kv_len.
    page_table: int32 [S, max_pages]. Its width is static: a bucket chosen by the caller.
    counts: int32 [2], number of decode sequences (one token each, first in the batch), number of sequences (each with
    at least one token).
    scale, softcap, k_scale, v_scale: float32 []; window: int32 []; sinks, slopes: float32 [N]. See `plan.Knobs`. Their
    values are traced, so one program serves all values.

    Static: which of these options are None; rules (see `plan.StaticRules`); decode_only (all sequences have one token:
    the mixed variant is not built); batch_invariant (decode sequences are computed as all others are, in passes that
    begin at multiples of their size: with T, S and max_pages constant a token's result depends on its sequence alone);
    use_kernel (False: the jnp reference); interpret (True or pltpu.InterpretParams); chip to compile for (two
    TensorCores of a device divide the lane heads, where their number is even).

    Return (out [T, N, V] of q's dtype, cache). Tokens beyond query_start[counts[1]] and sequences beyond counts are
    padding: ignored even if NaN, with zero outputs and no cache writes.
    Raise ValueError for invalid shapes or dtypes, or a page table too large for scalar memory.
    """
    batch = RaggedBatch(query_start, kv_len, page_table, counts)
    check(q, k, v, cache, layout, batch)
    knobs = make_knobs(scale, softcap, window, sinks, slopes, k_scale, v_scale)
    layer = jnp.asarray(layer, jnp.int32)
    if batch_invariant:
        batch = replace(batch, counts=batch.counts.at[0].set(0))
        decode_only = False
    if not use_kernel:
        return attention_reference(
            q, k, v, cache, layer, batch, knobs, layout=layout, decode_only=decode_only, rules=rules
        )
    return attention_kernel(
        q,
        k,
        v,
        cache,
        layer,
        batch,
        knobs,
        layout=layout,
        decode_only=decode_only,
        rules=rules,
        batch_invariant=batch_invariant,
        interpret=interpret,
        chip=chip,
    )


# Named static shapes of a call, for compile tests and schedules.


@dataclass(frozen=True)
class RaggedAttentionArgs:
    """One compiled shape: T tokens, S sequences, N query heads over `layout`, `context` tokens of page table."""

    tokens: int
    seqs: int
    heads: int
    layout: PagedKvLayout
    context: int = 1024
    layers: int = 4
    pages: int = 1024
    knobs: tuple[str, ...] = ()  # fields of plan.Knobs that are set, besides `scale`
    decode_only: bool = False
    rules: StaticRules = NO_RULES
    batch_invariant: bool = False

    def function(self, chip: ChipInfo) -> Callable[..., Any]:
        """Return the call as a function of `arguments`, jitted with the cache donated."""

        def attend(cache: jax.Array, arrays: dict[str, Any], knobs: dict[str, Any]) -> Any:
            return ragged_paged_attention(
                **arrays,
                **knobs,
                cache=cache,
                layout=self.layout,
                decode_only=self.decode_only,
                rules=self.rules,
                batch_invariant=self.batch_invariant,
                chip=chip,
            )

        return jax.jit(attend, donate_argnums=0)

    def arguments(self, sharding: Any = None) -> tuple[Any, ...]:
        """Return the ShapeDtypeStructs for `function`."""

        def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        layout = self.layout
        ints = jnp.int32
        pages = -(-self.context // layout.page_size)
        k, v = (
            array((self.tokens, layout.kv_heads, dim), layout.compute_dtype)
            for dim in (layout.head_dim, layout.value_dim)
        )
        arrays = {
            "q": array((self.tokens, self.heads, layout.head_dim), layout.compute_dtype),
            "k": k,
            "v": v,
            "layer": array((), ints),
            "query_start": array((self.seqs + 1,), ints),
            "kv_len": array((self.seqs,), ints),
            "page_table": array((self.seqs, pages), ints),
            "counts": array((2,), ints),
        }
        shapes = dict.fromkeys(("sinks", "slopes"), (self.heads,))
        knobs = {
            name: array(shapes.get(name, ()), ints if name == "window" else jnp.float32)
            for name in (*self.knobs, "scale")
        }
        return array(layout.shape(self.layers, self.pages), layout.word_dtype), arrays, knobs


def spec(name: str) -> RaggedAttentionArgs:
    """Return the named shape. Raise KeyError if unknown."""
    if name not in SPECS:
        raise KeyError(f"unknown shape {name!r}; use one of {', '.join(SPECS)}")
    return SPECS[name]


def _bf16(kv_heads: int, head_dim: int, value_dim: int = 0) -> PagedKvLayout:
    return PagedKvLayout(kv_heads, head_dim, "bfloat16", 128, value_dim)


SPECS: dict[str, RaggedAttentionArgs] = {
    "decode-8kv": RaggedAttentionArgs(64, 64, 32, _bf16(8, 128), decode_only=True),
    "prefill-8kv": RaggedAttentionArgs(2048, 8, 32, _bf16(8, 128), context=2048),
    "mixed-1kv": RaggedAttentionArgs(256, 64, 8, _bf16(1, 128), context=8192),
    "invariant-8kv-window": RaggedAttentionArgs(
        256, 64, 32, _bf16(8, 128), context=8192, knobs=("window",), batch_invariant=True
    ),
    "mixed-hd64-sinks-window": RaggedAttentionArgs(64, 8, 64, _bf16(8, 64), knobs=("sinks", "window")),
    "mixed-chunk": RaggedAttentionArgs(2048, 8, 40, _bf16(8, 128), context=16384, rules=StaticRules(8192)),
    "mixed-chunk-lookback": RaggedAttentionArgs(
        256, 8, 32, _bf16(8, 128), context=16384, rules=StaticRules(4096, lookback=4096)
    ),
    "mixed-hd128-slopes": RaggedAttentionArgs(64, 8, 8, _bf16(8, 128), knobs=("slopes",)),
    "mixed-hd128-slopes-root": RaggedAttentionArgs(
        64, 8, 12, _bf16(1, 128), knobs=("slopes",), rules=StaticRules(alibi_root=True)
    ),
    "mixed-hd192-values128": RaggedAttentionArgs(64, 8, 16, _bf16(1, 192, 128)),
    "mixed-hd192-values128-sinks-window": RaggedAttentionArgs(64, 8, 64, _bf16(8, 192, 128), knobs=("sinks", "window")),
    "mixed-hd256-softcap-window": RaggedAttentionArgs(64, 8, 16, _bf16(8, 256), knobs=("softcap", "window")),
    "mixed-hd80-odd-heads": RaggedAttentionArgs(64, 8, 9, _bf16(3, 80)),
    "mixed-fp32": RaggedAttentionArgs(64, 8, 9, PagedKvLayout(3, 64, "float32", 128)),
    "mixed-int8": RaggedAttentionArgs(64, 8, 32, PagedKvLayout(8, 128, "int8", 128), knobs=("k_scale", "v_scale")),
    "mixed-e4m3": RaggedAttentionArgs(
        64, 8, 8, PagedKvLayout(1, 128, "float8_e4m3fn", 128), knobs=("k_scale", "v_scale")
    ),
    "mixed-e5m2": RaggedAttentionArgs(64, 8, 32, PagedKvLayout(8, 128, "float8_e5m2", 128)),
}
