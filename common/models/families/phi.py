"""Phi-3, 3.5 and 4 (dense): fused q-k-v and gate-up weights, LongRoPE, partial RoPE in some sizes."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.family import (
    EMBED_RULES,
    PRE_NORM_RULES,
    Family,
    fused_linear,
    gated_mlp,
    linear,
    pre_norm_decoder,
    rms_norm,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.spec import ModelSpec


def _phi3(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    config.opt_size("original_max_position_embeddings", 4096)  # read again by the RoPE scaling
    config.expect("full_attn_mod", 1)
    config.expect("interpolate_factor", 1)
    attention = rotary_attention(config, config.size("hidden_size"))
    attention = replace(attention, window=config.window(None))
    return pre_norm_decoder(config, [attention] * layers, [gated_mlp(config)] * layers, rms_norm(config, 1e-5))


PHI3 = Family(
    _phi3,
    (
        *EMBED_RULES,
        *PRE_NORM_RULES,
        *fused_linear(
            "model.layers.{l}.self_attn.qkv_proj",
            "layers.{l}.mixers.0.q",
            "layers.{l}.mixers.0.k",
            "layers.{l}.mixers.0.v",
        ),
        *linear("model.layers.{l}.self_attn.o_proj", "layers.{l}.mixers.0.o"),
        *fused_linear("model.layers.{l}.mlp.gate_up_proj", "layers.{l}.ffn.gate", "layers.{l}.ffn.up"),
        *linear("model.layers.{l}.mlp.down_proj", "layers.{l}.ffn.down"),
    ),
)
