"""What `convert` lays a model out for. Where the model comes from is said by the engine's own settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pagoda.common.config.option import option
from pagoda.common.errors import ConfigError

SOURCE_SETTINGS: Final = (
    "tokenizer",
    "tokenizer_revision",
    "skip_tokenizer_init",
    "dtype",
    "seed",
    "hf_config_path",
    "hf_overrides",
    "hf_token",
    "revision",
    "load_format",
    "download_dir",
    "ignore_patterns",
    "safetensors_load_strategy",
    "use_tqdm_on_load",
)
"""The engine's settings that say what is converted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertConfig:
    """The devices that `convert` lays a model out for; they need not be there."""

    tensor_parallel_size: int = option(
        1, "Devices that share each layer; the result loads on any number, quickest on this.", aliases=("-tp",)
    )

    def __post_init__(self) -> None:
        if self.tensor_parallel_size < 1:
            raise ConfigError("--tensor-parallel-size", f"{self.tensor_parallel_size} is not positive; use 1 or more")
