"""LoRA adapters that are served as models of their own: loaded at start, by a request, or by a resolver plugin."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pagoda.common.config.env import ALLOW_RUNTIME_LORA_UPDATING, LORA_RESOLVER_CACHE_DIR
from pagoda.common.engine.lora.adapter import Adapter
from pagoda.common.errors import ConfigError, RequestError
from pagoda.server.async_llm import AsyncLLM
from pagoda.server.http.errors import HttpError
from pagoda.server.processing.adapters import ServedAdapter
from pagoda.server.vllm.request_types import FilesystemResolver, LoRAResolverRegistry

logger = logging.getLogger(__name__)

_FLAG: Final = "--lora-modules"
_ON: Final = ("1", "true")
_MAX_NAME: Final = 256

MAX_RESOLVED: Final = 256
"""Adapters that are served because a request named them; for a further one the one that came first goes."""

MAX_FAILED: Final = 256
"""Adapters that could not be used, kept with the reason so that not every request reads them again."""


@dataclass(frozen=True, slots=True)
class LoraModule:
    """An entry of --lora-modules."""

    name: str
    path: str
    base_model_name: str | None = None


def lora_modules(entries: Sequence[str]) -> list[LoraModule]:
    """Parse name=path, {"name": ..., "path": ..., "base_model_name": ...} and lists of these. Raises ConfigError."""
    modules: list[LoraModule] = []
    for entry in entries:
        name, equals, path = entry.partition("=")
        if equals and not entry.lstrip().startswith(("{", "[")):
            modules.append(LoraModule(name, path))
            continue
        try:
            values = json.loads(entry)
        except ValueError:
            raise ConfigError(_FLAG, f"{entry[:200]!r} is neither name=path nor JSON") from None
        modules += [_module(value) for value in (values if isinstance(values, list) else [values])]
    for module in modules:
        if not module.name or not module.path:
            raise ConfigError(_FLAG, "an adapter needs a name and a path")
        if sum(other.name == module.name for other in modules) > 1:
            raise ConfigError(_FLAG, f"two adapters have the name {module.name}")
    return modules


def _module(values: Any) -> LoraModule:
    keys = ("name", "path", "base_model_name")
    if not isinstance(values, dict) or not all(key in keys and isinstance(values[key], str) for key in values):
        raise ConfigError(_FLAG, f"{values!r} is not an object with the texts {', '.join(keys)}")
    return LoraModule(values.get("name", ""), values.get("path", ""), values.get("base_model_name"))


_Files = tuple[tuple[str, int, int], ...]
"""Names, sizes and times of change of the files of an adapter."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why an adapter could not be used."""

    files: _Files
    field: str
    message: str


