"""Drafter models: hidden states of the target and tokens -> the next guesses, greedily.

Every decoder guesses for n sequences. `first` runs on all tokens of a step, so that the caches stay complete, and
returns the logits after the last token of each sequence; `next` runs on one token per sequence, the guess before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from pagoda.backends.reference.execution import StepBatch
from pagoda.backends.reference.memory import LayerCache, held_bytes
from pagoda.backends.reference.model.decoder import Decoder
from pagoda.backends.reference.model.feed_forward import paged_makers
from pagoda.backends.reference.model.linear import float32_linear
from pagoda.backends.reference.model.mixers.attention.projection import load_attention
from pagoda.backends.reference.model.mixers.rotary import RotaryTables
from pagoda.backends.reference.model.named_ops import ReferenceOps, named_parts
from pagoda.backends.reference.model.numerics import Numerics
from pagoda.backends.reference.model.ops import to_torch
from pagoda.backends.reference.programs.operators import operators
from pagoda.backends.reference.weights.arrange import NamedWeights
from pagoda.backends.reference.weights.layers import load_layer
from pagoda.backends.reference.weights.load import Packer
from pagoda.backends.reference.weights.params import ModelParams
from pagoda.backends.torch_decoder.decoder import DecoderStack, TokenEmbedding
from pagoda.common.backend import Weight
from pagoda.common.models.drafters import (
    AttendedInputs,
    DrafterSpec,
    FeatureDrafter,
    HeadsDrafter,
    JoinedInputs,
    LanguageDrafter,
    StagesDrafter,
    drafter_params,
)
from pagoda.common.models.shapes import checked, lacking
from pagoda.common.weights.quantization.tensors import QuantizedTensor

Caches = Mapping[int, LayerCache]


@dataclass(frozen=True, slots=True)
class DraftInput:
    """The tokens that a drafter reads in one pass."""

    token_ids: Tensor  # int64 [T]
    batch: StepBatch
    caches: Caches  # by number of the drafter's cache
    features: Tensor | None  # [T, W] of the target in the first pass, else the drafter's own of the pass before
    last: Tensor  # int64 [n] index of the last token of each sequence that is guessed for


@dataclass(frozen=True, slots=True)
class Guessed:
    """What a pass returns for n sequences."""

    token_ids: Tensor  # int64 [n]
    features: Tensor | None  # [n, D] what the next pass reads in place of the target's


class DraftDecoder(Protocol):
    """A loaded drafter."""

    num_bytes: int  # of its own weights

    def records(self, num_tokens: int) -> bool:
        """Return whether a pass over sequences with a token each is recorded as a program, and then repeated."""
        ...

    def first(self, step: DraftInput) -> Guessed:
        """Run on all tokens of a step and return the first guesses."""
        ...

    def next(self, step: DraftInput, number: int) -> Guessed:
        """Run on the guesses before, one token per sequence, and return the guesses `number`, from 1."""
        ...


def load_drafter(
    spec: DrafterSpec, weights: Iterable[Weight], target: Decoder | None, numerics: Numerics, max_len: int
) -> DraftDecoder:
    """Return the drafter of these weights. `target`: whose embedding and head it may share. Raises WeightError."""
    match spec:
        case LanguageDrafter():
            params = Packer(spec.model, numerics).pack(weights)
            return LanguageDecoder(Decoder(spec.model, params, numerics, max_len))
        case FeatureDrafter():
            assert target is not None, "the target is a decoder"
            return FeatureDecoder(spec, *_feature_params(spec, weights, target, numerics), target, numerics, max_len)
        case HeadsDrafter():
            return HeadsDecoder(spec, _named(spec, weights, numerics), numerics)
        case StagesDrafter():
            return StagesDecoder(spec, _named(spec, weights, numerics), numerics)


def _named(spec: DrafterSpec, weights: Iterable[Weight], numerics: Numerics) -> dict[str, Tensor]:
    """Return every parameter in the weights' dtype. Raises WeightError."""
    expected = drafter_params(spec)
    exact = {name for name, param in expected.items() if param.float32}
    named = {}
    for name, value in checked(weights, expected):
        array = value.dequantize() if isinstance(value, QuantizedTensor) else value
        named[name] = to_torch(array).to(torch.float32 if name in exact else numerics.weights)
    if expected:
        raise lacking(expected)
    return named


