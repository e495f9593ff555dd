"""The one place that turns a configuration into a running engine.

    resolve (checkpoint, model spec, limits, KV layout) -> meet the other hosts or start the other ranks, if there are
    any -> backend -> weights -> memory plan -> KV cache -> warm-up

The backend's framework is imported in a thread while the checkpoint is opened and its weights are read ahead.
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

# Which cores the engine's threads run on.

FLAG: Final = "--cpu-omp-threads-bind"


@contextmanager
def pinned(cores: frozenset[int] | None) -> Iterator[None]:
    """Threads that start meanwhile, and theirs, run on these cores only; None: wherever they may. Raises ConfigError.

    A thread inherits its cores from the one that starts it. This one gets its own back.
    """
    if cores is None:
        yield
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError(FLAG, "this system does not pin threads to cores; use auto")
    before = os.sched_getaffinity(0)
    if not cores <= before:
        missing = ", ".join(map(str, sorted(cores - before)))
        raise ConfigError(FLAG, f"core {missing} is not this process's to use; choose from {ranges(before)}")
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def ranges(numbers: set[int]) -> str:
    """{0, 1, 2, 5} as 0-2,5."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ",".join("-".join(map(str, span)) for span in spans)


READ_AHEAD_BYTES: Final = 512 << 20

Gather = Callable[[Resolved, Usage], AbstractContextManager[WorkerGroup | None]]


def gathering(resolved: Resolved, usage: Usage) -> AbstractContextManager[WorkerGroup | None]:
    """Those who compute the steps too, while the engine is built."""
    if runs_ranks(resolved.backend, resolved.config.parallel):
        return leading(resolved, usage)
    return meeting(resolved)


def build_engine(config: EngineConfig, usage: Usage, gather: Gather = gathering) -> BuiltEngine:
    """Load the model and warm it up. Raises ConfigError, ModelError or WeightError: one line, cause and remedy."""
    with pinned(config.runtime.cores):
        return _build(config, usage, gather)


def _build(config: EngineConfig, usage: Usage, gather: Gather) -> BuiltEngine:
    phases = Phases()
    load_general_plugins(config)
    importing = import_backend(choose_backend(config.model.backend))
    with phases("open checkpoint"):
        resolved = _resolved(config, usage)
    with gather(resolved, usage) as company:
        return _load(importing, resolved, company, phases)


def check_engine(config: EngineConfig, usage: Usage, sources: Mapping[str, str] | None = None) -> Resolved:
    """What `build_engine` would load. Raises what it raises before it reads weights or meets other hosts or ranks.

    `sources`: setting -> who stated it. The tokenizer, which is opened beside the engine, is opened here, too.
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
    """A hub's model without its weights, which are fetched when the rest is known to fit."""
    return resolve(config, usage, sources, weights=is_local(config.model.model))


def _load(
    importing: Future[BackendModule], resolved: Resolved, company: WorkerGroup | None, phases: Phases
) -> BuiltEngine:
    """Read the weights ahead while the backend is imported, then put both together."""
    config = resolved.config
    checkpoint, fetched = resolved.checkpoint, is_local(config.model.model)
    if not fetched:  # a model that cannot be served is refused before its weights are downloaded
        with phases("fetch weights"):
            checkpoint = open_model(config, weights=True)
    weights = Prefetch(read_weights(config, checkpoint, resolved), READ_AHEAD_BYTES)
    try:
        with phases(f"import {resolved.backend}"):
            module = importing.result()
        return assemble(resolved, module, checkpoint, weights, company, phases)
    finally:
        weights.close()


def import_backend(name: str) -> Future[BackendModule]:
    """Import a backend in a thread that nobody waits for when the model cannot be served."""
    importing: Future[BackendModule] = Future()

    def run() -> None:
        try:
            importing.set_result(load_backend(name))
        except BaseException as error:
            importing.set_exception(error)

    threading.Thread(target=run, name="pagoda-import", daemon=True).start()
    return importing
