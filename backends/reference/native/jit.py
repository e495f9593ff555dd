"""LLVM IR -> machine code for this processor, and its call by torch's own threads.

A kernel is a function `void f(int64 *arguments)`. Its first argument is a counter from which threads take tasks, the
second the number of tasks. ctypes releases the GIL during a call.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

import llvmlite.binding as llvm
import torch
from llvmlite import ir

_KERNEL: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_lock: Final = threading.Lock()  # LLVM's global state


@cache
def _initialize() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


def _machine() -> Any:
    """Return a new machine: the engine that it is given to frees it."""
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
    """A compiled function."""

    def __init__(self, module: ir.Module | str) -> None:
        """`module`: with one function, `kernel`, or its text."""
        with _lock:
            machine = _machine()
            parsed = llvm.parse_assembly(str(module))
            parsed.verify()
            builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
            builder.getModulePassManager().run(parsed, builder)
            self._engine = llvm.create_mcjit_compiler(parsed, machine)
            self._engine.finalize_object()
        self.address = self._engine.get_function_address("kernel")
        self._call = _KERNEL(self.address)

    def __call__(self, arguments: Sequence[int], tasks: int, threads: int = 1) -> None:
        """Run tasks 0 to `tasks` - 1. `arguments`: integers and addresses, after counter and number of tasks."""
        packed = (ctypes.c_int64 * (2 + len(arguments)))(0, tasks, *arguments)
        self.run(ctypes.addressof(packed), min(threads, tasks))

    def run(self, arguments: int, threads: int) -> None:
        """Call it in a team of threads. `arguments`: address of all arguments, counters included."""
        if threads > 1 and (parallel := _gomp_parallel()) is not None:
            parallel(self.address, arguments, threads, 0)
        else:
            self._call(arguments)


@cache
def _gomp_parallel() -> Callable[..., None] | None:
    """Return the entry of a parallel region of the OpenMP runtime that torch has loaded; None if it is another one."""
    torch.get_num_threads()
    try:
        with open("/proc/self/maps") as maps:
            path = next(line.split()[-1] for line in maps if "libgomp" in line)
        parallel = ctypes.CDLL(path).GOMP_parallel
    except (OSError, StopIteration, AttributeError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    run: Callable[..., None] = parallel
    return run
