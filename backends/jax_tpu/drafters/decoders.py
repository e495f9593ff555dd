"""Drafter models as Flax NNX modules: hidden states of the target and tokens -> the next guesses, greedily.

`first` runs on all tokens of a step, so that the caches stay complete; `next` runs on one token per sequence, the guess
before. All run inside `shard_map`, as the target's decoder does, whose embedding and head they may share.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from pagoda.backends.jax_tpu.execution.step_input import StepInput
from pagoda.backends.jax_tpu.model.decoder import JaxDecoder, SegmentLayers
from pagoda.backends.jax_tpu.model.input_block import BlockInputs, unstacked
from pagoda.backends.jax_tpu.model.layers import (
    Caches,
    Rotations,
    apply_norm,
    lookup,
    make_norm,
    rotation,
    table_shape,
)
from pagoda.backends.jax_tpu.model.layout import CacheIndex, segments
from pagoda.backends.jax_tpu.model.mixers.registry import ops_of
from pagoda.backends.jax_tpu.model.parameters import JaxBuildContext, project
from pagoda.backends.jax_tpu.model.slots import padded
from pagoda.backends.jax_tpu.parallel import MODEL
from pagoda.common.models.drafters import (
    AttendedInputs,
    DrafterSpec,
    FeatureDrafter,
    HeadsDrafter,
    JoinedInputs,
    LanguageDrafter,
    StagesDrafter,
)

Target = JaxDecoder | None
"""Whose embedding and head a drafter may share; None: a model that transformers computes, which shares nothing."""


class JaxDraftDecoder(Protocol):
    """A drafter over given parameters, while tracing."""

    reads_next: bool  # at each position the token after it, with a hidden state; else that token alone

    def first(
        self, batch: StepInput, features: jax.Array, target: Target, caches: Caches
    ) -> tuple[jax.Array | None, Caches]:
        """Run on all tokens of a step; `features` [T, W]: of the target. Return states [T, D] and the caches.

        None: the first guess needs a pass over the newest token, `next` with number 0.
        """
        ...

    def begin(self, state: jax.Array, token_ids: jax.Array, target: Target) -> tuple[jax.Array, jax.Array]:
        """Return the first guesses int32 [S] and the states of the next, of the states of `first` after each sequence.

        `token_ids` int32 [S]: the newest.
        """
        ...

    def next(
        self, number: jax.Array, state: jax.Array, batch: StepInput, target: Target, caches: Caches
    ) -> tuple[jax.Array, jax.Array, Caches]:
        """Run on one token per sequence, the guess before. Return the guesses `number`, their states, the caches."""
        ...


def make_draft_decoder(
    spec: DrafterSpec, caches: CacheIndex, max_len: int, build: JaxBuildContext
) -> JaxLanguageDrafter | JaxFeatureDrafter | JaxHeadsDrafter | JaxStagesDrafter:
    """Create the module of a drafter. `caches`: its own, numbered from 0."""
    match spec:
        case LanguageDrafter():
            return JaxLanguageDrafter(spec, caches, max_len, build)
        case FeatureDrafter():
            return JaxFeatureDrafter(spec, caches, max_len, build)
        case HeadsDrafter():
            return JaxHeadsDrafter(spec, build)
        case StagesDrafter():
            return JaxStagesDrafter(spec, build)


def best_token(hidden: jax.Array, head: jax.Array, vocab: int) -> jax.Array:
    """Return the most likely token int32 [S] of hidden [S, D]; head [V, D] is sharded, padded beyond `vocab`."""
    logits = jax.lax.all_gather(project(hidden, head, dtype=jnp.float32), MODEL, axis=1, tiled=True)
    return jnp.argmax(logits[:, :vocab], -1).astype(jnp.int32)


class JaxLanguageDrafter(nnx.Module):
    """A language model that reads tokens alone."""

    reads_next = False

    def __init__(self, spec: LanguageDrafter, caches: CacheIndex, max_len: int, build: JaxBuildContext) -> None:
        self.decoder = JaxDecoder(spec.model, caches, max_len, build.at("decoder"))

    def first(
        self, batch: StepInput, features: jax.Array, target: Target, caches: Caches
    ) -> tuple[jax.Array | None, Caches]:
        return None, self.decoder.hidden(batch.token_ids, batch, caches)[1]

    def begin(self, state: jax.Array, token_ids: jax.Array, target: Target) -> tuple[jax.Array, jax.Array]:
        raise AssertionError("the first guess needs a pass of its own")

    def next(
        self, number: jax.Array, state: jax.Array, batch: StepInput, target: Target, caches: Caches
    ) -> tuple[jax.Array, jax.Array, Caches]:
        hidden, caches = self.decoder.hidden(batch.token_ids, batch, caches)
        return jnp.argmax(self.decoder.logits(hidden), -1).astype(jnp.int32), state, caches


class FrontInputs(nnx.Module):
    """What is in front of a drafter's layers: see `JoinedInputs` and `AttendedInputs`."""

    def __init__(self, spec: FeatureDrafter, build: JaxBuildContext) -> None:
        width = spec.model.width
        inputs = spec.inputs
        attends = isinstance(inputs, AttendedInputs)
        self.embed_norm = make_norm(inputs.embed_norm, width, build)
        self.hidden_norm = make_norm(inputs.hidden_norm, width if attends else spec.source_width, build)
        columns = spec.source_width if attends else width + spec.source_width
        self.project = build.parameter("D.", width, columns)
        biased = isinstance(inputs, JoinedInputs) and inputs.bias
        self.project_bias = build.parameter("D", width) if biased else None
        alone = replace(build, repeats=1)
        mixer = inputs.attention if isinstance(inputs, AttendedInputs) else None
        self.attention = None if mixer is None else ops_of(mixer).module(mixer, width, alone)

    def projected(self, x: jax.Array) -> jax.Array:
        """X [T, n] -> [T, D]."""
        x = project(x, self.project[...])
        return x if self.project_bias is None else x + self.project_bias[...]


