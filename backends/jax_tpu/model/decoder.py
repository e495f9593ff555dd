"""The decoder as Flax NNX modules, built once from a model spec.

Layers that repeat are one module with stacked parameters and a scan over the repeats; models whose layers differ scan
over the repeating block. Runs inside `shard_map`: every array is a device's own piece. Knows nothing of requests.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, assert_never

import jax
import jax.numpy as jnp
from flax import nnx

from pagoda.backends.jax_tpu.execution.packed_input import PackedInput
from pagoda.backends.jax_tpu.model import layers
from pagoda.backends.jax_tpu.model.attention import JaxAttention
from pagoda.backends.jax_tpu.model.layers import (
    AnyStep,
    JaxBuildContext,
    JaxPooler,
    MlpFfn,
    MoeFfn,
    ParameterStack,
    project,
    total,
)
from pagoda.backends.jax_tpu.model.layout import CachePlaces, Segment, padded, segments
from pagoda.backends.jax_tpu.model.rotary import JaxRotation, ropes, rotation, table_shape
from pagoda.backends.jax_tpu.parallel.sharding import MODEL
from pagoda.common.engine.step import EMBEDDED
from pagoda.common.models.spec import Ffn, Layer, Mlp, ModelSpec, Moe, Rope

Caches = tuple[jax.Array, ...]
Rotations = dict[Rope | None, JaxRotation | None]


class JaxDecoder(nnx.Module):
    """Token ids and a batch in; hidden states and logits out. `embed` [V, D], vocabulary padded with zeros."""

    def __init__(self, spec: ModelSpec, places: CachePlaces, max_len: int, build: JaxBuildContext) -> None:
        embedding = spec.embedding
        table, vocab = embedding.width or spec.width, padded(spec.vocab, build.tensor)
        self.spec = spec
        self.stacks = tuple((slots // build.tensor, head_dim) for slots, head_dim in places.shapes)
        self.embed = build.parameter("VD", vocab, table)
        positions = embedding.positions
        self.positions = (
            None if positions is None else build.parameter(".D", positions + embedding.position_offset, spec.width)
        )
        types = embedding.token_types
        self.token_types = build.parameter(".D", types, spec.width) if types else None
        self.embed_norm = layers.make_norm(embedding.norm, spec.width, build)
        narrow = table != spec.width
        self.embed_in = build.parameter("DD", spec.width, table) if narrow else None
        self.embed_out = build.parameter("DD", table, spec.width) if narrow else None
        self.segments = nnx.List([SegmentLayers(part, places, spec.width, build) for part in segments(spec.layers)])
        self.final_norm = layers.make_norm(spec.final_norm, spec.width, build)
        self.head = None if spec.tied else build.parameter("VD", vocab, table)
        self.head_bias = build.parameter("V", vocab) if spec.head_bias else None
        exact = replace(build, dtype=jnp.dtype(jnp.float32))
        self.pooler = None if spec.pooler is None else JaxPooler(spec.pooler, spec.hidden_width, exact)
        self.rotary = nnx.List([exact.parameter("...", *table_shape(rope, max_len)) for rope in ropes(spec)])

    def hidden(
        self, token_ids: jax.Array, step: AnyStep, caches: Caches, rows: jax.Array | None = None
    ) -> tuple[jax.Array, Caches]:
        """token_ids int32 [T] -> hidden states [T, D] after the final norm, and the caches with this step's K and V.

        `rows` [T, D]: as they are once they are looked up and scaled, of tokens that are EMBEDDED.
        """
        positions = step.positions
        x = self._embed(token_ids, positions, step.token_types, rows)
        rotations: Rotations = {None: None}
        for rope, table in zip(ropes(self.spec), self.rotary):
            rotations[rope] = rotation(table[...], positions)
        for segment in self.segments:
            x, caches = segment(x, caches, rotations, step)
        return layers.apply(self.final_norm, x), caches

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Hidden [R, D] -> float32 logits [R, V], whole on every device; -inf for the padding of the vocabulary."""
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
        """Raw answers float32 [R, n] of a model that pools."""
        assert self.pooler is not None, "the model pools"
        cached = any(layer.mixer.causal for layer in self.spec.layers)
        scratch = tuple(step.scratch(*stack) if cached else jnp.zeros(()) for stack in self.stacks)
        hidden, _ = self.hidden(step.token_ids, step, scratch)
        if self.embed_out is not None:
            hidden = project(hidden, self.embed_out[...])
        return self.pooler(step.answers(hidden, self.pooler.kind))

    def _embed(
        self, token_ids: jax.Array, positions: jax.Array, token_types: jax.Array | None, rows: jax.Array | None
    ) -> jax.Array:
        table, embedding = self.embed[...], self.spec.embedding
        local = token_ids - jax.lax.axis_index(MODEL) * table.shape[0]
        mine = (local >= 0) & (local < table.shape[0])
        x = total(jnp.where(mine[:, None], table[jnp.where(mine, local, 0)], 0))
        if embedding.scale != 1.0:
            x = x * jnp.asarray(embedding.scale, x.dtype)  # rounded to the weights' dtype, as it was trained
        if rows is not None:
            x = jnp.where((token_ids == EMBEDDED)[:, None], rows, x)
        if self.embed_in is not None:
            x = project(x, self.embed_in[...])
        if self.positions is not None:
            x = x + self.positions[...][positions + embedding.position_offset]
        if self.token_types is not None:
            table = self.token_types[...]
            x = x + (table[0] if token_types is None else table[jnp.minimum(token_types, len(table) - 1)])
        return layers.apply(self.embed_norm, x)


