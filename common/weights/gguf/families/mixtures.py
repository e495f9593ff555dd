"""Mixtures of experts whose router is a softmax (Llama 4: a sigmoid after the choice): their configs.

What files leave out (gpt-oss's clamped gate, Llama 4's chunks and temperatures) follows llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from pagoda.common.errors import ModelError
from pagoda.common.weights.gguf.decoder_keys import (
    ATTENTION_BIAS,
    EVERY_LAYER,
    EXPERT_WIDTH,
    EXPERTS,
    LAYER,
    MULTIPLIERS,
    OF_IMAGES,
    RMS,
    ROUTED,
    DecoderKeys,
    as_float32,
    decoder,
    expect_gating,
    softmax_experts,
)
from pagoda.common.weights.gguf.families.llama_block import granite, phi3
from pagoda.common.weights.gguf.metadata import Config, Metadata, has_tensor, rope, rows


def _granite_moe(metadata: Metadata, config: Config) -> Config:
    shared = metadata.opt("expert_shared_feed_forward_length", int, 0)
    return {**granite(metadata, config), **({"shared_intermediate_size": shared} if shared else {})}


def _phimoe(metadata: Metadata) -> Config:
    config = decoder(metadata, "PhimoeForCausalLM", "phimoe", ("rms_norm_eps", RMS))
    config |= {
        "num_local_experts": metadata.need("expert_count", int),
        "num_experts_per_tok": metadata.need("expert_used_count", int),
        "attention_bias": has_tensor(metadata, "blk.0.attn_q.bias"),
        "lm_head_bias": has_tensor(metadata, "output.bias"),
    }
    more = phi3(metadata, config)
    if more.pop("partial_rotary_factor") != 1.0:
        raise ModelError(f"{metadata.file.path}: rotary positions on a part of each head are not supported here")
    if "rope_scaling" not in more:
        more.pop("original_max_position_embeddings")
    return config | more


def _ernie_moe(metadata: Metadata, config: Config) -> Config:
    metadata.ignore("expert_shared_feed_forward_length")
    return {"moe_layer_end_index": config["num_hidden_layers"] - 1, "use_bias": False}


def _dbrx(metadata: Metadata) -> Config:
    if metadata.need(LAYER, float) != as_float32(1e-5):
        raise ModelError(f"{metadata.file.path}: metadata {LAYER} other than 1e-5 is not supported")
    expect_gating(metadata, 1, 1)
    width = metadata.need("embedding_length", int)
    heads = metadata.need("attention.head_count", int)
    return {
        "architectures": ["DbrxForCausalLM"],
        "model_type": "dbrx",
        "d_model": width,
        "n_layers": metadata.need("block_count", int),
        "n_heads": heads,
        "max_seq_len": metadata.need("context_length", int),
        "vocab_size": rows(metadata, "token_embd.weight"),
        "tie_word_embeddings": not has_tensor(metadata, "output.weight"),
        "attn_config": {
            "kv_n_heads": metadata.opt("attention.head_count_kv", int, heads),
            "clip_qkv": metadata.opt("attention.clamp_kqv", float, 0.0) or None,
            "rope_theta": rope(metadata, width // heads)["rope_theta"],
        },
        "ffn_config": {
            "ffn_hidden_size": metadata.need("feed_forward_length", int),
            "moe_num_experts": metadata.need("expert_count", int),
            "moe_top_k": metadata.need("expert_used_count", int),
        },
    }


_QWEN3_MOE: Final = DecoderKeys(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    fixed=EVERY_LAYER,
    values={**EXPERTS, **EXPERT_WIDTH, "norm_topk_prob": ("expert_weights_norm", bool, True)},
    present=ATTENTION_BIAS,
    more=softmax_experts,
)

_GPT_OSS: Final = DecoderKeys(
    "GptOssForCausalLM",
    "gpt_oss",
    values={
        "num_local_experts": EXPERTS["num_experts"],
        "num_experts_per_tok": EXPERTS["num_experts_per_tok"],
        "intermediate_size": ("expert_feed_forward_length", int, None),
        "sliding_window": ("attention.sliding_window", int, None),
    },
    present=ATTENTION_BIAS,
    theta=150_000.0,
)


def _gpt_oss(metadata: Metadata) -> Config:
    config = _GPT_OSS(metadata)
    scaling = config.get("rope_scaling")
    return config if scaling is None else {**config, "rope_scaling": {**scaling, "truncate": False}}


_LLAMA4: Final = DecoderKeys(
    "Llama4ForCausalLM",
    "llama4_text",
    fixed={"attention_chunk_size": 8192},
    values={
        "num_local_experts": EXPERTS["num_experts"],
        "num_experts_per_tok": EXPERTS["num_experts_per_tok"],
        "interleave_moe_layer_step": ("interleave_moe_layer_step", int, 1),
        "intermediate_size": ("expert_feed_forward_length", int, None),
        "intermediate_size_mlp": ("feed_forward_length", int, None),
    },
    present=ATTENTION_BIAS,
    more=lambda metadata, config: {"use_qk_norm": config["num_local_experts"] != 128},
    theta=500_000.0,
)


def _hunyuan(metadata: Metadata, config: Config) -> Config:
    metadata.ignore("rope.scaling.original_context_length")
    return {"intermediate_size": metadata.opt("expert_shared_feed_forward_length", int, config["intermediate_size"])}


_DEEPSEEK: Final = {key: value for key, value in ROUTED.items() if not key.endswith(("_group", "_factor"))}

CONFIGS: Final[Mapping[str, Callable[[Metadata], Config]]] = {
    "deepseek": DecoderKeys(
        "DeepseekForCausalLM",
        "deepseek",
        values=_DEEPSEEK,
        present=ATTENTION_BIAS,
        ignored=("expert_weights_scale",),
        more=softmax_experts,
    ),
    "arctic": DecoderKeys(
        "ArcticForCausalLM",
        "arctic",
        fixed={"moe_layer_frequency": 1},
        values={
            "num_local_experts": EXPERTS["num_experts"],
            "num_experts_per_tok": EXPERTS["num_experts_per_tok"],
        },
        more=softmax_experts,
    ),
    "qwen2moe": DecoderKeys(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        fixed={**EVERY_LAYER, "norm_topk_prob": False},
        values={
            **EXPERTS,
            **EXPERT_WIDTH,
            "shared_expert_intermediate_size": ("expert_shared_feed_forward_length", int, None),
        },
        present={"qkv_bias": "blk.0.attn_q.bias"},
        more=lambda metadata, config: {
            **softmax_experts(metadata, config),
            "layer_types": ["full_attention"] * config["num_hidden_layers"],
        },
    ),
    "qwen3moe": _QWEN3_MOE,
    "qwen3vlmoe": replace(_QWEN3_MOE, ignored=OF_IMAGES),
    "olmoe": DecoderKeys(
        "OlmoeForCausalLM",
        "olmoe",
        values={**EXPERTS, "norm_topk_prob": ("expert_weights_norm", bool, False)},
        present=ATTENTION_BIAS,
        more=softmax_experts,
    ),
    "granitemoe": DecoderKeys(
        "GraniteMoeForCausalLM",
        "granitemoe",
        values={
            **MULTIPLIERS,
            "num_local_experts": EXPERTS["num_experts"],
            "num_experts_per_tok": EXPERTS["num_experts_per_tok"],
        },
        present=ATTENTION_BIAS,
        more=_granite_moe,
    ),
    "phimoe": _phimoe,
    "dbrx": _dbrx,
    "ernie4_5-moe": DecoderKeys(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        values={
            **EXPERT_WIDTH,
            "moe_num_experts": ("expert_count", int, None),
            "moe_k": ("expert_used_count", int, None),
            "moe_num_shared_experts": ("expert_shared_count", int, 0),
            "moe_layer_interval": ("interleave_moe_layer_step", int, 1),
            "moe_layer_start_index": ("leading_dense_block_count", int, 0),
        },
        more=_ernie_moe,
    ),
    "gpt-oss": _gpt_oss,
    "llama4": _LLAMA4,
    "hunyuan-moe": DecoderKeys(
        "HunYuanMoEV1ForCausalLM",
        "hunyuan_v1_moe",
        values={
            "num_experts": EXPERTS["num_experts"],
            "moe_topk": EXPERTS["num_experts_per_tok"],
            **EXPERT_WIDTH,
            "num_shared_expert": ("expert_shared_count", int, 1),
        },
        present=ATTENTION_BIAS,
        more=_hunyuan,
    ),
    "bailingmoe": DecoderKeys("BailingMoeForCausalLM", "bailing_moe", values=ROUTED),
}
