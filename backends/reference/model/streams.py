"""What happens between layers: per-layer embeddings, several streams, scaled outputs, blends with earlier layers.

Axis letters: T tokens, D width, L layers, A streams, P channels of a per-layer embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.reference.model.ops import activation, norm
from pagoda.backends.reference.model.quantized.blocks import look_up
from pagoda.backends.reference.weights.params import LayerParams, ModelParams
from pagoda.common.models.spec import AltUp, ModelSpec, PerLayerEmbedding

SMALLEST_SQUARE: Final = 1e-5
"""Of the mean square of a projection that is scaled to another's."""

LayerStep = Callable[[int, Tensor], Tensor]
"""(index, x [T, D]; with an input block [x, embedding] [T, 2D]) -> [T, D]: one layer."""


def make_streams(spec: ModelSpec, params: ModelParams) -> Streams | None:
    """Return what runs the layers; None: they follow each other and nothing else happens."""
    changed = any(layer.output_scale or layer.blend is not None or layer.block is not None for layer in spec.layers)
    plain = spec.per_layer is None and spec.alt_up is None and not changed
    return None if plain else Streams(spec, params)


class Streams:
    """Runs the layers of a model."""

    def __init__(self, spec: ModelSpec, params: ModelParams) -> None:
        self.spec = spec
        self.params = params
        self.blended = spec.blended

    def run(self, token_ids: Tensor, x: Tensor, layer: LayerStep) -> Tensor:
        """token_ids int64 [T], first hidden states x [T, D] -> the input of the final norm [T, D]."""
        inputs = None if self.spec.per_layer is None else self._per_layer_inputs(self.spec.per_layer, token_ids, x)
        if self.spec.alt_up is not None:
            return self._alternate(self.spec.alt_up, x, inputs, layer)
        kept = dict[int, Tensor]()
        first = x
        for index, params in enumerate(self.params.layers):
            if index in self.blended:
                kept[index] = x
            if (blend := self.spec.layers[index].blend) is not None:
                x = torch.lerp(x, kept[blend.layer], blend.share)
            x = layer(index, x if self.spec.layers[index].block is None else torch.cat((x, first), -1))
            if inputs is not None:
                x = x + self._update(params, x, inputs[:, index])
            if (scale := params.extras.get("output_scale")) is not None:
                x = x * scale
        return x

    def _per_layer_inputs(self, spec: PerLayerEmbedding, token_ids: Tensor, x: Tensor) -> Tensor:
        """Return the part of each layer, [T, L, P]."""
        extras = self.params.extras
        shape = (len(token_ids), -1, spec.width)
        known = token_ids.where(token_ids < spec.vocab, 0)
        assert self.params.layer_table is not None, "the model has one"
        tokens = look_up(known, self.params.layer_table).to(x.dtype).view(shape) * spec.width**0.5
        projected = F.linear(x, extras["per_layer.projection"]).view(shape) * x.shape[1] ** -0.5
        return (norm(projected, spec.norm, extras["per_layer.norm"]) + tokens) * 2**-0.5

    def _update(self, params: LayerParams, x: Tensor, part: Tensor) -> Tensor:
        """Return what the per-layer embedding adds; `part` [T, P]."""
        assert self.spec.per_layer is not None, "there are inputs"
        gate = activation(self.spec.per_layer.activation)(F.linear(x, params.extras["per_layer.gate"]))
        out = F.linear(gate * part, params.extras["per_layer.out"])
        return norm(out, self.spec.per_layer.norm, params.extras["per_layer.norm"])

    def _alternate(self, spec: AltUp, x: Tensor, inputs: Tensor | None, layer: LayerStep) -> Tensor:
        others = torch.einsum("td,sed->ste", x, self.params.extras["alt_up.in"])
        streams = torch.cat((x[None], _rescaled(others, x)))  # [A, T, D]
        for index, params in enumerate(self.params.layers):
            extras = params.extras
            active = spec.active
            mixing = F.linear(_modes(spec, extras, streams[active]), extras["alt_up.prediction"])
            mixing = mixing.view(-1, spec.streams, spec.streams)
            predicted = streams + torch.einsum("tsi,itd->std", mixing, streams)
            y = layer(index, predicted[active])
            correction = 1 + F.linear(_modes(spec, extras, y), extras["alt_up.correction"])
            streams = predicted + correction.T[:, :, None] * (y - predicted[active])
            if inputs is not None:
                gating = streams[active] * extras["alt_up.scale"] if spec.scaled else streams[active]
                streams[1:] += self._update(params, gating, inputs[:, index])
        others = torch.einsum("std,sed->ste", streams[1:], self.params.extras["alt_up.out"])
        return torch.cat((streams[:1], _rescaled(others, streams[0]))).mean(0)


def _modes(spec: AltUp, extras: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return how much each stream matters for each token, [T, A] of x [T, D]."""
    normed = norm(x, spec.norm, extras["alt_up.norm"]) / x.shape[1]
    return F.linear(normed, extras["alt_up.router"]).float().tanh().to(x.dtype)


def _rescaled(x: Tensor, like: Tensor) -> Tensor:
    """Return x [A, T, D] with the RMS of `like` [T, D]."""
    size = x.square().mean(-1, keepdim=True).clamp(min=SMALLEST_SQUARE).sqrt()
    return x * like.square().mean(-1, keepdim=True).sqrt() / size