class JaxFeatureDrafter(nnx.Module):
    """Layers over embeddings and hidden states. `embed` [V, D] and `head` [V, D] unless they are the target's."""

    reads_next = True

    def __init__(self, spec: FeatureDrafter, caches: CacheIndex, max_len: int, build: JaxBuildContext) -> None:
        model = spec.model
        embed_width = model.embedding.width or model.width
        own = spec.own_embedding
        self.spec = spec
        self.caches = caches
        self.embed = build.parameter("VD", padded(model.vocab, build.tensor), embed_width) if own else None
        narrow = own and embed_width != model.width
        self.embed_in = build.parameter("DD", model.width, embed_width) if narrow else None
        self.embed_out = build.parameter("DD", embed_width, model.width) if narrow else None
        self.embed_norm = make_norm(model.embedding.norm, model.width, build)
        self.inputs = FrontInputs(spec, build)
        layer_caches = caches.after(len(spec.caches) - len(model.caches))
        self.segments = nnx.List(
            [
                SegmentLayers(segment, model, layer_caches, build.at("segments", number))
                for number, segment in enumerate(segments(model.layers))
            ]
        )
        self.final_norm = make_norm(model.final_norm, model.width, build)
        vocab = spec.head_vocab or model.vocab
        self.head = build.parameter("VD", padded(vocab, build.tensor), embed_width) if spec.own_head else None
        exact = build.float32()
        self.target_ids = None if spec.head_vocab is None else exact.parameter(".", spec.head_vocab)
        self.rotary = nnx.List([exact.parameter("...", *table_shape(rope, max_len)) for rope in spec.ropes])

    def first(
        self, batch: StepInput, features: jax.Array, target: Target, caches: Caches
    ) -> tuple[jax.Array | None, Caches]:
        attends = self.inputs.attention is not None
        return self._layers(batch, self.inputs.projected(features) if attends else features, target, caches)

    def begin(self, state: jax.Array, token_ids: jax.Array, target: Target) -> tuple[jax.Array, jax.Array]:
        assert target is not None, "hidden states are those of a decoder"
        normed = apply_norm(self.final_norm, state)
        if self.head is None:
            guesses = jnp.argmax(target.logits(normed), -1).astype(jnp.int32)
        else:
            narrow = normed if target.embed_out is None else project(normed, target.embed_out[...])
            guesses = best_token(narrow, self.head[...], self.spec.head_vocab or self.spec.model.vocab)
        if self.target_ids is not None:
            guesses = guesses + self.target_ids[...][guesses].astype(jnp.int32)
        return guesses, normed if self.spec.chains_normed else state

    def next(
        self, number: jax.Array, state: jax.Array, batch: StepInput, target: Target, caches: Caches
    ) -> tuple[jax.Array, jax.Array, Caches]:
        state, caches = self._layers(batch, state, target, caches)
        return *self.begin(state, batch.token_ids, target), caches

    def _layers(
        self, batch: StepInput, features: jax.Array, target: Target, caches: Caches
    ) -> tuple[jax.Array, Caches]:
        rotations = {rope: rotation(table[...], batch.positions) for rope, table in zip(self.spec.ropes, self.rotary)}
        x, caches = self._front(batch, features, target, caches, rotations)
        for segment in self.segments:
            x, caches, _ = segment(x, caches, rotations, batch, None, BlockInputs(x, ()))
        return x, caches

    def _front(
        self, batch: StepInput, features: jax.Array, target: Target, caches: Caches, rotations: Rotations
    ) -> tuple[jax.Array, Caches]:
        """Return what the first layer reads [T, D], and the caches."""
        inputs = self.spec.inputs
        front = self.inputs
        embeds = self._embed(batch.token_ids, target)
        if isinstance(inputs, JoinedInputs):
            if inputs.blank_first:
                embeds = jnp.where((batch.positions > 0)[:, None], embeds, 0)
            parts = [apply_norm(front.embed_norm, embeds), apply_norm(front.hidden_norm, features)]
            return front.projected(jnp.concatenate(parts[::-1] if inputs.hidden_first else parts, -1)), caches
        assert front.attention is not None
        normed = apply_norm(front.hidden_norm, features)
        both = jnp.concatenate([apply_norm(front.embed_norm, embeds), normed], -1)
        arrays = self.caches.arrays[0]
        stacks = list(caches)
        index = jnp.asarray([self.caches.group[0], self.caches.index[0]], jnp.int32)
        taken = tuple(stacks[array] for array in arrays)
        attended, taken = unstacked(front.attention)(both, taken, index, rotations, batch)
        for array, cache in zip(arrays, taken):
            stacks[array] = cache
        return (normed if inputs.norms_residual else features) + attended, tuple(stacks)

    def _embed(self, token_ids: jax.Array, target: Target) -> jax.Array:
        """token_ids int32 [T] -> [T, D]."""
        assert target is not None, "hidden states are those of a decoder"
        embedding = self.spec.model.embedding
        table, embed_in = (target.embed, target.embed_in) if self.embed is None else (self.embed, self.embed_in)
        x = lookup(table[...], token_ids)
        if embedding.scale != 1.0:
            x = x * jnp.asarray(embedding.scale, x.dtype)
        if embed_in is not None:
            x = project(x, embed_in[...])
        return apply_norm(self.embed_norm, x)


