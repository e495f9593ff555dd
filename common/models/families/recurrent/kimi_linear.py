"""Kimi Linear: three layers of KDA to one of latent attention without RoPE, a dense layer, then experts."""

from __future__ import annotations

import math

from pagoda.common.models.families.experts import (
    BLOCK_SPARSE_RULES,
    FFN,
    MOE_RULES,
    leading_dense,
    routed_moe,
    shared_rules,
)
from pagoda.common.models.families.latent.deepseek import RULES as LATENT_RULES
from pagoda.common.models.family import Family, Rename, Reshape, Rule, decoder, rms_norm
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import KimiDelta, LatentAttention, Mixer
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import LinearScaling, Rope
from pagoda.common.models.spec import ExpertGroups, Layer, ModelSpec, Norms, Router


def _kimi_linear(config: HfConfig) -> ModelSpec:
    for key, name in _NAMES.items():
        config.alias(key, name)
    config.expect("moe_router_activation_func", "sigmoid")
    config.expect("use_grouped_topk", True)
    config.expect("mla_use_nope", True)
    config.expect("hidden_act", "silu")
    config.ignore("num_nextn_predict_layers", "rope_theta", "rope_scaling", "rope_parameters")
    norm = rms_norm(config, 1e-5)
    layers = config.size("num_hidden_layers")
    kda, kinds = _kda(config, layers, norm)
    mixers: dict[str, Mixer] = {"linear_attention": kda, "full_attention": _latent_attention(config)}
    ffns = leading_dense(config, lambda: routed_moe(config, _router(config), shared=1), 1)
    norms = Norms(before_mixer=norm, before_ffn=norm)
    stack = [Layer((mixers[kind],), ffn, norms) for kind, ffn in zip(kinds, ffns)]
    return decoder(config, stack, norm)


_NAMES = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
"""Key of other families -> key of this one."""


def _kda(config: HfConfig, layers: int, norm: Norm) -> tuple[KimiDelta, list[str]]:
    """Return the mixer, and the kind of mixer of each layer."""
    kinds = ["full_attention" if layer and layer % 4 == 0 else "linear_attention" for layer in range(layers)]
    head_dim = config.opt_size("linear_head_dim", 128)
    heads = config.opt_size("linear_num_heads", 32)
    taps = config.opt_size("linear_conv_kernel_dim", 4)
    section = config.section("linear_attn_config")
    if section is not None:
        head_dim = section.opt_size("head_dim", head_dim)
        heads = section.opt_size("num_heads", heads)
        taps = section.opt_size("short_conv_kernel_size", taps)
        attending = section.opt("full_attn_layers", list, [])  # counted from 1
        kinds = ["full_attention" if layer + 1 in attending else "linear_attention" for layer in range(layers)]
        section.expect("kda_layers", [layer + 1 for layer, kind in enumerate(kinds) if kind == "linear_attention"])
        section.finish()
    kinds = config.opt("layer_types", list, kinds)
    if len(kinds) != layers or not set(kinds) <= {"linear_attention", "full_attention"}:
        raise config.error("layer_types", f"is {kinds}; it must have {layers} of linear_attention and full_attention")
    return KimiDelta(heads, head_dim, rank=head_dim, taps=taps, norm=norm), kinds


def _latent_attention(config: HfConfig) -> LatentAttention:
    heads = config.size("num_attention_heads")
    rope_dim = config.size("qk_rope_head_dim")
    nope_dim = config.size("qk_nope_head_dim")
    config.expect("num_key_value_heads", heads)
    config.ignore("head_dim", "qk_head_dim")
    return LatentAttention(
        heads=heads,
        query_rank=config.nullable("q_lora_rank", int),
        latent_dim=config.size("kv_lora_rank"),
        nope_dim=nope_dim,
        value_dim=config.size("v_head_dim"),
        scale=(nope_dim + rope_dim) ** -0.5,
        rope=Rope(10_000.0, rope_dim, LinearScaling(math.inf)),  # all angles are 0: no position is encoded
        norm=Norm(1e-6),  # whatever rms_norm_eps is
        bias=config.opt("attention_bias", bool, False),
    )


def _router(config: HfConfig) -> Router:
    groups = ExpertGroups(config.opt_size("n_group", 1), config.opt_size("topk_group", 1), "best_two")
    return Router(
        config.opt_size("num_experts_per_tok", 8),
        config.opt("norm_topk_prob", bool, True),
        scores="sigmoid",
        correction=True,
        groups=None if groups.count == groups.used else groups,
        scale=config.opt("routed_scaling_factor", float, 2.446),
    )


_ATTENTION = "[model.]layers.{l}.self_attn"
_TARGET = "layers.{l}.mixers.0"
_KDA = {
    **{f"{part}_proj.weight": part for part in "qkvo"},
    **{f"{part}_conv1d.weight": f"{part}_conv" for part in "qkv"},
    "b_proj.weight": "beta",
    "f_a_proj.weight": "decay_a",
    "f_b_proj.weight": "decay_b",
    "g_a_proj.weight": "gate_a",
    "g_b_proj.weight": "gate_b",
    "o_norm.weight": "norm",
    "dt_bias": "decay_offset",
}

KDA_RULES: tuple[Rule, ...] = (
    *(Rename(f"{_ATTENTION}.{name}", f"{_TARGET}.{part}") for name, part in _KDA.items()),
    Reshape(f"{_ATTENTION}.A_log", f"{_TARGET}.decay_rate"),
)

_MLP = ("gate", "up", "down")  # transformers writes dense layers under the name of mixtures

KIMI_LINEAR = Family(
    _kimi_linear,
    (
        *(rule for rule in LATENT_RULES if rule not in MOE_RULES),
        *BLOCK_SPARSE_RULES,
        *(Rename(f"[model.]layers.{{l}}.block_sparse_moe.{part}_proj.weight", f"{FFN}.{part}") for part in _MLP),
        Rename("[model.]layers.{l}.block_sparse_moe.gate.e_score_correction_bias", f"{FFN}.router_correction"),
        *shared_rules("[model.]layers.{l}.block_sparse_moe.shared_experts"),
        *KDA_RULES,
    ),
)
