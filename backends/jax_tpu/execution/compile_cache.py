"""Persistent cache of compiled programs: on a hit, a start neither traces nor compiles.

XLA's own cache is consulted only after tracing and lowering, which for all buckets of a model takes longer than reading
every program from disk. Here the file name is the digest of everything a program depends on: the model's facts, the
program's key and its arguments.
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

MAX_BYTES: Final = 16 << 30
"""Maximum size of the folder; beyond it the least recently used programs are deleted."""

_SUFFIX: Final = ".xla"
_DIGEST: Final = 32  # bytes of a SHA-256

KeyT = TypeVar("KeyT")

logger = logging.getLogger(__name__)


class ProgramSet(Protocol[KeyT]):
    """All programs of one engine by key. Keys are frozen dataclasses; a key's repr names its program."""

    @property
    def model(self) -> Model:
        """Return the model that the programs compute."""
        ...

    @property
    def facts(self) -> Mapping[str, Any]:
        """Return what bundled programs depend on besides model and limits; includes `num_blocks`."""
        ...

    def __iter__(self) -> Iterator[KeyT]:
        """Yield the key of every program, the largest first, which takes longest to compile."""
        ...

    def lower(self, key: KeyT) -> jax.stages.Lowered:
        """Trace and lower a program. Not thread-safe."""
        ...

    def signature(self, key: KeyT) -> str:
        """Return everything the program depends on besides the model and its key."""
        ...


class CompileCache:
    """A folder of programs. Each file is the SHA-256 of a program followed by the program. Engines may share it."""

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES) -> None:
        self._folder, self._max_bytes = folder, max_bytes

    def load(self, program_set: ProgramSet[KeyT], keys: Iterable[KeyT]) -> dict[KeyT, jax.stages.Compiled]:
        """Load the cached programs among `keys`; damaged ones are logged and left out."""
        devices, wanted = list(program_set.model.mesh.devices.flat), list(keys)
        facts = model_facts(program_set.model)

        def load_one(key: KeyT) -> jax.stages.Compiled | None:
            path = self._path(program_set, facts, key)
            data = self._read_verified(path)
            return None if data is None else _load(path, data, devices)

        with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "pagoda-load") as pool:
            return {key: program for key, program in zip(wanted, pool.map(load_one, wanted)) if program is not None}

    def read(self, program_set: ProgramSet[KeyT], key: KeyT) -> bytes | None:
        """Return a cached program without loading it; None if it is missing or damaged."""
        return self._read_verified(self._path(program_set, model_facts(program_set.model), key))

    def store(self, program_set: ProgramSet[KeyT], key: KeyT, compiled: jax.stages.Compiled) -> None:
        """Write a program. A failure is logged and otherwise ignored."""
        path = self._path(program_set, model_facts(program_set.model), key)
        try:
            data = to_bytes(compiled)
            self._folder.mkdir(parents=True, exist_ok=True)
            partial_file = path.with_suffix(f".{os.getpid()}")
            partial_file.write_bytes(hashlib.sha256(data).digest() + data)
            partial_file.replace(path)
        except (OSError, ValueError) as error:
            logger.warning("cannot cache compiled programs in %s: %s", self._folder, error)

    def trim(self) -> None:
        """Delete the least recently used programs until the folder is within its maximum size."""
        entries = [(file.stat().st_mtime, file.stat().st_size, file) for file in self._folder.glob(f"*{_SUFFIX}")]
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries, key=lambda entry: entry[0]):
            if total <= self._max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size

    def _read_verified(self, path: Path) -> bytes | None:
        try:
            data = path.read_bytes()
        except OSError:
            return None
        digest, program = data[:_DIGEST], data[_DIGEST:]
        if hashlib.sha256(program).digest() != digest:
            logger.warning("%s is damaged: its SHA-256 differs; recompiling the program", path)
            return None
        os.utime(path)
        return program

    def _path(self, program_set: ProgramSet[KeyT], facts: dict[str, Any], key: KeyT) -> Path:
        dependencies = json.dumps([facts, repr(key), program_set.signature(key)], sort_keys=True)
        return self._folder / (hashlib.sha256(dependencies.encode()).hexdigest() + _SUFFIX)


def _load(path: Path, data: bytes, devices: list[jax.Device]) -> jax.stages.Compiled | None:
    try:
        return from_bytes(data, devices)
    except Exception as error:  # XLA raises various types for an executable it rejects
        logger.warning("%s cannot be loaded (%s); recompiling the program", path, error)
        return None
