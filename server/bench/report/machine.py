"""The machine that a benchmark ran on; which kernels serve depends on its instruction sets."""

from __future__ import annotations

import os
import platform
from typing import Any

from pagoda.server.cli.diagnosis.machine import cores, has_bfloat16, processor, vector_features


def machine() -> dict[str, Any]:
    """Return processor, cores that may be used, instruction sets and load of this machine."""
    return {
        "cpu": processor(),
        "cores": cores(),
        "instructions": vector_features(),
        "bf16_instructions": has_bfloat16(),
        "load": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else [],
        "python": platform.python_version(),
    }


def processor_kind(facts: dict[str, Any]) -> str:
    """Return a line about the machine of `machine()`."""
    kind = "with" if facts["bf16_instructions"] else "without"
    return f"{facts['cpu']}, {facts['cores']} cores, {kind} bfloat16 instructions"
