"""OLMoE and FlexOlmo: norms on the whole projections of q and k, every layer a mixture of experts."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.families.experts import MOE_RULES
from pagoda.common.models.family import (
    ATTENTION_RULES,
    EMBED_RULES,
    FOUR_NORM_RULES,
    PRE_NORM_RULES,
    QK_NORM_RULES,
    Family,
    decoder,
    gated_mlp,
    rms_norm,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import Layer, ModelSpec, Moe, Norms, Router


def _olmoe(config: HfConfig) -> ModelSpec:
    config.expect("clip_qkv", None)
    norm = rms_norm(config, 1e-5)
    return _model(config, norm, Norms(before_mixer=norm, before_ffn=norm), top_k=8)


def _flex_olmo(config: HfConfig) -> ModelSpec:
    norm = rms_norm(config, 1e-6)
    return _model(config, norm, Norms(after_mixer=norm, after_ffn=norm), top_k=5)


def _model(config: HfConfig, norm: Norm, norms: Norms, *, top_k: int) -> ModelSpec:
    """`top_k`: the family's default."""
    bias = config.opt("attention_bias", bool, False)
    attention = replace(
        rotary_attention(config, config.size("hidden_size")),
        qk_norm=norm,
        qk_norm_over="full",
        qkv_bias=bias,
        out_bias=bias,
    )
    router = Router(config.opt_size("num_experts_per_tok", top_k), config.opt("norm_topk_prob", bool, False))
    moe = Moe(config.size("num_experts", "num_local_experts"), gated_mlp(config), router)
    return decoder(config, [Layer((attention,), moe, norms)] * config.size("num_hidden_layers"), norm)


_RULES = (*EMBED_RULES, *ATTENTION_RULES, *QK_NORM_RULES, *MOE_RULES)

OLMOE = Family(_olmoe, (*_RULES, *PRE_NORM_RULES))
FLEX_OLMO = Family(_flex_olmo, (*_RULES, *FOUR_NORM_RULES))
