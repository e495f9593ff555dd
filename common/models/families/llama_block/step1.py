"""Step 1 (Step-Audio's language models): Llama's block with ALiBi by the root of the distance."""

from __future__ import annotations

from dataclasses import replace

from pagoda.common.models.families.llama_block.llama import LLAMA
from pagoda.common.models.family import gated_mlp, grouped_attention, pre_norm_decoder, rms_norm
from pagoda.common.models.hf_config import HfConfig
from pagoda.common.models.mixers.attention import alibi_slopes
from pagoda.common.models.spec import ModelSpec


def _step1(config: HfConfig) -> ModelSpec:
    config.alias("num_key_value_heads", "num_attention_groups")
    config.alias("max_position_embeddings", "max_seq_len")
    config.default("num_key_value_heads", 1)
    layers = config.size("num_hidden_layers")
    bias = config.opt("attention_bias", bool, False)
    attention = grouped_attention(config, config.size("hidden_size"), None)
    attention = replace(attention, qkv_bias=bias, out_bias=bias, alibi_root=True)
    attention = replace(attention, alibi_slopes=alibi_slopes(attention.heads))
    ffn = gated_mlp(config, bias=config.opt("mlp_bias", bool, False))
    return pre_norm_decoder(config, [attention] * layers, [ffn] * layers, rms_norm(config, 1e-5))


STEP1 = replace(LLAMA, build=_step1)
