"""Compile all programs before serving, in a thread pool.

Lowering happens in the calling thread because tracing is not thread-safe. A program missing while serving is a bug in
the bucket shapes: an error if `strict`, else it is logged, counted and compiled then.
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
from pagoda.backends.jax_tpu.execution.executable import serialisable

logger = logging.getLogger(__name__)

_STACK_BYTES: Final = 64 << 20  # the compiler's recursion exceeds the default thread stack


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


CompiledT = TypeVar("CompiledT")
SetT = TypeVar("SetT", bound=ProgramSet[Any])


def compile_all(
    program_set: ProgramSet[KeyT], keys: Iterable[KeyT], compile: Callable[[jax.stages.Lowered], CompiledT]
) -> Iterator[tuple[KeyT, CompiledT]]:
    """Lower in this thread and compile in one thread per core; yield programs as they complete."""
    wanted = list(keys)
    previous = threading.stack_size(_STACK_BYTES)
    try:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "pagoda-compile") as pool:
            jobs = {pool.submit(compile, program_set.lower(key)): key for key in wanted}
            completed = as_completed(jobs)
            for job in tqdm(completed, "Compiling", len(jobs), disable=not sys.stderr.isatty(), file=sys.stderr):
                yield jobs[job], job.result()
    finally:
        threading.stack_size(previous)


class CompiledPrograms(Generic[SetT, KeyT]):
    """The compiled programs of one engine, by key."""

    def __init__(self, program_set: SetT, *, strict: bool = False, cache: CompileCache | None = None) -> None:
        self.program_set, self.strict, self._cache = program_set, strict, cache
        self.recompiles = 0  # programs compiled after `prepare`
        self._compiled: dict[KeyT, jax.stages.Compiled] = {}

    def __getitem__(self, key: KeyT) -> jax.stages.Compiled:
        """Return a program. Raise RecompileError if it is missing and `strict`."""
        program = self._compiled.get(key)
        return self._recompile(key) if program is None else program

    def prepare(self, keys: Iterable[KeyT] | None = None) -> JaxCompileReport:
        """Compile these programs, by default the whole program set, with a progress bar on a terminal."""
        begin, cache = time.perf_counter(), self._cache
        wanted = list(self.program_set if keys is None else keys)
        cached = {} if cache is None else cache.load(self.program_set, wanted)
        self._compiled.update(cached)
        missing = [key for key in wanted if key not in cached]
        with nullcontext() if cache is None else serialisable():
            for key, compiled in compile_all(self.program_set, missing, jax.stages.Lowered.compile):
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
