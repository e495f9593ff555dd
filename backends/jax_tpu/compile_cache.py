"""The compiler's persistent cache: where it is, and how often it answered."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax


@dataclass(frozen=True, slots=True)
class CacheCount:
    """How many programs this process found in the cache, and how many it asked for, up to now."""

    hits: int
    requests: int

    _events: ClassVar[dict[str, int]] = {}

    @classmethod
    def now(cls) -> CacheCount:
        """The counts; the first call starts the counting."""
        if not cls._events:
            cls._events.update(dict.fromkeys(_EVENTS, 0))
            jax.monitoring.register_event_listener(_count)
        return cls(*(cls._events[event] for event in _EVENTS))


_EVENTS = ("/jax/compilation_cache/cache_hits", "/jax/compilation_cache/compile_requests_use_cache")


def _count(event: str, **_: Any) -> None:
    if event in CacheCount._events:
        CacheCount._events[event] += 1


def use_cache(platform: str) -> Path:
    """Keep compiled programs on disk, whatever their size. Returns the folder.

    JAX_COMPILATION_CACHE_DIR names it; by default it is in the user's cache. Programs for a CPU hold its instructions,
    so each kind of processor has its own folder.
    """
    stated = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagoda" / "xla"
    folder = Path(stated) if stated else base / (_processor() if platform == "cpu" else platform)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder


def _processor() -> str:
    """A name for what this processor can execute."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), os.uname().machine)
    return f"cpu-{hashlib.sha256(features.encode()).hexdigest()[:12]}"
