"""An engine that was built: what whoever runs it gets."""

from __future__ import annotations

from dataclasses import dataclass

from pagoda.common.backend import Backend, PoolingBackend
from pagoda.common.engine.sharded import Engine
from pagoda.common.engine.sleep import Sleeper
from pagoda.common.engine.structured import Structured
from pagoda.common.hosts.following import FollowingBackend
from pagoda.common.hosts.leading import LeadingBackend
from pagoda.server.wire import EngineInfo


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """A warm engine and what is known about it. `backend` is closed by whoever ends the engine.

    `hosts`: the backend again where it works together with other hosts' or ranks'. `sleeper`: with --enable-sleep-mode.
    `structured`: what compiles grammars; None without a tokenizer.
    """

    core: Engine
    backend: Backend | PoolingBackend
    info: EngineInfo
    hosts: LeadingBackend | FollowingBackend | None = None
    sleeper: Sleeper | None = None
    structured: Structured | None = None
