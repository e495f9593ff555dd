"""Command with experts: Cohere 2's parallel block, a mixture as its ffn after leading dense layers."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.families.experts import MOE_RULES
from pagoda.common.models.families.gpt_block.cohere import COHERE2
from pagoda.common.models.family import decoder, gated_mlp, rotary_attention
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import Ffn, Layer, ModelSpec, Moe, Norms, Router


def _cohere2_moe(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    first = config.opt("first_k_dense_replace", int, 0)
    dense_kinds = config.opt("mlp_layer_types", list, ["dense"] * first + ["sparse"] * (layers - first))
    prefix = config.opt_size("prefix_dense_sliding_window_pattern", 1)
    every = config.opt_size("sliding_window_pattern", 4)
    cycles = [(n + 1) % prefix for n in range(first)] + [(n + 1) % every for n in range(layers - first)]
    kinds = config.layer_types(layers, ["sliding_attention" if cycle else "full_attention" for cycle in cycles])
    bias = config.opt("attention_bias", bool, False)
    config.default("head_dim", 128)
    rotary = replace(
        rotary_attention(config, config.size("hidden_size"), interleaved=True), qkv_bias=bias, out_bias=bias
    )
    windowed = replace(rotary, window=config.window(4096))
    mixers = [
        windowed
        if kind == "sliding_attention"
        else rotary
        if dense == "dense" and prefix == 1
        else replace(rotary, rope=None)
        for kind, dense in zip(kinds, dense_kinds)
    ]
    norm = Norm(config.opt("layer_norm_eps", float, 1e-5), kind="layer")
    if "rms_norm_eps" in config:
        norm = Norm(config.need("rms_norm_eps", float))
    moe = _moe(config)
    dense = gated_mlp(config)
    if "dense" in dense_kinds:
        dense = replace(dense, width=config.size("prefix_dense_intermediate_size"))
    config.ignore("prefix_dense_intermediate_size")
    ffns: list[Ffn] = [dense if kind == "dense" else moe for kind in dense_kinds]
    stack = (Layer((mixer,), ffn, Norms(norm), parallel=True) for mixer, ffn in zip(mixers, ffns))
    spec = replace(decoder(config, stack, norm, tied=True), logit_scale=config.opt("logit_scale", float, 0.0625))
    averaged = _averages(config) and moe.shared is not None
    return replace(spec, weight_scales=(("layers.*.ffn.shared.down", 0.5),)) if averaged else spec


def _moe(config: HfConfig) -> Moe:
    config.expect("expert_selection_fn", "softmax", "sigmoid")
    softmax = config.opt("expert_selection_fn", str, "softmax") == "softmax"
    renormalise = config.opt("norm_topk_prob", bool, True) or softmax  # the softmax is over the chosen experts
    router = Router(config.opt_size("num_experts_per_tok", 2), renormalise, "softmax" if softmax else "sigmoid")
    expert = gated_mlp(config)
    shared = config.opt("num_shared_experts", int, 0)
    if _averages(config) and shared:
        router = replace(router, scale=0.5)  # and so is the output of the shared Mlp
    width = shared * expert.width
    return Moe(config.opt_size("num_experts", 8), expert, router, replace(expert, width=width) if shared else None)


def _averages(config: HfConfig) -> bool:
    """Return whether the outputs of routed experts and shared Mlp are averaged instead of added."""
    config.expect("shared_expert_combination_strategy", "average", "sum")
    return config.opt("shared_expert_combination_strategy", str, "average") == "average"


COHERE2_MOE = replace(COHERE2, build=_cohere2_moe, rules=(*COHERE2.rules, *MOE_RULES))
