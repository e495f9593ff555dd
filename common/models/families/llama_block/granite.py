"""Granite and HyperCLOVA X (dense): Llama's block with multipliers of embedding, scores, updates and logits."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.families.llama_block.llama import RULES
from pagoda.common.models.family import (
    Family,
    Rename,
    decoder,
    gated_mlp,
    rms_norm,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import Embedding, Layer, ModelSpec, Norms


def _granite(config: HfConfig) -> ModelSpec:
    norm = rms_norm(config, 1e-6)
    spec = _model(config, Norms(before_mixer=norm, before_ffn=norm), norm, score_scale=1.0)
    return replace(spec, logit_scale=1 / config.opt("logits_scaling", float, 1.0))


def _hyperclovax(config: HfConfig) -> ModelSpec:
    norm = rms_norm(config, 1e-6)
    after = norm if config.opt("use_post_norm", bool, True) else None
    spec = _model(config, Norms(norm, after, norm, after), norm, score_scale=None)
    return replace(spec, logit_scale=config.opt("logits_scaling", float, 1.0))


def _model(config: HfConfig, norms: Norms, final_norm: Norm, *, score_scale: float | None) -> ModelSpec:
    """`score_scale`: the family's default factor on q.k; None: 1 / sqrt(head dim)."""
    bias = config.opt("attention_bias", bool, False)
    attention = rotary_attention(config, config.size("hidden_size"))
    scale = config.opt("attention_multiplier", float, attention.scale if score_scale is None else score_scale)
    layer = Layer(
        (replace(attention, scale=scale, qkv_bias=bias, out_bias=bias),),
        gated_mlp(config, bias=config.opt("mlp_bias", bool, False)),
        norms,
        residual_scale=config.opt("residual_multiplier", float, 1.0),
    )
    spec = decoder(config, [layer] * config.size("num_hidden_layers"), final_norm)
    return replace(spec, embedding=Embedding(scale=config.opt("embedding_multiplier", float, 1.0)))


POST_NORM_RULES = (
    Rename("[model.]layers.{l}.post_norm1.weight", "layers.{l}.norms.after_mixer"),
    Rename("[model.]layers.{l}.post_norm2.weight", "layers.{l}.norms.after_ffn"),
)

GRANITE = Family(_granite, RULES)
HYPERCLOVAX = Family(_hyperclovax, (*RULES, *POST_NORM_RULES))
