"""Write Hugging Face folders as GGUF files like llama.cpp's converter: the inverse of the tested code.

Names come from the gguf package's own table; layouts from the converter's source (convert_hf_to_gguf.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import MODEL_ARCH_NAMES
from safetensors.numpy import load_file

_ARCH = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}
_UNIT_OFFSET = ("gemma2", "gemma3")
_EXPERTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def convert(folder: Path, target: Path, arch: str, extra: dict[str, Any] | None = None) -> dict[str, np.ndarray]:
    """Write the folder's model as GGUF in float32; the Hugging Face tensors that went in.

    `extra`: further metadata under the architecture's prefix.
    """
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    writer = gguf.GGUFWriter(target, arch)
    (_gpt2_metadata if arch == "gpt2" else _metadata)(writer, arch, config)
    for key, value in (extra or {}).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{arch}.{key}", value)
    for name, array in _converted(arch, config, tensors).items():
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def _metadata(writer: gguf.GGUFWriter, arch: str, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if arch == "llama":
        writer.add_rope_dimension_count(head_dim)
    if head_dim * heads != config["hidden_size"]:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if "num_experts_per_tok" in config:
        writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if arch.startswith("gemma") or arch == "phi3":
        writer.add_sliding_window(config.get("sliding_window") or 0)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if arch == "phi3":
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])


def _gpt2_metadata(writer: gguf.GGUFWriter, arch: str, config: dict[str, Any]) -> None:
    writer.add_block_count(config["n_layer"])
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_feed_forward_length(config["n_inner"] or 4 * config["n_embd"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def _converted(arch: str, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    layers = config.get("num_hidden_layers") or config["n_layer"]
    names = gguf.get_tensor_name_map(_ARCH[arch], layers)
    result: dict[str, Any] = {}
    for name, array in tensors.items():
        if ".experts." in name:
            head, _, tail = name.partition(".experts.")
            expert, projection, _ = tail.split(".")
            merged = f"{head.replace('block_sparse_moe', 'mlp')}.experts.{_EXPERTS.get(projection, projection)}.weight"
            stack = result.setdefault(names.get_name(merged, try_suffixes=(".weight",)), {})
            stack[int(expert)] = array
            continue
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target, f"the gguf package has no name for {name} in {arch}"
        result[target] = _stored(arch, config, name, array)
    for name, value in result.items():
        if isinstance(value, dict):
            result[name] = np.stack([value[expert] for expert in sorted(value)])
    if rope := (config.get("rope_parameters") or {}):
        for kind in ("short", "long"):
            if f"{kind}_factor" in rope:
                result[f"rope_factors_{kind}.weight"] = np.array(rope[f"{kind}_factor"], np.float32)
    return result


def _stored(arch: str, config: dict[str, Any], name: str, array: np.ndarray) -> np.ndarray:
    if arch == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
        return halves.swapaxes(1, 2).reshape(array.shape)
    if arch in _UNIT_OFFSET and name.endswith("norm.weight"):
        return array + np.float32(1)
    if arch == "gpt2" and array.ndim == 2 and ".c_" in name:
        return array.T
    return array
