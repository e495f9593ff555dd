"""Mixtures of experts whose router is a sigmoid with a correction of the scores: their configs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from pagoda.common.errors import ModelError
from pagoda.common.weights.gguf.decoder_keys import (
    ATTENTION_BIAS,
    EXPERT_WIDTH,
    EXPERTS,
    KV_HEADS,
    RMS,
    ROUTED,
    DecoderKeys,
    sigmoid_experts,
    windows,
)
from pagoda.common.weights.gguf.metadata import Config, Metadata, has_tensor, rows


def _windowed(metadata: Metadata, config: Config) -> Config:
    return {**sigmoid_experts(metadata, config), **windows(metadata, config, 4)}


def _ling2(metadata: Metadata, config: Config) -> Config:
    sigmoid_experts(metadata, config)
    shared = metadata.opt("expert_shared_feed_forward_length", int, 0)
    count = config["n_shared_experts"]
    return {"scoring_func": "sigmoid", "moe_shared_expert_intermediate_size": shared // count if count else None}


def _mimo_v2(metadata: Metadata) -> Config:
    layers = metadata.need("block_count", int) - metadata.opt("nextn_predict_layers", int, 0)
    slides, kv_heads = (metadata.integers(key, layers) for key in ("attention.sliding_window_pattern", KV_HEADS))
    by_kind = [{count for count, slide in zip(kv_heads, slides) if slide == kind} for kind in (0, 1)]
    if any(len(counts) != 1 for counts in by_kind):
        raise ModelError(f"{metadata.file.path}: metadata {KV_HEADS} differs among layers of one kind")
    head_dim = metadata.need("attention.key_length", int)
    sigmoid_experts(metadata, {})
    routed = {key: place for key, place in ROUTED.items() if key not in ("n_shared_experts", "first_k_dense_replace")}
    return {
        "architectures": ["MiMoV2FlashForCausalLM"],
        "model_type": "mimo_v2_flash",
        "hidden_size": metadata.need("embedding_length", int),
        "num_hidden_layers": layers,
        "hybrid_layer_pattern": slides,
        "moe_layer_freq": [int(has_tensor(metadata, f"blk.{layer}.ffn_gate_inp.weight")) for layer in range(layers)],
        "intermediate_size": metadata.need("feed_forward_length", int),
        "num_attention_heads": metadata.need("attention.head_count", int),
        "num_key_value_heads": by_kind[0].pop(),
        "swa_num_key_value_heads": by_kind[1].pop(),
        "head_dim": head_dim,
        "v_head_dim": metadata.need("attention.value_length", int),
        "attention_bias": has_tensor(metadata, "blk.0.attn_q.bias"),
        "attention_value_scale": metadata.opt("attention.value_scale", float, 1.0),
        "sliding_window_size": metadata.need("attention.sliding_window", int),
        "rope_theta": metadata.opt("rope.freq_base", float, 5e6),
        "swa_rope_theta": metadata.opt("rope.freq_base_swa", float, 1e4),
        "partial_rotary_factor": metadata.need("rope.dimension_count", int) / head_dim,
        "rms_norm_eps": metadata.need(RMS, float),
        "max_position_embeddings": metadata.need("context_length", int),
        "vocab_size": rows(metadata, "token_embd.weight"),
        "tie_word_embeddings": not has_tensor(metadata, "output.weight"),
        **{
            key: metadata.need(name, kind) if default is None else metadata.opt(name, kind, default)
            for key, (name, kind, default) in routed.items()
        },
        "norm_topk_prob": metadata.opt("expert_weights_norm", bool, True),
    }


CONFIGS: Final[Mapping[str, Callable[[Metadata], Config]]] = {
    "mimo2": _mimo_v2,
    "afmoe": DecoderKeys(
        "AfmoeForCausalLM",
        "afmoe",
        fixed={"mup_enabled": True},
        values={
            **EXPERTS,
            **EXPERT_WIDTH,
            "num_shared_experts": ("expert_shared_count", int, 0),
            "num_dense_layers": ("leading_dense_block_count", int, 0),
            "route_norm": ("expert_weights_norm", bool, True),
            "route_scale": ("expert_weights_scale", float, 1.0),
            "n_group": ("expert_group_count", int, 1),
            "topk_group": ("expert_group_used_count", int, 1),
        },
        more=_windowed,
    ),
    "dots1": DecoderKeys(
        "Dots1ForCausalLM",
        "dots1",
        fixed={"sliding_window": None},
        values=ROUTED,
        present=ATTENTION_BIAS,
        more=sigmoid_experts,
    ),
    "glm4moe": DecoderKeys(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        values=ROUTED,
        present={**ATTENTION_BIAS, "use_qk_norm": "blk.0.attn_q_norm.weight"},
        partial=True,
        more=sigmoid_experts,
    ),
    "minimax-m2": DecoderKeys(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        values={
            "num_local_experts": ("expert_count", int, None),
            "num_experts_per_tok": ("expert_used_count", int, None),
            "rotary_dim": ("rope.dimension_count", int, None),
        },
        absent=("partial_rotary_factor",),
        ignored=("expert_feed_forward_length",),
        partial=True,
        more=sigmoid_experts,
    ),
    "exaone-moe": DecoderKeys(
        "ExaoneMoeForCausalLM",
        "exaone_moe",
        values=ROUTED,
        ignored=("expert_shared_feed_forward_length",),
        more=_windowed,
    ),
    "bailingmoe2": DecoderKeys(
        "BailingMoeV2ForCausalLM",
        "bailing_moe_v2",
        fixed={"moe_router_enable_expert_bias": True},
        values=ROUTED,
        present={"use_qk_norm": "blk.0.attn_q_norm.weight", "use_qkv_bias": "blk.0.attn_qkv.bias"},
        partial=True,
        more=_ling2,
    ),
}
