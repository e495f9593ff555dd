"""Step 3.5: windows with more heads in most layers, an output gate per head, experts whose gates are clipped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pagoda.common.models import hf_config
from pagoda.common.models.families.experts import FFN, MOE_RULES
from pagoda.common.models.family import (
    ATTENTION_RULES,
    EMBED_RULES,
    MLP_RULES,
    PRE_NORM_RULES,
    QK_NORM_RULES,
    Family,
    Rename,
    gated_mlp,
    grouped_attention,
    pre_norm_decoder,
    rms_norm,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Attention
from pagoda.common.models.spec import Ffn, Mlp, ModelSpec, Moe, Router


def _step3p5(config: HfConfig) -> ModelSpec:
    for key, *names in (
        ("num_key_value_heads", "num_attention_groups"),
        ("n_routed_experts", "moe_num_experts"),
        ("num_experts_per_tok", "moe_top_k"),
        ("share_expert_dim", "share_expert_dims"),
        ("max_position_embeddings", "max_seq_len"),
    ):
        config.alias(key, *names)
    for key, supported in (
        *(("use_moe", True), ("use_head_wise_attn_gate", True), ("gating", True), ("zero_centered", True)),
        *(("use_moe_router_bias", True), ("need_fp32_gate", True), ("moe_router_activation", "sigmoid")),
        *(
            ("att_impl_type", "GQA"),
            ("use_rope_layers", []),
            ("moe_every_n_layer", 1),
            ("use_bidirectional_attention", False),
        ),
    ):
        config.expect(key, supported)
    config.ignore(
        "moe_layer_offset", "num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types", "use_qk_norm"
    )
    layers = config.size("num_hidden_layers")
    kinds = config.opt("layer_types", list, ["full_attention"] * layers)[:layers]  # then those that propose drafts
    config.set("layer_types", kinds)
    mixers = _mixers(config, config.layer_types(layers, kinds))
    ffns = [_ffn(config, layer, kind) for layer, kind in enumerate(_ffn_kinds(config, layers))]
    return pre_norm_decoder(config, mixers, ffns, rms_norm(config, 1e-5, unit_offset=True))


def _mixers(config: HfConfig, kinds: tuple[str, ...]) -> list[Attention]:
    config.default("head_dim", 128)
    ropes = _ropes(config, kinds)
    bias = config.opt("attention_bias", bool, False)
    scalar = config.opt("query_pre_attn_scalar", float, 0.0)
    full = replace(
        grouped_attention(config, config.size("hidden_size"), ropes.get("full_attention")),
        qk_norm=rms_norm(config, 1e-5, unit_offset=True),
        qkv_bias=bias,
        out_bias=bias,
        output_gate=True,
        gate_per_head=True,
    )
    full = replace(full, scale=scalar**-0.5) if scalar else full
    heads = config.opt_size("num_sliding_attention_heads", full.heads)
    other = config.section("attention_other_setting")
    if other is not None:
        other.expect("attention_type", "sliding_attention")
        other.expect("head_dim", full.head_dim)
        other.expect("num_attention_groups", full.kv_heads)
        other.ignore("true_head_dim")
        heads = other.opt_size("num_attention_heads", heads)
        other.finish()
    if heads % full.kv_heads:
        raise config.error("num_sliding_attention_heads", f"is {heads}; there are {full.kv_heads} KV heads")
    windowed = replace(full, heads=heads, window=config.window(None), rope=ropes.get("sliding_attention"))
    return [windowed if kind == "sliding_attention" else full for kind in kinds]


def _ropes(config: HfConfig, kinds: tuple[str, ...]) -> Mapping[str, Any]:
    """Return RoPE by layer type; old files state base and rotated part layer by layer."""
    if not isinstance(config.opt("rope_parameters", dict, {}).get(kinds[0]), dict):
        count = len(kinds)
        scaled = config.opt("yarn_only_types", list, ["full_attention"])
        default = [config.need("rope_theta", float)] if config.is_number("rope_theta") else [1e4]
        thetas = default * count if config.is_number("rope_theta") else config.opt("rope_theta", list, default * count)
        partials = config.opt("partial_rotary_factors", list, [1.0] * count)
        scaling = config.opt("rope_scaling", dict, {})
        sections = {
            kind: {
                "rope_theta": thetas[kinds.index(kind)],
                "partial_rotary_factor": partials[kinds.index(kind)],
                **(scaling if kind in scaled else {}),
            }
            for kind in set(kinds)
        }
        for key in ("rope_theta", "rope_scaling", "partial_rotary_factors"):
            config.set(key, None)
        config.set("rope_parameters", sections)
    return hf_config.rope_per_layer_type(config, config.size("head_dim"), full=1e4, sliding=1e4)


def _ffn_kinds(config: HfConfig, layers: int) -> list[str]:
    """Return "sparse" or "dense" for each layer."""
    sparse = [str(layer) for layer in range(3, layers)]
    if config.is_text("moe_layers_enum"):
        sparse = config.need("moe_layers_enum", str).replace(" ", "").split(",")
    else:
        sparse = [str(layer) for layer in config.opt("moe_layers_enum", list, sparse)]
    kinds = ["sparse" if str(layer) in sparse else "dense" for layer in range(layers)]
    kinds = config.opt("mlp_layer_types", list, kinds)[:layers]
    if len(kinds) != layers or not set(kinds) <= {"dense", "sparse"}:
        raise config.error("mlp_layer_types", f"is {kinds}; it must have {layers} entries, dense or sparse")
    return kinds


def _ffn(config: HfConfig, layer: int, kind: str) -> Ffn:
    dense = _clipped(config, gated_mlp(config, bias=config.opt("mlp_bias", bool, False)), "swiglu_limits_shared", layer)
    if kind == "dense":
        return dense
    expert = replace(gated_mlp(config), width=config.opt_size("moe_intermediate_size", 1280))
    router = Router(
        config.opt_size("num_experts_per_tok", 8),
        config.opt("norm_expert_weight", bool, True),
        scores="sigmoid",
        correction=True,
        scale=config.opt("moe_router_scaling_factor", float, 1.0),
    )
    shared = replace(dense, width=config.opt_size("share_expert_dim", 1280))
    count = config.opt_size("n_routed_experts", 288)
    return Moe(count, _clipped(config, expert, "swiglu_limits", layer), router, shared)


def _clipped(config: HfConfig, mlp: Mlp, key: str, layer: int) -> Mlp:
    """Return the Mlp with the limit of its layer, 0 or null for none."""
    limits = config.opt(key, list, [])
    if limits and len(limits) <= layer:
        raise config.error(key, f"has {len(limits)} entries, fewer than there are layers")
    limit = limits[layer] if limits else None
    return replace(mlp, clip=float(limit)) if limit else mlp


_SOURCE: Final = "[model.]layers.{l}"
_PARTS: Final = ("gate", "up", "down")

STEP3P5 = Family(
    _step3p5,
    (
        *(EMBED_RULES + ATTENTION_RULES + QK_NORM_RULES + MLP_RULES + PRE_NORM_RULES + MOE_RULES),
        Rename(f"{_SOURCE}.self_attn.g_proj.weight", "layers.{l}.mixers.0.gate"),
        Rename(f"{_SOURCE}.moe.gate.weight", f"{FFN}.router"),
        Rename(f"{_SOURCE}.moe.router_bias", f"{FFN}.router_correction"),
        *(Rename(f"{_SOURCE}.moe.{part}_proj.weight", f"{FFN}.experts.{part}") for part in _PARTS),
        *(Rename(f"{_SOURCE}.share_expert.{part}_proj.weight", f"{FFN}.shared.{part}") for part in _PARTS),
    ),
    # layers after Step-3.5-Flash's last one, which only propose drafts
    ignored=("*.rotary_emb.inv_freq", "lm_head.weight", *(f"model.layers.{layer}.*" for layer in (45, 46, 47))),
)
