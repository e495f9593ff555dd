"""MiMo-V2: value heads narrower than keys; windowed layers have sinks, KV heads and RoPE of their own; experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from pagoda.common.models import hf_config
from pagoda.common.models.families.experts import corrected_sigmoid_router, leading_dense, routed_moe
from pagoda.common.models.families.sigmoid_mixtures.glm4_moe import GLM4_MOE
from pagoda.common.models.family import Rename, Rule, Split, grouped_attention, pre_norm_decoder, rms_norm
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Attention
from pagoda.common.models.spec import ModelSpec


def _mimo_v2(config: HfConfig) -> ModelSpec:
    config.alias("rms_norm_eps", "layernorm_epsilon")
    for key in ("swa_num_attention_heads", "swa_head_dim", "swa_v_head_dim"):
        config.expect(key, config.size(key.removeprefix("swa_")))
    config.expect("add_full_attention_sink_bias", False)
    config.expect("add_swa_attention_sink_bias", True)
    config.ignore("attention_chunk_size", "hybrid_block_size", "moe_router_dtype", "num_nextn_predict_layers")
    config.expect("attention_projection_layout", "separate", "split", "fused_qkv")
    layers = config.size("num_hidden_layers")
    _named_kinds(config, "hybrid_layer_pattern", "layer_types", _ATTENTION)
    _named_kinds(config, "moe_layer_freq", "mlp_layer_types", _FFN)
    config.default("mlp_layer_types", ["dense"] + ["sparse"] * (layers - 1))
    pattern = ["full_attention" if n == 0 or not (n + 1) % 6 else "sliding_attention" for n in range(layers)]
    mixers = _mixers(config)
    kinds = config.layer_types(layers, pattern)
    ffns = leading_dense(config, lambda: routed_moe(config, corrected_sigmoid_router(config)), 1)
    spec = pre_norm_decoder(config, [mixers[kind] for kind in kinds], ffns, rms_norm(config, 1e-5))
    scale = config.opt("attention_value_scale", float, 1.0)
    return replace(spec, weight_scales=(("layers.*.mixers.0.v", scale), ("layers.*.mixers.0.v_bias", scale)))


def _fused(config: HfConfig) -> tuple[Rule, ...]:
    """Return the rule of q, k and v in one tensor.

    Published float8 checkpoints have it in as many parts as full-attention layers have KV heads, quantised one by one;
    others, which transformers wrote, have all of q, then k, then v.
    """
    source = "[model.]layers.{l}.self_attn.qkv_proj"
    parts = tuple(f"layers.{{l}}.mixers.0.{part}" for part in "qkv")
    return (Split(f"{source}.weight", parts, quantised_pieces=config.size("num_key_value_heads")),)


_ATTENTION: Final = {0: "full_attention", 1: "sliding_attention"}
_FFN: Final = {0: "dense", 1: "sparse"}


def _named_kinds(config: HfConfig, key: str, named: str, names: dict[int, str]) -> None:
    """Take the kinds of the layers from a list of numbers, where the file has that instead of their names."""
    numbers: list[Any] = config.opt(key, list, [])
    if not set(numbers) <= set(names):
        raise config.error(key, f"is {numbers}; it must be a list of {sorted(names)}")
    if numbers:
        config.default(named, [names[number] for number in numbers])
        config.set(key, None)


def _mixers(config: HfConfig) -> dict[str, Attention]:
    """Return the attention of each kind of layer."""
    if (before := config.opt("sliding_window_size", int, 0)) > 0:
        config.set("sliding_window", before + 1)  # the file counts the tokens before the query
    if "rope_parameters" not in config:
        partial = config.opt("partial_rotary_factor", float, 0.334)
        thetas = {"full_attention": "rope_theta", "sliding_attention": "swa_rope_theta"}
        defaults = {"rope_theta": 5e6, "swa_rope_theta": 1e4}
        sections = {
            kind: {"rope_theta": config.opt(key, float, defaults[key]), "partial_rotary_factor": partial}
            for kind, key in thetas.items()
        }
        config.set("rope_parameters", sections)
    config.default("head_dim", 192)
    ropes = hf_config.rope_per_layer_type(config, config.size("head_dim"), full=5e6, sliding=1e4)
    full = replace(
        grouped_attention(config, config.size("hidden_size"), ropes["full_attention"]),
        value_dim=config.opt_size("v_head_dim", 128),
        qkv_bias=config.opt("attention_bias", bool, False),
    )
    kv_heads = config.opt_size("swa_num_key_value_heads", 2 * full.kv_heads)
    if full.heads % kv_heads:
        raise config.error("swa_num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {full.heads}")
    rope = ropes["sliding_attention"]
    window = config.window(129)
    return {
        "full_attention": full,
        "sliding_attention": replace(full, kv_heads=kv_heads, rope=rope, window=window, sinks=True),
    }


_SINKS: Final = ("sinks", "attention_sink_bias")

MIMO_V2 = replace(
    GLM4_MOE,
    build=_mimo_v2,
    config_rules=_fused,
    rules=(
        *GLM4_MOE.rules,
        *(Rename(f"[model.]layers.{{l}}.self_attn.{name}", "layers.{l}.mixers.0.sinks") for name in _SINKS),
    ),
    ignored=("*.rotary_emb.inv_freq", "lm_head.weight", "model.mtp.*"),
)
