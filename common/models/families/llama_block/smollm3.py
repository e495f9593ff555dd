"""SmolLM3: Llama's block; every fourth layer has no RoPE."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.families.llama_block.llama import RULES
from pagoda.common.models.family import (
    Family,
    gated_mlp,
    pre_norm_decoder,
    rms_norm,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.spec import ModelSpec


def _smollm3(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    bias = config.opt("attention_bias", bool, False)
    every = config.opt_size("no_rope_layer_interval", 4)
    with_rope = config.opt("no_rope_layers", list, [int((layer + 1) % every != 0) for layer in range(layers)])
    if len(with_rope) != layers:
        raise config.error("no_rope_layers", f"has {len(with_rope)} entries for {layers} layers")
    window = config.window(None) if config.opt("use_sliding_window", bool, False) else None
    config.ignore("sliding_window", "max_window_layers")
    pattern = ["full_attention" if rope or window is None else "sliding_attention" for rope in with_rope]
    kinds = config.layer_types(layers, pattern)
    attention = rotary_attention(config, config.size("hidden_size"), theta=2_000_000.0)
    attention = replace(attention, qkv_bias=bias, out_bias=bias)
    mixers = [
        replace(
            attention,
            rope=attention.rope if rope else None,
            window=window if kind == "sliding_attention" else None,
        )
        for rope, kind in zip(with_rope, kinds)
    ]
    ffn = gated_mlp(config, bias=config.opt("mlp_bias", bool, False))
    return pre_norm_decoder(config, mixers, [ffn] * layers, rms_norm(config, 1e-6), tied=True)


SMOLLM3 = Family(_smollm3, RULES)
