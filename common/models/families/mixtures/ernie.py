"""ERNIE 4.5 with experts: RoPE on interleaved channels, softmax scores with a correction, shared experts."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.families.experts import FFN, MOE_RULES
from pagoda.common.models.family import (
    ATTENTION_RULES,
    EMBED_RULES,
    MLP_RULES,
    PRE_NORM_RULES,
    Family,
    Rename,
    Reshape,
    gated_mlp,
    pre_norm_decoder,
    rms_norm,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.spec import Ffn, ModelSpec, Moe, Router


def _ernie_moe(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    bias = config.opt("use_bias", bool, False)
    config.expect("moe_norm_min", 1e-12)  # no sum of softmax scores is less
    config.expect("moe_gate", "topk")
    config.expect("moe_use_aux_free", True)
    config.ignore("moe_capacity", "num_nextn_predict_layers")  # training; layers that only propose drafts
    attention = rotary_attention(config, config.size("hidden_size"), theta=500_000.0, interleaved=True)
    attention = replace(attention, qkv_bias=bias, out_bias=bias)
    first = config.opt("moe_layer_start_index", int, 1)
    step = config.opt_size("moe_layer_interval", 1)
    end = config.opt("moe_layer_end_index", int, -1)
    last = layers - 1 if end == -1 else end
    dense = gated_mlp(config, bias=bias)
    moe = _moe(config)
    ffns: list[Ffn] = [moe if first <= n <= last and not (n + 1) % step else dense for n in range(layers)]
    spec = pre_norm_decoder(config, [attention] * layers, ffns, rms_norm(config, 1e-5), tied=True)
    return replace(spec, head_bias=bias)


def _moe(config: HfConfig) -> Moe:
    width = config.size("moe_intermediate_size")
    shared = config.opt("moe_num_shared_experts", int, 2)
    expert = replace(gated_mlp(config), width=width)
    router = Router(config.opt_size("moe_k", 6), renormalise=True, correction=True)
    bias = config.opt("use_bias", bool, False)
    return Moe(
        config.opt_size("moe_num_experts", 64),
        expert,
        router,
        replace(expert, width=shared * width, bias=bias) if shared else None,
    )


_CORRECTION = "[model.]layers.{l}.mlp.moe_statics.e_score_correction_bias"  # [1, E]

ERNIE_MOE = Family(
    _ernie_moe,
    (
        *(EMBED_RULES + ATTENTION_RULES + MLP_RULES + MOE_RULES + PRE_NORM_RULES),
        Rename("lm_head.bias", "head_bias"),
        Reshape(_CORRECTION, f"{FFN}.router_correction"),
    ),
    ignored=("*.rotary_emb.inv_freq", "lm_head.weight", "model.mtp_*"),
)
