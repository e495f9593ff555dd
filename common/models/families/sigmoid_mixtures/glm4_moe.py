"""GLM-4.5 to 4.7: experts with sigmoid scores after leading dense layers, RoPE on half of each head."""

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


def _glm4_moe(config: HfConfig) -> ModelSpec:
    norm = rms_norm(config, 1e-5)
    config.ignore("num_nextn_predict_layers")  # they only propose drafts
    attention = replace(
        rotary_attention(config, config.size("hidden_size"), partial=0.5),
        qk_norm=norm if config.opt("use_qk_norm", bool, False) else None,
        qkv_bias=config.opt("attention_bias", bool, False),
    )
    ffns = leading_dense(config, lambda: routed_moe(config, corrected_sigmoid_router(config), shared=1), 1)
    return pre_norm_decoder(config, [attention] * len(ffns), ffns, norm)


GLM4_MOE = Family(
    _glm4_moe,
    (*EMBED_RULES, *ATTENTION_RULES, *QK_NORM_RULES, *MLP_RULES, *MOE_RULES, *PRE_NORM_RULES),
    # layers after the last one of GLM-4.5-Air and GLM-4.5 to 4.7, which only propose drafts
    ignored=("*.rotary_emb.inv_freq", "lm_head.weight", "model.layers.46.*", "model.layers.92.*"),
)