class JaxHeadsDrafter(nnx.Module):
    """A head per guess: `blocks` [heads, blocks, D, D], `biases` [heads, blocks, D], `head` [heads, V, D]."""

    reads_next = True

    def __init__(self, spec: HeadsDrafter, build: JaxBuildContext) -> None:
        count = spec.heads
        blocks = spec.blocks
        width = spec.width
        self.spec = spec
        self.blocks = build.parameter("..D.", count, blocks, width, width)
        self.biases = build.parameter("..D", count, blocks, width) if spec.bias else None
        self.head = build.parameter(".VD", count, padded(spec.vocab, build.tensor), width)

    def first(
        self, batch: StepInput, features: jax.Array, target: Target, caches: Caches
    ) -> tuple[jax.Array | None, Caches]:
        return features, caches

    def begin(self, state: jax.Array, token_ids: jax.Array, target: Target) -> tuple[jax.Array, jax.Array]:
        return self._guess(jnp.int32(0), state), state

    def next(
        self, number: jax.Array, state: jax.Array, batch: StepInput, target: Target, caches: Caches
    ) -> tuple[jax.Array, jax.Array, Caches]:
        return self._guess(number, state), state, caches

    def _guess(self, number: jax.Array, x: jax.Array) -> jax.Array:
        matrices = self.blocks[...][number]
        biases = None if self.biases is None else self.biases[...][number]
        for block in range(self.spec.blocks):
            inner = project(x, matrices[block])
            x = x + jax.nn.silu(inner if biases is None else inner + biases[block])
        return best_token(x, self.head[...][number], self.spec.vocab)


