"""Resolvers of LoRA adapters under vLLM's names: plugins that find the adapter of an unknown model name."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from pagoda.server.vllm_compat.request_types import LoRARequest


class LoRAResolver(ABC):
    """Finds adapters."""

    @abstractmethod
    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """Return the adapter of that name for a base model; None if there is none."""


class LoRAResolverRegistry:
    """The resolvers of the installed plugins, which register them when the server starts."""

    _resolvers: ClassVar[dict[str, LoRAResolver]] = {}

    @classmethod
    def register_resolver(cls, resolver_name: str, resolver: LoRAResolver) -> None:
        """Add a resolver, in place of one of the same name."""
        cls._resolvers[resolver_name] = resolver

    @classmethod
    def get_supported_resolvers(cls) -> set[str]:
        """Return the names of the resolvers."""
        return set(cls._resolvers)

    @classmethod
    def get_resolver(cls, resolver_name: str) -> LoRAResolver:
        """Return a resolver. Raises KeyError."""
        return cls._resolvers[resolver_name]

    @classmethod
    def all(cls) -> tuple[LoRAResolver, ...]:
        """Return the resolvers, in the order in which they were registered."""
        return tuple(cls._resolvers.values())


class FilesystemResolver(LoRAResolver):
    """Adapters in a folder, each in a folder of its name."""

    def __init__(self, lora_cache_dir: str) -> None:
        self.lora_cache_dir = lora_cache_dir

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """Return the adapter in the folder `lora_name` if it was made for that base model."""
        root = Path(self.lora_cache_dir).resolve()
        if not lora_name or "\0" in lora_name:
            return None
        folder = (root / lora_name).resolve()
        if folder == root or not folder.is_relative_to(root):
            return None
        config = _config(folder / "adapter_config.json")
        if config.get("peft_type") != "LORA" or config.get("base_model_name_or_path") != base_model_name:
            return None
        return LoRARequest(lora_name, abs(hash(lora_name)) or 1, str(folder))


def _config(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
