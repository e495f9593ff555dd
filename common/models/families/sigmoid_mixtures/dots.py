"""dots.llm1: norms on q and k, sliding windows in some layers, experts with sigmoid scores."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.families.experts import MOE_RULES, corrected_sigmoid_router, leading_dense, routed_moe
from pagoda.common.models.family import (
    ATTENTION_RULES,
    EMBED_RULES,
    MLP_RULES,
    PRE_NORM_RULES,
    QK_NORM_RULES,
    Family,
    pre_norm_decoder,
    rms_norm,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.spec import ModelSpec


def _dots1(config: HfConfig) -> ModelSpec:
    norm = rms_norm(config, 1e-6)
    bias = config.opt("attention_bias", bool, False)
    attention = rotary_attention(config, config.size("hidden_size"))
    attention = replace(attention, qk_norm=norm, qkv_bias=bias, out_bias=bias)
    ffns = leading_dense(config, lambda: routed_moe(config, corrected_sigmoid_router(config, renormalise=False)), 0)
    layers = len(ffns)
    window = config.window(4096)
    first = config.opt("max_window_layers", int, 62)
    default = ["sliding_attention" if window and layer >= first else "full_attention" for layer in range(layers)]
    mixers = [
        replace(attention, window=window) if kind == "sliding_attention" else attention
        for kind in config.layer_types(layers, default)
    ]
    return pre_norm_decoder(config, mixers, ffns, norm)


DOTS1 = Family(_dots1, (*EMBED_RULES, *ATTENTION_RULES, *QK_NORM_RULES, *MLP_RULES, *MOE_RULES, *PRE_NORM_RULES))
