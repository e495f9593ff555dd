"""Softmax attention over K and V as a Flax NNX module. Runs inside `shard_map`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pagoda.backends.jax_tpu.execution.step_input import KernelChoice, PoolInput
from pagoda.backends.jax_tpu.model.layers import (
    Caches,
    JaxRotation,
    Rotations,
    all_reduce,
    local_part,
    normalise,
    piecewise,
    query_growth,
    reduced,
    scale_norm,
    split_norm,
)
from pagoda.backends.jax_tpu.model.lora import AdapterOutputs, JaxLora, LoraTerm, concatenated
from pagoda.backends.jax_tpu.model.mixers.bidirectional import attend_bidirectionally
from pagoda.backends.jax_tpu.model.mixers.block_sparse import JaxBlockIndex
from pagoda.backends.jax_tpu.model.mixers.ops import CostedStep, JaxMixerOps, MixerCost, MixerModule
from pagoda.backends.jax_tpu.model.parameters import AnyStep, JaxBuildContext, project, tokens_are_columns
from pagoda.backends.jax_tpu.model.slots import HeadLayout, KvStack, LatentStack, Stack
from pagoda.backends.jax_tpu.weights.arrange import Array, Placement, arrange_columns
from pagoda.common.models.mixers import Attention
from pagoda.kernels_pallas.ragged_paged_attention import ragged_paged_attention
from pagoda.kernels_pallas.ragged_paged_attention.plan import BlockSource, StaticRules, block_entry, tuning_key


def head_layout(spec: Attention, tensor: int) -> HeadLayout:
    """Return how the heads are arranged in slots."""
    return HeadLayout.of(heads=spec.heads, kv_heads=spec.kv_heads, tensor=tensor)


def slot_parts(spec: Attention, group: int) -> int:
    """Return the heads that a slot projects: queries, key, value if as wide, gates of the output's channels.

    Not the value if it is the key; neither if they are another layer's.
    """
    one = spec.values_are_keys or spec.value_width != spec.head_dim
    keys_and_values = 0 if spec.shares_cache_of is not None else 1 if one else 2
    return group + keys_and_values + (group if spec.output_gate and not spec.gate_per_head else 0)


@dataclass(frozen=True, slots=True)
class JaxHeadTerms:
    """The heads of a device, and what each query head has of its own; None: the layer has none."""

    kv_heads: int
    sinks: jax.Array | None = None  # [N]
    slopes: jax.Array | None = None  # float32 [N], of ALiBi


class JaxAttention(MixerModule):
    """Grouped-query attention over the paged cache (generation) or within the prompts of a step (pooling).

    Heads are arranged in slots (see `slots.HeadLayout`): a slot is one KV head with its query heads, so that one axis
    can be sharded over the devices. `qkv` [K * n, H, D]: per slot K the G query heads, then key and value unless they
    are another layer's, then G gates if the output has one per channel; `gate` [K, G, D] if it has one per head.
    `values` [K, V, D] has the values if they are not as wide. `out` [D, K * G * V] is flat: with G as the second-last
    axis the TPU would choose a layout that must be undone in every step.
    """

    def __init__(self, spec: Attention, width: int, build: JaxBuildContext) -> None:
        layout = head_layout(spec, build.tensor)
        slots = layout.slots
        group = layout.group
        dim = spec.head_dim
        self.spec = spec
        self.layout = layout
        self.kv_heads = slots // build.tensor
        parts = slot_parts(spec, group)
        inputs = spec.input_width(width)
        self.qkv = build.matrix("qkv", "K.D", slots * parts, dim, inputs)
        self.qkv_bias = build.parameter("KGH", slots, parts, dim) if spec.qkv_bias else None
        apart = spec.value_width != dim and spec.shares_cache_of is None
        self.values = build.matrix("values", "K.D", slots, spec.value_width, inputs) if apart else None
        self.values_bias = build.parameter("KH", slots, spec.value_width) if apart and spec.qkv_bias else None
        self.out = build.matrix("out", "DK", width, slots * group * spec.value_width)
        self.out_bias = build.parameter("D", width) if spec.out_bias else None
        self.q_norm, self.k_norm = _qk_norms(spec, slots, group, build)
        biased = spec.qk_norm is not None and spec.qk_norm.bias
        self.q_norm_bias, self.k_norm_bias = _qk_norms(spec, slots, group, build) if biased else (None, None)
        self.out_norm = None if spec.out_norm is None else build.parameter("KGH", slots, group, spec.value_width)
        self.sinks = build.parameter("KG", slots, group) if spec.sinks else None
        self.gate = build.parameter("KGD", slots, group, width) if spec.gate_per_head else None
        self.gate_bias = build.parameter("KG", slots, group) if spec.gate_per_head and spec.qkv_bias else None
        self.kv_scale = build.float32().parameter(".", 2) if build.scaled_cache else None  # of K, of V
        self.lora_in, self.lora_out = _lora(spec, layout, inputs, width, build)
        self.blocks = None if spec.blocks is None else JaxBlockIndex(spec.blocks, spec, slots, width, build)

    def __call__(
        self,
        x: jax.Array,
        caches: Caches,
        cache_index: jax.Array,
        rotations: Rotations,
        step: AnyStep,
        added: jax.Array | None = None,
    ) -> tuple[jax.Array, Caches]:
        """X [T, D], the stacked caches, block table and layer of each (int32 [2 n]) -> [T, D] and the caches.

        `added` [T, K, n, H]: to the projected heads, see `JaxAdapters`.
        """
        # The barrier keeps XLA from reshaping the product, for which it would copy the weight first.
        heads = jax.lax.optimization_barrier(piecewise(lambda piece: project(piece, self.qkv, step), x, step))
        heads = heads.reshape(heads.shape[0], self.kv_heads, -1, self.spec.head_dim)
        heads = heads if added is None else heads + added
        low_rank = self._adapters(x, step)
        if low_rank:
            fused = [term for term in low_rank.values() if term.addend.ndim == heads.ndim]
            heads = concatenated(fused, 2).on(heads)
        if self.qkv_bias is not None:
            heads = heads + self.qkv_bias[...]
        group = self.layout.group
        gates = None
        if self.spec.output_gate and self.gate is None:
            heads, gates = heads[:, :, :-group], heads[:, :, -group:]
        if self.spec.qkv_clip is not None:
            heads = jnp.clip(heads, -self.spec.qkv_clip, self.spec.qkv_clip)
        rotate = None if self.spec.rope is None else rotations[self.spec.rope]
        q, k, v = self._rotated(heads, self._values(x, step, low_rank.get("v")), rotate)
        if self.spec.query_growth is not None:
            q = q * query_growth(self.spec.query_growth, step.positions).astype(q.dtype)
        scales = None if self.kv_scale is None else self.kv_scale[...]
        if self.blocks is None:
            attended, cache = attend(step, q, k, v, caches[0], cache_index, self.spec, self._terms(), scales)
        else:
            assert k is not None, "an indexer's layer keeps K and V"
            assert v is not None
            caches = caches[0], self.blocks.store(x, caches[1], cache_index[2:], rotations, step)
            attended, cache = self.blocks.attend(x, (q, k, v), caches, cache_index, rotations, step)
        if self.gate is not None:
            gates = project(x, self.gate[...])
            gates = low_rank["gate"].on(gates) if low_rank else gates
            gates = (gates if self.gate_bias is None else gates + self.gate_bias[...])[..., None]
        if gates is not None:
            attended = attended * jax.nn.sigmoid(gates.reshape(*attended.shape[:2], -1))
        attended = self._normed(attended.reshape(len(x), -1))
        out = piecewise(lambda piece: reduced(self._addend(piece, step), step), attended, step)
        return (out if self.out_bias is None else out + self.out_bias[...]), (cache, *caches[1:])

    def _normed(self, attended: jax.Array) -> jax.Array:
        """Apply the norm of all heads, if any, to attended values [T, K*G*V]. Empty head positions become zeros."""
        if self.spec.out_norm is None or self.out_norm is None:
            return attended
        heads = self.layout.queries(np.ones(self.spec.heads, np.float32), 1)[..., 0]
        real = local_part(jnp.asarray(heads), self.kv_heads).reshape(-1)
        attended = jnp.where(jnp.repeat(real, self.spec.value_width) > 0, attended, 0)
        weight = self.out_norm[...].reshape(-1)
        return split_norm(attended, self.spec.out_norm, weight, self.spec.heads * self.spec.value_width)

    def _addend(self, attended: jax.Array, step: AnyStep) -> jax.Array:
        """Attended [T, K*G*V] -> this device's addend of the output [T, D] without its bias."""
        out = project(attended, self.out, step)
        if self.lora_out is None or step.adapter_mask is None:
            return out
        return self.lora_out(attended, step.adapter_mask)[0].on(out)

    def _adapters(self, x: jax.Array, step: AnyStep) -> dict[str, LoraTerm]:
        """X [T, D] -> the terms of adapters by projection: [T, K, n, H], or [T, K, ...] of one that is apart."""
        if self.lora_in is None or step.adapter_mask is None:
            return {}
        return dict(zip(_projections(self.spec), self.lora_in(x, step.adapter_mask)))

    def _values(self, x: jax.Array, step: AnyStep, term: LoraTerm | None) -> jax.Array | None:
        """X [T, D] -> values [T, K, V] if they have a projection of their own. `term`: of their adapters."""
        if self.values is None:
            return None
        v = project(x, self.values, step)
        v = v if term is None else term.on(v)
        v = v if self.values_bias is None else v + self.values_bias[...]
        return v if self.spec.qkv_clip is None else jnp.clip(v, -self.spec.qkv_clip, self.spec.qkv_clip)

    def _rotated(
        self, heads: jax.Array, v: jax.Array | None, rotation: JaxRotation | None
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """Heads [T, K, n, H] -> normalised and rotated q [T, N, H] and k [T, K, H], v; None if another layer's.

        `v` [T, K, V]: values that are not among the heads.
        """
        q = heads[:, :, : self.layout.group]
        k = None
        if self.spec.shares_cache_of is None:
            k = heads[:, :, self.layout.group]
            v = heads[:, :, -1] if v is None else v
            if self.spec.value_norm is not None:
                v = normalise(v, self.spec.value_norm, None)
        if not self.spec.qk_norm_after_rope:
            q, k = self._normalise(q, k)
        if rotation is not None:
            rotate = partial(rotation, columns=tokens_are_columns(len(q)))
            q = rotate(q)
            k = None if k is None else rotate(k)
        if self.spec.qk_norm_after_rope:
            q, k = self._normalise(q, k)
        return q.reshape(len(q), -1, q.shape[-1]), k, v

    def _terms(self) -> JaxHeadTerms:
        """Return the sinks and ALiBi slopes of this device's heads."""
        sinks = None if self.sinks is None else self.sinks[...].reshape(-1)
        if self.spec.alibi_slopes is None:
            return JaxHeadTerms(self.kv_heads, sinks)
        slopes = self.layout.queries(np.asarray(self.spec.alibi_slopes, np.float32), 1)
        return JaxHeadTerms(self.kv_heads, sinks, local_part(jnp.asarray(slopes), self.kv_heads).reshape(-1))

    def _normalise(self, q: jax.Array, k: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        """Apply the QK norm, if any, to q [T, K, G, H] and k [T, K, H]."""
        norm = self.spec.qk_norm
        if norm is None:
            return q, k
        if self.q_norm is None:
            return normalise(q, norm, None), None if k is None else normalise(k, norm, None)
        if self.spec.qk_norm_over != "full":
            q = normalise(q, norm, self.q_norm[...], None if self.q_norm_bias is None else self.q_norm_bias[...])
            if k is not None and self.k_norm is not None:
                k = normalise(k, norm, self.k_norm[...], None if self.k_norm_bias is None else self.k_norm_bias[...])
            return q, k
        wide = q.astype(jnp.float32)
        # Empty head positions hold zeros and copies count once, so the sums cover exactly the full projection.
        mean = all_reduce(jnp.square(wide).sum((1, 2, 3))) / (self.spec.heads * self.spec.head_dim)
        q = scale_norm(wide, mean[:, None, None, None], norm, self.q_norm[...]).astype(q.dtype)
        if k is not None and self.k_norm is not None:
            first_copy = local_part(jnp.asarray(self.layout.first_copy), k.shape[1])[:, None]
            wide = k.astype(jnp.float32)
            mean = all_reduce((jnp.square(wide) * first_copy).sum((1, 2))) / (self.spec.kv_heads * self.spec.head_dim)
            k = scale_norm(wide, mean[:, None, None], norm, self.k_norm[...]).astype(k.dtype)
        return q, k


def _projections(spec: Attention) -> tuple[str, ...]:
    """Return the projections of the input, in the order of a slot's heads."""
    keys = () if spec.shares_cache_of is not None else ("k",) if spec.values_are_keys else ("k", "v")
    return ("q", *keys, *(("gate",) if spec.output_gate else ()))


def _lora(
    spec: Attention, layout: HeadLayout, inputs: int, width: int, build: JaxBuildContext
) -> tuple[JaxLora | None, JaxLora | None]:
    """Return the adapters of the projections of the input, and of the output; None without slots."""
    if build.lora is None:
        return None, None
    slots = layout.slots
    group = layout.group
    dim = spec.head_dim
    value = (slots, 1, dim) if spec.value_width == dim else (slots, spec.value_width)
    gate = (slots, group) if spec.gate_per_head else (slots, group, dim)
    shapes = {"q": (slots, group, dim), "k": (slots, 1, dim), "v": value, "gate": gate}
    outputs = [AdapterOutputs("K" + "." * (len(shapes[name]) - 1), shapes[name]) for name in _projections(spec)]
    out = JaxLora("K", slots * group * spec.value_width, (AdapterOutputs("D", (width,)),), build)
    return JaxLora("D", inputs, outputs, build), out


def _qk_norms(
    spec: Attention, slots: int, group: int, build: JaxBuildContext
) -> tuple[nnx.Param | None, nnx.Param | None]:
    """Create the QK norm's weights, or its biases: [H] each, or one per channel of the full projections."""
    if spec.qk_norm is None or not spec.qk_norm.scale:
        return None, None
    shared = spec.shares_cache_of is not None
    dim = spec.head_dim
    if spec.qk_norm_over == "per_head":
        return build.parameter("H", dim), None if shared else build.parameter("H", dim)
    return build.parameter("KGH", slots, group, dim), None if shared else build.parameter("KH", slots, dim)


def attend(
    step: AnyStep,
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    cache: jax.Array,
    cache_index: jax.Array,
    spec: Attention,
    terms: JaxHeadTerms,
    scales: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Write K [T, K, H] and V [T, K, V], if any, into the stacked cache, then attend: q [T, N, H] -> [T, N, V], cache.

    `cache_index` int32 [2]: block table, layer of the stacked cache. `scales` [2]: of K and V in a scaled cache, which
    the scratch cache of a pooling step is not. Bidirectional layers use no cache.
    """
    if isinstance(step, PoolInput) and not spec.causal:
        assert k is not None, "a bidirectional layer keeps no K and V for others"
        assert v is not None
        return attend_bidirectionally(step, q, k, v, spec, terms.slopes), cache
    k_scale, v_scale = (None, None) if scales is None or isinstance(step, PoolInput) else scales
    kernel = step.kernel
    return ragged_paged_attention(
        q,
        k,
        v,
        cache,
        layout=kernel.kv_layout(terms.kv_heads, spec.head_dim, spec.value_width),
        scale=spec.scale,
        softcap=spec.softcap,
        window=spec.window,
        rules=StaticRules(spec.chunk, spec.lookback, spec.alibi_root),
        sinks=terms.sinks,
        slopes=terms.slopes,
        batch_invariant=kernel.batch_invariant,
        k_scale=k_scale,
        v_scale=v_scale,
        **step.kernel_batch(cache_index, cache),
        **kernel.options,
    )


class AttentionOps(JaxMixerOps[Attention]):
    """What the backend knows of this kind, see `JaxMixerOps`."""

    matrices = frozenset({"qkv", "values", "out"})
    exchanges_pieces = True

    def module(self, spec: Attention, width: int, build: JaxBuildContext) -> JaxAttention:
        return JaxAttention(spec, width, build)

    def placements(self, spec: Attention, tensor: int) -> Iterator[tuple[str, Placement]]:
        heads = head_layout(spec, tensor)
        dim = spec.head_dim

        def queries(rows: Array) -> Array:
            return heads.queries(rows, dim)

        def keys(rows: Array) -> Array:
            return heads.keys(rows, dim)

        def keys_in_slots(rows: Array) -> Array:
            return keys(rows)[:, None]

        for suffix, target in (("", "qkv"), ("_bias", "qkv_bias")):
            yield f"q{suffix}", Placement((target,), (), queries)
            yield f"k{suffix}", Placement((target,), (0, heads.group), keys_in_slots)
            if spec.value_width == dim:
                yield f"v{suffix}", Placement((target,), (0, heads.group + 1), keys_in_slots)
            else:
                yield f"v{suffix}", Placement((f"values{suffix}",), (), lambda rows: heads.keys(rows, spec.value_width))
            if spec.gate_per_head:
                yield f"gate{suffix}", Placement((f"gate{suffix}",), (), lambda rows: heads.queries(rows, 1)[:, :, 0])
            else:
                yield f"gate{suffix}", Placement((target,), (0, slot_parts(spec, heads.group) - heads.group), queries)
        yield (
            "o",
            Placement(
                ("out",), (), lambda rows: arrange_columns(rows, lambda rows: heads.queries(rows, spec.value_width))
            ),
        )
        yield "o_bias", Placement(("out_bias",))
        yield "out_norm", Placement(("out_norm",), (), lambda rows: heads.queries(rows, spec.value_width))
        yield "sinks", Placement(("sinks",), (), lambda rows: heads.queries(rows, 1)[..., 0])
        if spec.blocks is not None:
            index_dim = spec.blocks.head_dim
            yield "blocks.q", Placement(("blocks", "q"), (), lambda rows: heads.keys(rows, index_dim))
            yield "blocks.k", Placement(("blocks", "k"))
            for part in "qk":
                yield f"blocks.{part}_norm", Placement(("blocks", f"{part}_norm", "weight"))
        shared = spec.qk_norm_over == "per_head"  # by all heads
        for suffix in ("", "_bias"):
            for name, arrange in (("q_norm", queries), ("k_norm", keys)):
                target = f"{name}{suffix}"
                yield target, Placement((target,), (), (lambda v: v) if shared else partial(_flat, arrange))

    def stacks(self, spec: Attention, tensor: int) -> tuple[tuple[Stack, ...], ...]:
        if spec.shares_cache_of is not None:
            return ()
        keys_and_values = KvStack(head_layout(spec, tensor).slots, spec.head_dim, spec.value_width)
        return (
            ((keys_and_values,),)
            if spec.blocks is None
            else ((keys_and_values,), (LatentStack(spec.blocks.head_dim, 0),))
        )

    def cost_beside_xla(self, spec: Attention, step: CostedStep) -> MixerCost:
        """Return the FLOP alone: operands of plain XLA may stay on chip."""
        pairs = step.load.pairs if spec.causal else 2 * step.load.pairs
        heads = head_layout(spec, step.tensor)
        channels = spec.head_dim + spec.value_width
        return MixerCost(0, 2 * pairs * heads.slots * heads.group * channels // step.tensor)

    def without_layer_numbers(self, spec: Attention) -> Attention:
        return spec if spec.shares_cache_of is None else replace(spec, shares_cache_of=0)

    def has_projection(self, spec: Attention, name: str) -> bool:
        return name != "v" or not spec.values_are_keys

    def cache_without_scale(self, spec: Attention) -> str | None:
        if spec.blocks is not None:
            return "caches with an indexer"
        return "caches that layers share" if spec.shares_cache_of is not None else None

    def scored_heads(self, spec: Attention) -> int:
        return spec.heads

    def untuned(self, spec: Attention, kernel: KernelChoice, tensor: int) -> tuple[str, ...]:
        if not kernel.use_kernel:
            return ()
        heads = head_layout(spec, tensor)
        layout = kernel.kv_layout(heads.slots // tensor, spec.head_dim, spec.value_width)
        rows = heads.group * layout.heads_per_row
        missing = []
        for decode in (False,) if kernel.batch_invariant else (True, False):
            source = block_entry(kernel.chip, layout, rows, decode=decode).source
            if source is not BlockSource.TUNED:
                missing.append(f"{tuning_key(kernel.chip, layout, rows, decode=decode)} ({source.value})")
        return tuple(missing)


def adapter_placements(spec: Attention, tensor: int) -> Iterator[tuple[str, Placement]]:
    """Yield the placements of the low-rank adapters of an input block's attention, see `JaxAdapters`."""
    heads = head_layout(spec, tensor)
    arranged = {"q": lambda rows: heads.queries(rows, spec.head_dim)}
    arranged |= dict.fromkeys("kv", lambda rows: heads.keys(rows, spec.head_dim)[:, None])
    for index, (part, arrange) in enumerate(arranged.items()):
        yield f"{part}_adapter", Placement(("first",), (index,), lambda rows: rows[None])
        yield f"{part}_adapter_out", Placement((part,), (), arrange)


def _flat(arrange: Callable[[Array], Array], values: Array) -> Array:
    return arrange(values.reshape(-1))
