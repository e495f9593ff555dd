"""Drafter models: hidden states of the target and tokens -> the next guesses, greedily.

Every decoder guesses for n sequences. `first` runs on all tokens of a step, so that the caches stay complete, and
returns the logits after the last token of each sequence; `next` runs on one token per sequence, the guess before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pagoda.backends.reference.execution import StepBatch
from pagoda.backends.reference.memory import LayerCache, held_bytes
from pagoda.backends.reference.model.decoder import Decoder
from pagoda.backends.reference.model.feed_forward import paged_makers
from pagoda.backends.reference.model.linear import float32_linear
from pagoda.backends.reference.model.mixers.registry import ops_of
from pagoda.backends.reference.model.mixers.rotary import RotaryTables
from pagoda.backends.reference.model.named_ops import ReferenceOps, named_parts
from pagoda.backends.reference.model.numerics import Numerics
from pagoda.backends.reference.model.ops import to_torch
from pagoda.backends.reference.model.params import ModelParams
from pagoda.backends.reference.programs.operators import operators
from pagoda.backends.reference.weights.arrange import NamedWeights
from pagoda.backends.reference.weights.layers import load_layer
from pagoda.backends.reference.weights.load import Packer
from pagoda.backends.torch_decoder.drafters import FeatureLayers, HeadsGuesser, StagesGuesser
from pagoda.backends.torch_decoder.ops import Linear
from pagoda.common.backend import Weight
from pagoda.common.models.drafters import (
    AttendedInputs,
    DrafterSpec,
    FeatureDrafter,
    HeadsDrafter,
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
    own = NamedWeights({**named}, numerics)
    parts = {name: part for name, part in target.params.parts.items() if not name.startswith("layers.")}
    if spec.own_embedding:
        parts = {name: part for name, part in parts.items() if name not in ("embed_in", "embed_out")}
        parts["embed"] = own.table("embed")
    if head is not None:
        parts["head"] = float32_linear(head, None, numerics)
    parts["final_norm"] = own.norm("final_norm")
    layers: dict[str, object] = {}
    for index, layer in enumerate(spec.model.layers):
        prefix = f"layers.{index}"
        tensors = {name: tensor for name, tensor in named.items() if name.startswith(f"{prefix}.")}
        layers |= load_layer(NamedWeights({**tensors}, numerics), prefix, layer)
    return ModelParams(parts | layers, held_bytes(layers)), beside


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
        target_ids = beside.pop("target_ids", None)
        given = NamedWeights({name.removeprefix("inputs."): value for name, value in beside.items()}, numerics)
        attention = spec.inputs.attention if isinstance(spec.inputs, AttendedInputs) else None
        parts = named_parts(model, params) | {
            "inputs.embed_norm": given.norm("embed_norm"),
            "inputs.hidden_norm": given.norm("hidden_norm"),
            "inputs.project": given.linear("project"),
            "inputs.attention": None if attention is None else ops_of(attention).load(given, "attention", attention),
        }
        ops = ReferenceOps(parts, numerics, operators(numerics))
        self.layers = FeatureLayers(spec, ops, paged_makers(ops), parts["head"], parts.get("embed_out"), target_ids)
        self.rotary = RotaryTables(spec.ropes, max_len, numerics.compute)
        self.num_bytes = params.num_bytes + held_bytes(beside)

    def records(self, num_tokens: int) -> bool:
        return False

    def first(self, step: DraftInput) -> Guessed:
        assert step.features is not None, "it reads the target's hidden states"
        return self._run(step, self.layers.read(step.features))

    def next(self, step: DraftInput, number: int) -> Guessed:
        assert step.features is not None, "the pass before returned some"
        return self._run(step, step.features)

    def _run(self, step: DraftInput, features: Tensor) -> Guessed:
        positions = step.batch.positions
        rotations = self.rotary.at(positions)
        x = self.layers.run(step.token_ids, positions, features, step.batch, step.caches, rotations)
        return Guessed(*self.layers.guess(x[step.last])) if len(step.last) else Guessed(step.last, None)


class HeadsDecoder:
    """A head per guess."""

    def __init__(self, spec: HeadsDrafter, named: dict[str, Tensor], numerics: Numerics) -> None:
        self.num_bytes = held_bytes(named)
        weights = NamedWeights({**named}, numerics)
        self.heads = HeadsGuesser(spec, weights.linear, lambda name: float32_linear(weights.take(name), None, numerics))

    def records(self, num_tokens: int) -> bool:
        return False

    def first(self, step: DraftInput) -> Guessed:
        assert step.features is not None
        hidden = step.features[step.last]
        return Guessed(self.heads.guess(0, hidden), hidden)

    def next(self, step: DraftInput, number: int) -> Guessed:
        assert step.features is not None
        return Guessed(self.heads.guess(number, step.features), step.features)


class StagesDecoder:
    """A stage per guess over a state and the token before."""

    def __init__(self, spec: StagesDrafter, named: dict[str, Tensor], numerics: Numerics) -> None:
        self.num_bytes = held_bytes(named)
        weights = NamedWeights({**named}, numerics)

        def head(name: str) -> Linear:
            return float32_linear(weights.take(name), None, numerics)

        def tensor(name: str) -> Tensor:
            return weights.take(name) if name.endswith(".embed") else weights.take_wide(name)

        self.stages = StagesGuesser.of(spec, weights.linear, head, tensor)

    def records(self, num_tokens: int) -> bool:
        return False

    def first(self, step: DraftInput) -> Guessed:
        assert step.features is not None
        state = self.stages.first_state(step.features[step.last])
        return Guessed(*self.stages.guess(0, state, step.token_ids[step.last]))

    def next(self, step: DraftInput, number: int) -> Guessed:
        assert step.features is not None
        return Guessed(*self.stages.guess(number, step.features, step.token_ids))
