"""The drafters on a CPU: their parameters, packed, and the decoder that the torch drafters run on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import torch.nn.functional as F
from torch import Tensor, float32

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
from pagoda.backends.torch_decoder.drafters import (
    DraftModel,
    DraftTokens,
    FeatureModel,
    HeadsModel,
    LanguageModel,
    RowsOf,
    StagesModel,
    TokensOf,
)
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

DraftBatch = tuple[StepBatch, Mapping[int, LayerCache]]
"""What the mixers of a drafter read: the batch, and its caches by number."""

_FINAL_NORM = "final_norm"
"""Beginning of the names of the final norm's weight and bias, which a drafter does not share with the target."""


def load_drafter(
    spec: DrafterSpec, weights: Iterable[Weight], target: Decoder | None, numerics: Numerics, max_len: int
) -> DraftModel[DraftBatch]:
    """Return the drafter of these weights. `target`: whose embedding and head it may share. Raises WeightError."""
    if isinstance(spec, LanguageDrafter):
        params = Packer(spec.model, numerics).pack(weights)
        decoder = Decoder(spec.model, params, numerics, max_len)

        def hidden(tokens: DraftTokens[DraftBatch]) -> Tensor:
            batch, caches = tokens.batch
            return decoder.hidden(tokens.token_ids, batch, dict(caches))

        return LanguageModel(hidden, _most_likely(decoder.logits), params.num_bytes, decoder.records)
    named = _load_params(spec, weights, numerics)
    if isinstance(spec, FeatureDrafter):
        assert target is not None, "the target is a decoder"
        return _feature_model(spec, named, target, numerics, max_len)
    num_bytes = held_bytes(named)
    given = NamedWeights({**named}, numerics)

    def most_likely(name: str) -> TokensOf:
        return _most_likely(float32_linear(given.take(name), None, numerics))

    def rows(name: str) -> RowsOf:
        return partial(F.embedding, weight=given.take(name))

    match spec:
        case HeadsDrafter():
            return HeadsModel(spec, given.linear, most_likely, num_bytes)
        case StagesDrafter():
            return StagesModel(
                spec,
                linear=given.linear,
                most_likely=most_likely,
                rows=rows,
                tensor=given.take_wide,
                num_bytes=num_bytes,
            )


def _most_likely(head: Linear) -> TokensOf:
    """Return what gives the most likely tokens of a head."""
    return lambda hidden: head(hidden).argmax(-1)


def _load_params(spec: DrafterSpec, weights: Iterable[Weight], numerics: Numerics) -> dict[str, Tensor]:
    """Return every parameter of a drafter, dequantised, in the type of weights or in float32. Raise WeightError."""
    expected = drafter_params(spec)
    exact = {name for name, param in expected.items() if param.float32}
    tensors = {}
    for name, value in checked(weights, expected):
        array = value.dequantize() if isinstance(value, QuantizedTensor) else value
        tensors[name] = to_torch(array).to(float32 if name in exact else numerics.weights)
    if expected:
        raise lacking(expected)
    return tensors


def _feature_model(
    spec: FeatureDrafter, named: dict[str, Tensor], target: Decoder, numerics: Numerics, max_len: int
) -> FeatureModel[DraftBatch]:
    """Return the layers over embeddings and hidden states. `target`: whose embedding and head are shared."""
    beside = {name: named.pop(name) for name in list(named) if name.startswith(("inputs.", "target_ids"))}
    params = _feature_params(spec, named, target, numerics)
    num_bytes = params.num_bytes + held_bytes(beside)
    target_ids = beside.pop("target_ids", None)
    given = NamedWeights({**beside}, numerics)
    parts = named_parts(spec.model, params)
    parts["inputs.project"] = given.linear("inputs.project")
    if isinstance(spec.inputs, AttendedInputs):
        attention = spec.inputs.attention
        parts["inputs.attention"] = ops_of(attention).load(given, "inputs.attention", attention)
    parts |= {name: given.take_wide(name) for name in given.names}  # its norms
    ops = ReferenceOps(parts, numerics, operators(numerics))
    rotary = RotaryTables(spec.ropes, max_len, numerics.compute)
    return FeatureModel(
        spec,
        ops,
        paged_makers(ops),
        mixer_inputs=lambda tokens: (*tokens.batch, rotary.at(tokens.positions)),
        most_likely=_most_likely(parts["head"]),
        embed_out=parts.get("embed_out"),
        target_ids=target_ids,
        num_bytes=num_bytes,
    )


def _feature_params(spec: FeatureDrafter, named: dict[str, Tensor], target: Decoder, numerics: Numerics) -> ModelParams:
    """Return the layers, of these parameters, with the shared parts of the target."""
    head = named.pop("head", None)
    given = NamedWeights({**named}, numerics)
    parts = {name: part for name, part in target.params.parts.items() if not name.startswith(("layers.", _FINAL_NORM))}
    if spec.own_embedding:
        parts = {name: part for name, part in parts.items() if name not in ("embed_in", "embed_out")}
        parts["embed"] = given.table("embed")
    if head is not None:
        parts["head"] = float32_linear(head, None, numerics)
    parts |= {name: given.take_wide(name) for name in given.names if name.startswith(_FINAL_NORM)}
    layers: dict[str, object] = {}
    for index, layer in enumerate(spec.model.layers):
        prefix = f"layers.{index}"
        tensors = {name: tensor for name, tensor in named.items() if name.startswith(f"{prefix}.")}
        layers |= load_layer(NamedWeights({**tensors}, numerics), prefix, layer)
    return ModelParams(parts | layers, held_bytes(layers))
