"""The machine that a benchmark ran on; which kernels serve depends on its instruction sets."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any, Final

_INSTRUCTIONS: Final = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "bf16")
_BFLOAT16: Final = {"avx512_bf16", "amx_bf16", "bf16"}


def machine(info: str = "/proc/cpuinfo") -> dict[str, Any]:
    """Return processor, cores that may be used, instruction sets and load of this machine.

    `info`: where Linux describes its processors; elsewhere the instruction sets are empty.
    """
    try:
        lines = Path(info).read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": fields.get("model name") or platform.processor() or platform.machine(),
        "cores": cores,
        "instructions": [name for name in _INSTRUCTIONS if name in flags],
        "bf16_instructions": bool(flags & _BFLOAT16),
        "load": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else [],
        "python": platform.python_version(),
    }


def processor_kind(facts: dict[str, Any]) -> str:
    """Return a line about the machine of `machine()`."""
    kind = "with" if facts["bf16_instructions"] else "without"
    return f"{facts['cpu']}, {facts['cores']} cores, {kind} bfloat16 instructions"
