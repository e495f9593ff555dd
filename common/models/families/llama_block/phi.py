"""Phi-1, 1.5 and 2: mixer and ffn in parallel. Phi-3, 3.5 and 4 (dense): fused weights, LongRoPE, partial RoPE."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.family import (
    ATTENTION_RULES,
    EMBED_RULES,
    PRE_NORM_RULES,
    Family,
    Rename,
    decoder,
    fused_linear,
    gated_mlp,
    layer_norm,
    linear,
    plain_mlp,
    pre_norm_decoder,
    rms_norm,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.spec import Layer, ModelSpec, Norms


def _phi3(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    config.opt_size("original_max_position_embeddings", 4096)  # read again by the RoPE scaling
    config.expect("full_attn_mod", 1)
    config.expect("interpolate_factor", 1)
    attention = rotary_attention(config, config.size("hidden_size"))
    attention = replace(attention, window=config.window(None))
    return pre_norm_decoder(config, [attention] * layers, [gated_mlp(config)] * layers, rms_norm(config, 1e-5))


def _phi(config: HfConfig) -> ModelSpec:
    attention = rotary_attention(config, config.size("hidden_size"), partial=0.5)
    attention = replace(attention, qkv_bias=True, out_bias=True)
    norm = layer_norm(config)
    if config.opt("qk_layernorm", bool, False):
        attention = replace(attention, qk_norm=norm)
    layer = Layer((attention,), plain_mlp(config, "gelu_new", bias=True), Norms(before_mixer=norm), parallel=True)
    return replace(decoder(config, [layer] * config.size("num_hidden_layers"), norm), head_bias=True)


PHI = Family(
    _phi,
    (
        *EMBED_RULES,
        Rename("lm_head.bias", "head_bias"),
        *linear("[model.]final_layernorm", "final_norm"),
        *ATTENTION_RULES,
        *linear("[model.]layers.{l}.self_attn.dense", "layers.{l}.mixers.0.o"),
        *linear("[model.]layers.{l}.self_attn.q_layernorm", "layers.{l}.mixers.0.q_norm"),
        *linear("[model.]layers.{l}.self_attn.k_layernorm", "layers.{l}.mixers.0.k_norm"),
        *PRE_NORM_RULES,
        *linear("[model.]layers.{l}.mlp.fc1", "layers.{l}.ffn.up"),
        *linear("[model.]layers.{l}.mlp.fc2", "layers.{l}.ffn.down"),
    ),
)

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
