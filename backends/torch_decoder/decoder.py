"""Embedding, layers and final norm of a model, built once from its specification and called once per step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.torch_decoder.layers import make_layers
from pagoda.backends.torch_decoder.media_rows import MediaRows, without_rows
from pagoda.backends.torch_decoder.ops import BlockMakers, DecoderOps, LayerStep, MixerStep, Stream
from pagoda.backends.torch_decoder.streams import make_first_streams, run_layers
from pagoda.common.models.mixers import Mixer
from pagoda.common.models.spec import Embedding, ModelSpec

Wrap = Callable[[Sequence[LayerStep]], tuple[LayerStep, ...]]
"""Wraps all layers of a model in what a step does around each."""


class TokenEmbedding:
    """Token, position and type embeddings, scaled, projected, summed and normalised as the model specifies."""

    def __init__(self, spec: Embedding, ops: DecoderOps) -> None:
        self.spec = spec
        self.ops = ops
        self.positions = ops.get("positions")
        self.types = ops.get("token_types")
        self.norm = ops.norm(spec.norm, "embed_norm")
        self.project = ops.linear("embed_in") if ops.has("embed_in") else None
        self.scale = float(torch.tensor(spec.scale).to(ops.table_dtype))  # rounded to the weights' dtype, as trained

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        token_types: Tensor | None = None,
        media: MediaRows | None = None,
    ) -> Tensor:
        """Return [T, D] of token_ids, positions, token_types [T]; None: all types are 0.

        `media`: rows that token ids may name; None: none does.
        """
        x = self.ops.rows("embed", token_ids if media is None else without_rows(token_ids))
        if self.scale != 1.0:
            x = x * self.scale
        if media is not None:
            x = media.insert(x, token_ids)
        x = x.to(self.ops.compute_dtype)
        if self.project is not None:
            x = self.project(x)
        if self.positions is not None:
            x = x + F.embedding(positions + self.spec.position_offset, self.positions)
        if self.types is not None:
            x = x + (self.types[0] if token_types is None else F.embedding(token_types, self.types))
        return self.norm(x, None)[0]


class DecoderStack:
    """Layers and final norm. Without `match`, and without synchronising with the host, in a step."""

    def __init__(self, spec: ModelSpec, ops: DecoderOps, makers: BlockMakers, wrap: Wrap = tuple) -> None:
        self.ops = ops
        self.first = make_first_streams(spec, ops)
        self.layers = wrap(make_layers(spec, ops, makers))
        self.final_norm = ops.norm(spec.final_norm, "final_norm")

    def __call__(self, token_ids: Tensor, x: Tensor, *mixer_inputs: object) -> Tensor:
        """Return hidden states [T, D] after the final norm, of embeddings x [T, D] of token_ids [T]."""
        if self.first is None:
            return self.in_turn(x, *mixer_inputs)
        residual, update = run_layers(self.layers, self.first, token_ids, x, *mixer_inputs)
        return self.final_norm(update, residual)[0]

    def in_turn(self, x: Tensor, *mixer_inputs: object) -> Tensor:
        """Return hidden states [T, D] after the final norm, in a model whose layers just follow each other."""
        residual, update = self._layers_in_turn(x, *mixer_inputs)
        return self.final_norm(update, residual)[0]

    def without_norm(self, x: Tensor, *mixer_inputs: object) -> Tensor:
        """Return the output [T, D] of the last layer, in a model whose layers just follow each other."""
        residual, update = self._layers_in_turn(x, *mixer_inputs)
        return self.ops.add(residual, update)

    def _layers_in_turn(self, x: Tensor, *mixer_inputs: object) -> Stream:
        stream: Stream = None, x
        for layer in self.layers:
            stream = layer(stream, *mixer_inputs)
        return stream

    def captured(self, captured: tuple[int, ...], x: Tensor, *mixer_inputs: object) -> tuple[Tensor, Tensor]:
        """Return hidden states [T, D], and the inputs of the `captured` layers side by side [T, C*D]."""
        assert self.first is None, "layers have one residual stream"
        stream: Stream = None, x
        inputs: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if index in captured:
                inputs[index] = self.ops.add(*stream)
            stream = layer(stream, *mixer_inputs)
        residual, update = stream
        return self.final_norm(update, residual)[0], torch.cat([inputs[index] for index in captured], -1)


class TorchModel:
    """The parts of every decoder and encoder: embedding, layers with the final norm, and what comes before the head."""

    def __init__(self, spec: ModelSpec, ops: DecoderOps, makers: BlockMakers, wrap: Wrap = tuple) -> None:
        self.spec = spec
        self.embed = TokenEmbedding(spec.embedding, ops)
        self.stack = DecoderStack(spec, ops, makers, wrap)
        self.embed_out = ops.linear("embed_out") if ops.has("embed_out") else None

    def encoded(
        self, token_ids: Tensor, positions: Tensor, token_types: Tensor | None, *mixer_inputs: object
    ) -> Tensor:
        """Return what a head or a pooler reads, [T, n], of whole prompts: token_ids, positions, token_types [T]."""
        x = self.embed(token_ids, positions, token_types)
        return self.head_input(self.stack(token_ids, x, *mixer_inputs))

    def head_input(self, hidden: Tensor) -> Tensor:
        """Return what the head reads, [R, n] of hidden states [R, D]."""
        return hidden if self.embed_out is None else self.embed_out(hidden)

    def scaled(self, logits: Tensor) -> Tensor:
        """Return the head's results float32 [R, V], scaled and capped in place as the model specifies."""
        if self.spec.logit_scale != 1.0:
            logits *= self.spec.logit_scale
        if (cap := self.spec.logit_softcap) is not None:
            logits.div_(cap).tanh_().mul_(cap)
        return logits


def packed_mixers(
    spec: ModelSpec, packed: Callable[[Mixer, str, int | None], MixerStep]
) -> Callable[[Mixer, str, tuple[int, ...]], MixerStep]:
    """Return how an encoder's mixers are made. `packed`: the last: number of the cache that several mixers read."""
    readers = Counter(number for layer in spec.cache_numbers for mixer in layer for number in mixer)

    def make(mixer: Mixer, prefix: str, numbers: tuple[int, ...]) -> MixerStep:
        return packed(mixer, prefix, numbers[0] if numbers and readers[numbers[0]] > 1 else None)

    return make
