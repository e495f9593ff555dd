"""Command R (Cohere), Command A (Cohere 2): mixer and ffn in parallel after one LayerNorm, scaled logits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pagoda.common.models.families.llama_block.llama import RULES
from pagoda.common.models.family import QK_NORM_RULES, Family, decoder, gated_mlp, layer_norm, rotary_attention
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers import Attention
from pagoda.common.models.spec import Layer, ModelSpec, Norms


def _cohere(config: HfConfig) -> ModelSpec:
    attention = _attention(config, theta=500_000.0)
    if config.opt("use_qk_norm", bool, False):
        attention = replace(attention, qk_norm=layer_norm(config, bias=False), qk_norm_over="own_weights")
    return _model(config, [attention] * config.size("num_hidden_layers"))


def _cohere2(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    for key, supported in (
        ("position_embedding_type", "rope_gptj"),
        ("order_of_interleaved_layers", "local_attn_first"),
        ("rotary_pct", 1.0),
        ("use_embedding_sharing", True),
        ("use_gated_activation", True),
        ("use_parallel_block", True),
    ):
        config.expect(key, supported)
    config.ignore("use_parallel_embedding")
    attention = _attention(config, theta=10_000.0)
    full = replace(attention, rope=None)
    windowed = replace(attention, window=config.window(4096))
    config.alias("sliding_window_pattern", "_sliding_window_pattern", "layer_switch")
    every = config.opt_size("sliding_window_pattern", 4)
    pattern = ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    kinds = config.layer_types(layers, pattern)
    return _model(config, [windowed if kind == "sliding_attention" else full for kind in kinds])


def _attention(config: HfConfig, *, theta: float) -> Attention:
    bias = config.opt("attention_bias", bool, False)
    attention = rotary_attention(config, config.size("hidden_size"), theta=theta, interleaved=True)
    return replace(attention, qkv_bias=bias, out_bias=bias)


def _model(config: HfConfig, mixers: Iterable[Attention]) -> ModelSpec:
    norm = layer_norm(config, bias=False)
    ffn = gated_mlp(config)
    layers = (Layer((mixer,), ffn, Norms(before_mixer=norm), parallel=True) for mixer in mixers)
    spec = decoder(config, layers, norm, tied=True)
    return replace(spec, logit_scale=config.opt("logit_scale", float, 0.0625))


COHERE = Family(_cohere, (*RULES, *QK_NORM_RULES))
COHERE2 = Family(_cohere2, RULES)
