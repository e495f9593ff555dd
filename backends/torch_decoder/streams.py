"""What happens between layers: per-layer embeddings, several streams, scaled outputs, blends with earlier layers.

What has parameters belongs to a layer's step, so that those of an offloaded layer are read while they are on the
device. Axis letters: T tokens, D width, L layers, A streams, P channels of a per-layer embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.torch_decoder.ops import DecoderOps, LayerStep, Stream
from pagoda.common.models.spec import AltUp, Layer, ModelSpec, PerLayerEmbedding

_SMALLEST_SQUARE: Final = 1e-5
"""Of the mean square of a projection that is scaled to another's."""


def run_layers(
    layers: Sequence[LayerStep],
    first: FirstStreams,
    token_ids: Tensor,
    x: Tensor,
    *mixer_inputs: object,
) -> Stream:
    """Run the layers on first hidden states x [T, D] of token_ids [T]. `first`: see `make_first_streams`."""
    stream, parts = first(token_ids, x)
    kept: dict[int, Tensor] = {}
    for index, layer in enumerate(layers):
        stream = layer(first.blended(index, stream, kept), parts, *mixer_inputs)
    return first.last(stream)


def make_first_streams(spec: ModelSpec, ops: DecoderOps) -> FirstStreams | None:
    """Return what comes before and after the layers; None: they follow each other and nothing else happens."""
    changed = any(layer.output_scale or layer.block is not None or layer.blend is not None for layer in spec.layers)
    plain = spec.per_layer is None and spec.alt_up is None and not changed
    return None if plain else FirstStreams(spec, ops)


def with_streams(spec: ModelSpec, index: int, layer: LayerStep, ops: DecoderOps) -> LayerStep:
    """Return a layer with what happens at its ends, if the model has any of it."""
    prefix = f"layers.{index}"
    add_part = None if spec.per_layer is None else PartUpdate(spec.per_layer, index, ops, prefix)
    if spec.alt_up is not None:
        return AlternatingLayer(spec.alt_up, layer, add_part, ops, prefix)
    if spec.layers[index].block is not None:
        return layer  # reads the first hidden states
    if make_first_streams(spec, ops) is None:
        return layer
    return EndedLayer(spec.layers[index], layer, add_part, ops, prefix)


class FirstStreams:
    """The streams before the first layer, before layers with a blend, and what is left of them after the last."""

    def __init__(self, spec: ModelSpec, ops: DecoderOps) -> None:
        self.ops = ops
        self.read_later = spec.blended
        self.blocks = any(layer.block is not None for layer in spec.layers)
        self.blends = tuple(layer.blend for layer in spec.layers)
        self.parts = None if spec.per_layer is None else PerLayerParts(spec.per_layer, ops)
        self.project_in, self.project_out = (ops.get(f"alt_up.{name}") for name in ("in", "out"))

    def __call__(self, token_ids: Tensor, x: Tensor) -> tuple[Stream, Tensor | None]:
        """Return the stream, or several as an update [A, T, D], and the per-layer embeddings [T, L, P].

        With input blocks x stands in the place of the latter.
        """
        if self.blocks:
            return (None, x), x
        parts = None if self.parts is None else self.parts(token_ids, x)
        if self.project_in is None:
            return (None, x), parts
        others = torch.matmul(x, self.project_in.mT)  # [A - 1, T, D]
        return (None, torch.cat((x[None], _rescaled(others, x)))), parts

    def blended(self, index: int, stream: Stream, kept: dict[int, Tensor]) -> Stream:
        """Return the input of layer `index`. `kept`: those of earlier layers that later ones read, which it adds to."""
        blend = self.blends[index]
        residual, update = stream
        if blend is None and index not in self.read_later:
            return stream
        x = self.ops.add(residual, update)
        if index in self.read_later:
            kept[index] = x
        return None, x if blend is None else torch.lerp(x, kept[blend.layer], blend.share)

    def last(self, stream: Stream) -> Stream:
        """Return one stream, the input of the final norm."""
        if self.project_out is None:
            return stream
        streams = stream[1]
        others = torch.matmul(streams[1:], self.project_out.mT)
        return None, torch.cat((streams[:1], _rescaled(others, streams[0]))).mean(0)


