"""What XProf and TensorBoard see of the engine: the profiler's server, and scopes in the operations' names."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("flax")

import support.devices.jax_devices  # noqa: F401
from support.engines.backend_options import make_options
from support.engines.reference_driver import tiny_spec

from pagoda.backends.jax_tpu import backend as backend_module
from pagoda.backends.jax_tpu.ahead_of_time.compile import find_target, model_for
from pagoda.backends.jax_tpu.backend import JaxBackend, create
from pagoda.backends.jax_tpu.execution.program_sets import StepProgramSet
from pagoda.backends.jax_tpu.execution.step_programs import Forward
from pagoda.backends.jax_tpu.profiler import start_server
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.compilation import CompilationConfig
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.steps.shapes import StepShapes
from pagoda.common.errors import ConfigError
from pagoda.server.startup.engine import program_options

LIMITS = Limits(max_model_len=64, max_num_batched_tokens=16, max_num_seqs=8, block_size=8)


def test_the_parts_of_a_step_are_named() -> None:
    spec = tiny_spec()
    model = model_for(find_target("cpu"), spec, LIMITS, kv_layout(spec, 8), "float32", 1)
    program_set = StepProgramSet(model, StepShapes.of(LIMITS, 1), (40,), LIMITS.max_num_seqs)
    key = next(key for key in program_set if isinstance(key, Forward))
    text = program_set.lower(key).as_text(debug_info=True)
    for name in ("embed", "Attention", "MlpFfn", "head"):
        assert f"/{name}/" in text or f'"{name}/' in text, name


def listening() -> set[int]:
    """Ports on which this process listens."""
    own = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}


def profiled(port: int) -> JaxBackend:
    """Return a backend that compiles nothing when it warms up."""
    programs = program_options(CompilationConfig(xla_profiler_port=port, xla_cache_path=""), "jax_tpu")
    backend = create(replace(make_options(tiny_spec(), limits=LIMITS), programs=programs))
    backend.init_cache((9,))
    backend.prepare = lambda: None  # type: ignore[method-assign, assignment, return-value]
    return backend


@pytest.mark.setting("--xla-profiler-port")
def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        backend = profiled(port)
        with pytest.raises(ConfigError, match=f"--xla-profiler-port: {port}: .*; choose a free port"):
            backend.warmup()
        backend.close()
    with pytest.raises(ConfigError, match="--xla-profiler-port: 70000 is not a port"):
        CompilationConfig(xla_profiler_port=70000)


def test_the_profiler_server_listens_from_warm_up_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a port that it gets from the system here."""
    asked: list[int] = []
    monkeypatch.setattr(backend_module, "start_server", lambda port: asked.append(port) or start_server(0))
    before, backend = listening(), profiled(9012)
    backend.warmup()
    try:
        (port,) = listening() - before
        socket.create_connection(("localhost", port), timeout=60).close()
    finally:
        backend.close()
    assert asked == [9012]
    assert listening() == before
