"""Gemma 1 to 4: scaled embeddings, norms around both halves of a layer, windows.

Gemma 3n and 4 also have embeddings per layer, caches shared by the last layers, several residual streams.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Final

from pagoda.common.errors import ModelError
from pagoda.common.weights.gguf.decoder_keys import RMS, DecoderKeys, layer_types, windows
from pagoda.common.weights.gguf.metadata import Config, Metadata, has_tensor, rows


def _gemma(metadata: Metadata, config: Config, period: int, widest: int) -> Config:
    """`period`: distance of full-attention layers. `widest`: layer count of the size scaled by width / heads."""
    width = config["hidden_size"]
    heads = config["num_attention_heads"]
    return {
        "query_pre_attn_scalar": width // heads if config["num_hidden_layers"] == widest else config["head_dim"],
        **windows(metadata, config, period),
    }


_GEMMA_FIXED: Final = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}


def _gemma2(metadata: Metadata, config: Config) -> Config:
    return {
        **_gemma(metadata, config, period=2, widest=46),
        "attn_logit_softcapping": metadata.opt("attn_logit_softcapping", float, 50.0),
        "final_logit_softcapping": metadata.opt("final_logit_softcapping", float, 30.0),
    }


def _gemma3(metadata: Metadata, config: Config) -> Config:
    return {
        **_gemma(metadata, config, period=6, widest=62),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": metadata.opt("final_logit_softcapping", float, 0.0) or None,
        "rope_local_base_freq": metadata.opt("rope.freq_base_swa", float, 10000.0),
    }


_TABLE: Final = "per_layer_token_embd.weight"


def _gemma3n(metadata: Metadata, config: Config) -> Config:
    layers = config["num_hidden_layers"]
    slides = metadata.flags("attention.sliding_window_pattern", [bool((layer + 1) % 5) for layer in range(layers)])
    scales = metadata.floats("activation_sparsity_scale", layers)
    return {
        "layer_types": layer_types(slides),
        "activation_sparsity_pattern": [round(NormalDist().cdf(scale), 6) for scale in scales],
        "laurel_rank": rows(metadata, "blk.0.laurel_l.weight"),
        "vocab_size_per_layer_input": rows(metadata, _TABLE),
    }


def _gemma4(metadata: Metadata) -> Config:
    layers = metadata.need("block_count", int)
    width = metadata.need("embedding_length", int)
    slides = metadata.flags("attention.sliding_window_pattern", [bool((layer + 1) % 6) for layer in range(layers)])
    widths, kv_heads = (metadata.integers(key, layers) for key in ("feed_forward_length", "attention.head_count_kv"))
    head_dim, full_head_dim = (metadata.need(f"attention.key_length{kind}", int) for kind in ("_swa", ""))
    by_kind = {kind: {count for count, slide in zip(kv_heads, slides) if slide is kind} for kind in (True, False)}
    if any(len(counts) != 1 for counts in by_kind.values()):
        raise ModelError(f"{metadata.file.path}: metadata attention.head_count_kv differs among layers of one kind")
    metadata.ignore("attention.value_length", "attention.value_length_swa")
    metadata.ignore("rope.dimension_count", "rope.dimension_count_swa")
    full = [layer for layer, slide in enumerate(slides) if not slide]
    inputs = metadata.opt("embedding_length_per_layer_input", int, 0)
    experts = metadata.opt("expert_count", int, 0)
    config: Config = {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "intermediate_size": min(widths),
        "use_double_wide_mlp": max(widths) == 2 * min(widths),
        "num_attention_heads": metadata.need("attention.head_count", int),
        "num_key_value_heads": by_kind[True].pop(),
        "num_global_key_value_heads": by_kind[False].pop(),
        "attention_k_eq_v": not has_tensor(metadata, f"blk.{full[0]}.attn_v.weight"),
        "head_dim": head_dim,
        "global_head_dim": full_head_dim,
        "sliding_window": metadata.need("attention.sliding_window", int),
        "layer_types": layer_types(slides),
        "num_kv_shared_layers": metadata.opt("attention.shared_kv_layers", int, 0),
        "rms_norm_eps": metadata.need(RMS, float),
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": metadata.opt("final_logit_softcapping", float, 0.0) or None,
        "max_position_embeddings": metadata.need("context_length", int),
        "vocab_size": rows(metadata, "token_embd.weight"),
        "tie_word_embeddings": not has_tensor(metadata, "output.weight"),
        "hidden_size_per_layer_input": inputs,
        "rope_parameters": _ropes(metadata),
    }
    if inputs:
        config["vocab_size_per_layer_input"] = rows(metadata, _TABLE)
    if experts:
        config |= {
            "enable_moe_block": True,
            "num_experts": experts,
            "top_k_experts": metadata.need("expert_used_count", int),
            "moe_intermediate_size": metadata.need("expert_feed_forward_length", int),
        }
    else:
        metadata.ignore("expert_feed_forward_length")
    return config


def _ropes(metadata: Metadata) -> Config:
    """RoPE by kind of layer; divisors of 1e30 stand for channels of full layers that are not rotated."""
    divisors = metadata.file.tensor("rope_freqs.weight") if has_tensor(metadata, "rope_freqs.weight") else None
    return {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 1.0 if divisors is None else float((divisors == 1).sum() / len(divisors)),
            "rope_theta": metadata.opt("rope.freq_base", float, 1_000_000.0),
        },
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": metadata.opt("rope.freq_base_swa", float, 10_000.0),
        },
    }


CONFIGS: Final[Mapping[str, Callable[[Metadata], Config]]] = {
    "gemma3n": DecoderKeys(
        "Gemma3nForCausalLM",
        "gemma3n_text",
        fixed={"hidden_activation": "gelu_pytorch_tanh"},
        values={
            "sliding_window": ("attention.sliding_window", int, None),
            "final_logit_softcapping": ("final_logit_softcapping", float, 30.0),
            "rope_local_base_freq": ("rope.freq_base_swa", float, 10_000.0),
            "altup_active_idx": ("altup.active_idx", int, None),
            "altup_num_inputs": ("altup.num_inputs", int, None),
            "hidden_size_per_layer_input": ("embedding_length_per_layer_input", int, None),
            "num_kv_shared_layers": ("attention.shared_kv_layers", int, 0),
        },
        absent=("hidden_act",),
        theta=1_000_000.0,
        more=_gemma3n,
    ),
    "gemma4": _gemma4,
    "gemma": DecoderKeys("GemmaForCausalLM", "gemma", fixed=_GEMMA_FIXED, absent=("hidden_act",)),
    "gemma2": DecoderKeys("Gemma2ForCausalLM", "gemma2", fixed=_GEMMA_FIXED, absent=("hidden_act",), more=_gemma2),
    "gemma3": DecoderKeys(
        "Gemma3ForCausalLM",
        "gemma3_text",
        fixed=_GEMMA_FIXED,
        absent=("hidden_act",),
        theta=1_000_000.0,
        more=_gemma3,
    ),
}
