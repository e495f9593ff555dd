"""Mixtral: Mistral's block with a mixture of experts."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.families.experts import BLOCK_SPARSE_RULES
from pagoda.common.models.family import (
    ATTENTION_RULES,
    EMBED_RULES,
    PRE_NORM_RULES,
    Family,
    gated_mlp,
    pre_norm_decoder,
    rms_norm,
    rotary_attention,
)
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.spec import ModelSpec, Moe, Router


def _mixtral(config: HfConfig) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    attention = rotary_attention(config, config.size("hidden_size"), theta=1_000_000.0)
    attention = replace(attention, window=config.window(None))
    router = Router(config.opt_size("num_experts_per_tok", 2), renormalise=True)
    moe = Moe(config.size("num_local_experts", "num_experts"), gated_mlp(config), router)
    return pre_norm_decoder(config, [attention] * layers, [moe] * layers, rms_norm(config, 1e-5))


MIXTRAL = Family(
    _mixtral,
    (
        *EMBED_RULES,
        *ATTENTION_RULES,
        *PRE_NORM_RULES,
        *BLOCK_SPARSE_RULES,
    ),
)
