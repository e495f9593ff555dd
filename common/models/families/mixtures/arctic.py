"""Snowflake Arctic: a dense block, and around it a mixture of experts that reads the layer's input."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.family import (
    ATTENTION_RULES,
    EMBED_RULES,
    Family,
    Rename,
    Rule,
    Stack,
    decoder,
    gated_mlp,
    rms_norm,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.spec import Layer, ModelSpec, Moe, Norms, Router, Shortcut


def _arctic(config: HfConfig) -> ModelSpec:

    config.expect("use_residual", True)
    config.ignore("moe_token_dropping", "moe_min_capacity", "moe_train_capacity_factor", "moe_eval_capacity_factor")
    config.ignore("enable_expert_tensor_parallelism", "parallel_attn_mlp_res", "quantization", "enc_index")
    norm = rms_norm(config, 1e-5)
    norms = Norms(rms_norm(config, 1e-5), None, rms_norm(config, 1e-5))
    bias = config.opt("attention_bias", bool, False)
    attention = rotary_attention(config, config.size("hidden_size"), theta=1_000_000.0)
    attention = replace(attention, window=config.window(None), qkv_bias=bias, out_bias=bias)
    ffn = gated_mlp(config)
    top_k = config.opt_size("num_experts_per_tok", 1)
    moe = Moe(config.size("num_local_experts", "num_experts"), ffn, Router(top_k, renormalise=top_k > 1))
    dense = Layer((attention,), ffn, norms)
    sparse = Layer((attention,), replace(ffn, width=config.size("hidden_size")), norms, shortcut=Shortcut(moe, norm))
    layers = range(config.size("num_hidden_layers"))
    return decoder(config, (dense if (layer + 1) % _every(config) else sparse for layer in layers), norm)


def _every(config: HfConfig) -> int:
    """Return how many layers there are to one with experts."""
    return config.opt_size("moe_layer_frequency", 2)


_LAYER = "[model.]layers.{l}"
_MOE = "layers.{l}.shortcut.moe"


def _mlp(source: str, target: str) -> tuple[Rule, ...]:
    return tuple(Rename(f"{source}.{name}.weight", f"{target}.{part}") for name, part in _PARTS.items())


_PARTS = {"w1": "gate", "w3": "up", "w2": "down"}

ARCTIC = Family(
    _arctic,
    (
        *(EMBED_RULES + ATTENTION_RULES),
        Rename(f"{_LAYER}.input_layernorm.weight", "layers.{l}.norms.before_mixer"),
        Rename(f"{_LAYER}.residual_layernorm.weight", "layers.{l}.norms.before_ffn"),
        Rename(f"{_LAYER}.post_attention_layernorm.weight", "layers.{l}.shortcut.norm"),
        Rename(f"{_LAYER}.post_attention_layernorm.weight", "layers.{l}.norms.before_ffn"),
        *_mlp(f"{_LAYER}.residual_mlp", "layers.{l}.ffn"),
        *_mlp(f"{_LAYER}.block_sparse_moe.mlp", "layers.{l}.ffn"),
        Rename(f"{_LAYER}.block_sparse_moe.gate.weight", f"{_MOE}.router"),
        *(
            Stack(f"{_LAYER}.block_sparse_moe.experts.{{e}}.{name}.weight", f"{_MOE}.experts.{part}")
            for name, part in _PARTS.items()
        ),
    ),
)
