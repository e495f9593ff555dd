"""Decoders with latent attention: their configs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from pagoda.common.errors import ModelError
from pagoda.common.weights.gguf.decoder_keys import RMS, ROUTED, SIGMOID
from pagoda.common.weights.gguf.metadata import Config, Metadata, has_tensor, rope, rows


def _deepseek2(metadata: Metadata) -> Config:
    config = decoder_of_latents(metadata)
    theta = rope_of_latents(metadata)
    if not metadata.opt("expert_count", int, 0):
        metadata.ignore(*(name for name, _, _ in ROUTED.values()), "expert_gating_func")
        return {**config, **theta, "first_k_dense_replace": config["num_hidden_layers"]}
    for key, (name, kind, default) in ROUTED.items():
        config[key] = metadata.need(name, kind) if default is None else metadata.opt(name, kind, default)
    sigmoid = metadata.opt("expert_gating_func", int, 1) == SIGMOID
    if sigmoid:
        config |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    else:
        config["topk_method"] = "greedy" if config["n_group"] == 1 else "group_limited_greedy"
    return config | theta


def decoder_of_latents(metadata: Metadata, value_dim: int = 0) -> Config:
    """Config of a decoder with latent attention; the head dims are of the absorbed form in newer files.

    `value_dim`: channels of a value head if the file does not state them.
    """
    heads = metadata.need("attention.head_count", int)
    rank = metadata.need("attention.kv_lora_rank", int)
    keys = metadata.opt("attention.key_length_mla", int, metadata.opt("attention.key_length", int, 0))
    values = metadata.opt("attention.value_length_mla", int, metadata.opt("attention.value_length", int, value_dim))
    metadata.ignore("attention.head_count_kv")
    rope_dim = metadata.need("rope.dimension_count", int)
    if keys <= rope_dim or not values:
        raise ModelError(f"{metadata.file.path}: metadata attention.key_length or value_length is missing")
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": metadata.need("embedding_length", int),
        "num_hidden_layers": metadata.need("block_count", int) - metadata.opt("nextn_predict_layers", int, 0),
        "intermediate_size": metadata.need("feed_forward_length", int),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": metadata.opt("attention.q_lora_rank", int, 0) or None,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": keys - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": values,
        "hidden_act": "silu",
        "rms_norm_eps": metadata.need(RMS, float),
        "max_position_embeddings": metadata.need("context_length", int),
        "vocab_size": rows(metadata, "token_embd.weight"),
        "tie_word_embeddings": not has_tensor(metadata, "output.weight"),
    }


def rope_of_latents(metadata: Metadata) -> Config:
    """RoPE of latent attention, whose YaRN states the scale of the scores as mscale_all_dim."""
    log_multiplier = metadata.opt("rope.scaling.yarn_log_multiplier", float, 0.0)
    section = rope(metadata, metadata.need("rope.dimension_count", int))
    scaling = section.get("rope_scaling")
    if scaling is not None and log_multiplier:
        mscale = round(log_multiplier / 0.1, 6)
        section["rope_scaling"] = {**scaling, "mscale": mscale, "mscale_all_dim": mscale}
    return section


def _minicpm3(metadata: Metadata) -> Config:
    """Files state no factors, and frequencies by tensors alone."""
    width = metadata.need("embedding_length", int)
    heads = metadata.need("attention.head_count", int)
    config = decoder_of_latents(metadata, width // heads)
    config |= {"architectures": ["MiniCPM3ForCausalLM"], "model_type": "minicpm3"}
    config |= {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256}
    if has_tensor(metadata, "rope_factors_long.weight"):
        config["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": metadata.file.tensor("rope_factors_short.weight").tolist(),
            "long_factor": metadata.file.tensor("rope_factors_long.weight").tolist(),
            "original_max_position_embeddings": config["max_position_embeddings"],
            "attention_factor": 1.0,
        }
    return {**config, "rope_theta": metadata.opt("rope.freq_base", float, 10000.0)}


def _glm_dsa(metadata: Metadata) -> Config:
    """GLM-5: DeepSeek-V3's layers with an indexer."""
    config = _deepseek2(metadata)
    if config["architectures"] != ["DeepseekV3ForCausalLM"]:
        raise ModelError(f"{metadata.file.path}: only sigmoid over the experts is supported")
    return {
        **config,
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "index_n_heads": metadata.need("attention.indexer.head_count", int),
        "index_head_dim": metadata.need("attention.indexer.key_length", int),
        "index_topk": metadata.need("attention.indexer.top_k", int),
    }


CONFIGS: Final[Mapping[str, Callable[[Metadata], Config]]] = {
    "glm-dsa": _glm_dsa,
    "minicpm3": _minicpm3,
    "deepseek2": _deepseek2,
}
