"""Gemma 1, 2, VaultGemma, Gemma 3's text models, Rnj-1: scaled embeddings; from 2 on windows in turns, four norms."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pagoda.common.models import hf_config
from pagoda.common.models.families.llama_block.llama import RULES
from pagoda.common.models.family import (
    ATTENTION_RULES,
    EMBED_RULES,
    FOUR_NORM_RULES,
    MLP_RULES,
    QK_NORM_RULES,
    Family,
    decoder,
    pre_norm_decoder,
    rms_norm,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Attention
from pagoda.common.models.rope import Rope
from pagoda.common.models.spec import Embedding, Layer, Mlp, ModelSpec, Norms


def _gemma(config: HfConfig) -> ModelSpec:
    config.expect("use_bidirectional_attention", False)
    config.expect("hidden_act", "gelu", "gelu_pytorch_tanh")  # both mean the latter
    layers = config.size("num_hidden_layers")
    norm = rms_norm(config, 1e-6, unit_offset=True)
    config.default("head_dim", 256)
    bias = config.opt("attention_bias", bool, False)
    attention = replace(rotary_attention(config, config.size("hidden_size")), qkv_bias=bias, out_bias=bias)
    ffn = Mlp(config.size("intermediate_size"), config.activation("hidden_activation", "gelu_pytorch_tanh"), gated=True)
    spec = pre_norm_decoder(config, [attention] * layers, [ffn] * layers, norm, tied=True)
    return replace(spec, embedding=Embedding(scale=spec.width**0.5))


def _vaultgemma(config: HfConfig) -> ModelSpec:
    spec = _gemma2(config)
    norms = Norms(before_mixer=spec.final_norm, before_ffn=spec.final_norm)
    return replace(spec, layers=tuple(replace(layer, norms=norms) for layer in spec.layers))


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


def _rnj1(config: HfConfig) -> ModelSpec:
    """Gemma 3 whose local layers attend in chunks, to their own and the one before: together the window."""
    kinds = config.opt("layer_types", list, [])
    config.set("layer_types", [_CHUNKED.get(kind, kind) for kind in kinds])
    ropes = config.opt("rope_parameters", dict, {})
    if all(isinstance(section, dict) for section in ropes.values()):
        ropes = {_CHUNKED.get(kind, kind): section for kind, section in ropes.items()}
    else:
        ropes = {"full_attention": ropes, "sliding_attention": ropes}
    config.set("rope_parameters", ropes or None)
    spec = _gemma3(config)

    def chunked(layer: Layer) -> Layer:
        attention = layer.attention
        window = layer.attention.window
        if window is None:
            return layer
        if window % 2:
            raise config.error("sliding_window", f"is {window}; it must be two chunks")
        return replace(layer, mixers=(replace(attention, window=None, chunk=window // 2, chunk_lookback=1),))

    return replace(spec, layers=tuple(chunked(layer) for layer in spec.layers))


_CHUNKED = {"chunked_attention": "sliding_attention"}


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

GEMMA = Family(_gemma, RULES)
VAULTGEMMA = Family(_vaultgemma, _RULES)
GEMMA2 = Family(_gemma2, _RULES)
GEMMA3 = Family(_gemma3, (*_RULES, *QK_NORM_RULES))
RNJ1 = replace(GEMMA3, build=_rnj1)
