"""From a configuration to a running engine.

    resolve (checkpoint, model spec, limits, KV layout) -> meet the other hosts or start the other ranks, if any
    -> backend -> weights -> memory plan -> KV cache -> warm-up

The backend's framework is imported in a thread while the checkpoint is opened and its weights are prefetched.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Final

from pagoda.backends.modules import BackendModule
from pagoda.backends.registry import choose_backend, load_backend, runs_ranks
from pagoda.common.config.defaults import Usage
from pagoda.common.config.engine import EngineConfig
from pagoda.common.errors import ConfigError
from pagoda.common.weights.hub import is_local
from pagoda.server.plugins import load_general_plugins
from pagoda.server.processing.inputs import open_tokenizer
from pagoda.server.settings.resolve import Resolved, open_model, resolve
from pagoda.server.startup.build import assemble, check_assembly
from pagoda.server.startup.hosts import check_hosts, meeting
from pagoda.server.startup.parameters import read_weights
from pagoda.server.startup.ranks import check_ranks, leading
from pagoda.server.startup.worker_group import BuiltEngine, Phases, Prefetch, WorkerGroup

FLAG: Final = "--cpu-omp-threads-bind"


@contextmanager
def pinned(cores: frozenset[int] | None) -> Iterator[None]:
    """A context in which new threads are pinned to these cores; None: not pinned. Raises ConfigError.

    A thread inherits the cores of the thread that starts it; this thread's own are restored.
    """
    if cores is None:
        yield
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError(FLAG, "this system cannot pin threads to cores; use auto")
    before = os.sched_getaffinity(0)
    if not cores <= before:
        missing = ", ".join(map(str, sorted(cores - before)))
        raise ConfigError(FLAG, f"core {missing} is not available to this process; choose from {ranges(before)}")
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def ranges(numbers: set[int]) -> str:
    """Format {0, 1, 2, 5} as 0-2,5."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ",".join("-".join(map(str, span)) for span in spans)


READ_AHEAD_BYTES: Final = 512 << 20

Gather = Callable[[Resolved, Usage], AbstractContextManager[WorkerGroup | None]]


def connect_workers(resolved: Resolved, usage: Usage) -> AbstractContextManager[WorkerGroup | None]:
    """Return the context in which the other ranks or hosts are connected, while the engine is built."""
    if runs_ranks(resolved.backend, resolved.config.parallel):
        return leading(resolved, usage)
    return meeting(resolved)


def build_engine(config: EngineConfig, usage: Usage, gather: Gather = connect_workers) -> BuiltEngine:
    """Load the model and warm it up. Raises ConfigError, ModelError or WeightError, with cause and remedy."""
    with pinned(config.runtime.cores):
        return _build(config, usage, gather)


def _build(config: EngineConfig, usage: Usage, gather: Gather) -> BuiltEngine:
    phases = Phases()
    load_general_plugins(config)
    importing = import_backend(choose_backend(config.model.backend))
    with phases("open checkpoint"):
        resolved = _resolved(config, usage)
    with gather(resolved, usage) as workers:
        return _load(importing, resolved, workers, phases)


def check_engine(config: EngineConfig, usage: Usage, sources: Mapping[str, str] | None = None) -> Resolved:
    """Return what `build_engine` would load. Raises what it raises before it reads weights or meets other hosts.

    `sources`: setting -> where it was set. Opens the tokenizer too.
    """
    with pinned(config.runtime.cores):
        load_general_plugins(config)
        resolved = _resolved(config, usage, sources)
        if runs_ranks(resolved.backend, config.parallel):
            check_ranks(resolved)
        check_hosts(resolved)
        check_assembly(resolved, load_backend(resolved.backend))
    open_tokenizer(config)
    return resolved


def _resolved(config: EngineConfig, usage: Usage, sources: Mapping[str, str] | None = None) -> Resolved:
    """Resolve the settings; weights of a hub's model are fetched later, once everything else is checked."""
    return resolve(config, usage, sources, weights=is_local(config.model.model))


def _load(
    importing: Future[BackendModule], resolved: Resolved, workers: WorkerGroup | None, phases: Phases
) -> BuiltEngine:
    """Prefetch the weights while the backend is imported, then assemble the engine."""
    config = resolved.config
    checkpoint, fetched = resolved.checkpoint, is_local(config.model.model)
    if not fetched:  # downloaded only now that the model is known to be supported
        with phases("fetch weights"):
            checkpoint = open_model(config, weights=True)
    weights = Prefetch(read_weights(config, checkpoint, resolved), READ_AHEAD_BYTES)
    try:
        with phases(f"import {resolved.backend}"):
            module = importing.result()
        return assemble(resolved, module, checkpoint, weights, workers, phases)
    finally:
        weights.close()


def import_backend(name: str) -> Future[BackendModule]:
    """Import a backend in a daemon thread, which does not delay an error of the model."""
    importing: Future[BackendModule] = Future()

    def run() -> None:
        try:
            importing.set_result(load_backend(name))
        except BaseException as error:
            importing.set_exception(error)

    threading.Thread(target=run, name="pagoda-import", daemon=True).start()
    return importing
