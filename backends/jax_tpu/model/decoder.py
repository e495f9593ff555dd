"""The decoder as Flax NNX modules, built from a model spec.

Repeating layers, or repeating blocks of different layers, are one module with stacked parameters and a scan over the
repeats. Runs inside `shard_map`: every array is a device's local piece.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pagoda.backends.jax_tpu.execution.step_input import PoolInput
from pagoda.backends.jax_tpu.model.layers import (
    AnyStep,
    JaxBuildContext,
    JaxNorm,
    JaxPooler,
    JaxRotation,
    MoeFfn,
    ParameterStack,
    all_reduce,
    apply_norm,
    local_part,
    make_ffn,
    make_norm,
    normalise,
    project,
    rotation,
    scale_norm,
    table_shape,
)
from pagoda.backends.jax_tpu.model.layout import CacheIndex, HeadLayout, Segment, padded, segments
from pagoda.backends.jax_tpu.parallel import MODEL
from pagoda.common.engine.step import EMBEDDED
from pagoda.common.models.mixers import Attention
from pagoda.common.models.rope import Rope
from pagoda.common.models.spec import Layer, ModelSpec


class JaxAttention(nnx.Module):
    """Grouped-query attention over the paged cache (generation) or within the prompts of a step (pooling).

    Heads are arranged in slots (see `layout.HeadLayout`): a slot is one KV head with its query heads, so that one axis
    can be sharded over the devices. `qkv` [K * (G+2), H, D]: per slot K the G query heads, then key, then value.
    `out` [D, K * G * H] is flat: with G as the second-last axis the TPU would choose a layout that must be undone in
    every step.
    """

    def __init__(self, spec: Attention, width: int, build: JaxBuildContext) -> None:
        layout = HeadLayout.of(spec, build.tensor)
        slots, group, dim = layout.slots, layout.group, spec.head_dim
        self.spec, self.layout = spec, layout
        self.qkv, self.qkv_scale = build.matrix("K.D", slots * (group + 2), dim, width)
        self.qkv_bias = build.parameter("KGH", slots, group + 2, dim) if spec.qkv_bias else None
        self.out, self.out_scale = build.matrix("DK", width, slots * group * dim)
        self.out_bias = build.parameter("D", width) if spec.out_bias else None
        self.q_norm, self.k_norm = _qk_norms(spec, slots, group, build)
        self.kv_scale = build.float32().parameter(".", 2) if build.scaled_cache else None  # of K, of V

    def __call__(
        self, x: jax.Array, cache: jax.Array, cache_index: jax.Array, rotation: JaxRotation | None, step: AnyStep
    ) -> tuple[jax.Array, jax.Array]:
        """X [T, D], the stacked cache, this layer's int32 [2] (block table, cache layer) -> [T, D] and the cache."""
        # The barrier keeps XLA from reshaping the product, for which it would copy the weight first.
        heads = jax.lax.optimization_barrier(project(x, self.qkv[...], self.qkv_scale))
        heads = heads.reshape(heads.shape[0], -1, self.layout.group + 2, self.spec.head_dim)
        if self.qkv_bias is not None:
            heads = heads + self.qkv_bias[...]
        tokens, slots, per_slot, dim = heads.shape
        q, k, v = heads[:, :, :-2], heads[:, :, -2], heads[:, :, -1]
        q, k = self._normalise(q, k)
        q = q.reshape(tokens, slots * (per_slot - 2), dim)
        if rotation is not None:
            q, k = rotation(q), rotation(k)
        scales = None if self.kv_scale is None else self.kv_scale[...]
        attended, cache = step.attend(q, k, v, cache, cache_index, self.spec, scales)
        out = all_reduce(project(attended.reshape(tokens, -1), self.out[...], self.out_scale))
        return (out if self.out_bias is None else out + self.out_bias[...]), cache

    def _normalise(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Apply the QK norm, if any, to q [T, K, G, H] and k [T, K, H]."""
        norm = self.spec.qk_norm
        if norm is None or self.q_norm is None or self.k_norm is None:
            return q, k
        if self.spec.qk_norm_over == "per_head":
            return normalise(q, norm, self.q_norm[...]), normalise(k, norm, self.k_norm[...])
        first_copy = local_part(jnp.asarray(self.layout.first_copy), k.shape[1])[:, None]
        wide_q, wide_k = q.astype(jnp.float32), k.astype(jnp.float32)
        # Empty head positions hold zeros and copies count once, so the sums cover exactly the full projection.
        mean_q = all_reduce(jnp.square(wide_q).sum((1, 2, 3))) / (self.spec.heads * self.spec.head_dim)
        mean_k = all_reduce((jnp.square(wide_k) * first_copy).sum((1, 2))) / (self.spec.kv_heads * self.spec.head_dim)
        new_q = scale_norm(wide_q, mean_q[:, None, None, None], norm, self.q_norm[...])
        new_k = scale_norm(wide_k, mean_k[:, None, None], norm, self.k_norm[...])
        return new_q.astype(q.dtype), new_k.astype(k.dtype)


def _qk_norms(
    spec: Attention, slots: int, group: int, build: JaxBuildContext
) -> tuple[nnx.Param | None, nnx.Param | None]:
    """Create the QK norm weights: [H] each, or one per channel of the full projections."""
    if spec.qk_norm is None:
        return None, None
    if spec.qk_norm_over == "per_head":
        return build.parameter("H", spec.head_dim), build.parameter("H", spec.head_dim)
    return build.parameter("KGH", slots, group, spec.head_dim), build.parameter("KH", slots, spec.head_dim)


Caches = tuple[jax.Array, ...]
Rotations = dict[Rope | None, JaxRotation | None]


class JaxDecoder(nnx.Module):
    """Maps token ids and a batch to hidden states and logits. `embed` [V, D], the vocabulary padded with zeros."""

    def __init__(self, spec: ModelSpec, cache_index: CacheIndex, max_len: int, build: JaxBuildContext) -> None:
        embedding = spec.embedding
        embed_width, vocab = embedding.width or spec.width, padded(spec.vocab, build.tensor)
        self.spec = spec
        self.cache_shapes = tuple((slots // build.tensor, head_dim) for slots, head_dim in cache_index.shapes)
        self.embed = build.parameter("VD", vocab, embed_width)
        positions = embedding.positions
        self.positions = (
            None if positions is None else build.parameter(".D", positions + embedding.position_offset, spec.width)
        )
        types = embedding.token_types
        self.token_types = build.parameter(".D", types, spec.width) if types else None
        self.embed_norm = make_norm(embedding.norm, spec.width, build)
        narrow = embed_width != spec.width
        self.embed_in = build.parameter("DD", spec.width, embed_width) if narrow else None
        self.embed_out = build.parameter("DD", embed_width, spec.width) if narrow else None
        self.segments = nnx.List(
            [SegmentLayers(segment, cache_index, spec.width, build) for segment in segments(spec.layers)]
        )
        self.final_norm = make_norm(spec.final_norm, spec.width, build)
        self.head = None if spec.tied else build.parameter("VD", vocab, embed_width)
        self.head_bias = build.parameter("V", vocab) if spec.head_bias else None
        self.pooler = None if spec.pooler is None else JaxPooler(spec.pooler, spec.hidden_width, build.float32())
        self.rotary = nnx.List([build.float32().parameter("...", *table_shape(rope, max_len)) for rope in spec.ropes])

    def hidden(
        self, token_ids: jax.Array, step: AnyStep, caches: Caches, embeds: jax.Array | None = None
    ) -> tuple[jax.Array, Caches]:
        """token_ids int32 [T] -> hidden states [T, D] after the final norm, and the caches with this step's K and V.

        `embeds` [T, D]: scaled embeddings that replace the table's for tokens marked EMBEDDED.
        """
        positions = step.positions
        x = self._embed(token_ids, positions, step.token_types, embeds)
        rotations: Rotations = {None: None}
        for rope, table in zip(self.spec.ropes, self.rotary):
            rotations[rope] = rotation(table[...], positions)
        for segment in self.segments:
            x, caches = segment(x, caches, rotations, step)
        return apply_norm(self.final_norm, x), caches

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Hidden [R, D] -> float32 logits [R, V], replicated; -inf for vocabulary padding."""
        if self.embed_out is not None:
            hidden = project(hidden, self.embed_out[...])
        head = self.embed if self.head is None else self.head
        logits = project(hidden, head[...]).astype(jnp.float32)
        if self.head_bias is not None:
            logits = logits + self.head_bias[...].astype(jnp.float32)
        logits = jax.lax.all_gather(logits, MODEL, axis=1, tiled=True) * self.spec.logit_scale
        if self.spec.logit_softcap is not None:
            logits = jnp.tanh(logits / self.spec.logit_softcap) * self.spec.logit_softcap
        return jnp.where(jnp.arange(logits.shape[1]) < self.spec.vocab, logits, -jnp.inf)

    def pooled(self, step: PoolInput) -> jax.Array:
        """Return the pooling head's outputs, float32 [R, n]."""
        assert self.pooler is not None, "the model pools"
        cached = any(mixer.causal for mixer in self.spec.mixers)
        scratch = tuple(step.scratch(*shape) if cached else jnp.zeros(()) for shape in self.cache_shapes)
        hidden, _ = self.hidden(step.token_ids, step, scratch)
        if self.embed_out is not None:
            hidden = project(hidden, self.embed_out[...])
        return self.pooler(step.pool(hidden, self.pooler.kind))

    def _embed(
        self, token_ids: jax.Array, positions: jax.Array, token_types: jax.Array | None, embeds: jax.Array | None
    ) -> jax.Array:
        table, embedding = self.embed[...], self.spec.embedding
        index = token_ids - jax.lax.axis_index(MODEL) * table.shape[0]
        local = (index >= 0) & (index < table.shape[0])
        x = all_reduce(jnp.where(local[:, None], table[jnp.where(local, index, 0)], 0))
        if embedding.scale != 1.0:
            x = x * jnp.asarray(embedding.scale, x.dtype)  # rounded to the weights' dtype, as in training
        if embeds is not None:
            x = jnp.where((token_ids == EMBEDDED)[:, None], embeds, x)
        if self.embed_in is not None:
            x = project(x, self.embed_in[...])
        if self.positions is not None:
            x = x + self.positions[...][positions + embedding.position_offset]
        if self.token_types is not None:
            table = self.token_types[...]
            x = x + (table[0] if token_types is None else table[jnp.minimum(token_types, len(table) - 1)])
        return apply_norm(self.embed_norm, x)


class SegmentLayers(nnx.Module):
    """A repeating block of layers, each with its parameters stacked over the repeats."""

    def __init__(self, segment: Segment, cache_index: CacheIndex, width: int, build: JaxBuildContext) -> None:
        stacked = replace(build, repeats=segment.repeats)
        self.layers = nnx.List([JaxDecoderLayer(layer, width, stacked) for layer in segment.block])
        numbers = segment.numbers.tolist()
        self.indices = tuple(  # [repeats][block]: (block table, cache layer, repeat)
            tuple((cache_index.group[n], cache_index.index[n], repeat) for n in row)
            for repeat, row in enumerate(numbers)
        )
        self.stacks = tuple(cache_index.stack[n] for n in numbers[0])

    def __call__(self, x: jax.Array, caches: Caches, rotations: Rotations, step: AnyStep) -> tuple[jax.Array, Caches]:
        """X [T, D] -> [T, D], and the caches."""
        indices = jnp.asarray(self.indices, jnp.int32)  # [repeats, block, 3]
        split: list[tuple[Any, ...]] = [nnx.split(layer, ParameterStack, ...) for layer in self.layers]

        def block(carry: tuple[jax.Array, Caches], inputs: tuple) -> tuple[tuple[jax.Array, Caches], None]:
            x, caches = carry[0], list(carry[1])
            for position, ((graph, stacked, _), state) in enumerate(zip(split, inputs[0])):
                layer, stack = nnx.merge(graph, stacked, state), self.stacks[position]
                x, caches[stack] = layer(x, caches[stack], inputs[1][position], rotations, step)
            return (x, tuple(caches)), None

        return jax.lax.scan(block, (x, caches), (tuple(state for _, _, state in split), indices))[0]


class JaxDecoderLayer(nnx.Module):
    """One layer: mixer and feed-forward block with their norms, on the residual stream."""

    def __init__(self, spec: Layer, width: int, build: JaxBuildContext) -> None:
        self.spec = spec
        self.mixer = JaxAttention(spec.attention, width, build)
        self.ffn = make_ffn(spec.feed_forward, width, build)
        self.before_mixer = make_norm(spec.norms.before_mixer, width, build)
        self.after_mixer = make_norm(spec.norms.after_mixer, width, build)
        self.before_ffn = make_norm(spec.norms.before_ffn, width, build)
        self.after_ffn = make_norm(spec.norms.after_ffn, width, build)

    def __call__(
        self, x: jax.Array, cache: jax.Array, indices: jax.Array, rotations: Rotations, step: AnyStep
    ) -> tuple[jax.Array, jax.Array]:
        """X [T, D] -> [T, D], and the cache. `indices` int32 [3]: block table, cache layer, repeat."""
        rotation = rotations[self.spec.attention.rope]
        mixed, cache = self.mixer(apply_norm(self.before_mixer, x), cache, indices, rotation, step)
        x = self._add(x, mixed, self.after_mixer)
        return self._add(x, self._ffn(apply_norm(self.before_ffn, x), indices[2], step), self.after_ffn), cache

    def _ffn(self, x: jax.Array, repeat: jax.Array, step: AnyStep) -> jax.Array:
        return self.ffn(x, repeat, step) if isinstance(self.ffn, MoeFfn) else self.ffn(x)

    def _add(self, x: jax.Array, update: jax.Array, after: JaxNorm | None) -> jax.Array:
        if self.spec.norm_after_add:
            return apply_norm(after, x + update)
        return x + apply_norm(after, update)
