"""Compile all programs before serving, in a thread pool.

Lowering happens in the calling thread because tracing is not thread-safe. A program missing while serving is a bug in
the bucket shapes: an error if `strict`, else it is logged, counted and compiled then.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from tqdm import tqdm

from pagoda import __version__
from pagoda.backends.jax_tpu.model.model import StepModel
from pagoda.common.config.memory import available_bytes
from pagoda.common.models.transformers_spec import AnySpec, TransformersSpec

logger = logging.getLogger(__name__)

COMPILE_BYTES: Final = 2 << 30
"""Memory of this host for a program that is being compiled: the largest of an 8B model takes 1 to 1.5 GiB."""

_STACK_BYTES: Final = 64 << 20  # the compiler's recursion exceeds the default thread stack

# Serialised programs, and the facts that they depend on.
#
# Under another compiler, model or mesh an executable silently computes wrong results, so the facts must be stored with
# it. Deserialising uses pickle: load trusted files only.

_FLAGS: Final = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_ROOT: Final = Path(__file__).parents[3]
_SOURCES: Final = ("backends/jax_tpu", "kernels_pallas", "common")


def to_bytes(compiled: jax.stages.Compiled) -> bytes:
    """Serialise the executable with the pytree structure of its arguments and results."""
    return pickle.dumps(serialize_executable.serialize(compiled))


def from_bytes(data: bytes, devices: Sequence[jax.Device]) -> jax.stages.Compiled:
    """Load a program on the devices it was compiled for. Raises whatever pickle and XLA raise."""
    payload, arguments, results = pickle.loads(data)
    return serialize_executable.deserialize_and_load(payload, arguments, results, execution_devices=devices)


@contextmanager
def serialisable() -> Iterator[None]:
    """Disable XLA's own compilation cache, so that programs compiled inside can be serialised.

    An XLA:CPU program that came from that cache is serialised without its functions and fails when run (jax 0.10.2).
    """
    before = jax.config.values["jax_enable_compilation_cache"]
    _use_xla_cache(False)
    try:
        yield
    finally:
        _use_xla_cache(before)


def _use_xla_cache(use: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", use)
    compilation_cache.reset_cache()  # the setting is cached


def blocks_of(facts: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the KV blocks of each pool that programs with these facts were compiled for."""
    number = facts["num_blocks"]
    return (number,) if isinstance(number, int) else tuple(map(int, number))


def model_facts(model: StepModel) -> dict[str, Any]:
    """Return what every program of a model depends on, JSON-serialisable: versions, sources, flags, devices, model."""
    device = model.mesh.devices.flat[0]
    return {
        "pagoda": __version__,
        "sources": sources(),
        "jax": _version("jax"),
        "jaxlib": _version("jaxlib"),
        "libtpu": _version("libtpu") if device.platform == "tpu" else None,
        **{flag: os.environ.get(flag, "") for flag in _FLAGS},
        "device": device.device_kind,
        "processor": _processor() if device.platform == "cpu" else None,
        "tensor_parallel_size": model.tensor,
        "data_parallel_size": model.shards,
        "devices": [each.id for each in model.mesh.devices.flat],
        "model": fingerprint(model.spec),
        **_library_facts(model.spec),
        "dtype": model.dtype.name,
        "quantization": {".".join(map(str, path)): repr(form) for path, form in model.formats.items()},
        "kv_cache_dtype": model.kernel.cache_dtype,
    }


def _library_facts(spec: AnySpec) -> dict[str, Any]:
    """Return what programs depend on if their layers are transformers' code."""
    if not isinstance(spec, TransformersSpec):
        return {}
    code = sorted(spec.source.folder.rglob("*.py")) if spec.source.custom_code else []
    return {
        **{package: _version(package) for package in ("torch", "torchax", "transformers")},
        "code": hashlib.sha256(b"\0".join(file.read_bytes() for file in code)).hexdigest(),
    }


def fingerprint(spec: AnySpec) -> str:
    """Return a 16-digit SHA-256 prefix of the model spec. Weights are not included."""
    return hashlib.sha256(repr(spec).encode()).hexdigest()[:16]


