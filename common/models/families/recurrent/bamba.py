"""Bamba (Mamba-2 and attention layers) and Falcon-H1 (both side by side in every layer, with multipliers)."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.families.recurrent.mamba2 import FEED_FORWARD_RULES, hybrid_mamba2, mamba2_rules
from pagoda.common.models.family import (
    Family,
    Rule,
    decoder,
    gated_mlp,
    linear,
    pre_norm_decoder,
    rms_norm,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Attention
from pagoda.common.models.spec import Embedding, Layer, ModelSpec, Norms


def _bamba(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    norm = rms_norm(config, 1e-5)
    config.ignore("z_loss_coefficient", "attn_rotary_emb")
    attention = _attention(config, partial=0.5)
    mamba = hybrid_mamba2(config, norm)
    attending = config.opt("attn_layer_indices", list, [])
    mlp = gated_mlp(config, bias=config.opt("mlp_bias", bool, False))
    mixers = [attention if layer in attending else mamba for layer in range(layers)]
    return pre_norm_decoder(config, mixers, [mlp] * layers, norm)


def _falcon_h1(config: HfConfig) -> ModelSpec:
    norm = rms_norm(config, 1e-5)
    normed = config.opt("mamba_rms_norm", bool, False)
    config.expect("mamba_use_mlp", True)
    config.ignore("mlp_expansion_factor", "attn_layer_indices")
    width = config.opt_size("mamba_d_ssm", 1024)
    mamba = replace(
        hybrid_mamba2(config, norm if normed else None, width),
        norm_before_gate=config.opt("mamba_norm_before_gate", bool, True),
    )
    config.expect("projectors_bias", mamba.bias)
    attention = _attention(config)
    mlp = gated_mlp(config, bias=config.opt("mlp_bias", bool, False))
    layer = Layer((mamba, attention), mlp, Norms(before_mixer=norm, before_ffn=norm))
    return replace(
        decoder(config, [layer] * config.size("num_hidden_layers"), norm),
        embedding=Embedding(scale=config.opt("embedding_multiplier", float, 1.0)),
        logit_scale=config.opt("lm_head_multiplier", float, 1.0),
        weight_scales=_weight_scales(config),
    )


def _attention(config: HfConfig, partial: float = 1.0) -> Attention:
    bias = config.opt("attention_bias", bool, False)
    attention = rotary_attention(config, config.size("hidden_size"), partial=partial)
    return replace(attention, qkv_bias=bias, out_bias=bias)


def _weight_scales(config: HfConfig) -> tuple[tuple[str, float], ...]:
    """Return the factors of the linear layers: of inputs on weights alone, of outputs on weights and biases."""
    attention_in = config.opt("attention_in_multiplier", float, 1.0)
    mamba_in = config.opt("ssm_in_multiplier", float, 1.0)
    parts = _floats(config, "ssm_multipliers", 5)
    gate, down = _floats(config, "mlp_multipliers", 2)
    inputs = {
        **{f"mixers.0.{part}": mamba_in for part in ("gate", "v", "b", "c", "step")},
        **{f"mixers.1.{part}": attention_in for part in "qkv"},
    }
    outputs = {
        **{f"mixers.0.{part}": factor for part, factor in zip(("gate", "v", "b", "c", "step"), parts)},
        "mixers.0.o": config.opt("ssm_out_multiplier", float, 1.0),
        "mixers.1.k": config.opt("key_multiplier", float, 1.0),
        "mixers.1.o": config.opt("attention_out_multiplier", float, 1.0),
        "ffn.gate": gate,
        "ffn.down": down,
    }
    scales = [*inputs.items(), *outputs.items(), *((f"{name}_bias", factor) for name, factor in outputs.items())]
    return tuple((f"layers.*.{name}", factor) for name, factor in scales if factor != 1)


def _floats(config: HfConfig, key: str, count: int) -> list[float]:
    factors = config.opt(key, list, [1.0] * count)
    if len(factors) != count or not all(isinstance(factor, int | float) for factor in factors):
        raise config.error(key, f"is {factors}; it must be {count} numbers")
    return [float(factor) for factor in factors]


def _rules(attention: str) -> tuple[Rule, ...]:
    """`attention`: the mixer that attends."""
    return (
        *FEED_FORWARD_RULES,
        *(
            rule
            for part in "qkvo"
            for rule in linear(f"[model.]layers.{{l}}.self_attn.{part}_proj", f"layers.{{l}}.{attention}.{part}")
        ),
        *mamba2_rules("[model.]layers.{l}.mamba"),
    )


BAMBA = Family(_bamba, _rules("mixers.0"))
FALCON_H1 = Family(_falcon_h1, _rules("mixers.1"))