class ServedAdapters:
    """The adapters of one server. `entries`: of --lora-modules. Raises ConfigError for one that cannot be served."""

    def __init__(self, llm: AsyncLLM, entries: Sequence[str]) -> None:
        self._llm = llm
        self._lock = asyncio.Lock()
        self._resolved: dict[str, None] = {}  # Names, in the order in which they came.
        self._failed: dict[str, _Failure] = {}
        self._modules = lora_modules(entries)
        if self._modules and not llm.config.lora.enable_lora:
            raise ConfigError(_FLAG, "adapters need --enable-lora")
        for module in self._modules:
            if module.name in llm.names:
                raise ConfigError(_FLAG, f"{module.name} is the name of the model, too; give the adapter another one")
            llm.adapters.serve(llm.adapters.new(module.name, module.path), module.base_model_name or llm.names[0])

    @property
    def served(self) -> tuple[ServedAdapter, ...]:
        """All of them."""
        return self._llm.adapters.served

    def find(self, name: str | None) -> Adapter | None:
        """Return the adapter of that name."""
        served = None if name is None else self._llm.adapters.find(name)
        return None if served is None else served.adapter

    async def load_modules(self) -> None:
        """Read the adapters of --lora-modules. Raises ConfigError for one that cannot be used."""
        for module in self._modules:
            adapter = self.find(module.name)
            assert adapter is not None
            try:
                await self._llm.load_adapter(adapter)
            except RequestError as error:
                raise ConfigError(_FLAG, f"{module.name}: {error}") from None

    async def load(self, name: str, path: str, *, in_place: bool) -> None:
        """Read an adapter and serve it. Raises RequestError, or HttpError unless the server allows it."""
        _check_allowed()
        self._llm.adapters.check_enabled()
        if not name or len(name) > _MAX_NAME:
            raise RequestError("lora_name", f"lora_name must have 1 to {_MAX_NAME} characters")
        if name in self._llm.names:
            raise RequestError("lora_name", f"{name} is the name of the model; give the adapter another one")
        folder = _allowed_folder(path)
        async with self._lock:
            if self.find(name) is not None and not in_place:
                raise RequestError(
                    "lora_name", f"the adapter {name} is loaded; set load_inplace to true to load it again"
                )
            await self._add(name, folder, self._llm.names[0])

    async def unload(self, name: str) -> None:
        """Stop serving an adapter; its running requests continue. Raises HttpError."""
        _check_allowed()
        async with self._lock:
            if not await self._withdraw(name):
                raise HttpError(404, f"the adapter {name[:200]} is not loaded", "lora_name")

    async def _withdraw(self, name: str) -> bool:
        """Forget an adapter and its series. False if none has the name."""
        adapter = self._llm.adapters.withdraw(name)
        self._resolved.pop(name, None)
        if adapter is None:
            return False
        await self._llm.remove_lora(adapter.number)
        if self._llm.metrics is not None:
            self._llm.metrics.forget_adapter(name)
        return True

    async def resolve(self, name: str) -> bool:
        """Look for an adapter of an unknown name with the resolver plugins, and serve it. False if none has it.

        Raises RequestError for one that cannot be used.
        """
        if not self._llm.config.lora.enable_lora or not _is_allowed() or len(name) > _MAX_NAME:
            return False
        async with self._lock:
            if self.find(name) is not None:
                return True
            for resolver in (*LoRAResolverRegistry.all(), *_filesystem()):
                request = await resolver.resolve_lora(self._llm.names[0], name)
                if request is not None:
                    await self._add_resolved(name, request.lora_path, request.base_model_name or self._llm.names[0])
                    return True
        return False

    async def _add_resolved(self, name: str, path: str, parent: str) -> None:
        """Serve an adapter that a request named.

        Raises RequestError for one that cannot be used, without reading it again while its files are the same.
        """
        files = _files(path)
        failed = self._failed.pop(name, None)
        if failed is None or failed.files != files:
            failed = await self._failure(name, path, parent, files)
        if failed is not None:
            self._failed[name] = failed
            if len(self._failed) > MAX_FAILED:
                del self._failed[next(iter(self._failed))]
            raise RequestError(failed.field, failed.message)
        self._resolved[name] = None
        if len(self._resolved) > MAX_RESOLVED:
            await self._withdraw(next(iter(self._resolved)))

    async def _failure(self, name: str, path: str, parent: str, files: _Files) -> _Failure | None:
        """Serve an adapter; return why it cannot be used, None if it can."""
        try:
            await self._add(name, path, parent)
        except RequestError as error:
            return _Failure(files, error.field, str(error))
        return None

    async def _add(self, name: str, path: str, parent: str) -> None:
        before = self.find(name)
        adapter = self._llm.adapters.new(name, path)
        await self._llm.load_adapter(adapter)
        self._llm.adapters.serve(adapter, parent)
        logger.info("serving adapter %s from %s%s", name, path, "" if before is None else ", a new version")


def _files(folder: str) -> _Files:
    """Return what tells whether an adapter was changed; nothing if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return tuple(sorted((entry.name, entry.stat().st_size, entry.stat().st_mtime_ns) for entry in entries))
    except OSError:
        return ()


def _is_allowed() -> bool:
    return (ALLOW_RUNTIME_LORA_UPDATING.read() or "").lower() in _ON


def _check_allowed() -> None:
    """Raise HttpError unless adapters may be loaded and unloaded while serving."""
    if not _is_allowed():
        raise HttpError(
            403, f"adapters are loaded at start only; start the server with {ALLOW_RUNTIME_LORA_UPDATING.name}=1"
        )


def _filesystem() -> tuple[FilesystemResolver, ...]:
    folder = LORA_RESOLVER_CACHE_DIR.read()
    return () if folder is None else (FilesystemResolver(folder),)


def _allowed_folder(path: str) -> str:
    """Return the folder of an adapter. Raises HttpError for none, RequestError outside the resolver's folder."""
    folder = Path(path)
    allowed = LORA_RESOLVER_CACHE_DIR.read()
    if not path or "\0" in path or not folder.is_dir():
        raise HttpError(404, f"{path[:200]!r} is not a folder on the server", "lora_path")
    if allowed is not None and not folder.resolve().is_relative_to(Path(allowed).resolve()):
        raise RequestError("lora_path", f"{path[:200]!r} is outside {LORA_RESOLVER_CACHE_DIR.name}")
    return str(folder)
