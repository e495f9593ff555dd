"""LLVM IR -> machine code for this processor, and its call by torch's own threads.

A kernel is a function `void f(int64 *words)`. Its first words are counters from which threads take tasks, 0 at first.
ctypes releases the GIL during a call. The calls of a step can be recorded, to be repeated by `program.Program`.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import llvmlite.binding as llvm
import numpy as np
import torch
from llvmlite import ir
from torch import Tensor

_KERNEL: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_ALIGNMENT: Final = 64
_lock: Final = threading.Lock()  # LLVM's global state
_numbers: Final = itertools.count()  # of kernels, under the lock


@cache
def _initialize() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


@cache
def _machine() -> Any:
    """Return the machine that kernels are compiled for."""
    return _new_machine()


@cache
def _engine() -> Any:
    """Return the engine that holds the machine code of all kernels: one of its own for each takes 2 MB."""
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), _new_machine())  # which frees its machine


def _new_machine() -> Any:
    _initialize()
    features = llvm.get_host_cpu_features()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features.flatten(), opt=3
    )


@cache
def has_feature(name: str) -> bool:
    """Return whether the processor has an instruction set, by LLVM's name of it."""
    return bool(llvm.get_host_cpu_features().get(name, False))


class Kernel:
    """A compiled function. Its machine code stays for good."""

    def __init__(self, module: ir.Module) -> None:
        """`module`: with one function, `kernel`."""
        with _lock:
            machine = _machine()
            engine = _engine()
            name = f"kernel{next(_numbers)}"
            parsed = llvm.parse_assembly(str(module))
            parsed.get_function("kernel").name = name
            parsed.verify()
            builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
            builder.getModulePassManager().run(parsed, builder)
            engine.add_object_file(llvm.ObjectFileRef.from_data(machine.emit_object(parsed)))
            engine.finalize_object()
            self.address = engine.get_function_address(name)
        self._call = _KERNEL(self.address)

    def __call__(self, arguments: Sequence[int], tasks: int, threads: int = 1) -> None:
        """Run tasks 0 to `tasks` - 1. `arguments`: integers and addresses, after counter and number of tasks."""
        self.run(array("q", (0, tasks, *arguments)), min(threads, tasks))

    def run(self, words: array[int], threads: int) -> None:
        """Call it in a team of threads. `words`: all of them, counters included."""
        recording = _recording.get()
        if recording is not None:
            recording.calls.append((self.address, words[:]))
        self.call(words.buffer_info()[0], threads)

    def call(self, words: int, threads: int) -> None:
        """Call it in a team of threads. `words`: their address."""
        if threads > 1 and (parallel := _gomp_parallel()) is not None:
            parallel(self.address, words, threads, 0)
        else:
            self._call(words)


class StepMemory:
    """Memory for what the kernels of recorded steps write. It is used again when no tensor refers to it any more.

    A step that is repeated writes it in the same order, so all recorded steps of a thread can have one memory.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = {}

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an array at a multiple of _ALIGNMENT."""
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        size = 1 << (count * dtype.itemsize - 1).bit_length()
        free = self._free.setdefault(size, [])
        memory = free.pop() if free else np.empty(size + _ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        used = memory[start : start + size]  # lives as long as the tensor and its views
        weakref.finalize(used, free.append, memory)
        return torch.frombuffer(used, dtype=dtype, count=count).view(*shape)


@dataclass(frozen=True, slots=True)
class Recording:
    """The calls of kernels in one thread, and the memory that they write."""

    memory: StepMemory
    calls: list[tuple[int, array[int]]] = field(default_factory=list)  # address of the kernel, its words


_recording: Final[ContextVar[Recording | None]] = ContextVar("recording", default=None)


@contextmanager
def record(memory: StepMemory) -> Iterator[Recording]:
    """Record the calls of this thread meanwhile; they run, too. `memory`: what they write to."""
    token = _recording.set(recording := Recording(memory))
    try:
        yield recording
    finally:
        _recording.reset(token)


def allocate(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return an array that a kernel writes."""
    recording = _recording.get()
    return torch.empty(shape, dtype=dtype) if recording is None else recording.memory.take(shape, dtype)


@cache
def gomp() -> ctypes.CDLL | None:
    """Return the OpenMP runtime that torch has loaded; None if it is not libgomp."""
    torch.get_num_threads()
    try:
        with open("/proc/self/maps") as maps:
            path = next(line.split()[-1] for line in maps if "libgomp" in line)
        return ctypes.CDLL(path)
    except (OSError, StopIteration):
        return None


@cache
def _gomp_parallel() -> Callable[..., None] | None:
    """Return the entry of a parallel region; None if there is none."""
    parallel = getattr(gomp(), "GOMP_parallel", None)
    if parallel is None:
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    run: Callable[..., None] = parallel
    return run
