"""How attention is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagoda.common.config.numbers import json_object
from pagoda.common.config.option import option


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """The attention kernel."""

    attention_backend: str | None = option(
        None,
        "Attention kernel.",
        refused="each backend here has its own attention kernel and no second one; drop the flag",
        accepts=("auto", "AUTO", "TORCH_SDPA", "CPU_ATTN"),
    )
    attention_config: Mapping[str, Any] = option(
        {},
        "Attention settings as JSON.",
        aliases=("-ac",),
        parse=json_object,
        refused="each backend here has its own attention kernel and no second one; drop the flag",
    )
