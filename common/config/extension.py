"""Settings handed over whole, as JSON, to parts of the engine that stand beside the usual path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pagoda.common.config.numbers import json_object
from pagoda.common.config.option import option

_NO_TRANSFER: Final = "prefill and decode run in one engine here; drop it"


def names(text: str) -> tuple[str, ...]:
    """Names between commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtensionConfig:
    """Speculation, transfer, profiling, and settings that only a plugin knows."""

    speculative_config: Mapping[str, Any] = option(
        {}, "Speculative decoding as JSON.", parse=json_object, refused="speculation is not in this version; drop it"
    )
    kv_transfer_config: Mapping[str, Any] = option(
        {}, "KV transfer between engines as JSON.", parse=json_object, refused=_NO_TRANSFER
    )
    kv_events_config: Mapping[str, Any] = option(
        {}, "Events of the KV cache as JSON.", parse=json_object, refused="KV events are not sent; read /metrics"
    )
    ec_transfer_config: Mapping[str, Any] = option(
        {}, "Encoder cache transfer as JSON.", parse=json_object, refused=_NO_TRANSFER
    )
    profiler_config: Mapping[str, Any] = option(
        {}, "Settings of the profiler as JSON.", parse=json_object, refused="there is no built-in profiler; use py-spy"
    )
    additional_config: Mapping[str, Any] = option(
        {}, "JSON that plugins find in the configuration; the engine itself reads nothing in it.", parse=json_object
    )
    plugins: tuple[str, ...] | None = option(
        None, "Names of installed plugins to load; default: all of them.", parse=names
    )
    aggregate_engine_logging: bool = option(
        False, "One log line for all engines.", no_effect="there is one engine, so its line is the sum"
    )
    tokens_only: bool = option(
        False, "Serve token ids only; as --skip-tokenizer-init.", becomes=lambda on: {"skip_tokenizer_init": bool(on)}
    )
