"""TeleChat 2: Llama's block with biases on the projections out, k and v fused by KV head."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.family import (
    MLP_RULES,
    Family,
    Rename,
    Split,
    gated_mlp,
    linear,
    pre_norm_decoder,
    rms_norm,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.spec import ModelSpec


def _telechat2(config: HfConfig) -> ModelSpec:
    for key, *names in (
        ("hidden_size", "n_embed"),
        ("num_hidden_layers", "n_layer"),
        ("num_attention_heads", "n_head"),
        ("intermediate_size", "ffn_hidden_size"),
        ("rms_norm_eps", "layer_norm_epsilon"),
        ("max_position_embeddings", "training_seqlen", "seq_length"),
    ):
        config.alias(key, *names)
    config.expect("base_seqlen", config.size("max_position_embeddings"))  # else the base of RoPE differs
    config.expect("apply_residual_connection_post_layernorm", False)
    config.expect("embed_layernorm", False)
    config.ignore("logn", "hidden_dropout")  # logn: beyond the trained context, which is not served
    layers = config.size("num_hidden_layers")
    attention = replace(rotary_attention(config, config.size("hidden_size")), out_bias=True)
    ffn = replace(gated_mlp(config), down_bias=True)
    return pre_norm_decoder(config, [attention] * layers, [ffn] * layers, rms_norm(config, 1e-5))


_SOURCE = "[transformer.]h.{l}"
_MIXER = "layers.{l}.mixers.0"

TELECHAT2 = Family(
    _telechat2,
    (
        Rename("[transformer.]word_embeddings.weight", "embed"),
        Rename("[transformer.]ln_f.weight", "final_norm"),
        Rename("lm_head.weight", "head"),
        Rename(f"{_SOURCE}.input_layernorm.weight", "layers.{l}.norms.before_mixer"),
        Rename(f"{_SOURCE}.post_attention_layernorm.weight", "layers.{l}.norms.before_ffn"),
        Rename(f"{_SOURCE}.self_attention.query.weight", f"{_MIXER}.q"),
        Split(f"{_SOURCE}.self_attention.key_value.weight", (f"{_MIXER}.k", f"{_MIXER}.v"), interleaved=True),
        *linear(f"{_SOURCE}.self_attention.dense", f"{_MIXER}.o"),
        *(replace(rule, source=rule.source.replace("[model.]layers.{l}", _SOURCE)) for rule in MLP_RULES),
    ),
)
