"""Apertus: Llama's block with norms of q and k, and an ungated MLP with xIELU."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.family import (
    ATTENTION_RULES,
    EMBED_RULES,
    MLP_RULES,
    QK_NORM_RULES,
    Family,
    Rename,
    pre_norm_decoder,
    rms_norm,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.spec import Mlp, ModelSpec, Xielu


def _apertus(config: HfConfig) -> ModelSpec:
    config.expect("hidden_act", "xielu")
    config.expect("qk_norm", True)
    config.expect("post_norm", False)
    layers = config.size("num_hidden_layers")
    norm = rms_norm(config, 1e-5)
    bias = config.opt("attention_bias", bool, False)
    attention = rotary_attention(config, config.size("hidden_size"), theta=12_000_000.0)
    attention = replace(attention, qk_norm=norm, qkv_bias=bias, out_bias=bias)
    ffn = Mlp(config.size("intermediate_size"), "silu", gated=False, learned=Xielu())
    return pre_norm_decoder(config, [attention] * layers, [ffn] * layers, norm)


_LAYER = "[model.]layers.{l}"

APERTUS = Family(
    _apertus,
    (
        *EMBED_RULES,
        *ATTENTION_RULES,
        *QK_NORM_RULES,
        *MLP_RULES,
        Rename(f"{_LAYER}.attention_layernorm.weight", "layers.{l}.norms.before_mixer"),
        Rename(f"{_LAYER}.feedforward_layernorm.weight", "layers.{l}.norms.before_ffn"),
        Rename(f"{_LAYER}.mlp.act_fn.alpha_p", "layers.{l}.ffn.curvature_p"),
        Rename(f"{_LAYER}.mlp.act_fn.alpha_n", "layers.{l}.ffn.curvature_n"),
    ),
    ignored=("*.mlp.act_fn.beta", "*.mlp.act_fn.eps", "*.rotary_emb.inv_freq", "lm_head.weight"),
)
