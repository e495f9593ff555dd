"""Encoder-decoder models of transformers with their weights: the encoder's keys and values, and steps of the decoder.

The encoder runs once per request, over its whole prompt. One token of the decoder then gives the keys and values of
cross-attention, which later steps attend to; the decoder's self-attention is paged as any model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from pagoda.backends.fallback.attention import BIAS, SCALE, RelativeBias, install
from pagoda.backends.fallback.model import Attend, ProbeRows, TransformersModel
from pagoda.common.errors import ModelError
from pagoda.common.models.transformers_spec import EncoderSpec, TransformersSpec

CrossStates = tuple[tuple[Tensor, Tensor], ...]
"""Keys and values [K, S, H] of each call of cross-attention, for an encoder prompt of S tokens."""

AttendCross = Callable[[int, Tensor, float | None], Tensor]
"""(number of the call, q [N, T, H], scale; None: H ** -0.5) -> [N, T, H]."""


class EncoderDecoderModel(TransformersModel):
    """One encoder-decoder model on one device. Calls come in this order: create, place, encode, hidden and logits."""

    def __init__(self, spec: TransformersSpec, model: PreTrainedModel, max_len: int) -> None:
        assert spec.encoder is not None, "an encoder-decoder model"
        super().__init__(spec, model, max_len)
        self._encoder: Any = model.get_encoder()
        install(self._encoder, EncoderCalls())
        self._cross = CrossCalls()
        for name in spec.encoder.cross_attention:
            install(model.get_submodule(name), self._cross)
        RelativeBias.install(model)
        self._encoder_spec: EncoderSpec = spec.encoder

    def _layers(self, model: PreTrainedModel) -> nn.Module:
        decoder: nn.Module = model.get_decoder()
        return decoder

    def _separate_head(self) -> None:
        name = next(name for name, module in self._model.named_modules() if module is self._base)
        self._model.set_submodule(name, self._given)

    def encode(self, token_ids: Tensor) -> CrossStates:
        """Return the keys and values of cross-attention for an encoder prompt, int64 [S]."""
        output = self._encoder(input_ids=token_ids[None])[0]
        start = token_ids.new_tensor([self._encoder_spec.decoder_start[0]])
        with self._cross.recording() as states:
            self._decode(start, torch.zeros_like(start), _own_value, output)
        return tuple(states)

    def hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        insert: Callable[[Tensor], Tensor] | None = None,
        cross: AttendCross | None = None,
    ) -> Tensor:
        """Return hidden states [T, D] of the decoder's token_ids, positions int64 [T].

        `cross`: attends to what `encode` returned; None: the output of cross-attention is zero.
        """
        assert insert is None, "prompt embeddings are refused"
        nothing = self.embedding_table.new_zeros(1, 1, self.spec.width)
        with self._cross.by(cross or _zeros):
            return self._decode(token_ids, positions, attend, nothing)

    def _decode(self, token_ids: Tensor, positions: Tensor, attend: Attend, encoded: Tensor) -> Tensor:
        with self._calls.by(attend):
            hidden: Tensor = self._base(
                input_ids=token_ids[None],
                # Without a mask transformers makes one from the number of cached tokens.
                attention_mask=torch.ones_like(token_ids)[None],
                encoder_hidden_states=encoded,
                past_key_values=_Positions(positions),
                use_cache=False,
            )[0]
        return hidden[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [R, V] of hidden [R, D], by the model's own code after the layers."""
        self._given.hidden = hidden[None]
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        encoded = BaseModelOutput(last_hidden_state=hidden.new_zeros(1, 1, self.spec.width))
        logits: Tensor = self._model(encoder_outputs=encoded, decoder_input_ids=ids, use_cache=False).logits[0]
        return logits.float()

    def _probes(self) -> tuple[ProbeRows, ProbeRows]:
        """Return batches, one of them with padding: some models count positions without it."""
        first, second = super()._probes()
        padding = self._model.config.pad_token_id
        return first, second if padding is None else ((padding, 0), *second)

    def _without_attention(self, rows: ProbeRows, device: torch.device) -> list[Tensor]:
        try:
            return super()._without_attention(rows, device)
        except RuntimeError as error:
            raise ModelError(
                f"{type(self._model).__name__} cannot run on the paged KV cache: its decoder cannot be given the "
                f"position of each token ({error})"
            ) from error


class EncoderCalls:
    """Implements CallHandler: attention of every token of one prompt to all of its tokens."""

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        bias = RelativeBias.of(options.get(BIAS))
        added = None if bias is None else bias.whole(query.shape[2])
        return _attend(query, key, value, options.get(SCALE), added).transpose(1, 2)


class CrossCalls:
    """Implements CallHandler: hands the calls of a forward pass to a function, numbered in their order."""

    def __init__(self) -> None:
        self._attend: AttendCross | None = None
        self._recorded: list[tuple[Tensor, Tensor]] | None = None
        self._next = 0

    @contextmanager
    def by(self, attend: AttendCross) -> Iterator[None]:
        """A context of one forward pass, whose calls are handed to `attend`."""
        self._attend = attend
        self._next = 0
        try:
            yield
        finally:
            self._attend = None

    @contextmanager
    def recording(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """A context of one forward pass, whose keys and values are appended to the list."""
        recorded: list[tuple[Tensor, Tensor]] = []
        self._recorded = recorded
        try:
            with self.by(_zeros):
                yield recorded
        finally:
            self._recorded = None

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        assert self._attend is not None, "attention is called within encode() and hidden() alone"
        if self._recorded is not None:
            self._recorded.append((key[0], value[0]))
        number = self._next
        self._next = self._next + 1
        return self._attend(number, query[0], options.get(SCALE)).transpose(0, 1)[None]


def attend_rows(states: list[tuple[CrossStates, int]]) -> AttendCross:
    """Return the cross-attention of a step, whose next tokens belong to requests with these states, in order."""

    def attend(number: int, query: Tensor, scale: float | None) -> Tensor:
        mixed = []
        for part, (kept, _) in zip(query.split([count for _, count in states], 1), states):
            keys, values = kept[number]
            mixed.append(_attend(part[None], keys[None], values[None], scale)[0])
        return torch.cat(mixed, 1)

    return attend


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None, bias: Tensor | None = None) -> Tensor:
    """Softmax attention to all keys: query [1, N, T, H], key and value [1, K, S, H] -> [1, N, T, H]."""
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale, enable_gqa=grouped)


def _own_value(
    _number: int, q: Tensor, _k: Tensor, v: Tensor, _sinks: Tensor | None, _bias: RelativeBias | None
) -> Tensor:
    return v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def _zeros(_number: int, query: Tensor, _scale: float | None) -> Tensor:
    return torch.zeros_like(query)


class _Positions:
    """Stands in for the cache of a model that counts positions from its length: each token has a length of its own."""

    def __init__(self, positions: Tensor) -> None:
        self._before = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, layer: int = 0) -> Tensor:
        """Return the number of tokens before the batch, int64 [T]: token t has position t + this."""
        return self._before

    def update(self, key: Tensor, value: Tensor, layer: int, **_options: Any) -> tuple[Tensor, Tensor]:
        """Return the new keys and values: the cache is ours. Since 5.24 transformers hands its options over, too."""
        return key, value
