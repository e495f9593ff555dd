"""Granite 3 with experts, also shared ones: scaled embeddings, residuals and logits, fused gate and up matrices."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.families.experts import FFN
from pagoda.common.models.family import (
    ATTENTION_RULES,
    EMBED_RULES,
    PRE_NORM_RULES,
    Family,
    Rename,
    Split,
    gated_mlp,
    pre_norm_decoder,
    rms_norm,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.spec import Embedding, ModelSpec, Moe, Router


def _granite_moe(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    bias = config.opt("attention_bias", bool, False)
    attention = replace(
        rotary_attention(config, config.size("hidden_size")),
        scale=config.opt("attention_multiplier", float, 1.0),
        qkv_bias=bias,
        out_bias=bias,
    )
    expert = gated_mlp(config)
    shared = config.opt("shared_intermediate_size", int, 0)
    router = Router(config.opt_size("num_experts_per_tok", 2), renormalise=True)
    moe = Moe(
        config.opt_size("num_local_experts", 8), expert, router, replace(expert, width=shared) if shared else None
    )
    spec = pre_norm_decoder(config, [attention] * layers, [moe] * layers, rms_norm(config, 1e-6))
    scale = config.opt("residual_multiplier", float, 1.0)
    return replace(
        spec,
        layers=tuple(replace(layer, residual_scale=scale) for layer in spec.layers),
        embedding=Embedding(scale=config.opt("embedding_multiplier", float, 1.0)),
        logit_scale=1 / config.opt("logits_scaling", float, 1.0),
    )


_MOE = "[model.]layers.{l}.block_sparse_moe"
_SHARED = "[model.]layers.{l}.shared_mlp"

RULES = (
    *EMBED_RULES,
    *ATTENTION_RULES,
    *PRE_NORM_RULES,
    Rename(f"{_MOE}.router.layer.weight", f"{FFN}.router"),
    Split(f"{_MOE}.input_linear.weight", (f"{FFN}.experts.gate", f"{FFN}.experts.up"), axis=1),
    Rename(f"{_MOE}.output_linear.weight", f"{FFN}.experts.down"),
    Split(f"{_SHARED}.input_linear.weight", (f"{FFN}.shared.gate", f"{FFN}.shared.up")),
    Rename(f"{_SHARED}.output_linear.weight", f"{FFN}.shared.down"),
)

GRANITE_MOE = Family(_granite_moe, RULES)
