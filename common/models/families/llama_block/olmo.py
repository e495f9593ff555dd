"""OLMo 1: LayerNorm without weights, q, k, v clamped. OLMo 2, 3: norms after mixer and ffn, qk norm over all heads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pagoda.common.models import hf_config
from pagoda.common.models.family import (
    ATTENTION_RULES,
    EMBED_RULES,
    FOUR_NORM_RULES,
    MLP_RULES,
    QK_NORM_RULES,
    Family,
    decoder,
    gated_mlp,
    grouped_attention,
    pre_norm_decoder,
    rms_norm,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Attention
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import Layer, ModelSpec, Norms


def _olmo2(config: HfConfig) -> ModelSpec:
    attention = rotary_attention(config, config.size("hidden_size"))
    return _model(config, [attention] * config.size("num_hidden_layers"))


def _olmo3(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    width = config.size("hidden_size")
    theta = config.opt("rope_theta", float, 500_000.0)
    head_dim = hf_config.head_dim(config, width, config.size("num_attention_heads"))
    ropes = hf_config.rope_per_layer_type(config, head_dim, full=theta, sliding=theta)
    window = config.window(4096)
    pattern = ["sliding_attention" if (layer + 1) % 4 else "full_attention" for layer in range(layers)]
    full = grouped_attention(config, width, ropes["full_attention"])
    windowed = replace(full, rope=ropes["sliding_attention"], window=window)
    kinds = config.layer_types(layers, pattern)
    return _model(config, [windowed if kind == "sliding_attention" else full for kind in kinds])


def _model(config: HfConfig, mixers: Iterable[Attention]) -> ModelSpec:
    norm = rms_norm(config, 1e-5)
    bias = config.opt("attention_bias", bool, False)
    ffn = gated_mlp(config)
    layers = (
        Layer(
            (replace(mixer, qk_norm=norm, qk_norm_over="full", qkv_bias=bias, out_bias=bias),),
            ffn,
            Norms(after_mixer=norm, after_ffn=norm),
        )
        for mixer in mixers
    )
    return decoder(config, layers, norm)


def _olmo(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    bias = config.opt("attention_bias", bool, False)
    attention = replace(
        rotary_attention(config, config.size("hidden_size")),
        qkv_bias=bias,
        out_bias=bias,
        qkv_clip=config.nullable("clip_qkv", float),
    )
    norm = Norm(1e-5, kind="layer", scale=False)
    return pre_norm_decoder(config, [attention] * layers, [gated_mlp(config)] * layers, norm)


OLMO = Family(_olmo, (*EMBED_RULES, *ATTENTION_RULES, *MLP_RULES))
OLMO2 = Family(_olmo2, (*EMBED_RULES, *ATTENTION_RULES, *QK_NORM_RULES, *MLP_RULES, *FOUR_NORM_RULES))
OLMO3 = replace(OLMO2, build=_olmo3)
