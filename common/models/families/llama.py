"""Llama 1 to 3 and the families that share its block: SmolLM2, Mistral (sliding window)."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.family import (
    ATTENTION_RULES,
    EMBED_RULES,
    MLP_RULES,
    PRE_NORM_RULES,
    Family,
    gated_mlp,
    pre_norm_decoder,
    rms_norm,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.spec import ModelSpec


def _llama(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    bias = config.opt("attention_bias", bool, False)
    attention = replace(rotary_attention(config, config.size("hidden_size")), qkv_bias=bias, out_bias=bias)
    ffn = gated_mlp(config, bias=config.opt("mlp_bias", bool, False))
    return pre_norm_decoder(config, [attention] * layers, [ffn] * layers, rms_norm(config, 1e-6))


def _mistral(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    attention = rotary_attention(config, config.size("hidden_size"))
    attention = replace(attention, window=config.window(4096))
    return pre_norm_decoder(config, [attention] * layers, [gated_mlp(config)] * layers, rms_norm(config, 1e-6))


RULES = (*EMBED_RULES, *ATTENTION_RULES, *MLP_RULES, *PRE_NORM_RULES)

LLAMA = Family(_llama, RULES)
MISTRAL = Family(_mistral, RULES)
