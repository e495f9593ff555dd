"""Embedding, layers and final norm of a model, built once from its specification and called once per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.torch_decoder.layers import make_layers
from pagoda.backends.torch_decoder.ops import BlockMakers, DecoderOps, InsertedRows, LayerStep, Stream
from pagoda.backends.torch_decoder.streams import make_first_streams, run_layers
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
        embedded: InsertedRows | None = None,
    ) -> Tensor:
        """Return [T, D] of token_ids, positions, token_types [T]; None: all types are 0.

        `embedded`: replaces rows after lookup and scaling.
        """
        x = self.ops.rows("embed", token_ids if embedded is None else embedded.mask_ids(token_ids))
        if self.scale != 1.0:
            x = x * self.scale
        if embedded is not None:
            x = embedded.insert(x)
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
