"""Phi-3.5-MoE: LayerNorm, biases, two experts chosen by a sparse mixer."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.families.experts import BLOCK_SPARSE_RULES
from pagoda.common.models.family import (
    ATTENTION_RULES,
    EMBED_RULES,
    Family,
    Rename,
    gated_mlp,
    linear,
    pre_norm_decoder,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import ModelSpec, Moe, SparseMixer


def _phimoe(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    bias = config.opt("attention_bias", bool, False)
    config.expect("num_experts_per_tok", 2)
    config.ignore("input_jitter_noise")  # training
    attention = rotary_attention(config, config.size("hidden_size"))
    attention = replace(attention, qkv_bias=bias, out_bias=bias, window=config.window(None))
    mixer = SparseMixer(2, config.opt("router_jitter_noise", float, 0.01))
    moe = Moe(config.opt_size("num_local_experts", 16), gated_mlp(config), mixer)
    norm = Norm(config.opt("rms_norm_eps", float, 1e-5), kind="layer", bias=True)
    spec = pre_norm_decoder(config, [attention] * layers, [moe] * layers, norm)
    return replace(spec, head_bias=config.opt("lm_head_bias", bool, False))


PHIMOE = Family(
    _phimoe,
    (
        *EMBED_RULES,
        Rename("model.norm.bias", "final_norm_bias"),
        Rename("lm_head.bias", "head_bias"),
        *ATTENTION_RULES,
        *BLOCK_SPARSE_RULES,
        *linear("model.layers.{l}.input_layernorm", "layers.{l}.norms.before_mixer"),
        *linear("model.layers.{l}.post_attention_layernorm", "layers.{l}.norms.before_ffn"),
    ),
)
