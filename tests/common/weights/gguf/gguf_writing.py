"""Write Hugging Face folders as GGUF files like llama.cpp's converter: the inverse of the tested code.

Names come from the gguf package's own table; layouts from the converter's source (convert_hf_to_gguf.py).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import MODEL_ARCH_NAMES
from safetensors.numpy import load_file

from pagoda.tests.common.weights.gguf import gguf_writing_encoders, gguf_writing_newer, gguf_writing_recurrent

_PIECES = {**gguf_writing_newer.PIECES, **gguf_writing_recurrent.PIECES, **gguf_writing_encoders.PIECES}
_ARCH = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}
_UNIT_OFFSET = ("gemma", "gemma2", "gemma3", "gemma-embedding", "nemotron")
_EXPERTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
PERMUTED = ("llama", "mistral3", "xverse", "internlm2", "arcee", "smollm3", "granite", "granitemoe", "minicpm", "olmo")
PERMUTED += ("deepseek", "arctic")
"""Architectures of the converter's LlamaModel, and those that call its `permute`."""
_MHA_GROUPED = ("gptneox", "bloom")
Config = dict[str, Any]


def convert(folder: Path, target: Path, arch: str, extra: Config | None = None) -> dict[str, np.ndarray]:
    """Write the folder's model as GGUF in float32; the Hugging Face tensors that went in.

    `extra`: further metadata under the architecture's prefix.
    """
    config = json.loads((folder / "config.json").read_text())
    if "layers_block_type" in config:
        config["num_hidden_layers"] = len(config["layers_block_type"])
    tensors = load_file(folder / "model.safetensors")
    writer = gguf.GGUFWriter(target, arch)
    _metadata(writer, arch, config)
    _SPECIAL.get(arch, lambda writer, config: None)(writer, config)
    for key, value in (extra or {}).items():
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }[type(value)]
        add(f"{arch}.{key}", value)
    for key in ("alpha_p", "alpha_n", "beta", "eps") if arch == "apertus" else ():
        names = (f"model.layers.{layer}.mlp.act_fn.{key}" for layer in range(config["num_hidden_layers"]))
        getattr(writer, f"add_xielu_{key}")([float(tensors[name].item()) for name in names])
    for name, array in _converted(arch, config, tensors).items():
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


_ONE_KV_HEAD = {("deepseek2", "num_key_value_heads"), ("glm-dsa", "num_key_value_heads")}
_NOT_WRITTEN = {("mamba", "add_layer_norm_eps"), ("mamba2", "add_layer_norm_eps"), ("kimi-linear", "add_head_count_kv")}


def _first(config: Config, *keys: str) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


