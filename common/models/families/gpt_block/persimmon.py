"""Persimmon: LayerNorm, also of q and k; RoPE on half of each head; a plain MLP with relu^2; q-k-v fused by head."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.family import (
    EMBED_RULES,
    PRE_NORM_RULES,
    Family,
    fused_linear,
    layer_norm,
    linear,
    plain_mlp,
    pre_norm_decoder,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.spec import ModelSpec


def _persimmon(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    norm = layer_norm(config)
    attention = replace(
        rotary_attention(config, config.size("hidden_size"), partial=0.5),
        qk_norm=norm if config.opt("qk_layernorm", bool, True) else None,
        qkv_bias=True,
        out_bias=True,
    )
    return pre_norm_decoder(config, [attention] * layers, [plain_mlp(config, "relu2", bias=True)] * layers, norm)


_SOURCE = "[model.]layers.{l}"
_TARGET = "layers.{l}.mixers.0"

PERSIMMON = Family(
    _persimmon,
    (
        *EMBED_RULES,
        *linear("[model.]final_layernorm", "final_norm"),
        *PRE_NORM_RULES,
        *fused_linear(
            f"{_SOURCE}.self_attn.query_key_value", f"{_TARGET}.q", f"{_TARGET}.k", f"{_TARGET}.v", interleaved=True
        ),
        *linear(f"{_SOURCE}.self_attn.dense", f"{_TARGET}.o"),
        *linear(f"{_SOURCE}.self_attn.q_layernorm", f"{_TARGET}.q_norm"),
        *linear(f"{_SOURCE}.self_attn.k_layernorm", f"{_TARGET}.k_norm"),
        *linear(f"{_SOURCE}.mlp.dense_h_to_4h", "layers.{l}.ffn.up"),
        *linear(f"{_SOURCE}.mlp.dense_4h_to_h", "layers.{l}.ffn.down"),
    ),
)
