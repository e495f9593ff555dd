"""Programs kept from one start to the next, so that the second neither traces nor compiles.

XLA's own cache is asked after tracing and lowering, which for a model's ladder takes longer than reading every program
from disk. Here a program's name is the digest of all it depends on: the model's facts, its key and its arguments.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import jax

from pagoda.backends.jax_tpu.execution.executable import from_bytes, model_facts, to_bytes
from pagoda.backends.jax_tpu.model.model import Model

# What compiles, keeps and bundles programs asks of those who know them, of generation and of pooling alike.

KeyT = TypeVar("KeyT")


class ProgramSet(Protocol[KeyT]):
    """Every program of one engine, by key. Keys are frozen dataclasses: their repr names a program."""

    @property
    def model(self) -> Model:
        """What the programs compute."""
        ...

    @property
    def facts(self) -> Mapping[str, Any]:
        """What bundled programs depend on besides the model and the limits; `num_blocks` is among it."""
        ...

    def __iter__(self) -> Iterator[KeyT]:
        """The key of every program, the largest first."""
        ...

    def lower(self, key: KeyT) -> jax.stages.Lowered:
        """The program of that key, traced. Call from one thread."""
        ...

    def signature(self, key: KeyT) -> str:
        """All that the program depends on besides the model and its key."""
        ...


MOST_BYTES: Final = 16 << 30
"""What the folder may hold; beyond that the programs used longest ago go."""

_SUFFIX: Final = ".xla"
_DIGEST: Final = 32

logger = logging.getLogger(__name__)


class CompileCache:
    """A folder of programs, each file the SHA-256 of what follows, then the program. Several engines may share it."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self._folder, self._most_bytes = folder, most_bytes

    def load(self, catalogue: ProgramSet[KeyT], keys: Iterable[KeyT]) -> dict[KeyT, jax.stages.Compiled]:
        """Those of the programs that are there and whole, loaded; damaged ones are reported and left out."""
        devices, wanted = list(catalogue.model.mesh.devices.flat), list(keys)
        facts = model_facts(catalogue.model)

        def one(key: KeyT) -> jax.stages.Compiled | None:
            path = self._path(catalogue, facts, key)
            data = self._verified(path)
            return None if data is None else _load(path, data, devices)

        with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "pagoda-load") as pool:
            return {key: found for key, found in zip(wanted, pool.map(one, wanted)) if found is not None}

    def read(self, catalogue: ProgramSet[KeyT], key: KeyT) -> bytes | None:
        """One program as it was kept, not loaded; None when it is not there or damaged."""
        return self._verified(self._path(catalogue, model_facts(catalogue.model), key))

    def keep(self, catalogue: ProgramSet[KeyT], key: KeyT, compiled: jax.stages.Compiled) -> None:
        """Write a program. What cannot be written is reported once and done without."""
        path = self._path(catalogue, model_facts(catalogue.model), key)
        try:
            data = to_bytes(compiled)
            self._folder.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(f".{os.getpid()}")
            part.write_bytes(hashlib.sha256(data).digest() + data)
            part.replace(path)
        except (OSError, ValueError) as error:
            logger.warning("compiled programs are not kept in %s: %s", self._folder, error)

    def trim(self) -> None:
        """Delete the programs used longest ago until the rest fits."""
        found = [(entry.stat().st_mtime, entry.stat().st_size, entry) for entry in self._folder.glob(f"*{_SUFFIX}")]
        size = sum(each for _, each, _ in found)
        for _, bytes_, path in sorted(found, key=lambda each: each[0]):
            if size <= self._most_bytes:
                break
            path.unlink(missing_ok=True)
            size -= bytes_

    def _verified(self, path: Path) -> bytes | None:
        try:
            data = path.read_bytes()
        except OSError:
            return None
        digest, program = data[:_DIGEST], data[_DIGEST:]
        if hashlib.sha256(program).digest() != digest:
            logger.warning("%s is damaged: its SHA-256 differs; the program is compiled anew", path)
            return None
        os.utime(path)
        return program

    def _path(self, catalogue: ProgramSet[KeyT], facts: dict[str, Any], key: KeyT) -> Path:
        depends = json.dumps([facts, repr(key), catalogue.signature(key)], sort_keys=True)
        return self._folder / (hashlib.sha256(depends.encode()).hexdigest() + _SUFFIX)


def _load(path: Path, data: bytes, devices: list[jax.Device]) -> jax.stages.Compiled | None:
    try:
        return from_bytes(data, devices)
    except Exception as error:  # whatever XLA says of an executable that it does not take
        logger.warning("%s cannot be loaded (%s); the program is compiled anew", path, error)
        return None
