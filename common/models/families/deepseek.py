"""DeepSeek-V2, V3 and V3.2 with dense layers only, on the reference backend: latent, and sparse latent attention."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models import hf_config
from pagoda.common.models.family import (
    EMBED_RULES,
    MLP_RULES,
    PRE_NORM_RULES,
    Family,
    Rename,
    gated_mlp,
    linear,
    pre_norm_decoder,
    rms_norm,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Indexer, LatentAttention
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import ModelSpec


def _deepseek_v2(config: HfConfig) -> ModelSpec:
    mlp_bias = config.opt("mlp_bias", bool, False)
    return _model(config, _attention(config, interleaved=True), mlp_bias=mlp_bias, default_dense=0)


def _deepseek_v3(config: HfConfig) -> ModelSpec:
    interleaved = config.opt("rope_interleave", bool, True)
    config.ignore("num_nextn_predict_layers")  # they only propose drafts
    return _model(config, _attention(config, interleaved), mlp_bias=False, default_dense=3)


def _deepseek_v32(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    config.expect("layer_types", ["indexed_attention"] * layers)
    config.expect("rope_interleave", True)
    config.ignore("num_nextn_predict_layers")
    attention = _attention(config, interleaved=True)
    spec = _model(config, replace(attention, indexer=_indexer(config, attention)), mlp_bias=False, default_dense=3)
    config.expect("mlp_layer_types", ["dense"] * layers)
    return spec


def _model(config: HfConfig, attention: LatentAttention, *, mlp_bias: bool, default_dense: int) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    _refuse_experts(config, layers, default_dense)
    return pre_norm_decoder(
        config, [attention] * layers, [gated_mlp(config, bias=mlp_bias)] * layers, rms_norm(config, 1e-6)
    )


def _refuse_experts(config: HfConfig, layers: int, default_dense: int) -> None:
    """Raise ModelError unless every layer is dense; keys about experts then mean nothing."""
    dense = config.opt("first_k_dense_replace", int, default_dense)
    if dense < layers:
        raise config.error(
            "first_k_dense_replace",
            f"is {dense} of {layers} layers: this version has no mixture-of-experts layers for this family; serve a "
            "model whose layers are all dense",
        )
    config.ignore("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size")
    config.ignore("routed_scaling_factor", "topk_method", "topk_group", "n_group", "norm_topk_prob", "scoring_func")
    config.ignore("moe_layer_freq", "ep_size", "seq_aux", "aux_loss_alpha")


def _attention(config: HfConfig, interleaved: bool) -> LatentAttention:
    heads = config.size("num_attention_heads")
    nope_dim, rope_dim = config.size("qk_nope_head_dim"), config.size("qk_rope_head_dim")
    query_rank = config.nullable("q_lora_rank", int, 1536)
    config.expect("num_key_value_heads", heads)
    config.expect("head_dim", rope_dim)
    config.expect("qk_head_dim", nope_dim + rope_dim)
    return LatentAttention(
        heads=heads,
        query_rank=query_rank,
        latent_dim=config.size("kv_lora_rank"),
        nope_dim=nope_dim,
        value_dim=config.size("v_head_dim"),
        scale=(nope_dim + rope_dim) ** -0.5 * hf_config.yarn_scale(config),
        rope=replace(hf_config.rope(config, rope_dim), interleaved=interleaved),
        norm=Norm(1e-6),  # whatever rms_norm_eps is
        bias=config.opt("attention_bias", bool, False),
    )


def _indexer(config: HfConfig, attention: LatentAttention) -> Indexer:
    head_dim, rope_dim = config.size("index_head_dim"), attention.rope.dim
    if attention.query_rank is None:
        raise config.error("q_lora_rank", "is null; the indexer needs low-rank queries")
    if head_dim < rope_dim:
        raise config.error("index_head_dim", f"is {head_dim}; it must be at least qk_rope_head_dim, {rope_dim}")
    return Indexer(
        heads=config.size("index_n_heads"),
        head_dim=head_dim,
        top_k=config.size("index_topk"),
        rope=replace(attention.rope, interleaved=False),
        norm=Norm(1e-6, kind="layer", bias=True),
    )


_SOURCE, _TARGET = "[model.]layers.{l}.self_attn", "layers.{l}.mixers.0"

RULES = (
    *EMBED_RULES,
    *MLP_RULES,
    *PRE_NORM_RULES,
    *linear(f"{_SOURCE}.q_proj", f"{_TARGET}.q"),
    *linear(f"{_SOURCE}.q_a_proj", f"{_TARGET}.q_a"),
    Rename(f"{_SOURCE}.q_a_layernorm.weight", f"{_TARGET}.q_a_norm"),
    *linear(f"{_SOURCE}.q_b_proj", f"{_TARGET}.q_b"),
    *linear(f"{_SOURCE}.kv_a_proj_with_mqa", f"{_TARGET}.kv_a"),
    Rename(f"{_SOURCE}.kv_a_layernorm.weight", f"{_TARGET}.kv_a_norm"),
    *linear(f"{_SOURCE}.kv_b_proj", f"{_TARGET}.kv_b"),
    *linear(f"{_SOURCE}.o_proj", f"{_TARGET}.o"),
)
INDEXER_RULES = (
    Rename(f"{_SOURCE}.indexer.wq_b.weight", f"{_TARGET}.indexer.q"),
    Rename(f"{_SOURCE}.indexer.wk.weight", f"{_TARGET}.indexer.k"),
    Rename(f"{_SOURCE}.indexer.k_norm.weight", f"{_TARGET}.indexer.k_norm"),
    Rename(f"{_SOURCE}.indexer.k_norm.bias", f"{_TARGET}.indexer.k_norm_bias"),
    Rename(f"{_SOURCE}.indexer.weights_proj.weight", f"{_TARGET}.indexer.weights"),
)

DEEPSEEK_V2 = Family(_deepseek_v2, RULES)
DEEPSEEK_V3 = Family(_deepseek_v3, RULES)
DEEPSEEK_V32 = Family(_deepseek_v32, (*RULES, *INDEXER_RULES))
