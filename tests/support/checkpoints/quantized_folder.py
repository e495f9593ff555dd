"""A model folder whose linear layers are quantised, and its twin with the same values in float32."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LINEAR = re.compile(r".*(_proj|_proj_with_mqa|\.w[123]|\.wk|\.wq_b|lm_head)\.weight")
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
BLOCK = (16, 8)


def compressed_tensors(number: str = "float", strategy: str = "channel", **more: Any) -> dict[str, Any]:
    """The quantization_config that llm-compressor writes of 8-bit weights and activations."""
    activations = {"dynamic": True, "num_bits": 8, "strategy": "token", "symmetric": True, "type": number}
    weights = {"dynamic": False, "num_bits": 8, "observer": "minmax", "strategy": strategy, "symmetric": True}
    weights |= {"type": number, "actorder": None, "group_size": None}
    if strategy == "block":
        weights["block_structure"] = list(BLOCK)
    group = {"input_activations": activations, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "config_groups": {"group_0": group},
        "format": f"{number}-quantized",
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12.2",
        **more,
    }


def fp8(block: bool = False, **more: Any) -> dict[str, Any]:
    """The quantization_config of a checkpoint with static scales, or of DeepSeek-V3's with blocks."""
    if block:
        more = {"fmt": "e4m3", "weight_block_size": list(BLOCK), **more}
    return {"quant_method": "fp8", "activation_scheme": "dynamic", **more}


def gptq(**more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False, "sym": True, **more}


def awq(**more: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True, "version": "gemm", **more}


def write_quantized(
    dense: Path, folder: Path, config: dict[str, Any], group: str = "channel", kept: str = "lm_head", seed: int = 0
) -> tuple[Path, Path]:
    """Write the model of `dense` quantised, and its twin. Both folders. `kept`: pattern of matrices that stay dense."""
    number = torch.int8 if config.get("format") == "int-quantized" else torch.float8_e4m3fn
    suffix = "weight_scale_inv" if config["quant_method"] == "fp8" and group == "block" else "weight_scale"
    stored: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, weight in load_file(dense / "model.safetensors").items():
        stored[name] = values[name] = weight
        if LINEAR.fullmatch(name) and not re.search(kept, name):
            data, scales, values[name] = quantize(weight, number, group)
            stored[name], stored[f"{name.removesuffix('weight')}{suffix}"] = data, scales
    twin = folder.with_name(f"{folder.name}-twin")
    for path, tensors in ((folder, stored), (twin, values)):
        shutil.copytree(dense, path)
        order = torch.randperm(len(tensors), generator=torch.Generator().manual_seed(seed)).tolist()
        names = list(tensors)
        save_file({names[at]: tensors[names[at]].contiguous() for at in order}, path / "model.safetensors")
    whole = json.loads((dense / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**whole, "quantization_config": config}))
    return folder, twin


MXFP4 = {
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    "quant_method": "mxfp4",
}
EXPERTS = re.compile(r".*\.experts\.(gate_up|down)_proj")


def write_mxfp4(dense: Path, folder: Path, seed: int = 0) -> tuple[Path, Path]:
    """Write the model of `dense` with random experts in MXFP4, and its twin with transformers' values. Both folders."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(seed)
    stored: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, weight in load_file(dense / "model.safetensors").items():
        if not EXPERTS.fullmatch(name):
            stored[name] = values[name] = weight
            continue
        experts, inputs, outputs = weight.shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 125, shape, dtype=torch.uint8, generator=generator)
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
        values[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    twin = folder.with_name(f"{folder.name}-twin")
    for path, tensors in ((folder, stored), (twin, values)):
        shutil.copytree(dense, path)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    whole = json.loads((dense / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**whole, "quantization_config": MXFP4}))
    return folder, twin


def quantize(weight: Tensor, number: torch.dtype, group: str) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers, scales as stored, and the values that they mean, float32."""
    rows, columns = {"tensor": weight.shape, "channel": (1, weight.shape[1]), "block": BLOCK}[group]
    # Not the largest value of the group: scales that quantising again would not find.
    peaks = torch.stack(
        [torch.stack([part.abs().max() for part in row.split(columns, 1)]) for row in weight.split(rows, 0)]
    )
    scales = (peaks * 1.17 / LARGEST[number]).to(torch.bfloat16)
    spread = scales.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    spread = spread[: weight.shape[0], : weight.shape[1]]
    divided = weight / spread
    data = (divided.round() if number == torch.int8 else divided).to(number)
    return data, scales.reshape(()) if group == "tensor" else scales, data.float() * spread
