"""Nemotron (dense), Jais 2 and Arcee: plain MLPs with relu^2; LayerNorm but for Arcee."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.families.llama_block.llama import RULES
from pagoda.common.models.family import Family, layer_norm, plain_mlp, pre_norm_decoder, rms_norm, rotary_attention
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import ModelSpec


def _nemotron(config: HfConfig) -> ModelSpec:
    config.alias("partial_rotary_factor", "rope_percent")
    norm = replace(layer_norm(config, "norm_eps"), unit_offset=True)
    return _model(config, norm, bias=False, partial=0.5)


def _jais2(config: HfConfig) -> ModelSpec:
    return _model(config, layer_norm(config), bias=True, partial=1.0)


def _arcee(config: HfConfig) -> ModelSpec:
    return _model(config, rms_norm(config, 1e-5), bias=False, partial=1.0)


def _model(config: HfConfig, norm: Norm, *, bias: bool, partial: float) -> ModelSpec:
    """`bias`, `partial`: the family's defaults."""
    layers = config.size("num_hidden_layers")
    attention_bias = config.opt("attention_bias", bool, bias)
    attention = rotary_attention(config, config.size("hidden_size"), partial=partial)
    attention = replace(attention, qkv_bias=attention_bias, out_bias=attention_bias)
    ffn = plain_mlp(config, "relu2", bias=config.opt("mlp_bias", bool, bias))
    return pre_norm_decoder(config, [attention] * layers, [ffn] * layers, norm)


NEMOTRON = Family(_nemotron, RULES)
JAIS2 = Family(_jais2, RULES)
ARCEE = Family(_arcee, RULES)
