"""DeepSeek-V3 with other details: A.X-K1, GLM-5 (sparse attention), Sarvam 105B, openPangu Ultra."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.families.experts import corrected_sigmoid_router, leading_dense, routed_moe
from pagoda.common.models.families.latent.deepseek import (
    INDEXER_RULES,
    RULES,
    deepseek_v3,
    deepseek_v32,
    latent_attention,
    sigmoid_ffns,
)
from pagoda.common.models.family import Family, Rename, pre_norm_decoder, rms_norm
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.spec import Ffn, Layer, ModelSpec, Moe, Norms


def _axk1(config: HfConfig) -> ModelSpec:
    spec = deepseek_v3(config, default_dense=1)

    def normed(layer: Layer) -> Layer:
        return replace(layer, norms=replace(layer.norms, after_ffn=spec.final_norm))

    layers = (normed(layer) if isinstance(layer.ffn, Moe) else layer for layer in spec.layers)
    return replace(spec, layers=tuple(layers))


def _glm5(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    config.expect("indexer_types", ["full"] * layers)
    config.expect("index_topk_pattern", "F" * layers)
    config.expect("index_topk_freq", 0, 1)
    config.expect("indexer_rope_interleave", True)
    config.ignore("index_skip_topk_offset")
    return deepseek_v32(config, interleaved=True, eps=1e-5)


def _sarvam(config: HfConfig) -> ModelSpec:
    config.alias("n_routed_experts", "num_experts")
    config.alias("n_shared_experts", "num_shared_experts")
    config.alias("scoring_func", "score_function")
    config.expect("moe_router_enable_expert_bias", True)
    config.expect("moe_shared_expert_intermediate_size", config.size("moe_intermediate_size"))
    config.default("routed_scaling_factor", 2.5)
    if "q_lora_rank" not in config:
        config.set("q_lora_rank", None)
    config.ignore("router_dtype", "q_head_dim", "num_nextn_predict_layers")
    return _own_eps(config, sigmoid_ffns(config, 1))


def _pangu_ultra(config: HfConfig) -> ModelSpec:
    for key, name in (
        *(("qk_nope_head_dim", "attention_qk_dim"), ("qk_rope_head_dim", "attention_qk_rope_dim")),
        *(("q_lora_rank", "attention_q_lora_dim"), ("kv_lora_rank", "attention_kv_lora_dim")),
        *(("v_head_dim", "attention_v_dim"), ("first_k_dense_replace", "num_dense_layers")),
        *(("n_routed_experts", "num_routed_experts"), ("n_shared_experts", "num_shared_experts")),
    ):
        config.alias(key, name)
    config.ignore("num_mtp_layers", "num_nextn_predict_layers")
    corrected = config.opt("router_enable_expert_bias", bool, False)
    sandwich = config.opt("sandwich_norm", bool, False)

    def moe() -> Moe:
        return routed_moe(config, replace(corrected_sigmoid_router(config), correction=corrected), shared=1)

    spec = _own_eps(config, leading_dense(config, moe, 3), eps=1e-5)
    if not sandwich:
        return spec
    norm = spec.final_norm
    return replace(spec, layers=tuple(replace(layer, norms=Norms(norm, norm, norm, norm)) for layer in spec.layers))


def _own_eps(config: HfConfig, ffns: list[Ffn], eps: float = 1e-6) -> ModelSpec:
    """Return a model whose latent norms have the eps of the others."""
    norm = rms_norm(config, eps)
    interleaved = config.opt("rope_interleave", bool, True)
    return pre_norm_decoder(config, [latent_attention(config, interleaved, norm.eps)] * len(ffns), ffns, norm)


_DRAFTS = ("*.rotary_emb.inv_freq", "lm_head.weight", "model.layers.{}.*")

AXK1 = Family(
    _axk1,
    (*RULES, Rename("[model.]layers.{l}.post_mlp_layernorm.weight", "layers.{l}.norms.after_ffn")),
    ignored=tuple(name.format(61) for name in _DRAFTS),
)
GLM5 = Family(_glm5, (*RULES, *INDEXER_RULES), ignored=tuple(name.format(78) for name in _DRAFTS))
SARVAM_MLA = Family(_sarvam, RULES)
PANGU_ULTRA = Family(
    _pangu_ultra,
    (
        Rename("[model.]layers.{l}.post_attention_layernorm.weight", "layers.{l}.norms.after_mixer"),  # if there is one
        Rename("[model.]layers.{l}.pre_mlp_layernorm.weight", "layers.{l}.norms.before_ffn"),
        Rename("[model.]layers.{l}.post_mlp_layernorm.weight", "layers.{l}.norms.after_ffn"),
        *RULES,
    ),
    ignored=tuple(name.format(61) for name in _DRAFTS),
)
