"""Named static shapes of calls of ragged_paged_attention, for compile tests and schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pagoda.kernels_pallas.chips import ChipInfo
from pagoda.kernels_pallas.ragged_paged_attention import ragged_paged_attention
from pagoda.kernels_pallas.ragged_paged_attention.layout import PagedKvLayout
from pagoda.kernels_pallas.ragged_paged_attention.plan import NO_RULES, StaticRules


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
