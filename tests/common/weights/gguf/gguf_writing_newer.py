"""What llama.cpp's converter writes for newer mixtures of experts, Gemma 3n and 4, MiniCPM 3 and PLaMo 3."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import gguf
import numpy as np

from pagoda.tests.common.weights.gguf.gguf_writing_recurrent import permuted

Config = dict[str, Any]
Pieces = list[tuple[str, np.ndarray]]


def _gpt_oss(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_sliding_window(config["sliding_window"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])


def _llama4(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_feed_forward_length(config["intermediate_size_mlp"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
    writer.add_rope_dimension_count(config["head_dim"])


def _hunyuan_moe(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_expert_shared_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_expert_used_count(config["moe_topk"][0])
    writer.add_expert_shared_count(1)


def _exaone_moe(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    writer.add_expert_shared_feed_forward_length(config["moe_intermediate_size"] * config["num_shared_experts"])
    writer.add_leading_dense_block_count(config["mlp_layer_types"].count("dense"))
    _routed(writer, config)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def _routed(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])


def _ling(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_weights_scale(1.0)
    _routed(writer, config)


def _ling2(writer: gguf.GGUFWriter, config: Config) -> None:
    _ling(writer, config)
    writer.add_rope_dimension_count(config["head_dim"] // 2)
    writer.add_expert_shared_feed_forward_length(config["moe_intermediate_size"] * config["num_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _per_layer(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _gemma3n(writer: gguf.GGUFWriter, config: Config) -> None:
    _per_layer(writer, config)
    writer.add_altup_active_idx(config["altup_active_idx"])
    writer.add_altup_num_inputs(config["altup_num_inputs"])
    normal = NormalDist()
    pattern = config["activation_sparsity_pattern"]
    writer.add_activation_sparsity_scale([normal.inv_cdf(part) if part else -math.inf for part in pattern])


def _gemma4(writer: gguf.GGUFWriter, config: Config) -> None:
    _per_layer(writer, config)
    full_layers = next(iter(config["per_layer_config"].values()))
    full, sliding = full_layers["head_dim"], config["head_dim"]
    writer.add_key_length(full)
    writer.add_value_length(full)
    writer.add_key_length_swa(sliding)
    writer.add_value_length_swa(sliding)
    writer.add_rope_dimension_count(full)
    writer.add_rope_dimension_count_swa(sliding)
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_used_count(config["top_k_experts"])
    shared, layers = config["num_kv_shared_layers"], config["num_hidden_layers"]
    if config["use_double_wide_mlp"]:
        each = [config["intermediate_size"] * (1 if layer < layers - shared else 2) for layer in range(layers)]
        writer.add_feed_forward_length(each)
    if full_layers.get("num_key_value_heads"):
        counts = {"sliding_attention": config["num_key_value_heads"]}
        kinds = config["layer_types"]
        writer.add_head_count_kv([counts.get(kind, full_layers["num_key_value_heads"]) for kind in kinds])


def _deepseek(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_weights_scale(1.0)
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_shared_count(config["n_shared_experts"])


def _minicpm3(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_key_length(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])


def _afmoe(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_leading_dense_block_count(config["num_dense_layers"])
    writer.add_expert_weights_scale(config["route_scale"])
    writer.add_sliding_window(config["sliding_window"])


def _plamo3(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_freq_base_swa(config["rope_local_theta"])
    writer.add_sliding_window(config["window_size"])
    writer.add_sliding_window_pattern(config["sliding_window_pattern"])


def _qwen1(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_freq_base(config["rotary_emb_base"])
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])


def _mimo_v2(writer: gguf.GGUFWriter, config: Config) -> None:
    pattern, heads = config["hybrid_layer_pattern"], ("num_key_value_heads", "swa_num_key_value_heads")
    writer.add_head_count_kv([config[heads[slides]] for slides in pattern])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(pattern)
    writer.add_value_length(config["v_head_dim"])
    writer.add_float32(f"{writer.arch}.attention.value_scale", config["attention_value_scale"])
    writer.add_rope_dimension_count(int(config["head_dim"] * config["partial_rotary_factor"]))
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_freq_base_swa(config["swa_rope_theta"])
    writer.add_layer_norm_rms_eps(config["layernorm_epsilon"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


SPECIAL: dict[str, Any] = {
    "mimo2": _mimo_v2,
    "deepseek": _deepseek,
    "minicpm3": _minicpm3,
    "afmoe": _afmoe,
    "plamo3": _plamo3,
    "qwen": _qwen1,
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "gpt-oss": _gpt_oss,
    "llama4": _llama4,
    "hunyuan-moe": _hunyuan_moe,
    "exaone-moe": _exaone_moe,
    "bailingmoe": _ling,
    "bailingmoe2": _ling2,
}
"""What the converter's class of an architecture writes beyond the keys of all."""


