"""Traces of steps by torch.profiler, on CPUs and NVIDIA GPUs: one file in Chrome's trace format per profile."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity

from pagoda.common.config.groups.nested.profiler import ProfilerConfig

RunInOrder = Callable[[Callable[[], Any]], Any]
"""Calls a function after the steps that were executed before, on the thread that runs them; returns its result."""

_SUFFIX: Final = ".pt.trace.json"

_COMPRESS_LEVEL: Final = 1
"""Steps wait while a trace is written: torch's own level 9 takes nine times as long for a file a quarter smaller."""


class TorchTracer:
    """Implements common.backend.StepTracer. Operators of all threads are traced.

    With `torch_profiler_with_memory` only those of the thread that `run` calls functions on: torch records no
    allocations otherwise.
    """

    def __init__(self, config: ProfilerConfig, run: RunInOrder, *, is_gpu: bool = False) -> None:
        self._config = config
        self._run = run
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]
        self._profile: Any = None
        self._name = ""

    def start(self, name: str) -> None:
        """Trace the steps that are executed from now on. Raises RuntimeError if torch's profiler runs already."""
        self._run(lambda: self._start(name))

    def stop(self) -> Path:
        """Wait for the steps before, write their trace and return its path. Raises OSError, RuntimeError."""
        path: Path = self._run(self._stop)
        return path

    def _start(self, name: str) -> None:
        config = self._config
        profile = torch.profiler.profile(
            activities=self._activities,
            with_stack=config.torch_profiler_with_stack,
            record_shapes=config.torch_profiler_record_shapes,
            profile_memory=config.torch_profiler_with_memory,
            with_flops=config.torch_profiler_with_flops,
            experimental_config=_ExperimentalConfig(profile_all_threads=not config.torch_profiler_with_memory),
        )
        profile.start()
        self._profile = profile
        self._name = name

    def _stop(self) -> Path:
        profile = self._profile
        self._profile = None
        profile.stop()
        folder = self._config.folder
        name = self._name + _SUFFIX
        plain = folder / f".{name}"
        compressed = folder / f".{name}.gz"
        try:
            profile.export_chrome_trace(str(plain))
            if not self._config.torch_profiler_use_gzip:
                return plain.rename(folder / name)
            with plain.open("rb") as source, gzip.open(compressed, "wb", _COMPRESS_LEVEL) as target:
                shutil.copyfileobj(source, target)
            return compressed.rename(folder / f"{name}.gz")
        finally:
            plain.unlink(missing_ok=True)
            compressed.unlink(missing_ok=True)
