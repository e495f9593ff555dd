"""How the engine runs as a process: its sockets, how long it may be silent, which cores compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pagoda.common.config.fields import option
from pagoda.common.errors import ConfigError

ANY_CORE: Final = ("auto", "all", "nobind")
HEARTBEAT_MS: Final = 1000
"""An engine says that it lives this often."""


def core_list(text: str) -> str:
    """A word of ANY_CORE, or a list of core numbers such as 0-3,8. Raises ValueError."""
    word = text.strip().lower()
    if word not in ANY_CORE:
        _cores(word)
    return word


def _cores(text: str) -> frozenset[int]:
    if "|" in text:
        raise ValueError("one list per process, and this version runs one; leave out what follows the |")
    found: set[int] = set()
    for piece in text.split(","):
        first, dash, last = piece.partition("-")
        if not first.strip().isdecimal() or (dash and not last.strip().isdecimal()):
            raise ValueError(f"{piece!r} is no core number or range; write 0-3,8 or one of {', '.join(ANY_CORE)}")
        span = range(int(first), int(last or first) + 1)
        if not span:
            raise ValueError(f"{piece!r} runs backwards")
        found.update(span)
    return frozenset(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """The engine's process and threads."""

    rpc_base_path: str | None = option(
        None, "Folder in which the engine's sockets are made; default: the system's folder for temporary files."
    )
    rpc_timeout: int = option(
        15_000, "Milliseconds without a sign of life after which the engine counts as dead; it gives one every second."
    )
    engine_iteration_timeout_s: float = option(
        600.0, "Seconds that one step may take; an engine that takes longer counts as stuck."
    )
    cpu_omp_threads_bind: str = option(
        "auto",
        "Cores that the CPU backend's threads are pinned to, such as 0-3,8; "
        "auto, all, nobind: any core this process may use.",
        parse=core_list,
    )

    def __post_init__(self) -> None:
        if self.rpc_timeout < 2 * HEARTBEAT_MS:
            raise ConfigError("--rpc-timeout", f"{self.rpc_timeout} ms is too short; use {2 * HEARTBEAT_MS} or more")
        if not self.engine_iteration_timeout_s > 0:
            raise ConfigError(
                "--engine-iteration-timeout-s", f"{self.engine_iteration_timeout_s} is not a positive number of seconds"
            )
        if self.cpu_omp_threads_bind not in ANY_CORE:
            try:
                _cores(self.cpu_omp_threads_bind)
            except ValueError as error:
                raise ConfigError("--cpu-omp-threads-bind", str(error)) from None

    @property
    def cores(self) -> frozenset[int] | None:
        """The cores to pin threads to; None: any."""
        return None if self.cpu_omp_threads_bind in ANY_CORE else _cores(self.cpu_omp_threads_bind)