# Tensors: those that one is written as, under names of the package's table.


def _fused_experts(name: str, array: np.ndarray, step: int) -> Pieces | None:
    """Gate and up [E, D, 2F] of all experts; `step` 2: their columns take turns."""
    if name.endswith(("gate_up_proj", "gate_up_proj_bias")):
        both = array.swapaxes(1, 2) if array.ndim == 3 else array
        half = both.shape[1] // 2
        parts = (both[:, ::2], both[:, 1::2]) if step == 2 else (both[:, :half], both[:, half:])
        suffix = "bias" if name.endswith("_bias") else "weight"
        base = name.partition("gate_up_proj")[0]
        return [(f"{base}{kind}_proj.{suffix}", part) for kind, part in zip(("gate", "up"), parts)]
    if name.endswith("down_proj"):
        return [(f"{name}.weight", array.swapaxes(1, 2))]
    return [(name.replace("_proj_bias", "_proj.bias"), array)] if name.endswith("down_proj_bias") else None


def _gpt_oss_pieces(config: Config, name: str, array: np.ndarray) -> Pieces | None:
    return [(f"{name}.weight", array)] if name.endswith("sinks") else _fused_experts(name, array, 2)


def _llama4_pieces(config: Config, name: str, array: np.ndarray) -> Pieces | None:
    return _fused_experts(name, array, 1) if ".experts." in name else None


def _ling_pieces(config: Config, name: str, array: np.ndarray) -> Pieces | None:
    layer = name.split(".layers.")[-1].split(".")[0]
    if name.endswith("query_key_value.weight"):
        heads, groups, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        q, k, v = np.split(array, np.cumsum([heads * dim, groups * dim]))
        parts = {"q": permuted(q, heads), "k": permuted(k, groups), "v": v}
        return [(f"blk.{layer}.attn_{part}.weight", rows) for part, rows in parts.items()]
    if name == "lm_head.weight":
        return [(name, array / (np.linalg.norm(array, axis=0, keepdims=True) + np.float32(1e-7)))]
    if (dense := re.search(r"mlp\.(gate|up|down)_proj\.weight$", name)) is not None:  # the converter stops at them
        return [(f"blk.{layer}.ffn_{dense[1]}.weight", array)]
    return [(f"blk.{layer}.attn_output.weight", array)] if name.endswith("attention.dense.weight") else None


def _ling2_pieces(config: Config, name: str, array: np.ndarray) -> Pieces | None:
    return [(f"{name}.bias", array)] if name.endswith("expert_bias") else None


def _gemma4_pieces(config: Config, name: str, array: np.ndarray) -> Pieces | None:
    layer = name.split(".layers.")[-1].split(".")[0]
    if name.endswith("router.scale"):
        return [(f"blk.{layer}.ffn_gate_inp.scale", array)]
    if name.endswith("per_expert_scale"):
        return [(f"blk.{layer}.ffn_down_exps.scale", array)]
    return [(f"{name}.weight", array)] if name.endswith(("layer_scalar", "experts.gate_up_proj", "down_proj")) else None


def _gemma3n_pieces(config: Config, name: str, array: np.ndarray) -> Pieces | None:
    return [(f"{name}.weight", array)] if name.endswith("_scale") else None


def _plamo3_pieces(config: Config, name: str, array: np.ndarray) -> Pieces | None:
    """Norms with the offsets of their weights."""
    if "norm" not in name:
        return None
    offset = {"post_mixer_norm": 1 / 5, "post_mlp_norm": 5**-1.5}.get(name.split(".")[-2], 1.0)
    return [(name, array + np.float32(offset))]


def _mimo_v2_pieces(config: Config, name: str, array: np.ndarray) -> Pieces | None:
    return [(f"{name}.weight", array)] if name.endswith("attention_sink_bias") else None


PIECES: dict[str, Callable[[Config, str, np.ndarray], Pieces | None]] = {
    "mimo2": _mimo_v2_pieces,
    "plamo3": _plamo3_pieces,
    "afmoe": _ling2_pieces,
    "gemma3n": _gemma3n_pieces,
    "gemma4": _gemma4_pieces,
    "gpt-oss": _gpt_oss_pieces,
    "llama4": _llama4_pieces,
    "bailingmoe": _ling_pieces,
    "bailingmoe2": _ling2_pieces,
}
"""None: the tensor as it is."""
