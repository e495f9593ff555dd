"""Where the weights come from and how they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from pagoda.common.config.numbers import json_object
from pagoda.common.config.option import option
from pagoda.common.errors import ConfigError

LOAD_FORMATS: Final = ("auto", "safetensors", "pt", "gguf", "sharded_state", "dummy")
_FOREIGN_FORMATS: Final = {
    "npcache": "weights are mapped straight from their files, so a numpy copy beside them gains nothing; use pt",
    "tensorizer": "its files are not read; use the safetensors files they were made from",
    "runai_streamer": "files are read ahead by threads of the engine's own; use safetensors",
    "runai_streamer_sharded": "one device reads a whole checkpoint; use safetensors",
    "fastsafetensors": "files are read ahead by threads of the engine's own; use safetensors",
    "bitsandbytes": "weights are not quantised while they load; serve a GGUF file of the model",
    "mistral": "config.json and the weights beside it are read; use auto with the repository's Hugging Face files",
}
"""Formats that exist elsewhere, and what to do instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """How a checkpoint is found, fetched and read."""

    load_format: str = option(
        "auto",
        "Format of the weights: auto looks at the files, sharded_state is of convert, dummy makes random ones.",
        choices=(*LOAD_FORMATS, *_FOREIGN_FORMATS),
    )
    download_dir: str | None = option(None, "Where hub downloads are kept; default: the hub's own cache.")
    safetensors_load_strategy: Literal["lazy", "eager"] = option(
        "lazy", "lazy maps files into memory; eager reads each whole, which network file systems like better."
    )
    ignore_patterns: tuple[str, ...] = option(
        ("original/**/*",), "Names or patterns of files in a hub repository that are not fetched."
    )
    model_loader_extra_config: Mapping[str, Any] = option(
        {},
        "Settings for the loader of the load format.",
        parse=json_object,
        refused="none of the loaders here takes extra settings; drop it",
    )
    use_tqdm_on_load: bool = option(True, "Show a progress bar while weights load (on a terminal only).")
    pt_load_map_location: str = option(
        "cpu",
        "Device that torch .bin files are unpickled onto.",
        no_effect="torch .bin files are read without unpickling, straight into host memory",
    )

    def __post_init__(self) -> None:
        if self.load_format in _FOREIGN_FORMATS:
            raise ConfigError(
                "--load-format", f"{self.load_format} is not supported: {_FOREIGN_FORMATS[self.load_format]}"
            )
