"""Granite 4: Mamba-2 and attention layers with Granite's multipliers, an MLP or experts beside a shared one."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.families.experts import FFN
from pagoda.common.models.families.mixtures.granite_moe import RULES as GRANITE_MOE_RULES
from pagoda.common.models.families.recurrent.mamba2 import hybrid_mamba2, mamba2_rules
from pagoda.common.models.family import (
    Family,
    Rename,
    Split,
    gated_mlp,
    grouped_attention,
    pre_norm_decoder,
    rms_norm,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Attention, Mixer
from pagoda.common.models.spec import Embedding, Mlp, ModelSpec, Moe, Router

_KINDS = {"mamba": "mamba", "linear_attention": "mamba", "attention": "attention", "full_attention": "attention"}


def _granite_hybrid(config: HfConfig) -> ModelSpec:
    config.expect("normalization_function", "rmsnorm")
    config.ignore("init_method")
    layers = config.size("num_hidden_layers")
    norm = rms_norm(config, 1e-6)
    named = config.opt("layer_types", list, config.opt("layers_block_type", list, ["mamba"] * layers))
    if len(named) != layers or not set(named) <= _KINDS.keys():
        raise config.error("layer_types", f"is {named}; it must have {layers} entries of {', '.join(_KINDS)}")
    mixers: dict[str, Mixer] = {"attention": _attention(config), "mamba": hybrid_mamba2(config, norm)}
    kinds = [mixers[_KINDS[name]] for name in named]
    spec = pre_norm_decoder(config, kinds, [_ffn(config)] * layers, norm)
    scale = config.opt("residual_multiplier", float, 1.0)
    return replace(
        spec,
        layers=tuple(replace(layer, residual_scale=scale) for layer in spec.layers),
        embedding=Embedding(scale=config.opt("embedding_multiplier", float, 1.0)),
        logit_scale=1 / config.opt("logits_scaling", float, 1.0),
    )


def _attention(config: HfConfig) -> Attention:
    width = config.size("hidden_size")
    bias = config.opt("attention_bias", bool, False)
    config.expect("position_embedding_type", "rope", "nope")
    if config.opt("position_embedding_type", str, "nope") == "rope":
        attention = rotary_attention(config, width)
    else:
        config.ignore("rope_theta", "rope_scaling", "rope_parameters")
        attention = grouped_attention(config, width, None)
    scale = config.opt("attention_multiplier", float, 1.0)
    return replace(attention, scale=scale, qkv_bias=bias, out_bias=bias)


def _ffn(config: HfConfig) -> Mlp | Moe:
    experts = config.opt("num_local_experts", int, 8)
    expert = gated_mlp(config)
    shared = replace(expert, width=config.opt_size("shared_intermediate_size", 1024))
    router = Router(config.opt("num_experts_per_tok", int, 2), renormalise=True)
    return Moe(experts, expert, router, shared) if experts else shared


_SHARED = "[model.]layers.{l}.shared_mlp"

GRANITE_HYBRID = Family(
    _granite_hybrid,
    (
        *GRANITE_MOE_RULES,
        Split(f"{_SHARED}.input_linear.weight", (f"{FFN}.gate", f"{FFN}.up")),
        Rename(f"{_SHARED}.output_linear.weight", f"{FFN}.down"),
        *mamba2_rules("[model.]layers.{l}.mamba"),
    ),
)
