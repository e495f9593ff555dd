"""Ling 3: five layers of KDA to one of latent attention with an output gate per head, experts with sigmoid scores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

from pagoda.common.models.families.experts import FFN, leading_dense
from pagoda.common.models.families.latent.deepseek import RULES as LATENT_RULES
from pagoda.common.models.families.latent.deepseek import latent_attention
from pagoda.common.models.families.recurrent.kimi_linear import KDA_RULES
from pagoda.common.models.families.sigmoid_mixtures.bailing import bailing_moe, name_keys
from pagoda.common.models.family import Family, Rename, Rule, Zeros, pre_norm_decoder, rms_norm
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import KimiDelta, Mixer
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import ModelSpec

_NAMES: Final = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_experts_per_tok": "num_experts_per_token",
}
_FIXED: Final[tuple[tuple[str, Any], ...]] = (
    *(("no_kda_lora", True), ("use_kda_lora", False), ("linear_attention", "kda"), ("linear_silu", True)),
    *(("rope_interleave", True), ("group_norm_size", 1), ("use_bias", False), ("use_qkv_bias", False)),
    *(("scale_router_input", False), ("use_mla_nope", False), ("use_nGPT", False), ("up_proj_norm", False)),
    *(("value_norm", False), ("moe_router_enable_expert_bias", True)),
)


def _ling3(config: HfConfig) -> ModelSpec:
    for key, name in _NAMES.items():
        config.alias(key, name)
    for key, supported in _FIXED:
        config.expect(key, supported)
    # KDA always norms q and k; the width of RoPE is qk_rope_head_dim.
    config.ignore("use_qk_norm", "num_mtp_layers", "rotary_dim", "partial_rotary_factor")
    name_keys(config, "sigmoid")
    layers = config.size("num_hidden_layers")
    heads = config.size("num_attention_heads")
    norm = rms_norm(config, 1e-6)
    kda = _kda(config, heads, norm)
    config.set("head_dim", config.size("qk_rope_head_dim"))
    if "q_lora_rank" not in config:
        config.set("q_lora_rank", None)
    gated = config.opt("gated_attention_proj_granularity_type", str, "head_wise") == "head_wise"
    config.expect("gated_attention_proj_granularity_type", "head_wise")
    latent = replace(latent_attention(config, interleaved=True), gate_per_head=gated)
    mixers: dict[str, Mixer] = {"linear_attention": kda, "full_attention": latent}
    ffns = leading_dense(config, lambda: bailing_moe(config), 2)
    return pre_norm_decoder(config, [mixers[kind] for kind in hybrid_kinds(config, layers, 6)], ffns, norm)


def _kda(config: HfConfig, heads: int, norm: Norm) -> KimiDelta:
    config.expect("linear_num_heads", heads)
    head_dim = config.opt_size("linear_head_dim", config.opt_size("head_dim", 128))
    taps = config.opt_size("linear_conv_kernel_dim", config.opt_size("short_conv_kernel_size", 4))
    bound = config.nullable("kda_lower_bound", float, -5.0)
    bound = bound if config.opt("kda_safe_gate", bool, True) else None
    return KimiDelta(heads, head_dim, None, taps, norm, bound)


def hybrid_kinds(config: HfConfig, layers: int, group: int) -> list[str]:
    """Return the kind of mixer of each layer: the last of each `layer_group_size` attends. `group`: its default."""
    group = config.opt_size("layer_group_size", group)
    if "layer_types" not in config and layers % group:
        raise config.error("layer_group_size", f"is {group}, which does not divide num_hidden_layers {layers}")
    kinds = ["linear_attention" if (layer + 1) % group else "full_attention" for layer in range(layers)]
    kinds = config.opt("layer_types", list, kinds)
    if len(kinds) != layers or not set(kinds) <= {"linear_attention", "full_attention"}:
        raise config.error("layer_types", f"is {kinds}; it must have {layers} of linear_attention and full_attention")
    return kinds


def _of_hub(rules: Iterable[Rule]) -> Iterator[Rule]:
    """Yield the rules with the name that the hub's files have for the mixer."""
    for rule in rules:
        if not isinstance(rule, Zeros) and ".self_attn." in rule.source:
            yield replace(rule, source=rule.source.replace(".self_attn.", ".attention."))


_SOURCE = "[model.]layers.{l}.attention"
_TARGET = "layers.{l}.mixers.0"

HYBRID_RULES: Final[tuple[Rule, ...]] = (
    *LATENT_RULES,
    *_of_hub(LATENT_RULES),
    Rename("[model.]word_embeddings.weight", "embed"),
    Rename(f"{_SOURCE}.dense.weight", f"{_TARGET}.o"),
    Rename(f"{_SOURCE}.g_proj.weight", f"{_TARGET}.gate"),
    Rename("[model.]layers.{l}.mlp.gate.expert_bias", f"{FFN}.router_correction"),
)

LING3 = Family(
    _ling3,
    (*HYBRID_RULES, *_of_hub(KDA_RULES), Rename(f"{_SOURCE}.f_proj.weight", f"{_TARGET}.decay")),
    # the layer after the last one of Ling-3.0-flash and tiny, which only proposes drafts
    ignored=("*.rotary_emb.inv_freq", "lm_head.weight", "model.layers.42.*", "model.layers.24.*", "model.mtp.*"),
)
