"""The fixtures of tools/quantized_fixtures.py: a tiny model quantised by the library of each scheme."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

DATA = Path(__file__).parents[2] / "data" / "quantized"
NAMES = sorted(path.stem for path in DATA.glob("*.safetensors") if path.stem != "base")


@cache
def content(name: str) -> dict[str, Any]:
    """`libraries`, `quantization_config`, `tokens` and `logits` of a fixture."""
    read: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return read


def expected(name: str) -> tuple[list[int], torch.Tensor]:
    """Tokens, and the logits [T, V] of transformers' model with the values that the scheme's library dequantises."""
    return content(name)["tokens"], torch.tensor(content(name)["logits"])


def write_folder(name: str, folder: Path, **config: Any) -> Path:
    """Write a fixture as a model's folder; `config` changes its quantization_config."""
    folder.mkdir(parents=True, exist_ok=True)
    names: dict[str, str] = {}
    for stem in ("base", name):
        shutil.copyfile(DATA / f"{stem}.safetensors", folder / f"{stem}.safetensors")
        with safe_open(folder / f"{stem}.safetensors", "pt") as file:
            names |= dict.fromkeys(file.keys(), f"{stem}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    model_config = json.loads((DATA / "base.json").read_text())
    model_config["quantization_config"] = {**content(name)["quantization_config"], **config}
    (folder / "config.json").write_text(json.dumps(model_config))
    return folder
