"""Nemotron-H and Nemotron 3: layers of one Mamba-2 mixer, one attention without RoPE, one MLP or one mixture."""

from __future__ import annotations

from typing import Final

from pagoda.common.models.families.experts import FFN, corrected_sigmoid_router
from pagoda.common.models.families.recurrent.mamba2 import (
    BACKBONE_RULES,
    TRAINING_KEYS,
    groups,
    mamba2_rules,
    step_limit,
)
from pagoda.common.models.family import Family, Rename, Rule, Stack, decoder, grouped_attention, linear
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Mamba2
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import Layer, Mlp, ModelSpec, Moe, Norms

_LETTERS: Final = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_OTHER_NAMES: Final = {"linear_attention": "mamba", "full_attention": "attention"}


def _nemotron_h(config: HfConfig) -> ModelSpec:
    config.alias("head_dim", "attention_head_dim")
    config.alias("layer_norm_epsilon", "rms_norm_eps", "norm_eps")
    config.expect("sliding_window", None)
    config.expect("moe_latent_size", None)
    config.expect("mamba_proj_bias", False)
    config.expect("num_query_groups", config.opt_size("num_key_value_heads", 8))
    config.ignore("rope_theta", "partial_rotary_factor")  # no RoPE
    config.ignore("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern")
    config.ignore("mamba_ssm_cache_dtype", "moe_shared_expert_overlap", *TRAINING_KEYS)
    norm = Norm(config.opt("layer_norm_epsilon", float, 1e-5))
    kinds = _kinds(config)
    mixer = Norms(before_mixer=norm)
    ffn = Norms(before_ffn=norm)
    mlp = Mlp(
        config.opt_size("intermediate_size", 21504),
        config.activation("mlp_hidden_act", "relu2"),
        gated=False,
        bias=config.opt("mlp_bias", bool, False),
    )
    layers = {
        "mamba": Layer((_mamba2(config),), None, mixer),
        "attention": Layer((grouped_attention(config, config.size("hidden_size"), None),), None, mixer),
        "mlp": Layer((), mlp, ffn),
    }
    if "moe" in kinds:
        layers["moe"] = Layer((), _moe(config, mlp), ffn)
    else:
        config.ignore("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "routed_scaling_factor")
        config.ignore("moe_intermediate_size", "moe_shared_expert_intermediate_size", "norm_topk_prob")
        config.ignore("n_group", "topk_group")
    return decoder(config, [layers[kind] for kind in kinds], norm)


def _kinds(config: HfConfig) -> list[str]:
    """Return the kind of each layer, from its letter in `hybrid_override_pattern` or from `layers_block_type`."""
    pattern = config.opt("hybrid_override_pattern", str, "")
    named = config.opt(
        "layer_types", list, config.opt("layers_block_type", list, [_LETTERS.get(c, c) for c in pattern])
    )
    kinds = [_OTHER_NAMES.get(kind, kind) for kind in named]
    unknown = set(kinds) - set(_LETTERS.values())
    if unknown or not kinds:
        problem = f"has {unknown.pop()!r}" if unknown else "is empty"
        raise config.error("layers_block_type", f"{problem}; supported: {', '.join(_LETTERS.values())}")
    config.expect("num_hidden_layers", len(kinds))
    return kinds


def _mamba2(config: HfConfig) -> Mamba2:
    """Return the mixer. Its steps are limited by `time_step_limit`, not by `time_step_min`, of the initialisation."""
    config.expect("mamba_hidden_act", "silu")
    config.ignore("expand")
    heads = config.opt_size("mamba_num_heads", 128)
    return Mamba2(
        heads=heads,
        head_dim=config.opt_size("mamba_head_dim", 64),
        groups=groups(config, "n_groups", heads, 8),
        state_dim=config.opt_size("ssm_state_size", 128),
        taps=config.opt_size("conv_kernel", 4),
        norm=Norm(config.opt("layer_norm_epsilon", float, 1e-5)),
        bias=config.opt("use_bias", bool, False),
        conv_bias=config.opt("use_conv_bias", bool, True),
        step_limit=step_limit(config),
    )


def _moe(config: HfConfig, mlp: Mlp) -> Moe:
    if mlp.bias:
        raise config.error("mlp_bias", "is True; with experts only False is supported")
    config.expect("n_shared_experts", 1)
    expert = Mlp(config.size("moe_intermediate_size"), mlp.activation, gated=False)
    shared = Mlp(config.size("moe_shared_expert_intermediate_size"), mlp.activation, gated=False)
    return Moe(config.size("n_routed_experts"), expert, corrected_sigmoid_router(config), shared)


def _rules(backbone: str) -> tuple[Rule, ...]:
    layer = f"{backbone}layers.{{l}}"
    mixer = f"{layer}.mixer"
    return (
        *(rule for part in "qkvo" for rule in linear(f"{mixer}.{part}_proj", f"layers.{{l}}.mixers.0.{part}")),
        *(rule for part in ("up", "down") for rule in linear(f"{mixer}.{part}_proj", f"{FFN}.{part}")),
        *(Stack(f"{mixer}.experts.{{e}}.{part}_proj.weight", f"{FFN}.experts.{part}") for part in ("up", "down")),
        *(Rename(f"{mixer}.experts.{part}_proj", f"{FFN}.experts.{part}") for part in ("up", "down")),
        *(Rename(f"{mixer}.shared_experts.{part}_proj.weight", f"{FFN}.shared.{part}") for part in ("up", "down")),
        Rename(f"{mixer}.gate.weight", f"{FFN}.router"),
        Rename(f"{mixer}.gate.e_score_correction_bias", f"{FFN}.router_correction"),
        Rename(f"{layer}.norm.weight", "layers.{l}.norms.before_ffn"),
    )


NEMOTRON_H = Family(
    _nemotron_h,
    (*BACKBONE_RULES, *mamba2_rules("[backbone.]layers.{l}.mixer"), *_rules("[backbone.]")),
    ignored=("lm_head.weight", "mtp.*"),
)
