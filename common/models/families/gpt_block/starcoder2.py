"""StarCoder 2: LayerNorm, biases everywhere, a plain MLP, RoPE, sliding window."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.family import (
    ATTENTION_RULES,
    EMBED_RULES,
    PRE_NORM_RULES,
    Family,
    layer_norm,
    linear,
    plain_mlp,
    pre_norm_decoder,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.spec import ModelSpec


def _starcoder2(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    config.expect("norm_type", "layer_norm")
    config.expect("mlp_type", "default")
    config.expect("scale_attn_weights", True)
    config.ignore("activation_function", "layer_norm_epsilon")  # superseded by hidden_act and norm_epsilon
    config.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
    bias = config.opt("use_bias", bool, True)
    attention = rotary_attention(config, config.size("hidden_size"))
    attention = replace(attention, window=config.window(None), qkv_bias=bias, out_bias=bias)
    ffn = plain_mlp(config, "gelu_pytorch_tanh", bias=bias)
    norm = layer_norm(config, "norm_epsilon")
    return pre_norm_decoder(config, [attention] * layers, [ffn] * layers, norm, tied=True)


STARCODER2 = Family(
    _starcoder2,
    (
        *EMBED_RULES,
        *ATTENTION_RULES,
        *PRE_NORM_RULES,
        *linear("[model.]layers.{l}.mlp.c_fc", "layers.{l}.ffn.up"),
        *linear("[model.]layers.{l}.mlp.c_proj", "layers.{l}.ffn.down"),
    ),
)