class JaxStagesDrafter(nnx.Module):
    """A stage per guess over a state and the token before. n stages, or with `tied` one:

    `first_project` [I, W] of stage 0, `project` [n - 1, I, I] of the others, `embed` [n, V, I], `norm` and `norm_bias`
    [n, I], `head` [n, V, I].
    """

    reads_next = True

    def __init__(self, spec: StagesDrafter, build: JaxBuildContext) -> None:
        inner = spec.inner
        count = 1 if spec.tied else spec.stages
        vocab = padded(spec.vocab, build.tensor)
        self.spec = spec
        self.first_project = build.parameter("..", inner, spec.width)
        later = min(spec.stages - 1, 1) if spec.tied else spec.stages - 1
        self.project = build.parameter("...", later, inner, inner) if later else None
        self.embed = build.parameter(".V.", count, vocab, inner)
        self.head = build.parameter(".V.", count, vocab, inner)
        self.norm = build.parameter("..", count, inner)
        self.norm_bias = build.parameter("..", count, inner)

    def first(
        self, batch: StepInput, features: jax.Array, target: Target, caches: Caches
    ) -> tuple[jax.Array | None, Caches]:
        return features, caches

    def begin(self, state: jax.Array, token_ids: jax.Array, target: Target) -> tuple[jax.Array, jax.Array]:
        state = self._scaled(state) * 0.5**0.5 if self.spec.scales_input else state
        return self._stage(jnp.int32(0), project(state, self.first_project[...]), token_ids)

    def next(
        self, number: jax.Array, state: jax.Array, batch: StepInput, target: Target, caches: Caches
    ) -> tuple[jax.Array, jax.Array, Caches]:
        if self.project is None:  # a single stage: there is no next guess
            return batch.token_ids, state, caches
        matrix = self.project[...][0 if self.spec.tied else number - 1]
        return *self._stage(number, project(state, matrix), batch.token_ids), caches

    def _stage(self, number: jax.Array, projected: jax.Array, token_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the guesses and states of a stage. projected [S, I]: the state before."""
        spec = self.spec
        own = 0 if self.spec.tied else number
        embeds = lookup(self.embed[...][own], token_ids)
        mixed = self._scaled(projected + jnp.asarray(spec.embedding_weight, embeds.dtype) * embeds)
        state = jax.nn.gelu(mixed * self.norm[...][own] + self.norm_bias[...][own], approximate=False)
        return best_token(state, self.head[...][own], spec.vocab), state

    def _scaled(self, x: jax.Array) -> jax.Array:
        """Return x divided by its root mean square."""
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.spec.eps)