def _feature_params(
    spec: FeatureDrafter, weights: Iterable[Weight], target: Decoder, numerics: Numerics
) -> tuple[ModelParams, dict[str, Tensor]]:
    """Return the layers with the shared parts of the target, and the parameters beside them."""
    named = _named(spec, weights, numerics)
    beside = {name: named.pop(name) for name in list(named) if name.startswith(("inputs.", "target_ids"))}
    head = named.pop("head", None)
    layers = NamedWeights({**named}, numerics)
    own = [
        load_layer(_layer_weights(named, index, numerics), f"layers.{index}", layer)
        for index, layer in enumerate(spec.model.layers)
    ]
    base = target.params
    if spec.own_embedding:
        embed = layers.table("embed")
        assert embed is not None
        base = replace(base, embed=embed, embed_in=None, embed_out=None)
    packed = base.head if head is None else float32_linear(head, None, numerics)
    final_norm = layers.norm("final_norm")
    return replace(base, layers=tuple(own), final_norm=final_norm, head=packed), beside


def _layer_weights(named: dict[str, Tensor], index: int, numerics: Numerics) -> NamedWeights:
    prefix = f"layers.{index}."
    return NamedWeights({name: named.pop(name) for name in list(named) if name.startswith(prefix)}, numerics)


class LanguageDecoder:
    """A language model that reads tokens alone."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.num_bytes = decoder.params.num_bytes

    def records(self, num_tokens: int) -> bool:
        return self.decoder.records(num_tokens)

    def first(self, step: DraftInput) -> Guessed:
        hidden = self.decoder.hidden(step.token_ids, step.batch, dict(step.caches))
        if not len(step.last):
            return Guessed(step.last, None)
        return Guessed(self.decoder.logits(hidden[step.last]).argmax(-1), None)

    def next(self, step: DraftInput, number: int) -> Guessed:
        return self.first(step)


class FeatureDecoder:
    """Layers over embeddings and hidden states."""

    def __init__(
        self,
        spec: FeatureDrafter,
        params: ModelParams,
        beside: dict[str, Tensor],
        target: Decoder,
        numerics: Numerics,
        max_len: int,
    ) -> None:
        """`beside`: the parameters outside of the layers. `target`: whose embedding and head are shared."""
        model = spec.model
        self.spec = spec
        self.numerics = numerics
        native = operators(numerics)
        target_ids = beside.pop("target_ids", None)
        given = NamedWeights({name.removeprefix("inputs."): value for name, value in beside.items()}, numerics)
        attention = spec.inputs.attention if isinstance(spec.inputs, AttendedInputs) else None
        parts = named_parts(model, params) | {
            "inputs.embed_norm": given.norm("embed_norm"),
            "inputs.hidden_norm": given.norm("hidden_norm"),
            "inputs.project": given.linear("project"),
            "inputs.attention": None if attention is None else load_attention(given, "attention", attention),
        }
        ops = ReferenceOps(parts, numerics, native)
        self.embed = TokenEmbedding(model.embedding, replace(ops, native=None))
        self.stack = DecoderStack(model, ops, paged_makers(ops, len(spec.caches) - len(model.caches)))
        self.rotary = RotaryTables(spec.ropes, max_len, numerics.compute)
        self.target_ids = None if target_ids is None else torch.arange(len(target_ids)) + target_ids.long()
        self.embed_norm = ops.norm(spec.inputs.embed_norm, "inputs.embed_norm")
        self.hidden_norm = ops.norm(spec.inputs.hidden_norm, "inputs.hidden_norm")
        self.project = ops.linear("inputs.project")
        self.attend = None if attention is None else paged_makers(ops).mixer(attention, "inputs.attention", (0,))
        assert params.head is not None, "the target generates"
        self.head = params.head
        self.embed_out = params.embed_out
        self.num_bytes = held_bytes((params.layers, beside))

    def records(self, num_tokens: int) -> bool:
        return False

    def first(self, step: DraftInput) -> Guessed:
        assert step.features is not None, "it reads the target's hidden states"
        features = self.project(step.features) if self.attend is not None else step.features
        return self._run(step, features)

    def next(self, step: DraftInput, number: int) -> Guessed:
        assert step.features is not None, "the pass before returned some"
        return self._run(step, step.features)

    def _run(self, step: DraftInput, features: Tensor) -> Guessed:
        batch = step.batch
        caches = step.caches
        rotations = self.rotary.at(batch.positions)
        x = self.stack.without_norm(self._input(step, features, rotations), batch, caches, rotations)
        if not len(step.last):
            return Guessed(step.last, None)
        x = x[step.last]
        normed = self.stack.final_norm(x, None)[0]
        token_ids = self.head(normed if self.embed_out is None else self.embed_out(normed)).argmax(-1)
        if self.target_ids is not None:
            token_ids = self.target_ids[token_ids]
        return Guessed(token_ids, normed if self.spec.chains_normed else x)

    def _input(self, step: DraftInput, features: Tensor, rotations: object) -> Tensor:
        """Return what the first layer reads, [T, D]."""
        inputs = self.spec.inputs
        positions = step.batch.positions
        embeds = self.embed(step.token_ids, positions + 1)
        if isinstance(inputs, JoinedInputs):
            if inputs.blank_first:
                embeds = embeds * (positions > 0)[:, None]
            parts = [self.embed_norm(embeds, None)[0], self.hidden_norm(features, None)[0]]
            return self.project(torch.cat(parts[::-1] if inputs.hidden_first else parts, -1))
        normed = self.hidden_norm(features, None)[0]
        assert self.attend is not None
        both = torch.cat([self.embed_norm(embeds, None)[0], normed], -1)
        return (normed if inputs.norms_residual else features) + self.attend(both, step.batch, step.caches, rotations)


class HeadsDecoder:
    """A head per guess."""

    def __init__(self, spec: HeadsDrafter, named: dict[str, Tensor], numerics: Numerics) -> None:
        self.num_bytes = held_bytes(named)
        parts = NamedWeights({**named}, numerics)
        self.heads = [
            (
                [parts.linear(f"heads.{head}.blocks.{block}") for block in range(spec.blocks)],
                float32_linear(parts.take(f"heads.{head}.head"), None, numerics),
            )
            for head in range(spec.heads)
        ]

    def records(self, num_tokens: int) -> bool:
        return False

    def first(self, step: DraftInput) -> Guessed:
        assert step.features is not None
        hidden = step.features[step.last]
        return Guessed(self._guess(hidden, 0), hidden)

    def next(self, step: DraftInput, number: int) -> Guessed:
        assert step.features is not None
        return Guessed(self._guess(step.features, number), step.features)

    def _guess(self, hidden: Tensor, number: int) -> Tensor:
        blocks, head = self.heads[number]
        for block in blocks:
            hidden = hidden + torch.nn.functional.silu(block(hidden))
        return head(hidden).argmax(-1)


class StagesDecoder:
    """A stage per guess over a state and the token before."""

    def __init__(self, spec: StagesDrafter, named: dict[str, Tensor], numerics: Numerics) -> None:
        self.spec = spec
        self.num_bytes = held_bytes(named)
        parts = NamedWeights({**named}, numerics)
        sources = range(1 if spec.tied else spec.stages)
        norms = [parts.norm(f"stages.{stage}.norm") for stage in sources]
        heads = [float32_linear(parts.take(f"stages.{stage}.head"), None, numerics) for stage in sources]
        tables = [parts.take(f"stages.{stage}.embed") for stage in sources]
        projections = [parts.linear(f"stages.{stage}.project") for stage in range(2 if spec.tied else spec.stages)]
        self.stages = [
            (projections[min(stage, len(projections) - 1)], norms[own], heads[own], tables[own])
            for stage in range(spec.stages)
            for own in (0 if spec.tied else stage,)
        ]

    def records(self, num_tokens: int) -> bool:
        return False

    def first(self, step: DraftInput) -> Guessed:
        assert step.features is not None
        state = step.features[step.last]
        if self.spec.scales_input:
            state = self._scaled(state) * 0.5**0.5
        return self._stage(0, state, step.token_ids[step.last])

    def next(self, step: DraftInput, number: int) -> Guessed:
        assert step.features is not None
        return self._stage(number, step.features, step.token_ids)

    def _stage(self, number: int, state: Tensor, token_ids: Tensor) -> Guessed:
        project, norm, head, table = self.stages[number]
        assert norm is not None
        assert norm.bias is not None
        embeds = torch.nn.functional.embedding(token_ids, table).to(state.dtype)
        state = self._scaled(project(state) + self.spec.embedding_weight * embeds) * norm.weight + norm.bias
        state = torch.nn.functional.gelu(state)
        return Guessed(head(state).argmax(-1), state)

    def _scaled(self, x: Tensor) -> Tensor:
        """Return x divided by its root mean square."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.spec.eps)
