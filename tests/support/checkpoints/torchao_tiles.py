"""Matrices of 4-bit numbers in the order of NVIDIA's tensor cores, as torchao stores them, and models of such.

Written from the fragment of B in `mma.m16n8k16` (PTX ISA): lane t has of each tile of 16 inputs four values v[0..3] of
output t // 4, those of inputs 2 (t % 4) + i % 2 + 8 (i // 2). A word has the values v[0..7] of two tiles, in the order
0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits on.
"""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
GROUP = 32
CONFIG = {
    "quant_method": "torchao",
    "quant_type": {
        "default": {
            "_type": "Int4WeightOnlyConfig",
            "_version": 2,
            "_data": {
                "group_size": GROUP,
                "int4_choose_qparams_algorithm": {"_type": "Int4ChooseQParamsAlgorithm", "_data": "TINYGEMM"},
                "int4_packing_format": {"_type": "Int4PackingFormat", "_data": "TILE_PACKED_TO_4D"},
                "int4_tile_packed_ntile": 8,
                "set_inductor_config": True,
            },
        }
    },
}


def in_tiles(numbers: npt.NDArray[np.uint8], words: int = 4) -> npt.NDArray[np.int32]:
    """Return numbers [O, I], of whole tiles, as words [O / 8, I / (32 words), 32, words]."""
    outputs, inputs = numbers.shape
    by_word = numbers.reshape(outputs // 8, 8, inputs // 32 // words, words, 32).astype(np.uint32)
    packed = np.zeros((outputs // 8, inputs // 32 // words, 32, words), np.uint32)
    for lane, (place, value) in product(range(32), enumerate(ORDER)):
        tile, i = divmod(value, 4)
        column = 16 * tile + 2 * (lane % 4) + i % 2 + 8 * (i // 2)
        packed[:, :, lane] |= by_word[:, lane // 4, :, :, column] << np.uint32(4 * place)
    return packed.view(np.int32)


def quantised(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return the stored tensors of a matrix [O, I], padded with zeros, and its values."""
    outputs, inputs = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -inputs % 1024, 0, -outputs % 8))
    groups = padded.reshape(len(padded), -1, GROUP)
    low = groups.amin(-1)
    scales = ((groups.amax(-1) - low) / 15).clamp(1e-6).bfloat16()
    zeros = (low + 8 * scales.float()).bfloat16()
    numbers = ((groups - zeros.float()[..., None]) / scales.float()[..., None]).round().add(8).clamp(0, 15)
    values = (numbers - 8) * scales.float()[..., None] + zeros.float()[..., None]
    words = in_tiles(numbers.reshape(padded.shape).numpy().astype(np.uint8))
    factors = torch.stack((scales, zeros), -1).transpose(0, 1).contiguous()
    stored = {"_weight_qdata": torch.from_numpy(words), "_weight_scale_and_zero": factors}
    return stored, values.reshape(padded.shape)[:outputs, :inputs].contiguous()


def write_tiles(dense: Path, folder: Path) -> tuple[Path, Path]:
    """Write the model of `dense` with its layers' matrices in tiles, and its twin with their values. Both folders."""
    stored: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, weight in load_file(dense / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = values[name] = weight
            continue
        parts, values[name] = quantised(weight)
        stored |= {name.removesuffix("weight") + part: tensor for part, tensor in parts.items()}
    twin = folder.with_name(f"{folder.name}-twin")
    for path, tensors in ((folder, stored), (twin, values)):
        shutil.copytree(dense, path)
        save_file(tensors, path / "model.safetensors")
    whole = json.loads((dense / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**whole, "quantization_config": CONFIG}))
    return folder, twin
