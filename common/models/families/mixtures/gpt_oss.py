"""gpt-oss: attention sinks, every second layer with a window, experts with biases and a clamped gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pagoda.common.models.families.experts import FFN
from pagoda.common.models.family import (
    ATTENTION_RULES,
    EMBED_RULES,
    PRE_NORM_RULES,
    AnswerFormat,
    Family,
    Rename,
    Split,
    linear,
    pre_norm_decoder,
    rms_norm,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.spec import ClampedGlu, Mlp, ModelSpec, Moe, Router


def _gpt_oss(config: HfConfig) -> ModelSpec:
    config.ignore("initial_context_length")  # in the section of the rope, too
    config.expect("hidden_act", "silu")
    config.alias("num_experts_per_tok", "experts_per_token")
    layers = config.size("num_hidden_layers")
    bias = config.opt("attention_bias", bool, True)
    attention = rotary_attention(config, config.size("hidden_size"), theta=150_000.0)
    full = replace(attention, sinks=True, qkv_bias=bias, out_bias=bias)
    windowed = replace(full, window=config.window(128))
    pattern = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    kinds = config.layer_types(layers, pattern)
    gate = ClampedGlu(config.opt("swiglu_limit", float, 7.0), config.opt("swiglu_alpha", float, 1.702))
    expert = Mlp(config.size("intermediate_size"), "silu", gated=True, bias=True, clamped=gate)
    router = Router(config.opt_size("num_experts_per_tok", 4), renormalise=True, bias=True)
    moe = Moe(config.size("num_local_experts", "num_experts"), expert, router)
    mixers = [windowed if kind == "sliding_attention" else full for kind in kinds]
    return pre_norm_decoder(config, mixers, [moe] * layers, rms_norm(config, 1e-5))


_SOURCE: Final = "[model.]layers.{l}.mlp.experts"
_GATE_UP: Final = f"{FFN}.experts.gate", f"{FFN}.experts.up"
_GATE_UP_BIAS: Final = f"{FFN}.experts.gate_bias", f"{FFN}.experts.up_bias"

GPT_OSS = Family(
    _gpt_oss,
    (
        *EMBED_RULES,
        *ATTENTION_RULES,
        *PRE_NORM_RULES,
        Rename("[model.]layers.{l}.self_attn.sinks", "layers.{l}.mixers.0.sinks"),
        *linear("[model.]layers.{l}.mlp.router", f"{FFN}.router"),
        Split(f"{_SOURCE}.gate_up_proj", _GATE_UP, transpose=True, axis=1, alternating=True),
        Split(f"{_SOURCE}.gate_up_proj_blocks", _GATE_UP, axis=1, alternating=True),
        Split(f"{_SOURCE}.gate_up_proj_bias", _GATE_UP_BIAS, axis=1, alternating=True),
        Rename(f"{_SOURCE}.down_proj", f"{FFN}.experts.down", transpose=True),
        Rename(f"{_SOURCE}.down_proj_blocks", f"{FFN}.experts.down"),
        Rename(f"{_SOURCE}.down_proj_bias", f"{FFN}.experts.down_bias"),
    ),
    answers=AnswerFormat("openai_gptoss", "openai", ("<|return|>", "<|call|>")),
)
