"""LFM2, dense or with experts: short gated convolutions, and attention with QK norm in some layers."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.families.experts import FFN, expert_rules
from pagoda.common.models.family import Family, Rename, fused_linear, linear, pre_norm_decoder, rotary_attention
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Mixer, ShortConvolution
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import Ffn, Mlp, ModelSpec, Moe, Router


def _lfm2(config: HfConfig) -> ModelSpec:
    config.alias("intermediate_size", "block_ff_dim")
    width = config.size("intermediate_size")
    if config.opt("block_auto_adjust_ff_dim", bool, True):
        multiple = config.opt_size("block_multiple_of", 256)
        width = int(config.opt("block_ffn_dim_multiplier", float, 1.0) * int(2 * width / 3))
        width = -(-width // multiple) * multiple
    config.ignore("block_multiple_of", "block_ffn_dim_multiplier")
    layers = config.size("num_hidden_layers")
    attending = config.opt("full_attn_idxs", list, list(range(layers)))
    default = ["full_attention" if layer in attending else "conv" for layer in range(layers)]
    return _model(config, [Mlp(width, "silu", gated=True)] * layers, default)


def _lfm2_moe(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    dense = Mlp(config.size("intermediate_size"), "silu", gated=True)
    router = Router(
        config.opt_size("num_experts_per_tok", 4),
        renormalise=config.opt("norm_topk_prob", bool, True),
        scores="sigmoid",
        correction=config.opt("use_expert_bias", bool, True),
        scale=config.opt("routed_scaling_factor", float, 1.0),
    )
    expert = replace(dense, width=config.opt_size("moe_intermediate_size", 1792))
    moe = Moe(config.opt_size("num_experts", 32), expert, router)
    leading = config.opt("num_dense_layers", int, 2)
    return _model(config, [dense if layer < leading else moe for layer in range(layers)], ["full_attention"] * layers)


def _model(config: HfConfig, ffns: list[Ffn], default: list[str]) -> ModelSpec:
    """`default`: the kind of mixer of each layer, unless `layer_types` states them."""
    width = config.size("hidden_size")
    norm = Norm(config.opt("norm_eps", float, 1e-5))
    config.alias("num_attention_heads", "num_heads")
    config.alias("tie_word_embeddings", "tie_embedding")
    config.alias("rope_theta", "theta")
    for key in ("block_dim", "conv_dim", "conv_dim_out"):
        config.expect(key, width)
    for key in ("block_use_swiglu", "use_pos_enc"):
        config.expect(key, True)
    config.expect("block_norm_eps", norm.eps)
    config.ignore("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init")
    kinds = config.opt("layer_types", list, default)
    if len(kinds) != len(ffns) or not set(kinds) <= {"full_attention", "conv"}:
        raise config.error("layer_types", f"is {kinds}; it must have {len(ffns)} entries, full_attention or conv")
    attention = replace(rotary_attention(config, width, theta=1_000_000.0), qk_norm=norm)
    convolution = ShortConvolution(width, config.opt_size("conv_L_cache", 3), config.opt("conv_bias", bool, False))
    mixers: list[Mixer] = [attention if kind == "full_attention" else convolution for kind in kinds]
    return pre_norm_decoder(config, mixers, ffns, norm, tied=True)


_LAYER = "[model.]layers.{l}"
_TARGET = "layers.{l}.mixers.0"


RULES = (
    Rename("[model.]embed_tokens.weight", "embed"),
    Rename("[model.]embedding_norm.weight", "final_norm"),
    Rename("lm_head.weight", "head"),
    Rename(f"{_LAYER}.operator_norm.weight", "layers.{l}.norms.before_mixer"),
    Rename(f"{_LAYER}.ffn_norm.weight", "layers.{l}.norms.before_ffn"),
    *(rule for part in "qkv" for rule in linear(f"{_LAYER}.self_attn.{part}_proj", f"{_TARGET}.{part}")),
    *linear(f"{_LAYER}.self_attn.out_proj", f"{_TARGET}.o"),
    Rename(f"{_LAYER}.self_attn.q_layernorm.weight", f"{_TARGET}.q_norm"),
    Rename(f"{_LAYER}.self_attn.k_layernorm.weight", f"{_TARGET}.k_norm"),
    *fused_linear(f"{_LAYER}.conv.in_proj", *(f"{_TARGET}.{part}" for part in "bcv")),
    *linear(f"{_LAYER}.conv.conv", f"{_TARGET}.conv"),
    *linear(f"{_LAYER}.conv.out_proj", f"{_TARGET}.o"),
    *linear(f"{_LAYER}.feed_forward.w1", f"{FFN}.gate"),
    *linear(f"{_LAYER}.feed_forward.w3", f"{FFN}.up"),
    *linear(f"{_LAYER}.feed_forward.w2", f"{FFN}.down"),
    Rename(f"{_LAYER}.feed_forward.gate.weight", f"{FFN}.router"),
    Rename(f"{_LAYER}.feed_forward.expert_bias", f"{FFN}.router_correction"),
    *expert_rules(f"{_LAYER}.feed_forward.experts", "w1", "w3", "w2"),
)

LFM2 = Family(_lfm2, RULES)
LFM2_MOE = Family(_lfm2_moe, RULES)
