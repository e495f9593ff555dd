"""Devices, processor, memory, and what the system grants of them."""

from __future__ import annotations

import os
from typing import Final

from pagoda.common.config import env
from pagoda.common.config.doctor import DoctorConfig
from pagoda.server.commands.checks import machine
from pagoda.server.commands.checks.finding import Finding, Findings

FEW_FILES: Final = 4096
LITTLE_MEMORY: Final = 2 * machine.GIB


def devices(config: DoctorConfig) -> Findings:
    """Device files and drivers of GPUs and TPUs."""
    nvidia = machine.device_files("nvidia[0-9]*", "nvidiactl")
    listed, problem = machine.gpus()
    if listed:
        yield from (Finding("ok", "gpu", line) for line in listed)
    elif nvidia:
        yield Finding("warn", "gpu", f"{nvidia[0]} is there, but {problem}; install the driver's tools, or its version")
    elif problem and problem != "nvidia-smi is not installed":
        yield Finding("warn", "gpu", f"{problem}; without the driver, or docker run --gpus all, no GPU can be used")
    else:
        yield Finding("ok", "gpu", "none")
    chips = machine.device_files("accel[0-9]*", "vfio/[0-9]*")
    for path in chips:
        if not os.access(path, os.R_OK | os.W_OK):
            yield Finding("warn", "tpu", f"{path} is not yours to open; run as root, or docker run --privileged")
    if not chips:
        yield Finding("ok", "tpu", "none")
    elif all(os.access(path, os.R_OK | os.W_OK) for path in chips):
        yield Finding("ok", "tpu", f"{len(chips)} chips or groups: {', '.join(map(str, chips))}")


def processor(config: DoctorConfig) -> Findings:
    """What the processor multiplies fast, and how much of it there is."""
    features = ", ".join(machine.vector_features()) or "no vector instructions known here"
    wide = "" if machine.has_bfloat16() else "; no bfloat16, so products run in float32 and weights take more memory"
    yield Finding("ok", "processor", f"{machine.processor()}: {features}{wide}")
    cores, quota = machine.cores(), machine.cpu_quota()
    if quota is not None and quota < cores and env.OMP_NUM_THREADS.read() is None:
        threads = max(1, int(quota))
        yield Finding(
            "warn", "cores", f"{cores}, but the container may use {quota:g} at a time; set OMP_NUM_THREADS={threads}"
        )
    else:
        yield Finding("ok", "cores", str(cores) if quota is None else f"{cores}, {quota:g} at a time")


def memory(config: DoctorConfig) -> Findings:
    """Memory in all and free."""
    total, free = machine.memory()
    text = f"{machine.gib(free)} of {machine.gib(total)} free"
    if free < LITTLE_MEMORY:
        yield Finding("warn", "memory", f"{text}; end other programs, or set --kv-cache-memory-bytes low")
    else:
        yield Finding("ok", "memory", text)


def limits(config: DoctorConfig) -> Findings:
    """Open files: each client's connection is one."""
    files = machine.limit("RLIMIT_NOFILE")
    if files is not None and files < FEW_FILES:
        yield Finding("warn", "open files", f"at most {files}, one per client; ulimit -n 65536 before the start")
    else:
        yield Finding("ok", "open files", "no limit" if files is None else f"at most {files}")