def _metadata(writer: gguf.GGUFWriter, arch: str, config: Config) -> None:
    """What the converter writes for every architecture: each key whose value the config has."""
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    for add, keys in (
        (writer.add_block_count, ("num_hidden_layers", "n_layer", "n_layers", "num_layers")),
        (writer.add_context_length, ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")),
        (writer.add_embedding_length, ("hidden_size", "n_embd", "d_model")),
        (writer.add_feed_forward_length, ("intermediate_size", "n_inner")),
        (writer.add_head_count, ("num_attention_heads", "n_head", "n_heads")),
        (writer.add_head_count_kv, ("num_key_value_heads", "num_kv_heads")),
        (writer.add_layer_norm_rms_eps, ("rms_norm_eps", "norm_eps")),
        (writer.add_layer_norm_eps, ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")),
        (writer.add_expert_count, ("num_local_experts", "num_experts")),
        (writer.add_expert_used_count, ("num_experts_per_tok",)),
        (writer.add_expert_group_count, ("n_group",)),
        (writer.add_expert_group_used_count, ("topk_group",)),
        (writer.add_vocab_size, ("vocab_size",)),
    ):
        value = 1 if (arch, keys[0]) in _ONE_KV_HEAD else _first(config, *keys)
        if value is not None and (arch, add.__name__) not in _NOT_WRITTEN:
            add(value)
    if rope.get("rope_theta") is not None:
        writer.add_rope_freq_base(rope["rope_theta"])
    if (kind := rope.get("rope_type")) in ("yarn", "longrope"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
    if kind == "yarn":
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    scores = {"sigmoid": gguf.ExpertGatingFuncType.SIGMOID, "softmax": gguf.ExpertGatingFuncType.SOFTMAX}
    if config.get("scoring_func") in scores:
        writer.add_expert_gating_func(scores[config["scoring_func"]])
    if config.get("head_dim") and arch not in ("deepseek2", "glm-dsa", "minicpm3", "granite", "granitemoe", "mamba2"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])


def _head_dim(config: Config) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _partial(config: Config, default: float = 1.0) -> int:
    rope = config.get("rope_parameters") or {}
    return int(rope.get("partial_rotary_factor", default) * _head_dim(config))


def _whole_heads(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_rope_dimension_count(_head_dim(config))


def _part_of_heads(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_rope_dimension_count(_partial(config))


def _exaone(writer: gguf.GGUFWriter, config: Config) -> None:
    _whole_heads(writer, config)
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])


def _orion(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_layer_norm_eps(config["rms_norm_eps"])


def _chatglm(writer: gguf.GGUFWriter, config: Config) -> None:
    if "ffn_hidden_size" not in config:
        return _part_of_heads(writer, config)
    writer.add_feed_forward_length(config["ffn_hidden_size"])
    writer.add_head_count_kv(config["multi_query_group_num"])
    writer.add_layer_norm_rms_eps(config["layernorm_epsilon"])
    writer.add_rope_dimension_count(config["kv_channels"] // 2)
    writer.add_rope_freq_base(1e4 * config["rope_ratio"])
    return None


def _window(writer: gguf.GGUFWriter, config: Config) -> None:
    if config.get("sliding_window") is not None:
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])


def _gemma(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_sliding_window(config.get("sliding_window") or 0)


def _gemma2(writer: gguf.GGUFWriter, config: Config) -> None:
    _gemma(writer, config)
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _phi3(writer: gguf.GGUFWriter, config: Config) -> None:
    _gemma(writer, config)
    _part_of_heads(writer, config)
    writer.add_rope_scaling_orig_ctx_len(_first(config, "original_max_position_embeddings", "max_position_embeddings"))


def _granite(writer: gguf.GGUFWriter, config: Config) -> None:
    _whole_heads(writer, config)
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    if config.get("shared_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])


def _minicpm(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_embedding_scale(config["scale_emb"])
    writer.add_residual_scale(config["scale_depth"] / config["num_hidden_layers"] ** 0.5)
    writer.add_logit_scale(config["hidden_size"] / config["dim_model_base"])


def _cohere(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_logit_scale(config["logit_scale"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def _cohere2(writer: gguf.GGUFWriter, config: Config) -> None:
    _cohere(writer, config)
    writer.add_sliding_window(config["sliding_window"])
    _whole_heads(writer, config)


def _nemotron(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_layer_norm_eps(config["norm_eps"])
    _part_of_heads(writer, config)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def _hunyuan(writer: gguf.GGUFWriter, config: Config) -> None:
    rope, dim = config["rope_parameters"], config["head_dim"]
    if rope["rope_type"] == "dynamic":
        writer.add_rope_freq_base(rope["rope_theta"] * rope["alpha"] ** (dim / (dim - 2)))
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_rope_scaling_factor(1)
        writer.add_rope_scaling_orig_ctx_len(262144)


def _gpt2(writer: gguf.GGUFWriter, config: Config) -> None:
    if not config.get("n_inner"):
        writer.add_feed_forward_length(4 * config["n_embd"])
    if config.get("multi_query"):
        writer.add_head_count_kv(1)


def _four_widths(writer: gguf.GGUFWriter, config: Config) -> None:
    if "intermediate_size" not in config:
        writer.add_feed_forward_length(4 * _first(config, "hidden_size", "d_model"))


def _bloom(writer: gguf.GGUFWriter, config: Config) -> None:
    _four_widths(writer, config)
    writer.add_context_length(2048)


def _mpt(writer: gguf.GGUFWriter, config: Config) -> None:
    _four_widths(writer, config)
    attention = config["attn_config"]
    if attention.get("clip_qkv") is not None:
        writer.add_clamp_kqv(attention["clip_qkv"])
    writer.add_max_alibi_bias(attention["alibi_bias_max"] if attention["alibi"] else 0.0)


def _falcon(writer: gguf.GGUFWriter, config: Config) -> None:
    _four_widths(writer, config)
    writer.add_tensor_data_layout("jploski")
    if config.get("multi_query") and not config["new_decoder_architecture"]:
        writer.add_head_count_kv(1)


def _gptneox(writer: gguf.GGUFWriter, config: Config) -> None:
    _part_of_heads(writer, config)
    writer.add_parallel_residual(config["use_parallel_residual"])


def _stablelm(writer: gguf.GGUFWriter, config: Config) -> None:
    _part_of_heads(writer, config)
    writer.add_parallel_residual(config["use_parallel_residual"])


def _olmo(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_layer_norm_eps(1e-5)
    if config.get("clip_qkv") is not None:
        writer.add_clamp_kqv(config["clip_qkv"])


def _dbrx(writer: gguf.GGUFWriter, config: Config) -> None:
    attention, ffn = config["attn_config"], config["ffn_config"]
    writer.add_feed_forward_length(ffn["ffn_hidden_size"])
    writer.add_head_count_kv(attention["kv_n_heads"])
    writer.add_rope_freq_base(attention["rope_theta"])
    writer.add_clamp_kqv(attention["clip_qkv"])
    writer.add_expert_count(ffn["moe_num_experts"])
    writer.add_expert_used_count(ffn["moe_top_k"])
    writer.add_layer_norm_eps(1e-5)


def _qwen2_moe(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _routed(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])


def _sigmoid(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _glm4_moe(writer: gguf.GGUFWriter, config: Config) -> None:
    _routed(writer, config)
    _sigmoid(writer, config)
    _part_of_heads(writer, config)


def _dots1(writer: gguf.GGUFWriter, config: Config) -> None:
    _routed(writer, config)
    _sigmoid(writer, config)


def _minimax_m2(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    _sigmoid(writer, config)
    _part_of_heads(writer, config)


def _deepseek2(writer: gguf.GGUFWriter, config: Config) -> None:
    rank, rope_dim = config["kv_lora_rank"], config["qk_rope_head_dim"]
    _routed(writer, config)
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rope_dim)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope_dim)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rope_dim)
    if config["architectures"] == ["DeepseekV3ForCausalLM"]:
        _sigmoid(writer, config)
    if all_dim := config["rope_parameters"].get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * all_dim)


def _glm_dsa(writer: gguf.GGUFWriter, config: Config) -> None:
    _deepseek2(writer, config)
    _sigmoid(writer, config)
    writer.add_indexer_head_count(config["index_n_heads"])
    writer.add_indexer_key_length(config["index_head_dim"])
    writer.add_indexer_top_k(config["index_topk"])


def _ernie_moe(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_expert_count(config["moe_num_experts"])
    writer.add_expert_used_count(config["moe_k"])
    writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
    writer.add_leading_dense_block_count(config["moe_layer_start_index"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["moe_num_shared_experts"])
    writer.add_expert_shared_feed_forward_length(config["intermediate_size"] // config["num_key_value_heads"])


_SPECIAL: dict[str, Any] = {
    "arctic": _whole_heads,
    **dict.fromkeys(("llama", "xverse", "arcee", "smollm3", "apertus", "mistral3"), _whole_heads),
    "exaone": _exaone,
    "orion": _orion,
    **dict.fromkeys(("glm4", "phi2"), _part_of_heads),
    "chatglm": _chatglm,
    **dict.fromkeys(("olmo2", "exaone4"), _window),
    "gemma2": _gemma2,
    "gemma3": _gemma,
    "phi3": _phi3,
    "phimoe": _phi3,
    "granite": _granite,
    "granitemoe": _granite,
    "minicpm": _minicpm,
    "command-r": _cohere,
    "cohere2": _cohere2,
    "nemotron": _nemotron,
    "hunyuan-dense": _hunyuan,
    "gpt2": _gpt2,
    "starcoder": _gpt2,
    "bloom": _bloom,
    "mpt": _mpt,
    "falcon": _falcon,
    "gptneox": _gptneox,
    "stablelm": _stablelm,
    "olmo": _olmo,
    "dbrx": _dbrx,
    "qwen2moe": _qwen2_moe,
    "qwen3moe": _qwen2_moe,
    "glm4moe": _glm4_moe,
    "dots1": _dots1,
    "minimax-m2": _minimax_m2,
    "deepseek2": _deepseek2,
    "glm-dsa": _glm_dsa,
    "ernie4_5-moe": _ernie_moe,
    **gguf_writing_newer.SPECIAL,
    **gguf_writing_recurrent.SPECIAL,
    **gguf_writing_encoders.SPECIAL,
}
"""What the converter's class of an architecture writes beyond the keys of all."""


def _converted(arch: str, config: Config, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    layers = _first(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    names = _tensor_names(arch, layers)
    result: dict[str, Any] = {}
    for name, array in tensors.items():
        if ".act_fn." in name or name.endswith(".inv_freq") or name.startswith("pooler."):
            continue
        if re.search(r"\.experts\.\d", name):
            head, _, tail = name.partition(".experts.")
            expert, projection, _ = tail.split(".")
            head = head.replace("block_sparse_moe", "mlp").replace("backbone", "model").replace("mixer", "mlp")
            merged = f"{head}.experts.{_EXPERTS.get(projection, projection)}.weight"
            stack = result.setdefault(names.get_name(merged, try_suffixes=(".weight",)), {})
            stack[int(expert)] = array
            continue
        if (stream := re.search(r"(altup_\w*projections)\.(\d)\.weight$", name)) is not None:
            merged = f"model.{stream[1]}.weight"
            stack = result.setdefault(names.get_name(merged, try_suffixes=(".weight",)), {})
            stack[int(stream[2])] = array
            continue
        if "layernorm.norms." in name:
            head, _, tail = name.partition(".norms.")
            stack = result.setdefault(names.get_name(f"{head}.weight", try_suffixes=(".weight",)), {})
            stack[int(tail.split(".")[0])] = array
            continue
        for part, (source, piece) in enumerate(_pieces(arch, config, name, array)):
            own = source if source.startswith("blk.") else None
            target = names.get_name(source, try_suffixes=(".weight", ".bias")) or own
            assert target, f"the gguf package has no name for {source} in {arch}"
            result[target] = _stored(arch, config, source, piece)
            assert part < 3
    for name, value in result.items():
        if isinstance(value, dict):
            result[name] = np.stack([value[expert] for expert in sorted(value)])
    if rope := (config.get("rope_parameters") or {}):
        if (full := rope.get("full_attention", {})).get("rope_type") == "proportional":
            pairs = next(iter(config["per_layer_config"].values()))["head_dim"] // 2
            rotated = full["partial_rotary_factor"]
            result["rope_freqs.weight"] = np.where(np.arange(pairs) < rotated * pairs, 1, 1e30).astype(np.float32)
        if rope.get("rope_type") == "llama3":
            result["rope_freqs.weight"] = _llama3_factors(rope, _head_dim(config))
        for kind in ("short", "long"):
            if f"{kind}_factor" in rope:
                result[f"rope_factors_{kind}.weight"] = np.array(rope[f"{kind}_factor"], np.float32)
    return result


def _tensor_names(arch: str, layers: int) -> gguf.TensorNameMap:
    """The package's table, which that of Arctic would change for all."""
    table = gguf.TensorNameMap.block_mappings_cfg
    shared = dict(table)
    names = gguf.get_tensor_name_map(_ARCH[arch], layers)
    table.clear()
    table.update(shared)
    return names


def _llama3_factors(rope: Config, head_dim: int) -> np.ndarray:
    """The divisors of the frequencies, one by one as the converter computes them."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    factors = []
    for pair in range(head_dim // 2):
        waves = original / (2 * np.pi * rope["rope_theta"] ** (2 * pair / head_dim))
        smooth = (waves - low) / (high - low)
        factors.append(1.0 if waves > high else factor if waves < low else 1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def _pieces(arch: str, config: Config, name: str, array: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """A tensor, or those that the converter makes of it, under names of the package's table."""
    if arch in _PIECES and (pieces := _PIECES[arch](config, name, array)) is not None:
        return pieces
    layer = name.split(".layers.")[-1].split(".")[0]
    if arch == "internlm2" and "wqkv" in name:
        return _internlm2(config, name, array)
    if name.endswith("e_score_correction_bias"):  # tensors of the package's table have a suffix
        return [(name.replace("correction_bias", "correction.bias"), array)]
    if arch == "granitemoe" and name.endswith("input_linear.weight"):
        gate, up = np.split(array, 2, axis=-2)
        kind = "shexp" if "shared_mlp" in name else "exps"
        return [(f"blk.{layer}.ffn_gate_{kind}.weight", gate), (f"blk.{layer}.ffn_up_{kind}.weight", up)]
    if arch in ("deepseek2", "glm-dsa") and name.endswith("kv_b_proj.weight"):
        nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
        heads = array.reshape(config["num_attention_heads"], nope + value, -1)
        keys = heads[:, :nope].swapaxes(1, 2)
        return [(name.replace("kv_b_proj", "k_b_proj"), keys), (name.replace("kv_b_proj", "v_b_proj"), heads[:, nope:])]
    if arch == "dbrx" and "ffn.experts" in name:
        ffn = config["ffn_config"]
        stack = array.reshape(ffn["moe_num_experts"], ffn["ffn_hidden_size"], -1)
        return [(f"{name}.weight", stack.swapaxes(1, 2) if name.endswith("w2") else stack)]
    return [(name.removeprefix("transformer.") if arch in ("bloom", "chatglm") else name, array)]


def _internlm2(config: Config, name: str, array: np.ndarray) -> list[tuple[str, np.ndarray]]:
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    dim, each = config["hidden_size"] // heads, config["num_attention_heads"] // config["num_key_value_heads"]
    rows = array.reshape(groups, each + 2, dim, *array.shape[1:])
    parts = (rows[:, :each], rows[:, each], rows[:, each + 1])
    flat = (part.reshape(-1, *array.shape[1:]) for part in parts)
    return [(name.replace("wqkv", f"w{letter}"), part) for letter, part in zip("qkv", flat)]


def _stored(arch: str, config: Config, name: str, array: np.ndarray) -> np.ndarray:
    projection = {"q_proj": "q", "attention.wq.": "q", "k_proj": "k", "attention.wk.": "k"}
    kind = next((kind for part, kind in projection.items() if part in name), None)
    if arch in PERMUTED and kind is not None:
        heads = config["num_attention_heads" if kind == "q" else "num_key_value_heads"]
        halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
        return halves.swapaxes(1, 2).reshape(array.shape)
    if arch in _MHA_GROUPED and "query_key_value" in name:
        heads = _first(config, "num_attention_heads", "n_head")
        return array.reshape(heads, 3, -1, *array.shape[1:]).swapaxes(0, 1).reshape(array.shape)
    if arch == "falcon" and "query_key_value" in name:
        return _falcon_qkv(config, array)
    if arch in _UNIT_OFFSET and name.endswith("norm.weight"):
        return array + np.float32(1)
    if arch == "gpt2" and array.ndim == 2 and ".c_" in name:
        return array.T
    return array.squeeze() if array.ndim > 1 and 1 in array.shape else array


def _falcon_qkv(config: Config, array: np.ndarray) -> np.ndarray:
    heads = config["num_attention_heads"]
    groups = config["num_kv_heads"] if config["new_decoder_architecture"] else 1
    rows = array.reshape(groups, heads // groups + 2, -1, *array.shape[1:])
    parts = (rows[:, :-2], rows[:, -2], rows[:, -1])
    return np.concatenate([part.reshape(-1, *array.shape[1:]) for part in parts])
