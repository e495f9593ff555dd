"""Seed-OSS, InternLM 1 and 3, IQuestCoder, Ernie 4.5, Helium, CWM, Pangu Embedded: Llama's block with other details."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pagoda.common.models.families.llama_block.llama import RULES
from pagoda.common.models.family import Family, gated_mlp, pre_norm_decoder, rms_norm, rotary_attention
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.spec import ModelSpec


def _llama_like(
    config: HfConfig, *, qkv_bias: bool, out_bias: bool, mlp_bias: bool, tied: bool = False, **rope: Any
) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    attention = rotary_attention(config, config.size("hidden_size"), **rope)
    attention = replace(attention, qkv_bias=qkv_bias, out_bias=out_bias)
    ffn = gated_mlp(config, bias=mlp_bias)
    return pre_norm_decoder(config, [attention] * layers, [ffn] * layers, rms_norm(config, 1e-6), tied=tied)


def _seed_oss(config: HfConfig) -> ModelSpec:
    config.default("head_dim", 128)
    return _llama_like(
        config,
        qkv_bias=config.opt("attention_bias", bool, True),
        out_bias=config.opt("attention_out_bias", bool, False),
        mlp_bias=config.opt("mlp_bias", bool, False),
    )


def _internlm3(config: HfConfig) -> ModelSpec:
    config.alias("qkv_bias", "attention_bias")
    config.alias("bias", "mlp_bias")
    config.default("rms_norm_eps", 1e-5)
    bias = config.opt("bias", bool, False)
    return _llama_like(config, qkv_bias=config.opt("qkv_bias", bool, False), out_bias=bias, mlp_bias=bias)


def _iquestcoder(config: HfConfig) -> ModelSpec:
    config.expect("clip_qkv", None)
    config.expect("use_sliding_window", False)
    config.ignore("sliding_window", "max_window_layers")
    config.default("rms_norm_eps", 1e-5)
    bias = config.opt("attention_bias", bool, False)
    return _llama_like(config, qkv_bias=bias, out_bias=bias, mlp_bias=config.opt("mlp_bias", bool, False))


def _ernie(config: HfConfig) -> ModelSpec:
    config.default("rms_norm_eps", 1e-5)
    bias = config.opt("use_bias", bool, False)
    return _llama_like(
        config, qkv_bias=bias, out_bias=bias, mlp_bias=bias, tied=True, theta=500_000.0, interleaved=True
    )


def _helium(config: HfConfig) -> ModelSpec:
    config.default("rms_norm_eps", 1e-8)
    return _llama_like(
        config,
        qkv_bias=config.opt("attention_bias", bool, False),
        out_bias=False,
        mlp_bias=config.opt("mlp_bias", bool, False),
        theta=100_000.0,
        interleaved=True,
    )


def _cwm(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    config.default("rms_norm_eps", 1e-5)
    spec = _llama_like(
        config, qkv_bias=False, out_bias=False, mlp_bias=config.opt("mlp_bias", bool, False), theta=1_000_000.0
    )
    windowed = replace(spec.layers[0].attention, window=config.window(8192))
    pattern = ["sliding_attention" if layer % 4 else "full_attention" for layer in range(layers)]
    kinds = config.layer_types(layers, pattern)
    stack = (
        replace(layer, mixers=(windowed,)) if kind == "sliding_attention" else layer
        for layer, kind in zip(spec.layers, kinds)
    )
    return replace(spec, layers=tuple(stack))


def _pangu(config: HfConfig) -> ModelSpec:
    bias = config.opt("bias", bool, True)
    return _llama_like(config, qkv_bias=bias, out_bias=bias, mlp_bias=False)


PANGU = Family(_pangu, RULES)
SEED_OSS = Family(_seed_oss, RULES)
INTERNLM3 = Family(_internlm3, RULES)
IQUESTCODER = Family(_iquestcoder, RULES)
ERNIE = Family(_ernie, RULES)
HELIUM = Family(_helium, RULES)
CWM = Family(_cwm, RULES)
