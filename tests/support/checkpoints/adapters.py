"""Adapters for tests: peft's format, written by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pagoda.common.engine.lora.adapter import Adapter
from pagoda.common.weights.lora.peft import BaseModel, read_adapter
from pagoda.common.weights.lora.weights import AdapterWeights
from pagoda.common.weights.safetensors import write_safetensors

Modules = Mapping[str, tuple[int, int]]
"""Module names -> outputs and inputs."""


def llama_modules(width: int, ffn: int, heads: int, kv_heads: int, layers: int) -> dict[str, tuple[int, int]]:
    """The linear modules of a Llama."""
    kv = width // heads * kv_heads
    attention = {"q_proj": (width, width), "k_proj": (kv, width), "v_proj": (kv, width), "o_proj": (width, width)}
    mlp = {"gate_proj": (ffn, width), "up_proj": (ffn, width), "down_proj": (width, ffn)}
    return {
        f"model.layers.{layer}.{part}.{name}": shape
        for layer in range(layers)
        for part, modules in (("self_attn", attention), ("mlp", mlp))
        for name, shape in modules.items()
    }


def write_adapter(
    folder: Path,
    modules: Modules,
    *,
    rank: int = 4,
    seed: int = 0,
    scale: float = 0.2,
    saved: Modules | None = None,
    **config: Any,
) -> Path:
    """Write a random adapter of these modules and return its folder. `config`: keys of adapter_config.json.

    `saved`: modules of which it has the whole weight. With `use_dora` rows have lengths of about 1/2.
    """
    numbers = np.random.default_rng(seed)
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for name, (rows, columns) in modules.items():
        for part, shape in (("lora_A", (rank, columns)), ("lora_B", (rows, rank))):
            values = numbers.standard_normal(shape, np.float32) * np.float32(scale)
            tensors[f"base_model.model.{name}.{part}.weight"] = values
        if config.get("use_dora"):
            magnitudes = numbers.uniform(0.3, 0.7, rows).astype(np.float32)
            tensors[f"base_model.model.{name}.lora_magnitude_vector"] = magnitudes
    for name, shape in (saved or {}).items():
        weight = numbers.standard_normal(shape, np.float32) * np.float32(0.1)
        tensors[f"base_model.model.{name}.weight"] = weight
    if saved:
        config["modules_to_save"] = list(saved)
    return save_adapter(folder, tensors, **{"r": rank, **config})


def save_adapter(folder: Path, tensors: Mapping[str, npt.NDArray[Any]], **config: Any) -> Path:
    """Write an adapter's tensors and its config."""
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    values = {"peft_type": "LORA", "lora_alpha": 4, "target_modules": ["q_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


class ReaderHere:
    """In place of the engine's AdapterReader: reads in this process, without the cost of another."""

    def __init__(self, base: BaseModel) -> None:
        self._base = base

    def read(self, adapter: Adapter) -> AdapterWeights:
        return read_adapter(Path(adapter.path), self._base)
