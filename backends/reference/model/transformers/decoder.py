"""Decoders whose layers are transformers' code (--model-impl transformers), over the same paged cache."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagoda.backends.fallback.attention import RelativeBias
from pagoda.backends.fallback.encoder_decoder import CrossStates, EncoderDecoderModel, attend_rows
from pagoda.backends.fallback.model import TransformersModel
from pagoda.backends.reference.execution import StepBatch
from pagoda.backends.reference.memory import LayerCache
from pagoda.backends.reference.model.linear import Linear, float32_linear
from pagoda.backends.reference.model.mixers.attention.paged import PagedHeads
from pagoda.backends.reference.model.numerics import Numerics
from pagoda.backends.reference.weights.load import rounded_weights
from pagoda.backends.torch_decoder.media_rows import MediaRows, without_rows
from pagoda.common.backend import Weight
from pagoda.common.engine.steps.contract import RowStart
from pagoda.common.models.transformers_spec import TransformersSpec

CPU: Final = torch.device("cpu")
_LEAST_ROWS: Final = 8


class TransformersDecoder:
    """Maps token ids and a batch to hidden states and logits, as `Decoder` does.

    The layers may be on another device (torch-xla's). Attention and the cache stay on the CPU, and steps are padded to
    powers of two tokens there, because a program is compiled for each length.
    """

    def __init__(
        self,
        spec: TransformersSpec,
        weights: Iterable[Weight],
        numerics: Numerics,
        max_len: int,
        device: torch.device = CPU,
    ) -> None:
        """`max_len`: served context. Raise WeightError or ModelError, see TransformersModel."""
        self.spec = spec
        self.numerics = numerics
        self.device = device
        self.model = TransformersModel.load(spec, rounded_weights(weights, numerics), numerics.compute, max_len)
        self.model.place(device)
        self.model.set_head(self._head)
        self.num_bytes = self.model.num_bytes

    def hidden(
        self, token_ids: Tensor, batch: StepBatch, caches: dict[int, LayerCache], media: MediaRows | None = None
    ) -> Tensor:
        """token_ids int64 [T] -> hidden states [T, D] after the final norm; K and V are written to the caches."""
        count = len(token_ids)

        def attend(number: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, _: object) -> Tensor:
            q, k, v = (self._received(heads, count) for heads in (q, k, v))
            heads = PagedHeads(self.spec.attention[number], number, None if sinks is None else sinks.cpu())
            return self._sent(heads(q, (k, v), batch, caches).view_as(q))

        def insert(rows: Tensor) -> Tensor:
            assert media is not None, "token ids name rows"
            return self._sent(media.insert(self._received(rows, count), token_ids))

        ids = token_ids if media is None else without_rows(token_ids)
        sent = self._sent(ids), self._sent(batch.positions)
        return self._received(self.model.hidden(*sent, attend, None if media is None else insert), count)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden [R, D] -> float32 logits [R, V]."""
        return self._received(self.model.logits(self._sent(hidden)), len(hidden))

    def _head(self, head: nn.Linear) -> Linear:
        """Return the product of the head, with results in float32."""
        if self.device != CPU:
            return lambda hidden: F.linear(hidden.float(), head.weight.float(), head.bias)
        return _float32_head(self.model, self.numerics, head)

    def _sent(self, rows: Tensor) -> Tensor:
        """Return rows [T, ...] on the layers' device, padded there."""
        if self.device == CPU:
            return rows
        padding = max(_LEAST_ROWS, 1 << (len(rows) - 1).bit_length()) - len(rows)
        return torch.cat((rows, rows.new_zeros(padding, *rows.shape[1:]))).to(self.device)

    def _received(self, rows: Tensor, count: int) -> Tensor:
        """Return the first `count` rows on the CPU."""
        return rows if self.device == CPU else rows.cpu()[:count]


class EncoderDecoder:
    """The decoder of an encoder-decoder model, on the CPU.

    `start` runs the encoder for a row, and keeps what its decoder attends to until the row starts again.
    """

    def __init__(self, spec: TransformersSpec, weights: Iterable[Weight], numerics: Numerics, max_len: int) -> None:
        """`max_len`: served context. Raise WeightError or ModelError, see TransformersModel."""
        self.spec = spec
        self.model = EncoderDecoderModel.load(spec, rounded_weights(weights, numerics), numerics.compute, max_len)
        self.model.place(CPU)
        self.model.set_head(partial(_float32_head, self.model, numerics))
        self.num_bytes = self.model.num_bytes
        self._encoded: dict[int, CrossStates] = {}

    def start(self, start: RowStart) -> None:
        """Run the encoder for a row."""
        assert start.encoder_token_ids is not None, "every request has an encoder prompt"
        self._encoded.pop(start.row, None)  # freed first: there is memory for one of each row
        self._encoded[start.row] = self.model.encode(torch.from_numpy(start.encoder_token_ids.astype(np.int64)))

    def hidden(
        self, token_ids: Tensor, batch: StepBatch, caches: dict[int, LayerCache], media: MediaRows | None = None
    ) -> Tensor:
        """token_ids int64 [T] -> hidden states [T, D] after the final norm; K and V are written to the caches."""
        assert media is None, "prompts of encoder-decoder models have no media"

        def attend(number: int, q: Tensor, k: Tensor, v: Tensor, _: object, bias: RelativeBias | None) -> Tensor:
            table = None if bias is None else bias.by_distance(self.spec.max_positions)
            return PagedHeads(self.spec.attention[number], number, bias=table)(q, (k, v), batch, caches).view_as(q)

        encoded = [(self._encoded[each.row], each.end - each.begin) for each in batch.sequences]
        return self.model.hidden(token_ids, batch.positions, attend, cross=attend_rows(encoded))

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden [R, D] -> float32 logits [R, V]."""
        return self.model.logits(hidden)


def _float32_head(model: TransformersModel, numerics: Numerics, head: nn.Linear) -> Linear:
    """Return the product of the head, with results in float32. A weight of its own is dropped once it is packed."""
    product = float32_linear(head.weight, head.bias, numerics)
    if head.weight is not model.embedding_table:
        head.weight = nn.Parameter(head.weight.new_empty(0), requires_grad=False)
    return product
