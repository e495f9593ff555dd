"""Hunyuan 3 (Hy3): norms on q and k before RoPE, experts with sigmoid scores after a dense layer."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.families.experts import FFN, MOE_RULES, leading_dense, routed_moe, shared_rules
from pagoda.common.models.family import (
    ATTENTION_RULES,
    EMBED_RULES,
    MLP_RULES,
    PRE_NORM_RULES,
    QK_NORM_RULES,
    Family,
    Rename,
    pre_norm_decoder,
    rms_norm,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.spec import ModelSpec, Moe, Router

# Training, the dtype of a sum that is float32 here, and layers that only propose drafts.
_UNUSED = (
    "enable_moe_fp32_combine",
    "enable_attention_fp32_softmax",
    "enable_lm_head_fp32",
    "num_nextn_predict_layers",
)


def _hy3(config: HfConfig) -> ModelSpec:
    config.alias("n_routed_experts", "num_experts", "num_local_experts")
    config.alias("n_shared_experts", "num_shared_experts")
    config.alias("moe_intermediate_size", "expert_hidden_dim")
    for key in ("qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias"):
        config.expect(key, True)
    config.ignore(*_UNUSED)

    def moe() -> Moe:
        scale = config.opt("router_scaling_factor", float, 2.826)
        top_k = config.opt_size("num_experts_per_tok", 8)
        router = Router(top_k, renormalise=True, scores="sigmoid", correction=True, scale=scale)
        return routed_moe(config, router, shared=1)

    norm = rms_norm(config, 1e-5)
    bias = config.opt("attention_bias", bool, False)
    attention = rotary_attention(config, config.size("hidden_size"), theta=11_158_840.0)
    attention = replace(attention, qk_norm=norm, qkv_bias=bias, out_bias=bias)
    ffns = leading_dense(config, moe, 1)
    return pre_norm_decoder(config, [attention] * len(ffns), ffns, norm)


_MLP = "[model.]layers.{l}.mlp"

HY3 = Family(
    _hy3,
    (
        *(EMBED_RULES + ATTENTION_RULES + QK_NORM_RULES + MLP_RULES + MOE_RULES + PRE_NORM_RULES),
        Rename(f"{_MLP}.e_score_correction_bias", f"{FFN}.router_correction"),
        Rename(f"{_MLP}.expert_bias", f"{FFN}.router_correction"),
        Rename(f"{_MLP}.router.gate.weight", f"{FFN}.router"),
        *shared_rules(f"{_MLP}.shared_mlp"),
    ),
    ignored=("*.rotary_emb.inv_freq", "lm_head.weight", "model.layers.80.*"),  # layer 80 only proposes drafts
)
