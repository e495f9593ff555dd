"""Traces of steps by jax.profiler: a folder per profile, for TensorBoard and XProf, with a trace for Perfetto; and the
server from which those capture traces by themselves."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import jax

from pagoda.common.config.groups.nested.profiler import FLAG, ProfilerConfig
from pagoda.common.errors import ConfigError

_TORCH_ONLY: Final = ("torch_profiler_record_shapes", "torch_profiler_with_memory", "torch_profiler_with_flops")


def start_server(port: int) -> Any:
    """Start JAX's profiler server; it runs as long as the returned object lives. Raise ConfigError."""
    with socket.socket() as test:  # JAX only logs that it cannot listen
        try:
            test.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            test.bind(("", port))
        except OSError as error:
            raise ConfigError("--xla-profiler-port", f"{port}: {error.strerror}; choose a free port") from None
    return jax.profiler.start_server(port)


class JaxTracer:
    """Implements common.backend.StepTracer. Raises ConfigError for settings that jax's profiler does not have."""

    def __init__(self, config: ProfilerConfig, latest: Callable[[], Any]) -> None:
        """`latest`: returns the arrays that the newest step writes."""
        for key in _TORCH_ONLY:
            if getattr(config, key):
                raise ConfigError(FLAG, f"{key} is not recorded by jax's profiler; drop it")
        if not config.torch_profiler_use_gzip:
            raise ConfigError(FLAG, "torch_profiler_use_gzip: jax's profiler compresses every trace; drop it")
        self._config = config
        self._latest = latest
        self._path = Path()

    def start(self, name: str) -> None:
        """Trace the programs that are enqueued from now on. Raises RuntimeError if jax's profiler runs already."""
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = int(self._config.torch_profiler_with_stack)
        path = self._config.folder / name
        jax.profiler.start_trace(path, profiler_options=options)
        self._path = path

    def stop(self) -> Path:
        """Wait for the steps before, write the trace and return its folder."""
        jax.block_until_ready(self._latest())
        jax.profiler.stop_trace()
        return self._path
