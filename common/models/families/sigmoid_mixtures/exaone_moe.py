"""K-EXAONE: EXAONE 4's attention in a pre-norm block, experts with sigmoid scores after leading dense layers."""

from __future__ import annotations

from pagoda.common.models.families.experts import MOE_RULES, corrected_sigmoid_router, leading_dense, routed_moe
from pagoda.common.models.families.llama_block.exaone import exaone4_attentions
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
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.spec import ModelSpec


def _exaone_moe(config: HfConfig) -> ModelSpec:
    config.alias("n_routed_experts", "num_experts")
    config.alias("n_shared_experts", "num_shared_experts")
    config.ignore("num_nextn_predict_layers", "mtp_loss_factor", "mtp_share_layers")  # layers that propose drafts
    if "mlp_layer_types" in config:
        config.ignore("is_moe_layer", "first_last_k_dense_replace")  # the same in another form
    config.default("routed_scaling_factor", 2.5)
    config.default("num_experts_per_tok", 8)
    config.default("moe_intermediate_size", 1024)
    ffns = leading_dense(config, lambda: routed_moe(config, corrected_sigmoid_router(config), shared=1), 1)
    return pre_norm_decoder(config, exaone4_attentions(config), ffns, rms_norm(config, 1e-5))


EXAONE_MOE = Family(
    _exaone_moe,
    (
        *(EMBED_RULES + ATTENTION_RULES + QK_NORM_RULES + MLP_RULES + MOE_RULES + PRE_NORM_RULES),
        Rename("[model.]layers.{l}.mlp.e_score_correction_bias", "layers.{l}.ffn.router_correction"),
    ),
    ignored=("*.rotary_emb.inv_freq", "lm_head.weight", "mtp.*"),
)
