"""The decoder as Flax NNX modules, built from a model spec.

Repeating layers, or repeating blocks of different layers, are one module with stacked parameters and a scan over the
repeats. Runs inside `shard_map`: every array is a device's local piece.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx

from pagoda.backends.jax_tpu.execution.step_input import PoolInput, StepInput, slot_mask
from pagoda.backends.jax_tpu.model.input_block import BlockInputs, JaxAdapters, JaxInputBlock, unstacked
from pagoda.backends.jax_tpu.model.layers import (
    Caches,
    JaxNorm,
    JaxPooler,
    MlpFfn,
    MoeFfn,
    Rotations,
    all_tokens,
    apply_norm,
    gathered,
    insert_rows,
    lookup,
    make_ffn,
    make_norm,
    own_tokens,
    rotation,
    table_shape,
    without_rows,
)
from pagoda.backends.jax_tpu.model.layout import (
    CacheIndex,
    Segment,
    scratch_depths,
    segments,
)
from pagoda.backends.jax_tpu.model.lora import AdapterOutputs, JaxEmbeddingLora, JaxLora, JaxSlotCopies
from pagoda.backends.jax_tpu.model.mixers.registry import ops_of
from pagoda.backends.jax_tpu.model.parameters import AnyStep, JaxBuildContext, ParameterStack, project
from pagoda.backends.jax_tpu.model.slots import padded
from pagoda.backends.jax_tpu.model.streams import (
    JaxAltUp,
    JaxLayerParts,
    JaxLowRank,
    JaxPartUpdate,
    JaxSecondHalf,
    JaxShortcut,
    JaxSideMoe,
    JaxStreamEnds,
)
from pagoda.backends.jax_tpu.parallel import MODEL
from pagoda.common.models.spec import Layer, Mlp, ModelSpec
from pagoda.kernels_pallas.chips import ChipInfo
from pagoda.kernels_pallas.token_selection import SelectedTokens

_SCATTERED_TOKENS: Final = 16
"""Least tokens of a device in a scattered step: rows of a tile of 16-bit numbers."""

_PIECES: Final = 2
_PIECE_TOKENS: Final = 1024
"""Least tokens of a piece: with half as many a step gains 5 % at most, with a quarter it loses a quarter, because the
weights are read for each piece (benchmarks/LOG.md).
"""


def _scatters(spec: ModelSpec, tensor: int, tokens: int) -> bool:
    """Whether each device computes residuals and norms for its part of a step's tokens only.

    Sums over devices are then scattered, and norms gathered: as many bytes on the links as when sums are shared.
    """
    streams = spec.per_layer is not None or spec.alt_up is not None or bool(spec.block_owners) or bool(spec.blended)
    plain = all(not (layer.side_moe or layer.shortcut or layer.second) for layer in spec.layers)
    return not streams and plain and tensor > 1 and tokens % (_SCATTERED_TOKENS * tensor) == 0


def exchanged_pieces(spec: ModelSpec, chip: ChipInfo, tensor: int, tokens: int, *, adapted: bool) -> int:
    """Return in how many pieces a step's tokens are exchanged, so that XLA multiplies one while another travels."""
    if adapted or not chip.sums_on_sparse_cores:
        return 1
    whole = _scatters(spec, tensor, tokens) and tokens % (_PIECES * max(_PIECE_TOKENS, _SCATTERED_TOKENS * tensor)) == 0
    return _PIECES if whole and all(map(_exchanges_pieces, spec.layers)) else 1


def _exchanges_pieces(layer: Layer) -> bool:
    sums = not layer.parallel and layer.low_rank is None and layer.block is None and not layer.output_scale
    mixes = len(layer.mixers) == 1 and ops_of(layer.mixers[0]).exchanges_pieces
    return sums and mixes and isinstance(layer.ffn, Mlp) and not (layer.ffn.sparsity or layer.ffn.inner_norm)


