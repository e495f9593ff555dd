"""Gemma 2 and the text models of Gemma 3: four norms per layer, scaled embeddings, interleaved sliding windows."""

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
    rms_norm,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Attention
from pagoda.common.models.rope import Rope
from pagoda.common.models.spec import Embedding, Layer, Mlp, ModelSpec, Norms


def _gemma2(config: HfConfig) -> ModelSpec:
    config.expect("use_bidirectional_attention", False)
    layers = config.size("num_hidden_layers")
    head_dim = config.opt_size("head_dim", 256)
    attention = _attention(config, head_dim, hf_config.rope(config, head_dim))
    attention = replace(attention, softcap=config.nullable("attn_logit_softcapping", float, 50.0))
    window = config.window(4096)
    config.expect("sliding_window_size", window)  # an older name of the same key
    windowed = replace(attention, window=window)
    alternating = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    kinds = config.layer_types(layers, alternating)
    mixers = [windowed if kind == "sliding_attention" else attention for kind in kinds]
    return _model(config, mixers, final_softcap=30.0)


def _gemma3(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    head_dim = config.opt_size("head_dim", 256)
    ropes = hf_config.rope_per_layer_type(config, head_dim, full=1_000_000.0, sliding=10_000.0)
    attention = _attention(config, head_dim, ropes["full_attention"])
    attention = replace(
        attention,
        softcap=config.nullable("attn_logit_softcapping", float),
        qk_norm=rms_norm(config, 1e-6, unit_offset=True),
    )
    window = config.window(4096)
    if config.opt("use_bidirectional_attention", bool, False):
        attention = replace(attention, causal=False)
        window = None if window is None else window // 2 + 1  # the config counts both sides
    windowed = replace(attention, window=window, rope=ropes["sliding_attention"])
    every = config.opt_size("sliding_window_pattern", config.opt_size("_sliding_window_pattern", 6))
    pattern = ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    kinds = config.layer_types(layers, pattern)
    mixers = [windowed if kind == "sliding_attention" else attention for kind in kinds]
    # max_position_embeddings already includes the RoPE scaling of the full layers.
    return replace(_model(config, mixers, final_softcap=None), max_positions=config.size("max_position_embeddings"))


def _attention(config: HfConfig, head_dim: int, rope: Rope) -> Attention:
    heads = config.size("num_attention_heads")
    bias = config.opt("attention_bias", bool, False)
    return Attention(
        heads=heads,
        kv_heads=hf_config.kv_heads(config, heads),
        head_dim=head_dim,
        scale=config.opt("query_pre_attn_scalar", float, 256.0) ** -0.5,
        rope=rope,
        qkv_bias=bias,
        out_bias=bias,
    )


def _model(config: HfConfig, mixers: Iterable[Attention], *, final_softcap: float | None) -> ModelSpec:
    config.ignore("hidden_act")  # superseded by hidden_activation
    norm = rms_norm(config, 1e-6, unit_offset=True)
    ffn = Mlp(config.size("intermediate_size"), config.activation("hidden_activation", "gelu_pytorch_tanh"), gated=True)
    norms = Norms(norm, norm, norm, norm)
    spec = decoder(config, (Layer((mixer,), ffn, norms) for mixer in mixers), norm, tied=True)
    return replace(
        spec,
        embedding=Embedding(scale=spec.width**0.5),
        logit_softcap=config.nullable("final_logit_softcapping", float, final_softcap),
    )


_RULES = (*EMBED_RULES, *ATTENTION_RULES, *MLP_RULES, *FOUR_NORM_RULES)

GEMMA2 = Family(_gemma2, _RULES)
GEMMA3 = Family(_gemma3, (*_RULES, *QK_NORM_RULES))
