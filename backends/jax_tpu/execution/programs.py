"""Programs compiled before serving, by several threads, and never after.

Lowering happens in the calling thread (tracing is not thread-safe), compiling in a pool. A program that is asked for
although it was not prepared is a fault of the shapes: an error when `strict`, else counted, logged and compiled late.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import jax
from tqdm import tqdm

from pagoda.backends.jax_tpu.execution.compile_cache import CompileCache, KeyT, ProgramSet
from pagoda.backends.jax_tpu.execution.executable import writable

logger = logging.getLogger(__name__)

_STACK: Final = 64 << 20  # the compiler recurses deeper than a thread's usual stack


class RecompileError(RuntimeError):
    """A program was missing after warm-up."""


@dataclass(frozen=True, slots=True)
class JaxCompileReport:
    """What preparing cost. `cached`: programs from the compile cache; `bundled`: from a bundle."""

    programs: int
    cached: int
    seconds: float
    bundled: int = 0

    def __str__(self) -> str:
        if self.bundled:
            return f"{self.bundled} programs from the bundle"
        return f"{self.programs} programs in {self.seconds:.1f} s, {self.cached} of them from the compile cache"


CompiledT = TypeVar("CompiledT")
SetT = TypeVar("SetT", bound=ProgramSet[Any])


def compile_all(
    catalogue: ProgramSet[KeyT], keys: Iterable[KeyT], compile: Callable[[jax.stages.Lowered], CompiledT]
) -> Iterator[tuple[KeyT, CompiledT]]:
    """Lower here, compile in as many threads as there are cores; programs in the order in which they are done."""
    wanted = list(keys)
    previous = threading.stack_size(_STACK)
    try:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "pagoda-compile") as pool:
            jobs = {pool.submit(compile, catalogue.lower(key)): key for key in wanted}
            done = as_completed(jobs)
            for job in tqdm(done, "Compiling", len(jobs), disable=not sys.stderr.isatty(), file=sys.stderr):
                yield jobs[job], job.result()
    finally:
        threading.stack_size(previous)


class CompiledPrograms(Generic[SetT, KeyT]):
    """The compiled programs of one engine. `recompiles` counts those compiled after `prepare`."""

    def __init__(self, catalogue: SetT, *, strict: bool = False, cache: CompileCache | None = None) -> None:
        self.catalogue, self.strict, self._cache = catalogue, strict, cache
        self.recompiles = 0
        self._compiled: dict[KeyT, jax.stages.Compiled] = {}

    def __getitem__(self, key: KeyT) -> jax.stages.Compiled:
        """The program of that key. Raises RecompileError when it is missing and `strict`."""
        found = self._compiled.get(key)
        return self._late(key) if found is None else found

    def prepare(self, keys: Iterable[KeyT] | None = None) -> JaxCompileReport:
        """Compile these programs, by default all of the catalogue, with a bar where stderr is a terminal."""
        begin, cache = time.perf_counter(), self._cache
        wanted = list(self.catalogue if keys is None else keys)
        cached = {} if cache is None else cache.load(self.catalogue, wanted)
        self._compiled.update(cached)
        missing = [key for key in wanted if key not in cached]
        with nullcontext() if cache is None else writable():
            for key, compiled in compile_all(self.catalogue, missing, jax.stages.Lowered.compile):
                self._compiled[key] = compiled
                if cache is not None:
                    cache.keep(self.catalogue, key, compiled)
        if missing and cache is not None:
            cache.trim()
        return JaxCompileReport(len(wanted), len(cached), time.perf_counter() - begin)

    def adopt(self, programs: Mapping[KeyT, jax.stages.Compiled]) -> JaxCompileReport:
        """Take programs that were compiled elsewhere."""
        self._compiled.update(programs)
        return JaxCompileReport(len(programs), 0, 0.0, len(programs))

    def clear(self) -> None:
        """Let go of all of them."""
        self._compiled.clear()

    def _late(self, key: KeyT) -> jax.stages.Compiled:
        if self.strict:
            raise RecompileError(f"{key} was not compiled before serving")
        self.recompiles += 1
        logger.error("compiling %s while serving: it was not prepared; please report this", key)
        self._compiled[key] = self.catalogue.lower(key).compile()
        return self._compiled[key]