class JaxDecoder(nnx.Module):
    """Maps token ids and a batch to hidden states and logits. `embed` [V, D], the vocabulary padded with zeros."""

    def __init__(self, spec: ModelSpec, cache_index: CacheIndex, max_len: int, build: JaxBuildContext) -> None:
        embedding = spec.embedding
        embed_width = embedding.width or spec.width
        vocab = padded(spec.vocab, build.tensor)
        self.spec = spec
        self.tensor = build.tensor
        self.stacks = cache_index.stacks
        self.scratch_depths = scratch_depths(spec, cache_index)
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
        self.lora = build.lora
        self.embed_lora = None if build.lora is None else JaxEmbeddingLora(vocab, embed_width, build)
        head_outputs = (AdapterOutputs("V", (vocab,)),)
        self.head_lora = None if build.lora is None else JaxLora("D", embed_width, head_outputs, build)
        copies = () if build.lora is None else build.lora.copies
        self.embed_copies = JaxSlotCopies(vocab, embed_width, build) if "embed" in copies else None
        self.head_copies = JaxSlotCopies(vocab, embed_width, build) if "head" in copies else None
        alone = replace(build, repeats=1, lora=None)
        self.blocks = nnx.List(
            [
                JaxInputBlock(spec.layers[owner], spec.width, alone.at("blocks", number))
                for number, owner in enumerate(spec.block_owners)
            ]
        )
        self.segments = nnx.List(
            [
                SegmentLayers(segment, spec, cache_index, build.at("segments", number))
                for number, segment in enumerate(segments(spec.layers))
            ]
        )
        part = spec.per_layer
        alt_up = spec.alt_up
        self.parts = None if part is None else JaxLayerParts(part, len(spec.layers), spec.width, build)
        self.stream_ends = None if alt_up is None else JaxStreamEnds(alt_up, spec.width, build)
        self.final_norm = make_norm(spec.final_norm, spec.width, build)
        self.head = None if spec.tied else build.parameter("VD", vocab, embed_width)
        self.head_bias = build.parameter("V", vocab) if spec.head_bias else None
        self.pooler = None if spec.pooler is None else JaxPooler(spec.pooler, spec.hidden_width, build.float32())
        self.rotary = nnx.List([build.float32().parameter("...", *table_shape(rope, max_len)) for rope in spec.ropes])

    def hidden(
        self, token_ids: jax.Array, step: AnyStep, caches: Caches, rows: jax.Array | None = None
    ) -> tuple[jax.Array, Caches]:
        """token_ids int32 [T] -> hidden states [T, D] after the final norm, and the caches with this step's K and V.

        `rows` [R, D]: scaled embeddings that token ids from FIRST_ROW on name; None: none does.
        """
        hidden, caches, _ = self._run(token_ids, step, caches, rows)
        return hidden, caches

    def hidden_and_captured(
        self,
        token_ids: jax.Array,
        step: StepInput,
        caches: Caches,
        captured: tuple[int, ...],
        rows: jax.Array | None = None,
    ) -> tuple[jax.Array, Caches, jax.Array]:
        """Return the same, and the inputs of the `captured` layers side by side, [T, C*D]."""
        layers = sorted(set(captured))
        slots = np.full(len(self.spec.layers), len(layers), np.int32)
        slots[layers] = np.arange(len(layers))
        inputs = jnp.zeros((len(layers) + 1, len(token_ids), self.spec.width), self.embed[...].dtype)
        hidden, caches, kept = self._run(token_ids, step, caches, rows, LayerInputs(slots, inputs))
        assert kept is not None, "it was given"
        return hidden, caches, jnp.concatenate([kept.inputs[layers.index(layer)] for layer in captured], -1)

    def _run(
        self,
        token_ids: jax.Array,
        step: AnyStep,
        caches: Caches,
        rows: jax.Array | None,
        kept_inputs: LayerInputs | None = None,
    ) -> tuple[jax.Array, Caches, LayerInputs | None]:
        """Return hidden states, caches, and the inputs of layers if they are kept."""
        positions = step.positions
        if self.lora is not None and isinstance(step, StepInput):
            step = step.with_adapters(self.lora.slots, self.lora.rank)
        with jax.named_scope("embed"):
            x = self._embed(token_ids, positions, step, rows)
        rotations = {rope: rotation(table[...], positions) for rope, table in zip(self.spec.ropes, self.rotary)}
        if kept_inputs is None and _scatters(self.spec, self.tensor, len(x)):
            step = replace(step, scattered=True)
            if isinstance(step, StepInput):
                adapted = step.adapter_mask is not None
                pieces = exchanged_pieces(self.spec, step.kernel.chip, self.tensor, len(x), adapted=adapted)
                step = replace(step, pieces=pieces)
            x = own_tokens(x, step, self.tensor)
        parts = None if self.parts is None else self.parts(token_ids, x)
        x = x if self.stream_ends is None else self.stream_ends.split(x)
        read = BlockInputs(x, tuple(unstacked(block) for block in self.blocks))
        kept: dict[int, jax.Array] = {}
        caches = self._with_selection(caches, step, len(token_ids))
        for segment in self.segments:
            x = self._blended(segment.first, x, kept)
            x, caches, kept_inputs = segment(x, caches, rotations, step, parts, read, kept_inputs)
        x = x if self.stream_ends is None else self.stream_ends.join(x)
        caches = caches[: len(self.stacks)]
        return gathered(apply_norm(self.final_norm, x), step), caches, kept_inputs

    def _with_selection(self, caches: Caches, step: AnyStep, tokens: int) -> Caches:
        """Return the caches, followed by the selection of tokens that layers share, if any do in this step's shape."""
        selected = self.spec.shared_top_k
        if selected is None:
            return caches
        selection = None
        if step.max_context > selected:
            selection = SelectedTokens.unselected(
                tokens=tokens,
                seqs=step.shape.seqs,
                max_pages=step.shape.pages,
                page_size=step.kernel.page_size,
                decode_only=step.decode_only,
            )
        return (*caches, cast(jax.Array, selection))

    def _blended(self, index: int, x: jax.Array, kept: dict[int, jax.Array]) -> jax.Array:
        """X [T, D] -> the input of layer `index`. `kept`: those that later layers blend in, which this adds to."""
        if index in self.spec.blended:
            kept[index] = x
        blend = self.spec.layers[index].blend
        if blend is None:
            return x
        share = jnp.asarray(blend.share, x.dtype)
        return x + share * (kept[blend.layer] - x)

    def logits(self, hidden: jax.Array, adapter_slots: jax.Array | None = None) -> jax.Array:
        """Hidden [R, D] -> float32 logits [R, V], replicated; -inf for vocabulary padding.

        `adapter_slots` int32 [R]: of the rows' adapters, or -1; None: no row has one.
        """
        if self.embed_out is not None:
            hidden = project(hidden, self.embed_out[...])
        head = self.embed if self.head is None else self.head
        logits = project(hidden, head[...], dtype=jnp.float32)
        if self.lora is not None and self.head_lora is not None and adapter_slots is not None:
            mask = slot_mask(adapter_slots, self.lora.rank, self.lora.slots)
            if self.head_copies is not None:
                logits = self.head_copies.logits(logits, hidden, mask)
            logits = self.head_lora(hidden, mask, jnp.float32)[0].on(logits)
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
        scratch = tuple(
            step.scratch(stack, depth, self.tensor) if cached else jnp.zeros(())
            for stack, depth in zip(self.stacks, self.scratch_depths)
        )
        hidden, _ = self.hidden(step.token_ids, step, scratch)
        if self.embed_out is not None:
            hidden = project(hidden, self.embed_out[...])
        return self.pooler(step.pool(hidden, self.pooler.kind), step.shape.of_tokens)

    def _embed(self, token_ids: jax.Array, positions: jax.Array, step: AnyStep, rows: jax.Array | None) -> jax.Array:
        embedding = self.spec.embedding
        token_types = step.token_types
        named = token_ids
        if rows is not None:
            token_ids = without_rows(token_ids)
        x = lookup(self.embed[...], token_ids)
        if self.embed_lora is not None and step.adapter_mask is not None:
            if self.embed_copies is not None:
                x = self.embed_copies.embeddings(x, token_ids, step.adapter_mask)
            expanded = lookup(self.embed_lora.b[...], token_ids)
            x = self.embed_lora(expanded, step.adapter_mask, x.dtype).on(x)
        if embedding.scale != 1.0:
            x = x * jnp.asarray(embedding.scale, x.dtype)  # rounded to the weights' dtype, as in training
        if rows is not None:
            x = insert_rows(x, named, rows)
        if self.embed_in is not None:
            x = project(x, self.embed_in[...])
        if self.positions is not None:
            x = x + self.positions[...][positions + embedding.position_offset]
        if self.token_types is not None:
            table = self.token_types[...]
            x = x + (table[0] if token_types is None else table[jnp.minimum(token_types, len(table) - 1)])
        return apply_norm(self.embed_norm, x)


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """The inputs of some layers, which a drafter reads."""

    slots: npt.NDArray[np.int32]  # [L] index in `inputs` of each layer; C, the last one, of those that nothing reads
    inputs: jax.Array  # [C + 1, T, D]


