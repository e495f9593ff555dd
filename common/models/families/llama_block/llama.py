"""Llama 1 to 3 and models with its block: as fairseq2 writes it, SmolLM2, Mistral (windows), Ministral 3."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pagoda.common.models import hf_config
from pagoda.common.models.family import (
    ATTENTION_RULES,
    EMBED_RULES,
    MLP_RULES,
    PRE_NORM_RULES,
    Family,
    Rename,
    gated_mlp,
    grouped_attention,
    linear,
    pre_norm_decoder,
    rms_norm,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import QueryGrowth
from pagoda.common.models.spec import ModelSpec


def llama(config: HfConfig, *, tied: bool = False) -> ModelSpec:
    """Return Llama's spec. `tied`: the family's default."""
    layers = config.size("num_hidden_layers")
    bias = config.opt("attention_bias", bool, False)
    attention = replace(rotary_attention(config, config.size("hidden_size")), qkv_bias=bias, out_bias=bias)
    ffn = gated_mlp(config, bias=config.opt("mlp_bias", bool, False))
    return pre_norm_decoder(config, [attention] * layers, [ffn] * layers, rms_norm(config, 1e-6), tied=tied)


def _mistral(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    attention = rotary_attention(config, config.size("hidden_size"))
    attention = replace(attention, window=config.window(4096))
    return pre_norm_decoder(config, [attention] * layers, [gated_mlp(config)] * layers, rms_norm(config, 1e-6))


def _fairseq2(config: HfConfig) -> ModelSpec:
    """The same with RoPE on interleaved channels."""
    spec = llama(config)
    attention = spec.layers[0].attention
    assert attention.rope is not None
    layer = replace(spec.layers[0], mixers=(replace(attention, rope=replace(attention.rope, interleaved=True)),))
    return replace(spec, layers=(layer,) * len(spec.layers))


def _ministral3(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    width = config.size("hidden_size")
    head_dim = hf_config.head_dim(config, width, config.size("num_attention_heads"))
    rope = hf_config.rope(config, head_dim, read_elsewhere=(_GROWTH, "max_position_embeddings"))
    attention = replace(grouped_attention(config, width, rope), window=config.window(None))
    section = hf_config.rope_section(config)
    if section is not None and (rate := section.opt(_GROWTH, float, 0.0)):
        growth = QueryGrowth(rate, section.size("original_max_position_embeddings"))
        attention = replace(attention, query_growth=growth)
    return pre_norm_decoder(config, [attention] * layers, [gated_mlp(config)] * layers, rms_norm(config, 1e-5))


_GROWTH: Final = "llama_4_scaling_beta"
"""Key of `rope_parameters`: the rate at which queries grow with their position."""

RULES = (*EMBED_RULES, *ATTENTION_RULES, *MLP_RULES, *PRE_NORM_RULES)

_LAYER = "decoder.layers.{l}"
_FAIRSEQ2_RULES = (
    Rename("decoder_frontend.embed.weight", "embed"),
    Rename("final_proj.weight", "head"),
    Rename("decoder.layer_norm.weight", "final_norm"),
    Rename(f"{_LAYER}.self_attn_layer_norm.weight", "layers.{l}.norms.before_mixer"),
    Rename(f"{_LAYER}.ffn_layer_norm.weight", "layers.{l}.norms.before_ffn"),
    *(rule for part in "qkv" for rule in linear(f"{_LAYER}.self_attn.{part}_proj", f"layers.{{l}}.mixers.0.{part}")),
    *linear(f"{_LAYER}.self_attn.output_proj", "layers.{l}.mixers.0.o"),
    *linear(f"{_LAYER}.ffn.gate_proj", "layers.{l}.ffn.gate"),
    *linear(f"{_LAYER}.ffn.inner_proj", "layers.{l}.ffn.up"),
    *linear(f"{_LAYER}.ffn.output_proj", "layers.{l}.ffn.down"),
)

FAIRSEQ2 = Family(_fairseq2, _FAIRSEQ2_RULES, ignored=("final_proj.weight",))
LLAMA = Family(llama, RULES)
MINISTRAL3 = Family(_ministral3, RULES)
MISTRAL = Family(_mistral, RULES)
