"""OLMo 2: norms after mixer and ffn only, qk norm over the whole projection."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.family import (
    ATTENTION_RULES,
    EMBED_RULES,
    FOUR_NORM_RULES,
    MLP_RULES,
    QK_NORM_RULES,
    Family,
    decoder,
    gated_mlp,
    rms_norm,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.spec import Layer, ModelSpec, Norms


def _olmo2(config: HfConfig) -> ModelSpec:
    norm = rms_norm(config, 1e-5)
    bias = config.opt("attention_bias", bool, False)
    attention = replace(
        rotary_attention(config, config.size("hidden_size")),
        qk_norm=norm,
        qk_norm_over="full",
        qkv_bias=bias,
        out_bias=bias,
    )
    layer = Layer((attention,), gated_mlp(config), Norms(after_mixer=norm, after_ffn=norm))
    return decoder(config, [layer] * config.size("num_hidden_layers"), norm)


OLMO2 = Family(_olmo2, (*EMBED_RULES, *ATTENTION_RULES, *QK_NORM_RULES, *MLP_RULES, *FOUR_NORM_RULES))
