"""Runs Python that launches Triton kernels as on a GPU, up to the launch: arguments are bound, programs compiled.

Tensors stay on the CPU, nothing is executed. What is compiled for which types, and whether a call reuses it, is then
what it would be on the GPU. Must run where TRITON_INTERPRET is not set: `programs(code)` starts such a process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


def programs(code: str) -> list[list[str]]:
    """[kernel, name of its compiled program] of every launch of `code`, in order."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__, code], env=environment, capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    found: list[list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


class AbsentGpu:
    """What Triton asks of a driver: an H100 that nobody has."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main(code: str) -> None:
    """In a process of its own."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    launched: list[tuple[str, Any]] = []
    run = JITFunction.run

    def bind(self: JITFunction, *args: Any, **how: Any) -> Any:
        program = run(self, *args, **{**how, "warmup": True})
        launched.append((self.__name__, program))
        return program

    driver.set_active(AbsentGpu())
    JITFunction.run = bind
    exec(code, {})
    numbers: dict[int, str] = {}
    print(json.dumps([[name, numbers.setdefault(id(made), f"{name} {len(numbers)}")] for name, made in launched]))


if __name__ == "__main__":
    main(sys.argv[1])
