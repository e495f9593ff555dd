"""The forward pass of an encoder-decoder model without weights, and the handlers that record what it attends to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from pagoda.backends.fallback.attention import (
    BIAS,
    SCALE,
    WITHOUT_EFFECT,
    RelativeBias,
    TracedCalls,
    install,
    mask_rule,
)
from pagoda.backends.fallback.tracing import TRACED_TOKENS, MetaValues, on_meta, vocab_of
from pagoda.common.errors import ModelError
from pagoda.common.models.transformers_spec import EncoderSpec, TransformersSource, TransformersSpec

_ENCODER_TOKENS: Final = 3


def trace_encoder_decoder(
    source: TransformersSource, config: PretrainedConfig, max_positions: int, start: tuple[int, ...]
) -> TransformersSpec:
    """Build the model on the meta device and record a forward pass of its encoder, then of its decoder."""
    model = on_meta(source, config, torch.float32)  # Some models have parts that stay in float32.
    calls = TracedDecoder(TracedCalls(max_positions), _ENCODER_TOKENS)
    encoder: Any = model.get_encoder()
    decoder: Any = model.get_decoder()
    install(decoder, calls)
    install(encoder, TracedEncoder())
    RelativeBias.install(model)
    with torch.no_grad(), torch.device("meta"), MetaValues():
        encoded = encoder(input_ids=torch.zeros(1, _ENCODER_TOKENS, dtype=torch.int64))[0]
        ids = torch.zeros(1, TRACED_TOKENS, dtype=torch.int64)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "encoder_hidden_states": encoded}
        hidden = decoder(**inputs, use_cache=False)[0]
    if not calls.self_attention.attention or len(calls.self_attention.attention) != len(calls.cross):
        raise ModelError(
            f"its decoder attends {len(calls.self_attention.attention)} times to its own tokens and {len(calls.cross)} "
            "times to the encoder's through transformers' attention interface, not once each in every layer"
        )
    names = {module: name for name, module in model.named_modules()}
    return TransformersSpec(
        vocab=vocab_of(model),
        width=int(hidden.shape[-1]),
        max_positions=max_positions,
        attention=tuple(calls.self_attention.attention),
        source=source,
        encoder=EncoderSpec(
            max_positions=max_positions,
            decoder_start=start,
            cross_attention=tuple(names[module] for module in calls.cross),
            cross_elements=sum(calls.cross.values()),
        ),
    )


class TracedEncoder:
    """Implements CallHandler. Raises ModelError for what `EncoderCalls` does not compute."""

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        _check(module, query, key, value, mask, options)
        if options.get(BIAS) is not None and RelativeBias.of(options[BIAS]) is None and _has_bias(module):
            raise ModelError(f"{type(module).__name__} computes a bias of attention by itself")
        return query.new_empty(1, query.shape[2], *value.shape[1::2])


@dataclass(slots=True)
class TracedDecoder:
    """Implements CallHandler. `self_attention` records the calls that attend to the decoder's own tokens.

    The encoder's output has `encoder_tokens` tokens, another number than the decoder's.
    """

    self_attention: TracedCalls
    encoder_tokens: int
    # Module -> numbers in K and V of one encoder token, in call order.
    cross: dict[nn.Module, int] = field(default_factory=dict)

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        if key.shape[2] == self.encoder_tokens:
            return self._attend_cross(module, query, key, value, mask, options)
        bias = options.get(BIAS)
        if bias is not None and RelativeBias.of(bias) is None:
            raise ModelError(f"{type(module).__name__} computes a bias of attention by itself")
        others = {name: option for name, option in options.items() if name != BIAS}
        return self.self_attention(module, query, key, value, mask, others)

    def _attend_cross(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        _check(module, query, key, value, mask, options)
        if module in self.cross or (options.get(BIAS) is not None and _has_bias(module)):
            raise ModelError(f"{type(module).__name__} attends to the encoder's output several times, or with a bias")
        self.cross[module] = (key.shape[1] + value.shape[1]) * key.shape[3]
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


def _check(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> None:
    """Raise ModelError unless it is plain attention to all keys."""
    kind = type(module).__name__
    for name, option in options.items():
        if option is not None and name not in (*WITHOUT_EFFECT, SCALE, BIAS):
            raise ModelError(f"{kind} gives attention the option {name}, which the encoder's attention does not have")
    heads = query.shape[1]
    kv_heads = key.shape[1]
    if heads % kv_heads or value.shape != key.shape or key.shape[3] != query.shape[3]:
        raise ModelError(
            f"{kind} attends from q {list(query.shape)} to k {list(key.shape)} and v {list(value.shape)}, which is not "
            "attention of grouped heads"
        )
    if mask is not None:
        rule = mask_rule(mask)
        length = key.shape[2]
        if rule is None or not all(
            bool(rule.visible(query_index, length).all()) for query_index in range(query.shape[2])
        ):
            raise ModelError(f"{kind} does not attend to all tokens of the encoder")


def _has_bias(module: nn.Module) -> bool:
    """Return False for modules that say that their bias is zero."""
    return getattr(module, "has_relative_attention_bias", True) is not False