class SegmentLayers(nnx.Module):
    """A repeating block of layers, each with its parameters stacked over the repeats."""

    def __init__(self, segment: Segment, places: CachePlaces, width: int, build: JaxBuildContext) -> None:
        stacked = replace(build, repeats=segment.repeats)
        self.layers = nnx.List([JaxDecoderLayer(layer, width, stacked) for layer in segment.block])
        numbers = segment.numbers.tolist()
        self.places = tuple(
            tuple((places.group[n], places.index[n], repeat) for n in row) for repeat, row in enumerate(numbers)
        )
        self.stacks = tuple(places.stack[n] for n in numbers[0])

    def __call__(self, x: jax.Array, caches: Caches, rotations: Rotations, step: AnyStep) -> tuple[jax.Array, Caches]:
        """X [T, D] -> [T, D], and the caches."""
        places = jnp.asarray(self.places, jnp.int32)  # [repeats, block, 3]
        split: list[tuple[Any, ...]] = [nnx.split(layer, ParameterStack, ...) for layer in self.layers]

        def block(carry: tuple[jax.Array, Caches], inputs: tuple) -> tuple[tuple[jax.Array, Caches], None]:
            x, held = carry[0], list(carry[1])
            for index, ((graph, whole, _), state) in enumerate(zip(split, inputs[0])):
                layer, stack = nnx.merge(graph, whole, state), self.stacks[index]
                x, held[stack] = layer(x, held[stack], inputs[1][index], rotations, step)
            return (x, tuple(held)), None

        return jax.lax.scan(block, (x, caches), (tuple(state for _, _, state in split), places))[0]


class JaxDecoderLayer(nnx.Module):
    """One layer: mixer and ffn, each between its norms, on the residual stream."""

    def __init__(self, spec: Layer, width: int, build: JaxBuildContext) -> None:
        self.spec = spec
        self.mixer = JaxAttention(spec.mixer, width, build)
        self.ffn = make_ffn(spec.ffn, width, build)
        self.before_mixer = layers.make_norm(spec.norms.before_mixer, width, build)
        self.after_mixer = layers.make_norm(spec.norms.after_mixer, width, build)
        self.before_ffn = layers.make_norm(spec.norms.before_ffn, width, build)
        self.after_ffn = layers.make_norm(spec.norms.after_ffn, width, build)

    def __call__(
        self, x: jax.Array, cache: jax.Array, place: jax.Array, rotations: Rotations, step: AnyStep
    ) -> tuple[jax.Array, jax.Array]:
        """X [T, D] -> [T, D], and the cache. `place` int32 [3]: block table, layer of the cache, repeat."""
        rotation = rotations[self.spec.mixer.rope]
        mixed, cache = self.mixer(layers.apply(self.before_mixer, x), cache, place, rotation, step)
        x = self._add(x, mixed, self.after_mixer)
        return self._add(x, self._ffn(layers.apply(self.before_ffn, x), place[2], step), self.after_ffn), cache

    def _ffn(self, x: jax.Array, repeat: jax.Array, step: AnyStep) -> jax.Array:
        return self.ffn(x, repeat, step) if isinstance(self.ffn, MoeFfn) else self.ffn(x)

    def _add(self, x: jax.Array, update: jax.Array, after: layers.JaxNorm | None) -> jax.Array:
        if self.spec.norm_after_add:
            return layers.apply(after, x + update)
        return x + layers.apply(after, update)


def make_ffn(spec: Ffn, width: int, build: JaxBuildContext) -> MlpFfn | MoeFfn:
    """The block's module."""
    match spec:
        case Mlp():
            return MlpFfn(spec, width, build)
        case Moe():
            return MoeFfn(spec, width, build)
        case _:
            assert_never(spec)
