"""The layers of a pooling model, causal or not: whole prompts at once, without a cache."""

from __future__ import annotations

from torch import Tensor

from pagoda.backends.reference.execution import PackedPrompts, attend
from pagoda.backends.reference.model.attention import Projection
from pagoda.backends.reference.model.decoder import DecoderLayer, TokenEmbedding, make_norm
from pagoda.backends.reference.model.numerics import Numerics
from pagoda.backends.reference.model.rotary import RotaryTables, Rotation
from pagoda.backends.reference.weights import AttentionParams, ModelParams
from pagoda.common.models.spec import Attention, ModelSpec


class Encoder:
    """Maps a batch of prompts to hidden states."""

    def __init__(self, spec: ModelSpec, params: ModelParams, numerics: Numerics, max_len: int) -> None:
        self.params = params
        self.embed = TokenEmbedding(spec, params, numerics)
        self.layers = tuple(
            DecoderLayer(layer, p, PackedAttention(layer.mixer, p.mixer))
            for layer, p in zip(spec.layers, params.layers)
        )
        self.final_norm = make_norm(spec.final_norm, params.final_norm)
        self.rotary = RotaryTables(spec, max_len, numerics.compute)

    def hidden(self, batch: PackedPrompts) -> Tensor:
        """Return hidden states [T, D] after the last norm, the input of a head or a pooler."""
        x = self.embed(batch.token_ids, batch.positions, batch.token_types)
        rotations = self.rotary.at(batch.positions)
        for layer in self.layers:
            x = layer(x, batch, rotations[layer.rope])
        x = self.final_norm(x)
        return x if self.params.embed_out is None else self.params.embed_out(x)


class PackedAttention:
    """One layer's attention within each prompt."""

    def __init__(self, spec: Attention, params: AttentionParams) -> None:
        self.spec, self.project = spec, Projection(spec, params)

    def __call__(self, x: Tensor, batch: PackedPrompts, rotation: Rotation | None) -> Tensor:
        """X [T, D] -> [T, D]."""
        return self.project.out(attend(*self.project(x, rotation), batch, self.spec))
