"""Ling and Ring 1 and 2 (Bailing), Sarvam 30B, Param 2: experts with softmax or sigmoid scores, q-k-v fused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from pagoda.common.models.families.experts import FFN, MOE_RULES, corrected_sigmoid_router, leading_dense, routed_moe
from pagoda.common.models.family import (
    EMBED_RULES,
    MLP_RULES,
    PRE_NORM_RULES,
    Family,
    Normalise,
    Rename,
    Rule,
    fused_linear,
    linear,
    pre_norm_decoder,
    rms_norm,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Attention
from pagoda.common.models.spec import ModelSpec, Moe, Router

# Training, the dtype of scores that are float32 here, layers that propose drafts.
_UNUSED = (
    *("router_dtype", "multi_gate", "mtp_loss_scaling_factor", "num_nextn_predict_layers"),
    *("use_rmsnorm", "norm_softmax", "router_type", "rotary_type"),
)


def _bailing(config: HfConfig, *, scores: str, shared_width_is_whole: bool = False) -> ModelSpec:
    name_keys(config, scores)
    if "rotary_dim" in config and "head_dim" in config:
        config.default("partial_rotary_factor", config.size("rotary_dim") / config.size("head_dim"))
    bias = config.opt("use_bias", bool, False)
    ffns = leading_dense(config, partial(bailing_moe, config, shared_width_is_whole), 0, bias=bias)
    return pre_norm_decoder(config, [_attention(config, bias)] * len(ffns), ffns, rms_norm(config, 1e-5))


def name_keys(config: HfConfig, scores: str) -> None:
    """Give the keys of the experts the names that shared readers know. `scores`: the family's default."""
    config.alias("n_routed_experts", "num_experts", "num_local_experts")
    config.alias("n_shared_experts", "num_shared_experts")
    config.alias("scoring_func", "score_function")
    config.default("scoring_func", scores)
    config.ignore(*_UNUSED)


def _attention(config: HfConfig, bias: bool) -> Attention:
    attention = rotary_attention(config, config.size("hidden_size"))
    return replace(
        attention,
        qk_norm=rms_norm(config, 1e-5) if config.opt("use_qk_norm", bool, False) else None,
        qkv_bias=config.opt("use_qkv_bias", bool, False) or bias,
        out_bias=bias,
    )


def bailing_moe(config: HfConfig, shared_width_is_whole: bool = False) -> Moe:
    """Return a mixture. `shared_width_is_whole`: the stated width of shared experts is that of all together."""
    moe = routed_moe(config, _router(config), shared=1)
    width = config.opt("moe_shared_expert_intermediate_size", int, 0)
    if moe.shared is None or not width:
        return moe
    count = 1 if shared_width_is_whole else config.size("n_shared_experts")
    return replace(moe, shared=replace(moe.shared, width=count * width))


def _router(config: HfConfig) -> Router:
    corrected = config.opt("moe_router_enable_expert_bias", bool, config.opt("scoring_func", str, "") == "sigmoid")
    if corrected:
        return corrected_sigmoid_router(config)
    config.expect("scoring_func", "softmax")
    config.expect("n_group", 1)
    config.expect("topk_group", 1)
    config.expect("routed_scaling_factor", 1.0)
    return Router(config.size("num_experts_per_tok"), config.opt("norm_topk_prob", bool, True))


def _head(config: HfConfig) -> tuple[Rule, ...]:
    normalised = config.opt("norm_head", bool, False)
    return (Normalise("lm_head.weight", "head", axis=0),) if normalised else ()


_SOURCE = "[model.]layers.{l}.attention"
_TARGET = "layers.{l}.mixers.0"

RULES = (
    *(EMBED_RULES + MLP_RULES + MOE_RULES + PRE_NORM_RULES),
    Rename("[model.]word_embeddings.weight", "embed"),
    *fused_linear(f"{_SOURCE}.query_key_value", *(f"{_TARGET}.{part}" for part in "qkv")),
    *linear(f"{_SOURCE}.dense", f"{_TARGET}.o"),
    Rename(f"{_SOURCE}.query_layernorm.weight", f"{_TARGET}.q_norm"),
    Rename(f"{_SOURCE}.key_layernorm.weight", f"{_TARGET}.k_norm"),
    Rename("[model.]layers.{l}.mlp.gate.expert_bias", f"{FFN}.router_correction"),
)

BAILING = Family(partial(_bailing, scores="softmax"), RULES, config_rules=_head)
BAILING_V2 = Family(partial(_bailing, scores="sigmoid"), RULES, config_rules=_head)
PARAM2 = replace(BAILING_V2, build=partial(_bailing, scores="sigmoid", shared_width_is_whole=True))
