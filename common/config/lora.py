"""LoRA adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from pagoda.common.config.numbers import json_object
from pagoda.common.config.option import option

_NO_LORA: Final = "LoRA adapters are not in this version; merge the adapter into the weights and serve those"
_LORA_ONLY: Final = "it matters with --enable-lora only"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAConfig:
    """Adapters over a base model."""

    enable_lora: bool = option(False, "Serve LoRA adapters.", refused=_NO_LORA)
    max_loras: int = option(1, "Adapters in one step.", no_effect=_LORA_ONLY)
    max_lora_rank: int = option(16, "Largest rank.", no_effect=_LORA_ONLY)
    lora_dtype: Literal["auto", "bfloat16", "float16"] = option("auto", "Numbers of adapters.", no_effect=_LORA_ONLY)
    max_cpu_loras: int | None = option(None, "Adapters kept in host memory.", no_effect=_LORA_ONLY)
    fully_sharded_loras: bool = option(False, "Spread adapters fully.", no_effect=_LORA_ONLY)
    default_mm_loras: Mapping[str, Any] = option({}, "Adapter per kind of media.", parse=json_object, refused=_NO_LORA)