class SegmentLayers(nnx.Module):
    """A repeating block of layers, each with its parameters stacked over the repeats."""

    def __init__(self, segment: Segment, spec: ModelSpec, cache_index: CacheIndex, build: JaxBuildContext) -> None:
        stacked = replace(build, repeats=segment.repeats)
        self.first = segment.first
        self.layers = nnx.List(
            [JaxDecoderLayer(layer, spec, stacked.at("layers", index)) for index, layer in enumerate(segment.block)]
        )
        self.repeats = segment.repeats
        numbers = [[spec.cache_numbers[n] for n in row] for row in segment.numbers.tolist()]
        self.indices = tuple(  # [block][mixer][repeats]: block table and cache layer of each of the mixer's caches
            tuple(
                tuple(
                    tuple(part for n in row[position][mixer] for part in (cache_index.group[n], cache_index.index[n]))
                    for row in numbers
                )
                for mixer in range(len(layer.mixers))
            )
            for position, layer in enumerate(segment.block)
        )
        carried = () if spec.shared_top_k is None else (len(cache_index.stacks),)  # the selection follows the arrays
        self.arrays = tuple(  # [block][mixer]: numbers of the arrays
            tuple(
                (
                    *(array for n in caches for array in cache_index.arrays[n]),
                    *(carried if mixer.selected_tokens else ()),
                )
                for mixer, caches in zip(layer.mixers, mixers)
            )
            for layer, mixers in zip(segment.block, numbers[0])
        )

    def __call__(
        self,
        x: jax.Array,
        caches: Caches,
        rotations: Rotations,
        step: AnyStep,
        parts: jax.Array | None,
        read: BlockInputs,
        kept: LayerInputs | None = None,
    ) -> tuple[jax.Array, Caches, LayerInputs | None]:
        """X [T, D] -> [T, D], or several streams [A, T, D], and the caches. `parts` [T, L, P]: see `JaxLayerParts`.

        `kept`: where the inputs of some layers are written to.
        """
        indices = tuple(tuple(jnp.asarray(each, jnp.int32) for each in mixers) for mixers in self.indices)
        repeats = jnp.arange(self.repeats, dtype=jnp.int32)
        split: list[tuple[Any, ...]] = [nnx.split(layer, ParameterStack, ...) for layer in self.layers]

        slots = None if kept is None else jnp.asarray(kept.slots)

        def block(carry: tuple[Any, ...], inputs: tuple) -> tuple[tuple[Any, ...], None]:
            x, caches, layer_inputs = carry
            states, indices, repeat = inputs
            current = replace(step, repeat=repeat)
            for position, (graph, stacked, _) in enumerate(split):
                layer = nnx.merge(graph, stacked, states[position])
                number = self.first + repeat * len(split) + position
                part = None
                if slots is not None:
                    layer_inputs = jax.lax.dynamic_update_index_in_dim(layer_inputs, x, slots[number], 0)
                if parts is not None:
                    part = jax.lax.dynamic_index_in_dim(parts, number, 1, keepdims=False)
                index = indices[position]
                x, caches = layer(x, caches, self.arrays[position], index, repeat, rotations, current, part, read)
            return (x, caches, layer_inputs), None

        scanned = tuple(state for _, _, state in split), indices, repeats
        (x, caches, inputs), _ = jax.lax.scan(block, (x, caches, None if kept is None else kept.inputs), scanned)
        return x, caches, None if kept is None or inputs is None else replace(kept, inputs=inputs)


