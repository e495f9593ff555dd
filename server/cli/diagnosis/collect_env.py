"""`pagoda collect-env`: print what a bug report needs about a machine, without keys, names and private paths."""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
from collections.abc import Iterator
from typing import Final

import pagoda
from pagoda.backends.registry import BACKENDS
from pagoda.common.config.commands import COMMAND_SETTINGS
from pagoda.common.config.env import PREFIXES, VARIABLES, is_secret
from pagoda.common.config.tpu_host import tpu_chips
from pagoda.common.observe.redact import HIDDEN, Redactor
from pagoda.server.cli.diagnosis import machine

Lines = Iterator[tuple[str, str]]

_MORE_PACKAGES: Final = ("jaxlib", "starlette", "huggingface-hub", "nvidia-cuda-runtime-cu12", "nvidia-nccl-cu12")
_FAMILIES: Final = re.compile(
    r"(OMP|GOMP|KMP|MKL|DNNL|ONEDNN|ATEN|TORCH|PYTORCH|CUDA|NVIDIA|NCCL|TRITON|JAX|XLA|TPU|LIBTPU|HF|TRANSFORMERS"
    r"|TOKENIZERS)_\w+|(HTTPS?|NO|ALL)_PROXY|LD_PRELOAD|MALLOC_\w+",
    re.IGNORECASE,
)
"""Variables of libraries that pagoda uses."""

_LIMITS: Final = {"open files": "RLIMIT_NOFILE", "processes": "RLIMIT_NPROC", "locked memory": "RLIMIT_MEMLOCK"}


def run(args: argparse.Namespace) -> int:
    """Print the report. Returns 0."""
    redact = Redactor()
    for title, lines in (
        ("pagoda", iter([("version", pagoda.__version__)])),
        ("system", _system()),
        ("devices", _devices()),
        ("packages", _packages()),
        ("environment", _environment()),
        ("limits", _limits()),
        ("backends", _backends()),
    ):
        print(f"[{title}]")
        for name, value in lines:
            print(redact(f"{name:<28}{value}").rstrip())
        print()
    return 0


def _system() -> Lines:
    total, free = machine.memory()
    quota = machine.cpu_quota()
    yield "python", sys.version.split()[0]
    yield "platform", platform.platform()
    yield "processor", machine.processor()
    yield "features", " ".join(machine.vector_features())
    yield "cores", str(machine.cores()) + ("" if quota is None else f" (quota {quota:g})")
    yield "memory", f"{total / machine.GIB:.1f} GiB, {free / machine.GIB:.1f} GiB free"


def _devices() -> Lines:
    listed, problem = machine.gpus()
    for line in listed or [problem]:
        yield "gpu", line
    chips = [chip.name.lower() for chip in tpu_chips()]
    yield "tpu", " ".join([*chips, *map(str, machine.tpu_files())]) if chips else "none"


def _packages() -> Lines:
    names = [re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in machine.project()[1]]
    for name in sorted({*names, *_MORE_PACKAGES} - {"pagoda"}):
        if (version := machine.version(name)) is not None:
            yield name, version


def _environment() -> Lines:
    """Yield the variables that are set: known ones, those of settings, and those of libraries.

    Other PAGODA_ and VLLM_ variables are listed by name only: their values may be secret.
    """
    known_names = {name for variable in VARIABLES for name in variable.names}
    known_names |= {setting.variable for settings in COMMAND_SETTINGS.values() for setting in settings.values()}
    for name in sorted(os.environ):
        if name in known_names or _FAMILIES.fullmatch(name):
            yield name, HIDDEN if is_secret(name) else repr(os.environ[name])
        elif name.startswith(PREFIXES):
            yield name, f"{HIDDEN} (not read)"


def _limits() -> Lines:
    for name, resource in _LIMITS.items():
        limit = machine.limit(resource)
        yield name, "unlimited" if limit is None else str(limit)


def _backends() -> Lines:
    for entry in BACKENDS:
        yield entry.name, entry.obstacle() or "available"