@cache
def sources() -> str:
    """Return a 16-digit SHA-256 prefix of the source files that programs are traced from."""
    digest = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((_ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".json"):
                digest.update(os.fspath(path.relative_to(_ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _version(package: str) -> str | None:
    return importlib.metadata.version(package) if importlib.util.find_spec(package) else None


def _processor() -> str:
    """Return a digest of the CPU's instruction set features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), os.uname().machine)
    return hashlib.sha256(features.encode()).hexdigest()[:12]


MAX_BYTES: Final = 16 << 30
"""Maximum size of the folder; beyond it the least recently used programs are deleted."""

_SUFFIX: Final = ".xla"
_DIGEST: Final = 32  # bytes of a SHA-256

KeyT = TypeVar("KeyT")


class ProgramSet(Protocol[KeyT]):
    """All programs of one engine by key. Keys are frozen dataclasses; a key's repr names its program."""

    @property
    def model(self) -> StepModel:
        """Return the model that the programs compute."""
        ...

    @property
    def facts(self) -> Mapping[str, Any]:
        """Return what bundled programs depend on besides model and limits; includes `num_blocks`, see `blocks_of`."""
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
    """A folder of compiled programs: on a hit, a start neither traces nor compiles. Engines may share it.

    XLA's own cache is consulted only after tracing and lowering, which for all buckets of a model takes longer than
    reading every program from disk. Here the file name is the digest of everything a program depends on: the model's
    facts, the program's key and its arguments. A file is the SHA-256 of a program followed by the program.
    """

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES) -> None:
        self.folder = folder
        self._max_bytes = max_bytes

    def load(self, program_set: ProgramSet[KeyT], keys: Iterable[KeyT]) -> dict[KeyT, jax.stages.Compiled]:
        """Load the cached programs among `keys`; damaged ones are logged and left out."""
        devices = list(program_set.model.mesh.devices.flat)
        wanted = list(keys)
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
            self.folder.mkdir(parents=True, exist_ok=True)
            partial_file = path.with_suffix(f".{os.getpid()}")
            partial_file.write_bytes(hashlib.sha256(data).digest() + data)
            partial_file.replace(path)
        except (OSError, ValueError) as error:
            logger.warning("cannot cache compiled programs in %s: %s", self.folder, error)

    def trim(self) -> None:
        """Delete the least recently used programs until the folder is within its maximum size."""
        entries = [(file.stat().st_mtime, file.stat().st_size, file) for file in self.folder.glob(f"*{_SUFFIX}")]
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
        digest = data[:_DIGEST]
        program = data[_DIGEST:]
        if hashlib.sha256(program).digest() != digest:
            logger.warning("%s is damaged: its SHA-256 differs; recompiling the program", path)
            return None
        os.utime(path)
        return program

    def _path(self, program_set: ProgramSet[KeyT], facts: dict[str, Any], key: KeyT) -> Path:
        dependencies = json.dumps([facts, repr(key), program_set.signature(key)], sort_keys=True)
        return self.folder / (hashlib.sha256(dependencies.encode()).hexdigest() + _SUFFIX)


def _load(path: Path, data: bytes, devices: list[jax.Device]) -> jax.stages.Compiled | None:
    try:
        return from_bytes(data, devices)
    except Exception as error:  # XLA raises various types for an executable it rejects
        logger.warning("%s cannot be loaded (%s); recompiling the program", path, error)
        return None


class RecompileError(RuntimeError):
    """A program was missing after warm-up."""


@dataclass(frozen=True, slots=True)
class JaxCompileReport:
    """Result of `CompiledPrograms.prepare`."""

    programs: int
    cached: int  # of them from the compile cache
    seconds: float
    bundled: int = 0  # of them from a bundle

    def __str__(self) -> str:
        if self.bundled:
            return f"{self.bundled} programs from the bundle"
        return f"{self.programs} programs in {self.seconds:.1f} s, {self.cached} of them from the compile cache"


def compile_threads() -> int:
    """Return the number of programs to compile at a time: one per core, as far as the memory that is free suffices."""
    return max(1, min(len(os.sched_getaffinity(0)), available_bytes() // COMPILE_BYTES))


CompiledT = TypeVar("CompiledT")
SetT = TypeVar("SetT", bound=ProgramSet[Any])


def compile_all(
    program_set: ProgramSet[KeyT], keys: Iterable[KeyT], compile: Callable[[KeyT, jax.stages.Lowered], CompiledT]
) -> Iterator[tuple[KeyT, CompiledT]]:
    """Lower in this thread and compile in `compile_threads`; yield programs as they complete."""
    wanted = list(keys)
    previous = threading.stack_size(_STACK_BYTES)
    try:
        with ThreadPoolExecutor(compile_threads(), "pagoda-compile") as pool:
            jobs = {pool.submit(compile, key, program_set.lower(key)): key for key in wanted}
            completed = as_completed(jobs)
            for job in tqdm(completed, "Compiling", len(jobs), disable=not sys.stderr.isatty(), file=sys.stderr):
                yield jobs[job], job.result()
    finally:
        threading.stack_size(previous)


class CompiledPrograms(Generic[SetT, KeyT]):
    """The compiled programs of one engine, by key."""

    def __init__(self, program_set: SetT, *, strict: bool = False, cache: CompileCache | None = None) -> None:
        self.program_set = program_set
        self.strict = strict
        self._cache = cache
        self.recompiles = 0  # programs compiled after `prepare`
        self._compiled: dict[KeyT, jax.stages.Compiled] = {}

    def __getitem__(self, key: KeyT) -> jax.stages.Compiled:
        """Return a program. Raise RecompileError if it is missing and `strict`."""
        program = self._compiled.get(key)
        return self._recompile(key) if program is None else program

    def prepare(self, keys: Iterable[KeyT] | None = None) -> JaxCompileReport:
        """Compile these programs, by default the whole program set, with a progress bar on a terminal."""
        begin = time.perf_counter()
        cache = self._cache
        wanted = list(self.program_set if keys is None else keys)
        cached = {} if cache is None else cache.load(self.program_set, wanted)
        self._compiled.update(cached)
        missing = [key for key in wanted if key not in cached]
        with nullcontext() if cache is None else serialisable():
            for key, compiled in compile_all(self.program_set, missing, lambda _, lowered: lowered.compile()):
                self._compiled[key] = compiled
                if cache is not None:
                    cache.store(self.program_set, key, compiled)
        if missing and cache is not None:
            cache.trim()
        return JaxCompileReport(len(wanted), len(cached), time.perf_counter() - begin)

    def adopt(self, programs: Mapping[KeyT, jax.stages.Compiled]) -> JaxCompileReport:
        """Add programs loaded from a bundle."""
        self._compiled.update(programs)
        return JaxCompileReport(len(programs), 0, 0.0, len(programs))

    def clear(self) -> None:
        """Release all programs."""
        self._compiled.clear()

    def _recompile(self, key: KeyT) -> jax.stages.Compiled:
        if self.strict:
            raise RecompileError(f"{key} was not compiled before serving")
        self.recompiles += 1
        logger.error("compiling %s while serving: it was not prepared; please report this", key)
        self._compiled[key] = self.program_set.lower(key).compile()
        return self._compiled[key]