class JaxDecoderLayer(nnx.Module):
    """One layer: mixers and feed-forward block with their norms, on the residual stream."""

    def __init__(self, spec: Layer, model: ModelSpec, build: JaxBuildContext) -> None:
        width = model.width
        self.spec = spec
        own = spec.mixers if spec.block is None else spec.mixers[1:]
        self.mixers = nnx.List(
            [ops_of(mixer).module(mixer, width, build.at("mixers", index)) for index, mixer in enumerate(own)]
        )
        self.adapters = None if spec.block is None else JaxAdapters(spec, spec.block, width, build)
        self.block = None if spec.block is None else model.block_owners.index(spec.block.weights_of)
        self.ffn = None if spec.ffn is None else make_ffn(spec.ffn, width, build.at("ffn"))
        self.before_mixer = make_norm(spec.norms.before_mixer, width, build)
        self.after_mixer = make_norm(spec.norms.after_mixer, width, build)
        self.before_ffn = make_norm(spec.norms.before_ffn, width, build)
        self.after_ffn = make_norm(spec.norms.after_ffn, width, build)
        self.low_rank = None if spec.low_rank is None else JaxLowRank(spec.low_rank, width, build)
        plain = replace(build, lora=None)
        self.side = None if spec.side_moe is None else JaxSideMoe(spec.side_moe, width, plain.at("side"))
        self.shortcut = None if spec.shortcut is None else JaxShortcut(spec.shortcut, width, plain.at("shortcut"))
        self.second = None if spec.second is None else JaxSecondHalf(spec.second, width, build.at("second"))
        self.part = None if model.per_layer is None else JaxPartUpdate(model.per_layer, width, build)
        self.alt_up = None if model.alt_up is None else JaxAltUp(model.alt_up, width, build)
        self.output_scale = build.parameter(".", 1) if spec.output_scale else None

    def __call__(
        self,
        x: jax.Array,
        caches: Caches,
        arrays: tuple[tuple[int, ...], ...],
        indices: tuple[jax.Array, ...],
        repeat: jax.Array,
        rotations: Rotations,
        step: AnyStep,
        part: jax.Array | None,
        read: BlockInputs,
    ) -> tuple[jax.Array, Caches]:
        """X [T, D] -> [T, D], or several streams [A, T, D], and the caches.

        `arrays`: numbers of each mixer's. `indices`: int32 [2 n] of each mixer, tables and layers of its n caches.
        `part` [T, P]: the layer's of a per-layer embedding, None without any.
        """
        added = None
        if self.block is not None and self.adapters is not None:
            own = arrays[0]
            arrays = arrays[1:]
            stacks = list(caches)
            both = jnp.concatenate([x, read.first], -1)
            taken = tuple(stacks[array] for array in own)
            added, taken = read.blocks[self.block](both, taken, indices[0], rotations, step, self.adapters)
            for array, cache in zip(own, taken):
                stacks[array] = cache
            caches = tuple(stacks)
            indices = indices[1:]
        if self.alt_up is not None:
            predicted = self.alt_up.predict(x)
            active = predicted[self.alt_up.spec.active]
            y, caches = self._run(active, caches, arrays, indices, repeat, rotations, step)
            x = self.alt_up.correct(predicted, y)
            if self.part is not None and part is not None:
                x = self.alt_up.add_part(x, self.part, part)
            return x, caches
        y, caches = self._run(x, caches, arrays, indices, repeat, rotations, step, added)
        x = y if self.shortcut is None else y + self.shortcut(x, repeat, step)
        if self.part is not None and part is not None:
            x = x + self.part(x, part)
        return (x if self.output_scale is None else x * self.output_scale[...]), caches

    def _run(
        self,
        x: jax.Array,
        caches: Caches,
        arrays: tuple[tuple[int, ...], ...],
        indices: tuple[jax.Array, ...],
        repeat: jax.Array,
        rotations: Rotations,
        step: AnyStep,
        added: jax.Array | None = None,
    ) -> tuple[jax.Array, Caches]:
        """Run mixers and feed-forward block; arguments as of `__call__`. `added` [T, D]: to the mixers' input."""
        if not self.mixers:
            return (x if self.ffn is None else self._feed(x, repeat, step)), caches
        part = apply_norm(self.before_mixer, x if added is None else x + added)  # of the tokens, in a scattered step
        normed = gathered(part, step)
        updates = []
        count = len(self.mixers) - (self.second is not None)
        for number in range(count):
            mixed, caches = self._mixed(number, normed, caches, arrays, indices, rotations, step)
            updates.append(mixed)
        residual = part if self.spec.norm_residual else x
        if step.pieces > 1:
            return self._feed_pieces(residual, updates[0], step), caches
        y = self._add(residual, sum(updates[1:], start=updates[0]), self.after_mixer)
        if self.low_rank is not None:
            y = (y + self.low_rank(part)) * 2**-0.5
        if self.ffn is None:
            return y, caches
        if self.second is not None:
            fed = apply_norm(self.before_ffn, y)
            y = self._add(y, self._fed(fed, repeat, step), self.after_ffn)
            normed = self.second.mixer_norm(y)
            mixed, caches = self._mixed(count, normed, caches, arrays, indices, rotations, step)
            return self.second.feed(y + mixed, fed, repeat, step), caches
        if not self.spec.parallel:
            return self._feed(y, repeat, step), caches
        if self.before_ffn is not None:
            normed = gathered(apply_norm(self.before_ffn, x), step)
        return self._add(y, self._fed(normed, repeat, step), self.after_ffn), caches

    def _mixed(
        self,
        number: int,
        normed: jax.Array,
        caches: Caches,
        arrays: tuple[tuple[int, ...], ...],
        indices: tuple[jax.Array, ...],
        rotations: Rotations,
        step: AnyStep,
    ) -> tuple[jax.Array, Caches]:
        """Return the output of a mixer [T, D], by its number, and the caches; arguments as of `__call__`."""
        mixer = self.mixers[number]
        stacks = list(caches)
        taken = tuple(stacks[array] for array in arrays[number])
        with jax.named_scope(type(mixer).__name__.removeprefix("Jax")):
            mixed, taken = mixer(normed, taken, indices[number], rotations, step)
        for array, cache in zip(arrays[number], taken):
            stacks[array] = cache
        return mixed, tuple(stacks)

    def _feed(self, x: jax.Array, repeat: jax.Array, step: AnyStep) -> jax.Array:
        """X [T, D] -> [T, D], after the feed-forward block."""
        normed = apply_norm(self.before_ffn, x)
        fed = self._fed(gathered(normed, step), repeat, step)
        fed = fed if self.side is None else self.side(fed, x, repeat, step)
        return self._add(normed if self.spec.norm_residual else x, fed, self.after_ffn)

    def _feed_pieces(self, x: jax.Array, update: jax.Array, step: AnyStep) -> jax.Array:
        """X [T, D] and the mixer's output -> [T, D] after the feed-forward block, one piece of tokens after the other.

        The next piece's exchanges before the block begin with this one's products, which hide them. Without the barrier
        XLA would compute the norms of all pieces together, when the last one has come.
        """
        assert isinstance(self.ffn, MlpFfn), "see `exchanged_pieces`"
        xs = jnp.split(x, step.pieces)
        updates = jnp.split(update, step.pieces)
        outputs = []
        for number in range(step.pieces):
            y = self._add(xs[number], updates[number], self.after_mixer)
            normed = apply_norm(self.before_ffn, y)
            with jax.named_scope(type(self.ffn).__name__):
                hidden = self.ffn.hidden(all_tokens(normed), step)
                if number + 1 < step.pieces:
                    updates[number + 1], hidden = jax.lax.optimization_barrier((updates[number + 1], hidden))
                fed = self.ffn.total(hidden, step)
            outputs.append(self._add(normed if self.spec.norm_residual else y, fed, self.after_ffn))
        return jnp.concatenate(outputs)

    def _fed(self, normed: jax.Array, repeat: jax.Array, step: AnyStep) -> jax.Array:
        assert self.ffn is not None, "the layer has an ffn"
        with jax.named_scope(type(self.ffn).__name__):
            return self.ffn(normed, repeat, step) if isinstance(self.ffn, MoeFfn) else self.ffn(normed, step)

    def _add(self, x: jax.Array, update: jax.Array, after: JaxNorm | None) -> jax.Array:
        if self.spec.norm_after_add:
            return apply_norm(after, x + self._scaled(update))
        return x + self._scaled(apply_norm(after, update))

    def _scaled(self, update: jax.Array) -> jax.Array:
        scale = self.spec.residual_scale
        return update if scale == 1.0 else (update.astype(jnp.float32) * scale).astype(update.dtype)
