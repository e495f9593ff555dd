"""The adapter of a request, and its place in a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

NO_ADAPTER: Final = -1
"""Slot of a sequence without an adapter."""

LORA_FIELD: Final = "lora_request"
"""The field that errors of adapters name."""


class AdapterRequest(Protocol):
    """An adapter as callers of the Python API give it: vLLM's LoRARequest."""

    @property
    def lora_name(self) -> str: ...

    @property
    def lora_int_id(self) -> int: ...

    @property
    def lora_path(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter. Two with a different field are different adapters: they share no slot and no cached prefix."""

    number: int  # at least 1
    name: str
    path: str  # local folder of the files
    version: int = 0  # raised when the files of the folder are to be read again

    def __str__(self) -> str:
        """Return what is unique of it."""
        return f"{self.number}/{self.version}/{len(self.name)}/{self.name}/{self.path}"


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """An adapter whose weights replace those in a slot before a step."""

    slot: int
    adapter: Adapter
