"""MiniMax-M2: norms on the whole projections of q and k, experts with sigmoid scores and a score correction."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.families.experts import BLOCK_SPARSE_RULES
from pagoda.common.models.family import (
    ATTENTION_RULES,
    EMBED_RULES,
    PRE_NORM_RULES,
    QK_NORM_RULES,
    Family,
    gated_mlp,
    pre_norm_decoder,
    rms_norm,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.spec import ModelSpec, Moe, Router

# Keys of published files about layers of other kinds, which M2 does not have, and about layers that propose drafts.
_UNUSED = ("mlp_intermediate_size", "shared_moe_mode", "mtp_transformer_layers", "num_mtp_modules", "use_mtp")


def _minimax_m2(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    norm = rms_norm(config, 1e-6)
    width = config.size("hidden_size")
    config.expect("attn_type_list", [1] * layers)
    for key, supported in (
        ("qk_norm_type", "per_layer"),
        ("use_qk_norm", True),
        ("scoring_func", "sigmoid"),
        ("use_routing_bias", True),
        ("shared_intermediate_size", 0),
        *((f"layernorm_{part}_beta", 1.0) for part in ("full_attention", "linear_attention", "mlp")),
    ):
        config.expect(key, supported)
    config.ignore(*_UNUSED)
    head_dim = config.opt_size("head_dim", 128)
    partial = config.opt_size("rotary_dim", head_dim) / head_dim
    attention = replace(
        rotary_attention(config, width, theta=5_000_000.0, partial=partial),
        qk_norm=norm,
        qk_norm_over="full",
        window=config.window(None),
    )
    router = Router(config.size("num_experts_per_tok"), renormalise=True, scores="sigmoid", correction=True)
    moe = Moe(config.size("num_local_experts", "num_experts"), gated_mlp(config), router)
    return pre_norm_decoder(config, [attention] * layers, [moe] * layers, norm)


RULES = (*EMBED_RULES, *ATTENTION_RULES, *QK_NORM_RULES, *BLOCK_SPARSE_RULES, *PRE_NORM_RULES)

MINIMAX_M2 = Family(_minimax_m2, RULES)
