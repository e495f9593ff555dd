"""AFMoE (Arcee Trinity): gated attention with RoPE in windowed layers only, four norms, experts with sigmoid scores."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.families.experts import FFN, expert_rules, shared_rules
from pagoda.common.models.family import (
    ATTENTION_RULES,
    EMBED_RULES,
    MLP_RULES,
    QK_NORM_RULES,
    Family,
    Rename,
    decoder,
    gated_mlp,
    rms_norm,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.spec import Embedding, Ffn, Layer, ModelSpec, Moe, Norms, Router


def _afmoe(config: HfConfig) -> ModelSpec:
    for key, supported in (("score_func", "sigmoid"), ("route_norm", True), ("n_group", 1), ("topk_group", 1)):
        config.expect(key, supported)
    config.ignore("load_balance_coeff", "num_expert_groups", "num_limited_groups", "use_grouped_mm")
    layers = config.size("num_hidden_layers")
    width = config.size("hidden_size")
    norm = rms_norm(config, 1e-5)
    config.default("head_dim", 128)
    windowed = replace(rotary_attention(config, width), qk_norm=norm, output_gate=True, window=config.window(1024))
    full = replace(windowed, rope=None, window=None)
    every = config.opt_size("global_attn_every_n_layers", 4)
    pattern = ["sliding_attention" if (n + 1) % every else "full_attention" for n in range(layers)]
    kinds = config.layer_types(layers, pattern)
    dense = gated_mlp(config)
    moe = _moe(config)
    first = config.opt("num_dense_layers", int, 1)
    ffns: list[Ffn] = [dense if n < first else moe for n in range(layers)]
    norms = Norms(norm, norm, norm, norm)
    stack = (Layer((windowed if kind == "sliding_attention" else full,), ffn, norms) for kind, ffn in zip(kinds, ffns))
    scale = width**0.5 if config.opt("mup_enabled", bool, False) else 1.0
    return replace(decoder(config, stack, norm), embedding=Embedding(scale=scale))


def _moe(config: HfConfig) -> Moe:
    scale = config.opt("route_scale", float, 1.0)
    top_k = config.opt_size("num_experts_per_tok", 6)
    router = Router(top_k, renormalise=True, scores="sigmoid", correction=True, scale=scale)
    expert = replace(gated_mlp(config), width=config.opt_size("moe_intermediate_size", 1408))
    shared = replace(expert, width=expert.width * config.opt_size("num_shared_experts", 2))
    return Moe(config.opt_size("num_experts", 64), expert, router, shared)


_LAYER = "[model.]layers.{l}"
_NORMS = "layers.{l}.norms"

AFMOE = Family(
    _afmoe,
    (
        *(EMBED_RULES + ATTENTION_RULES + QK_NORM_RULES + MLP_RULES),
        Rename(f"{_LAYER}.self_attn.gate_proj.weight", "layers.{l}.mixers.0.gate"),
        Rename(f"{_LAYER}.input_layernorm.weight", f"{_NORMS}.before_mixer"),
        Rename(f"{_LAYER}.post_attention_layernorm.weight", f"{_NORMS}.after_mixer"),
        Rename(f"{_LAYER}.pre_mlp_layernorm.weight", f"{_NORMS}.before_ffn"),
        Rename(f"{_LAYER}.post_mlp_layernorm.weight", f"{_NORMS}.after_ffn"),
        Rename(f"{_LAYER}.mlp.router.gate.weight", f"{FFN}.router"),
        Rename(f"{_LAYER}.mlp.expert_bias", f"{FFN}.router_correction"),
        *expert_rules(f"{_LAYER}.mlp.experts"),
        *shared_rules(f"{_LAYER}.mlp.shared_experts"),
    ),
)
