"""OLMo Hybrid: three layers of the gated delta rule with beta up to 2 to one of OLMo 3's block."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.family import (
    ATTENTION_RULES,
    EMBED_RULES,
    MLP_RULES,
    QK_NORM_RULES,
    Family,
    Rename,
    decoder,
    gated_mlp,
    grouped_attention,
    rms_norm,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Attention, GatedDelta
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import Layer, ModelSpec, Norms


def _olmo_hybrid(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    norm = rms_norm(config, 1e-6)
    ffn = gated_mlp(config)
    config.expect("hidden_act", "silu")  # also the activation of the convolution
    config.ignore("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")
    kinds = ["linear_attention" if layer % 4 != 3 else "full_attention" for layer in range(layers)]
    if "full_attention" not in kinds:
        kinds[-1] = "full_attention"
    kinds = config.opt("layer_types", list, kinds)
    if len(kinds) != layers or not set(kinds) <= {"linear_attention", "full_attention"}:
        raise config.error("layer_types", f"is {kinds}; it must have {layers} of linear_attention and full_attention")
    kind_layers = {
        "linear_attention": Layer((_gated_delta(config),), ffn, Norms(before_mixer=norm, before_ffn=norm)),
        "full_attention": Layer((_attention(config, norm),), ffn, Norms(after_mixer=norm, after_ffn=norm)),
    }
    return decoder(config, [kind_layers[kind] for kind in kinds], norm)


def _attention(config: HfConfig, norm: Norm) -> Attention:
    width = config.size("hidden_size")
    bias = config.opt("attention_bias", bool, False)
    rope = config.opt("rope_parameters", dict, {})
    if "rope_theta" not in config and rope.get("rope_theta") is None:
        attention = grouped_attention(config, width, None)
    else:
        attention = rotary_attention(config, width, theta=500_000.0)
    return replace(attention, qk_norm=norm, qk_norm_over="full", qkv_bias=bias, out_bias=bias)


def _gated_delta(config: HfConfig) -> GatedDelta:
    heads = config.size("num_attention_heads")
    key_heads = config.opt_size("linear_num_key_heads", heads)
    value_heads = config.opt_size("linear_num_value_heads", heads)
    key_dim = config.opt_size("linear_key_head_dim", int(0.75 * config.size("hidden_size") / key_heads))
    if value_heads % key_heads:
        raise config.error("linear_num_key_heads", f"{key_heads} does not divide linear_num_value_heads {value_heads}")
    return GatedDelta(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=config.opt_size("linear_value_head_dim", 2 * key_dim),
        taps=config.opt_size("linear_conv_kernel_dim", 4),
        norm=Norm(1e-5),  # whatever rms_norm_eps is
        beta_scale=2.0 if config.opt("linear_allow_neg_eigval", bool, True) else 1.0,
    )


_LAYER = "[model.]layers.{l}"
_LINEAR = "[model.]layers.{l}.linear_attn"
_TARGET = "layers.{l}.mixers.0"
_NORMS = (
    ("attention_layer_norm", "before_mixer"),
    ("input_layernorm", "before_mixer"),
    ("feedforward_layer_norm", "before_ffn"),
    ("feedforward_layer_norm", "after_mixer"),
    ("post_attention_layernorm", "after_mixer"),
    ("post_attention_layernorm", "before_ffn"),
    ("post_feedforward_layernorm", "after_ffn"),
)

OLMO_HYBRID = Family(
    _olmo_hybrid,
    (
        *EMBED_RULES,
        *ATTENTION_RULES,
        *QK_NORM_RULES,
        *MLP_RULES,
        *(Rename(f"{_LAYER}.{name}.weight", f"layers.{{l}}.norms.{norm}") for name, norm in _NORMS),
        *(Rename(f"{_LINEAR}.{part}_proj.weight", f"{_TARGET}.{part}") for part in "qkvo"),
        *(Rename(f"{_LINEAR}.{part}_conv1d.weight", f"{_TARGET}.{part}_conv") for part in "qkv"),
        Rename(f"{_LINEAR}.g_proj.weight", f"{_TARGET}.gate"),
        Rename(f"{_LINEAR}.b_proj.weight", f"{_TARGET}.beta"),
        Rename(f"{_LINEAR}.a_proj.weight", f"{_TARGET}.decay"),
        Rename(f"{_LINEAR}.A_log", f"{_TARGET}.decay_rate"),
        Rename(f"{_LINEAR}.dt_bias", f"{_TARGET}.decay_offset"),
        Rename(f"{_LINEAR}.o_norm.weight", f"{_TARGET}.norm"),
    ),
)
