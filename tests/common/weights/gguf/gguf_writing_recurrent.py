"""What llama.cpp's converter writes for models with recurrent layers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np

Config = dict[str, Any]
Pieces = list[tuple[str, np.ndarray]]


def kinds_of(config: Config) -> list[str]:
    """The kind of each layer, from whichever key states it."""
    for key in ("layers_block_type", "layer_types"):
        if config.get(key):
            return list(config[key])
    period, offset = config["attn_layer_period"], config["attn_layer_offset"]
    return ["attention" if layer % period == offset else "mamba" for layer in range(config["num_hidden_layers"])]


def kv_heads(config: Config) -> list[int]:
    return [
        config["num_key_value_heads"] if kind.endswith("attention") and "linear" not in kind else 0
        for kind in kinds_of(config)
    ]


def _state_space(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_context_length(2**20)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_state_size(config["state_size"])
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])


def _mamba(writer: gguf.GGUFWriter, config: Config) -> None:
    _state_space(writer, config)
    writer.add_ssm_inner_size(config["intermediate_size"])
    writer.add_ssm_time_step_rank(config["time_step_rank"])
    writer.add_ssm_dt_b_c_rms(config["model_type"] == "falcon_mamba")


def _mamba2(writer: gguf.GGUFWriter, config: Config) -> None:
    _state_space(writer, config)
    writer.add_ssm_inner_size(config["num_heads"] * config["head_dim"])
    writer.add_ssm_time_step_rank(config["num_heads"])
    writer.add_ssm_group_count(config["n_groups"])


def _jamba(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_head_count_kv(kv_heads(config))
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_time_step_rank(config["mamba_dt_rank"])


def _falcon_h1(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_inner_size(config["mamba_d_ssm"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    writer.add_ssm_group_count(config["mamba_n_groups"])


def _kimi_linear(writer: gguf.GGUFWriter, config: Config) -> None:
    kinds, rope_dim = config["layer_types"], config["qk_rope_head_dim"]
    writer.add_head_count_kv([int(kind == "full_attention") for kind in kinds])
    writer.add_ssm_conv_kernel(4)
    writer.add_kda_head_dim(config["linear_head_dim"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_rope_dimension_count(rope_dim)
    writer.add_key_length(config["kv_lora_rank"] + rope_dim)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope_dim)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_context_length(config["model_max_length"])
    writer.add_expert_used_count(config["num_experts_per_token"])
    writer.add_expert_group_count(config["num_expert_group"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_leading_dense_block_count(config["mlp_layer_types"].count("dense"))
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _granite_hybrid(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    writer.add_head_count_kv(kv_heads(config))
    writer.add_rope_scaling_finetuned(config.get("position_embedding_type") == "rope")


def _nemotron_h(writer: gguf.GGUFWriter, config: Config) -> None:
    inner = config["mamba_num_heads"] * config["mamba_head_dim"]
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_state_size(config["ssm_state_size"])
    writer.add_ssm_group_count(config["n_groups"])
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_time_step_rank(config["mamba_num_heads"])
    writer.add_head_count_kv(kv_heads(config))
    writer.add_rope_scaling_finetuned(False)
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    kinds, experts = kinds_of(config), "moe" in kinds_of(config)
    width = config["moe_intermediate_size"] if experts else config["intermediate_size"]
    writer.add_feed_forward_length([width if kind in ("mlp", "moe") else 0 for kind in kinds])
    if experts:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_count(config["n_routed_experts"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _lfm2(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_head_count_kv(kv_heads(config))
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    writer.add_layer_norm_rms_eps(config["norm_eps"])
    if config.get("block_auto_adjust_ff_dim"):
        multiple = config["block_multiple_of"]
        writer.add_feed_forward_length(-(-int(2 * config["intermediate_size"] / 3) // multiple) * multiple)


def _lfm2_moe(writer: gguf.GGUFWriter, config: Config) -> None:
    _lfm2(writer, config)
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_leading_dense_block_count(config["num_dense_layers"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _delta(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"] // 4)
    for add, key in (
        (writer.add_expert_feed_forward_length, "moe_intermediate_size"),
        (writer.add_expert_shared_feed_forward_length, "shared_expert_intermediate_size"),
    ):
        if config.get(key):
            add(config[key])


def _mamba_pieces(config: Config, name: str, array: np.ndarray) -> Pieces | None:
    second = any(key in config for key in ("n_groups", "mamba_n_groups"))
    if name.endswith(".A_log"):
        rates = -np.exp(array)
        return [(name, rates[:, None] if second else rates)]
    if name.endswith(".D"):
        return [(name, array[:, None] if second else array)]
    if name.endswith(".dt_bias"):
        return [(name.replace("dt_bias", "dt_proj.bias"), array)]
    if second and re.search(r"(mixer|mamba)\.norm\.weight$", name):
        return [(name, array.reshape(config.get("n_groups", config.get("mamba_n_groups")), -1))]
    return None


def _granite_pieces(config: Config, name: str, array: np.ndarray) -> Pieces | None:
    layer = name.split(".layers.")[-1].split(".")[0]
    shared = "_shexp" if config["num_local_experts"] else ""
    kind = "_exps" if "block_sparse_moe" in name else shared
    if name.endswith("input_linear.weight"):
        gate, up = np.split(array, 2, axis=-2)
        return [(f"blk.{layer}.ffn_gate{kind}.weight", gate), (f"blk.{layer}.ffn_up{kind}.weight", up)]
    if name.endswith("shared_mlp.output_linear.weight"):
        return [(f"blk.{layer}.ffn_down{kind}.weight", array)]
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for part, key in heads.items():
        if part in name:
            return [(name, permuted(array, config[key]))]
    return _mamba_pieces(config, name, array)


def permuted(array: np.ndarray, heads: int) -> np.ndarray:
    return array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _falcon_h1_pieces(config: Config, name: str, array: np.ndarray) -> Pieces | None:
    """Weights times the factors of their inputs and outputs."""
    inner, state = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    attention, (gate, down) = config["attention_in_multiplier"], config["mlp_multipliers"]
    parts = np.repeat(config["ssm_multipliers"], (inner, inner, state, state, config["mamba_n_heads"]))
    factors = {
        "down_proj": down,
        "gate_proj": gate,
        "k_proj": config["key_multiplier"] * attention,
        "q_proj": attention,
        "v_proj": attention,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "in_proj": config["ssm_in_multiplier"] * parts[:, None].astype(np.float32),
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    factor = factors.get(name.split(".")[-2])
    if factor is not None:
        return [(name, (array * factor).astype(np.float32))]
    return _mamba_pieces(config, name, array)


def _kimi_linear_pieces(config: Config, name: str, array: np.ndarray) -> Pieces | None:
    if name.endswith("_conv1d.weight"):
        return [(name, array.reshape(1, -1, 1, array.shape[-1]))]
    if name.endswith(".A_log"):
        return [(name, -np.exp(array.reshape(1, 1, -1, 1)))]
    if name.endswith(".dt_bias"):
        return [(name.replace("dt_bias", "dt_proj.bias"), array)]
    if (dense := re.search(r"layers\.(\d+)\.block_sparse_moe\.(gate|up|down)_proj\.weight$", name)) is not None:
        return [(f"blk.{dense[1]}.ffn_{dense[2]}.weight", array)]  # named otherwise by its authors
    if name.endswith("kv_b_proj.weight"):
        heads = array.reshape(config["num_attention_heads"], config["qk_nope_head_dim"] + config["v_head_dim"], -1)
        keys, values = heads[:, : config["qk_nope_head_dim"]], heads[:, config["qk_nope_head_dim"] :]
        return [
            (name.replace("kv_b_proj", "k_b_proj"), keys.swapaxes(1, 2)),
            (name.replace("kv_b_proj", "v_b_proj"), values),
        ]
    return None


def _jamba_pieces(config: Config, name: str, array: np.ndarray) -> Pieces | None:
    return _mamba_pieces({}, name, array)


def _delta_pieces(config: Config, name: str, array: np.ndarray) -> Pieces | None:
    if name.endswith(".A_log"):
        return [(name, -np.exp(array))]
    if name.endswith(".dt_bias"):
        return [(name.replace("dt_bias", "dt_proj.bias"), array)]
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return [(name, array + np.float32(1))]
    if name.endswith(".in_proj_qkvz.weight"):
        keys, dim, value_dim = (config[f"linear_{key}"] for key in ("num_key_heads", "key_head_dim", "value_head_dim"))
        each = config["linear_num_value_heads"] // keys * value_dim
        rows = array.reshape(keys, 2 * dim + 2 * each, -1)
        parts = np.split(rows, np.cumsum([dim, dim, each]), axis=1)
        q, k, v, z = (part.reshape(-1, array.shape[1]) for part in parts)
        layer = name.split(".layers.")[-1].split(".")[0]
        return [(f"blk.{layer}.attn_qkv.weight", np.concatenate([q, k, v])), (f"blk.{layer}.attn_gate.weight", z)]
    return None


def _tiled(config: Config, array: np.ndarray, axis: int, channels: int) -> np.ndarray:
    keys, shape = config["linear_num_key_heads"], array.shape
    grouped = array.reshape(*shape[:axis], keys, -1, channels, *shape[axis + 1 :])
    return grouped.swapaxes(axis, axis + 1).reshape(shape)


def _qwen35_pieces(config: Config, name: str, array: np.ndarray) -> Pieces | None:
    if "linear_attn." in name:
        dim = config["linear_value_head_dim"]
        begin = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
        if ".in_proj_qkv." in name or ".conv1d." in name:
            array = np.concatenate([array[:begin], _tiled(config, array[begin:], 0, dim)])
        elif ".in_proj_z." in name:
            array = _tiled(config, array, 0, dim)
        elif ".out_proj." in name:
            array = _tiled(config, array, 1, dim)
        elif ".norm." not in name:
            array = _tiled(config, array, 0, 1)
    if name.endswith("experts.gate_up_proj"):
        gate, up = np.split(array, 2, axis=1)
        return [
            (name.replace("gate_up_proj", f"{kind}_proj.weight"), part) for kind, part in (("gate", gate), ("up", up))
        ]
    if name.endswith("experts.down_proj"):
        return [(f"{name}.weight", array)]
    return _delta_pieces(config, name, array) or [(name, array)]


def _expert_bias_pieces(config: Config, name: str, array: np.ndarray) -> Pieces | None:
    return [(f"{name}.bias", array)] if name.endswith("expert_bias") else None


SPECIAL: dict[str, Any] = {
    "mamba": _mamba,
    "mamba2": _mamba2,
    "jamba": _jamba,
    "falcon-h1": _falcon_h1,
    "kimi-linear": _kimi_linear,
    "granitehybrid": _granite_hybrid,
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _nemotron_h),
    "lfm2": _lfm2,
    "lfm2moe": _lfm2_moe,
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), _delta),
}
"""What the converter's class of an architecture writes beyond the keys of all."""

PIECES: dict[str, Callable[[Config, str, np.ndarray], Pieces | None]] = {
    **dict.fromkeys(("mamba", "mamba2", "nemotron_h", "nemotron_h_moe"), _mamba_pieces),
    "jamba": _jamba_pieces,
    "falcon-h1": _falcon_h1_pieces,
    "kimi-linear": _kimi_linear_pieces,
    "granitehybrid": _granite_pieces,
    "lfm2moe": _expert_bias_pieces,
    "qwen3next": _delta_pieces,
    **dict.fromkeys(("qwen35", "qwen35moe"), _qwen35_pieces),
}
"""None: the tensor as it is."""
