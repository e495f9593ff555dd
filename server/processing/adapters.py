"""The LoRA adapters that requests may name: which one a name, a number or a path is, and in which version."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from typing import Final, overload

from pagoda.common.config.groups.model import LoRAConfig
from pagoda.common.engine.lora.adapter import LORA_FIELD, Adapter, AdapterRequest
from pagoda.common.errors import RequestError

NO_PINS: Final = "adapters cannot be pinned: requests wait for a slot; raise --max-loras to keep more"


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter that is served as a model of its own name."""

    adapter: Adapter
    parent: str  # Name of the base model.


class AdapterRegistry:
    """Known adapters. Numbers are unique among those that are served by name."""

    def __init__(self, config: LoRAConfig) -> None:
        self._enabled = config.enable_lora
        self._versions: dict[tuple[int, str, str], int] = {}
        self._new_versions = count(1)
        self._added: dict[int, Adapter] = {}
        self._served: dict[str, ServedAdapter] = {}

    def check_enabled(self) -> None:
        """Raise RequestError without --enable-lora."""
        if not self._enabled:
            raise RequestError(LORA_FIELD, "the engine has no LoRA adapters; start it with --enable-lora")

    @overload
    def adapter(self, request: AdapterRequest) -> Adapter: ...

    @overload
    def adapter(self, request: AdapterRequest | None) -> Adapter | None: ...

    def adapter(self, request: AdapterRequest | None) -> Adapter | None:
        """Return the adapter that a caller of the Python API gives. Raises RequestError for something else."""
        if request is None:
            return None
        self.check_enabled()
        try:
            key = request.lora_int_id, request.lora_name, request.lora_path
        except AttributeError:
            raise RequestError(
                LORA_FIELD, f"{LORA_FIELD} must be a LoRARequest, not {type(request).__name__}"
            ) from None
        return Adapter(number=key[0], name=key[1], path=key[2], version=self._versions.get(key, 0))

    def reload(self, request: AdapterRequest) -> Adapter:
        """Return the adapter in a new version, so that its files are read again for requests from now on."""
        adapter = self.adapter(request)
        version = next(self._new_versions)
        self._versions[adapter.number, adapter.name, adapter.path] = version
        return replace(adapter, version=version)

    def add(self, adapter: Adapter) -> bool:
        """Note an adapter as loaded. False if its number was."""
        is_added = adapter.number in self._added
        self._added[adapter.number] = adapter
        return not is_added

    def remove(self, number: int) -> bool:
        """Forget a loaded adapter. False if there is none of that number."""
        adapter = self._added.pop(number, None)
        if adapter is not None:
            self._versions[adapter.number, adapter.name, adapter.path] = next(self._new_versions)
        return adapter is not None

    @property
    def numbers(self) -> set[int]:
        """The numbers of loaded adapters."""
        return set(self._added)

    # Adapters that are served by name.

    @property
    def served(self) -> tuple[ServedAdapter, ...]:
        """Those that are served, in the order in which they came."""
        return tuple(self._served.values())

    def find(self, name: str) -> ServedAdapter | None:
        """Return the adapter that is served under a name."""
        return self._served.get(name)

    def new(self, name: str, path: str) -> Adapter:
        """Return an adapter with a number of its own, or a new version of the one that has the name."""
        served = self._served.get(name)
        version = next(self._new_versions)
        if served is not None:
            return replace(served.adapter, path=path, version=version)
        return Adapter(number=1 + max(self._added, default=0), name=name, path=path, version=version)

    def serve(self, adapter: Adapter, parent: str) -> None:
        """Serve an adapter under its name."""
        self._served[adapter.name] = ServedAdapter(adapter, parent)
        self.add(adapter)

    def withdraw(self, name: str) -> Adapter | None:
        """Stop serving the adapter and return it; None if no adapter has that name."""
        served = self._served.pop(name, None)
        if served is not None:
            self.remove(served.adapter.number)
        return None if served is None else served.adapter
