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

from pagoda.backends.jax_tpu.execution.packed_input import PackedInput
from pagoda.backends.jax_tpu.model.attention import JaxAttention
from pagoda.backends.jax_tpu.model.layers import (
    AnyStep,
    JaxBuildContext,
    JaxNorm,
    JaxPooler,
    MoeFfn,
    ParameterStack,
    all_reduce,
    apply_norm,
    make_ffn,
    make_norm,
    project,
)
from pagoda.backends.jax_tpu.model.layout import CacheIndex, Segment, padded, segments
from pagoda.backends.jax_tpu.model.rotary import JaxRotation, ropes, rotation, table_shape
from pagoda.backends.jax_tpu.parallel.sharding import MODEL
from pagoda.common.engine.step import EMBEDDED
from pagoda.common.models.spec import Layer, ModelSpec, Rope

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
        self.rotary = nnx.List([build.float32().parameter("...", *table_shape(rope, max_len)) for rope in ropes(spec)])

    def hidden(
        self, token_ids: jax.Array, step: AnyStep, caches: Caches, embeds: jax.Array | None = None
    ) -> tuple[jax.Array, Caches]:
        """token_ids int32 [T] -> hidden states [T, D] after the final norm, and the caches with this step's K and V.

        `embeds` [T, D]: scaled embeddings that replace the table's for tokens marked EMBEDDED.
        """
        positions = step.positions
        x = self._embed(token_ids, positions, step.token_types, embeds)
        rotations: Rotations = {None: None}
        for rope, table in zip(ropes(self.spec), self.rotary):
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

    def pooled(self, step: PackedInput) -> jax.Array:
        """Return the pooling head's outputs, float32 [R, n]."""
        assert self.pooler is not None, "the model pools"
        cached = any(layer.mixer.causal for layer in self.spec.layers)
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
        self.mixer = JaxAttention(spec.mixer, width, build)
        self.ffn = make_ffn(spec.ffn, width, build)
        self.before_mixer = make_norm(spec.norms.before_mixer, width, build)
        self.after_mixer = make_norm(spec.norms.after_mixer, width, build)
        self.before_ffn = make_norm(spec.norms.before_ffn, width, build)
        self.after_ffn = make_norm(spec.norms.after_ffn, width, build)

    def __call__(
        self, x: jax.Array, cache: jax.Array, indices: jax.Array, rotations: Rotations, step: AnyStep
    ) -> tuple[jax.Array, jax.Array]:
        """X [T, D] -> [T, D], and the cache. `indices` int32 [3]: block table, cache layer, repeat."""
        rotation = rotations[self.spec.mixer.rope]
        mixed, cache = self.mixer(apply_norm(self.before_mixer, x), cache, indices, rotation, step)
        x = self._add(x, mixed, self.after_mixer)
        return self._add(x, self._ffn(apply_norm(self.before_ffn, x), indices[2], step), self.after_ffn), cache

    def _ffn(self, x: jax.Array, repeat: jax.Array, step: AnyStep) -> jax.Array:
        return self.ffn(x, repeat, step) if isinstance(self.ffn, MoeFfn) else self.ffn(x)

    def _add(self, x: jax.Array, update: jax.Array, after: JaxNorm | None) -> jax.Array:
        if self.spec.norm_after_add:
            return apply_norm(after, x + update)
        return x + apply_norm(after, update)
