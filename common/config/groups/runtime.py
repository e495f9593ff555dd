"""Settings of the engine process: sockets, timeouts, CPU affinity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pagoda.common.config.fields import need_not_negative, option
from pagoda.common.errors import ConfigError

ANY_CORE: Final = ("auto", "all", "nobind")
HEARTBEAT_MS: Final = 1000
"""Interval of the engine process's heartbeats."""


def core_list(text: str) -> str:
    """Return `text` in lower case if it is in ANY_CORE, a core list such as 0-3,8, or several with | between them.

    Raise ValueError otherwise.
    """
    word = text.strip().lower()
    if word not in ANY_CORE:
        for part in word.split("|"):
            _cores(part)
    return word


def _cores(text: str) -> frozenset[int]:
    cores: set[int] = set()
    for piece in text.split(","):
        first, dash, last = piece.partition("-")
        if not first.strip().isdecimal() or (dash and not last.strip().isdecimal()):
            raise ValueError(f"{piece!r} is not a core number or range; use 0-3,8 or one of {', '.join(ANY_CORE)}")
        span = range(int(first), int(last or first) + 1)
        if not span:
            raise ValueError(f"{piece!r} is an empty range; put the smaller number first")
        cores.update(span)
    return frozenset(cores)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """The engine process and its threads."""

    rpc_base_path: str | None = option(
        None, "Directory of the engine's Unix sockets; default: the system's temporary directory."
    )
    rpc_timeout: int = option(
        15_000,
        "Milliseconds without a heartbeat after which the engine is considered dead. The engine sends one every "
        "second.",
    )
    engine_iteration_timeout_s: float = option(
        600.0, "Maximum duration of one step, in seconds; an engine that exceeds it is considered stuck."
    )
    restart_engine: int = option(
        0,
        "Maximum number of times per hour that an engine that died or is stuck is restarted. Requests of which the "
        "client has received nothing run again; the others fail. 0: no restart, the server exits.",
    )
    exit_on_stuck_engine: bool = option(
        False,
        "Treat a stuck engine (see --rpc-timeout and --engine-iteration-timeout-s) like one that died. Otherwise its "
        "requests fail, and new ones get HTTP 503 until it continues.",
    )
    incident_dir: str | None = option(
        None,
        "Directory for incident snapshots, which `pagoda replay` reads; default: ~/.cache/pagoda/incidents. A "
        "snapshot is written when the engine fails, on SIGUSR1 to its process, and on POST /incident_snapshot. The "
        "newest 16 are kept.",
    )
    incident_tokens: bool = option(
        False, "Include the token ids of unfinished requests in incident snapshots; by default they are left out."
    )
    cpu_omp_threads_bind: str = option(
        "auto",
        "CPU cores that the threads of the CPU backend are pinned to, such as 0-3,8. auto, all or nobind: no pinning."
        " With replicas (--data-parallel-size), auto divides the cores among them; to choose them, give a list for "
        "each, separated by |: 0-3|4-7.",
        parse=core_list,
    )

    def __post_init__(self) -> None:
        if self.rpc_timeout < 2 * HEARTBEAT_MS:
            raise ConfigError("--rpc-timeout", f"{self.rpc_timeout} ms is too short; use {2 * HEARTBEAT_MS} or more")
        if not self.engine_iteration_timeout_s > 0:
            raise ConfigError(
                "--engine-iteration-timeout-s", f"{self.engine_iteration_timeout_s} is not a positive number of seconds"
            )
        need_not_negative(self, "restart_engine", remedy="use 0 for no restarts")
        try:
            core_list(self.cpu_omp_threads_bind)
        except ValueError as error:
            raise ConfigError("--cpu-omp-threads-bind", str(error)) from None

    @property
    def cores(self) -> frozenset[int] | None:
        """The cores to pin threads to; None: no pinning. Raises ConfigError for the lists of several engines."""
        if self.cpu_omp_threads_bind in ANY_CORE:
            return None
        lists = self.cpu_omp_threads_bind.split("|")
        if len(lists) > 1:
            raise ConfigError("--cpu-omp-threads-bind", f"{len(lists)} core lists for one engine; give one, without |")
        return _cores(lists[0])

    def cores_of_engine(self, engine: int, engines: int, cores: Sequence[int]) -> str:
        """Return the setting of one of several engines. `cores`: those of this process, divided with auto.

        Raises ConfigError unless there is a list for each engine.
        """
        if self.cpu_omp_threads_bind == "auto":
            engine_cores = cores[engine * len(cores) // engines : (engine + 1) * len(cores) // engines]
            return ",".join(map(str, engine_cores)) or "auto"
        if self.cpu_omp_threads_bind in ANY_CORE:
            return self.cpu_omp_threads_bind
        lists = self.cpu_omp_threads_bind.split("|")
        if len(lists) != engines:
            raise ConfigError(
                "--cpu-omp-threads-bind", f"{len(lists)} core lists for {engines} replicas; give one each, as 0-3|4-7"
            )
        return lists[engine]
