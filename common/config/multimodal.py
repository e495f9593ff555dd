"""Images, audio and video. The models served here read text; the settings are accepted and change nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from pagoda.common.config.numbers import json_object
from pagoda.common.config.option import option

_TEXT_ONLY: Final = "the models served here read text only"


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiModalConfig:
    """How media in requests are read."""

    allowed_local_media_path: str = option("", "Folder that requests may read media from.", no_effect=_TEXT_ONLY)
    allowed_media_domains: tuple[str, ...] = option((), "Domains that media may come from.", no_effect=_TEXT_ONLY)
    limit_per_prompt: Mapping[str, Any] = option(
        {}, "Most items of each kind in a prompt.", flag="limit-mm-per-prompt", parse=json_object, no_effect=_TEXT_ONLY
    )
    enable_mm_embeds: bool = option(
        False, "Take embeddings of media as input.", refused="the models served here read text only; drop it"
    )
    media_io_kwargs: Mapping[str, Any] = option({}, "How media are read.", parse=json_object, no_effect=_TEXT_ONLY)
    mm_processor_kwargs: Mapping[str, Any] = option(
        {}, "Settings of the model's processor.", parse=json_object, no_effect=_TEXT_ONLY
    )
    mm_processor_cache_gb: float = option(4.0, "GiB of processed media kept.", no_effect=_TEXT_ONLY)
    mm_processor_cache_type: Literal["lru", "shm"] = option("lru", "Kind of that cache.", no_effect=_TEXT_ONLY)
    mm_shm_cache_max_object_size_mb: int = option(128, "Largest object in that cache.", no_effect=_TEXT_ONLY)
    mm_encoder_tp_mode: Literal["data", "weights"] = option("weights", "How encoders spread.", no_effect=_TEXT_ONLY)
    mm_encoder_attn_backend: str | None = option(None, "Attention of the encoders.", no_effect=_TEXT_ONLY)
    interleave_mm_strings: bool = option(False, "Keep text and media in order.", no_effect=_TEXT_ONLY)
    skip_mm_profiling: bool = option(False, "Leave encoders out of the memory profile.", no_effect=_TEXT_ONLY)
    video_pruning_rate: float | None = option(None, "Share of video tokens dropped.", no_effect=_TEXT_ONLY)
    disable_chunked_mm_input: bool = option(False, "Never split an item over steps.", no_effect=_TEXT_ONLY)