class PerLayerParts:
    """The per-layer embeddings of a step's tokens, of which each layer reads its part."""

    def __init__(self, spec: PerLayerEmbedding, ops: DecoderOps) -> None:
        self.spec = spec
        self.ops = ops
        self.project = ops.linear("per_layer.projection")
        self.norm = ops.norm(spec.norm, "per_layer.norm")

    def __call__(self, token_ids: Tensor, x: Tensor) -> Tensor:
        """Return [T, L, P] of token_ids [T] and first hidden states x [T, D]."""
        spec = self.spec
        known = token_ids.masked_fill(token_ids >= spec.vocab, 0)
        tokens = self.ops.rows("per_layer.table", known).to(x.dtype) * spec.width**0.5
        projected = self.project(x).view(-1, spec.width) * x.shape[1] ** -0.5
        return ((self.norm(projected, None)[0].view(tokens.shape) + tokens) * 2**-0.5).view(len(x), -1, spec.width)


class PartUpdate:
    """What a layer's part of the per-layer embedding adds at its end."""

    def __init__(self, spec: PerLayerEmbedding, index: int, ops: DecoderOps, prefix: str) -> None:
        self.index = index
        self.activate = ops.activation(spec.activation)
        self.gate = ops.linear(f"{prefix}.per_layer.gate")
        self.out = ops.linear(f"{prefix}.per_layer.out")
        self.norm = ops.norm(spec.norm, f"{prefix}.per_layer.norm")

    def __call__(self, x: Tensor, parts: Tensor) -> Tensor:
        """Return [T, D] of x [T, D] and the parts of all layers [T, L, P]."""
        gate = self.activate(self.gate(x))
        return self.norm(self.out(gate * parts[:, self.index]), None)[0]


class EndedLayer:
    """A layer, then the per-layer embedding's update and the scale of the output, as far as the model has them."""

    def __init__(
        self, spec: Layer, layer: LayerStep, add_part: PartUpdate | None, ops: DecoderOps, prefix: str
    ) -> None:
        self.ops = ops
        self.layer = layer
        self.add_part = add_part
        self.scale = ops.tensor(f"{prefix}.output_scale") if spec.output_scale else None

    def __call__(self, stream: Stream, parts: Tensor | None, *mixer_inputs: object) -> Stream:
        residual, update = self.layer(stream, *mixer_inputs)
        if self.add_part is not None and parts is not None:
            residual = self.ops.add(residual, update)
            update = self.add_part(residual, parts)
        if self.scale is None:
            return residual, update
        return None, self.ops.add(residual, update) * self.scale


class AlternatingLayer:
    """A layer on one of several streams, from which the others are predicted and corrected; see `AltUp`."""

    def __init__(
        self, spec: AltUp, layer: LayerStep, add_part: PartUpdate | None, ops: DecoderOps, prefix: str
    ) -> None:
        self.ops = ops
        self.spec = spec
        self.layer = layer
        self.add_part = add_part
        self.norm = ops.norm(spec.norm, f"{prefix}.alt_up.norm")
        self.router = ops.tensor(f"{prefix}.alt_up.router")
        self.prediction, self.correction = (
            ops.tensor(f"{prefix}.alt_up.{name}") for name in ("prediction", "correction")
        )
        self.scale = ops.tensor(f"{prefix}.alt_up.scale") if spec.scaled else None

    def __call__(self, stream: Stream, parts: Tensor | None, *mixer_inputs: object) -> Stream:
        spec = self.spec
        _, streams = stream
        active = spec.active
        count = spec.streams
        mixing = F.linear(self._modes(streams[active]), self.prediction).view(-1, count, count)
        predicted = streams + torch.bmm(mixing, streams.transpose(0, 1)).transpose(0, 1)
        residual, update = self.layer((None, predicted[active].contiguous()), *mixer_inputs)
        y = self.ops.add(residual, update)
        correction = 1 + F.linear(self._modes(y), self.correction)  # [T, A]
        streams = predicted + correction.T[:, :, None] * (y - predicted[active])
        if self.add_part is not None and parts is not None:
            gating = streams[active] if self.scale is None else streams[active] * self.scale
            streams[1:] += self.add_part(gating, parts)
        return None, streams

    def _modes(self, x: Tensor) -> Tensor:
        """Return how much each stream matters for each token, [T, A] of x [T, D]."""
        normed = self.norm(x, None)[0] / x.shape[1]
        return F.linear(normed, self.router).float().tanh().to(x.dtype)


def _rescaled(x: Tensor, like: Tensor) -> Tensor:
    """Return x [A, T, D] with the RMS of `like` [T, D]."""
    size = x.square().mean(-1, keepdim=True).clamp(min=_SMALLEST_SQUARE).sqrt()
    return x * like.square().mean(-1, keepdim=True).sqrt() / size
