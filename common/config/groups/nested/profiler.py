"""Profiler settings: the keys of --profiler-config, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from pagoda.common.config.fields import did_you_mean
from pagoda.common.errors import ConfigError, RequestError

FLAG: Final = "--profiler-config"

PROFILER_OFF: Final = (
    'the profiler is off; set it, for example to {"profiler": "torch", "torch_profiler_dir": "/tmp/traces"}'
)
"""Why no profile can be started without the flag."""

_DIR: Final = "torch_profiler_dir"
_PROFILER: Final = "torch"

_REFUSED_KEYS: Final[Mapping[str, tuple[Any, str]]] = {
    "ignore_frontend": (True, "steps of the engine are traced, never the API process; drop it, or run py-spy on that"),
    "torch_profiler_dump_cuda_time_total": (
        False,
        "times are not summed up; drop it, and read them from the trace in https://ui.perfetto.dev",
    ),
    "wait_iterations": (0, "use delay_iterations"),
    "warmup_iterations": (0, "use delay_iterations"),
    "active_iterations": (5, "use max_iterations"),
    "cuda_profiler_control_dp_rank": (0, "profiler cuda is not supported; drop it"),
    "cuda_profiler_control_worker_rank": (0, "profiler cuda is not supported; drop it"),
}
"""Key of vLLM's -> the one value with which it changes nothing here, and why others are refused."""

_URI: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_PREFIX: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerConfig:
    """What is traced, and where to. Field names are the keys of --profiler-config; see `profiler_of`."""

    torch_profiler_dir: str  # Folder of the traces.
    profiler: str = _PROFILER
    torch_profiler_with_stack: bool = True  # Trace Python calls, too.
    torch_profiler_record_shapes: bool = False  # Trace the shapes of the operators' inputs.
    torch_profiler_with_memory: bool = False  # Trace allocations.
    torch_profiler_with_flops: bool = False  # Trace what FLOP are computed from: shapes, and arguments such as strides.
    torch_profiler_use_gzip: bool = True  # Compress traces.
    delay_iterations: int = 0  # Number of steps after the start that are not traced.
    max_iterations: int = 0  # The trace is written after this many steps; 0: no limit.

    @property
    def folder(self) -> Path:
        """The folder of the traces, absolute."""
        return Path(self.torch_profiler_dir).expanduser().absolute()

    def make_folder(self) -> None:
        """Create the folder of the traces. Raises ConfigError if that fails."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                FLAG, f"{_DIR} {self.torch_profiler_dir}: {error.strerror}; name a folder that can be written"
            ) from None


_KEYS: Final = tuple(field.name for field in fields(ProfilerConfig))
_SWITCHES: Final = tuple(field.name for field in fields(ProfilerConfig) if field.type == "bool")
_COUNTS: Final = ("delay_iterations", "max_iterations")


def profiler_of(settings: Mapping[str, Any]) -> ProfilerConfig | None:
    """Return the checked settings of a --profiler-config; None if it is empty, or without a profiler.

    Keys that are null count as not given. Raise ConfigError naming the key and the remedy.
    """
    set_keys = {key: value for key, value in settings.items() if value is not None}
    for key, value in set_keys.items():
        if key in _REFUSED_KEYS:
            harmless, why = _REFUSED_KEYS[key]
            if value != harmless or type(value) is not type(harmless):
                raise ConfigError(FLAG, f"{key} {value!r} is not supported: {why}")
        elif key not in _KEYS:
            raise ConfigError(FLAG, f"{key} is unknown{did_you_mean(key, _KEYS)}; drop it")
    set_keys = {key: value for key, value in set_keys.items() if key in _KEYS}
    _check_types(set_keys)
    profiler = set_keys.get("profiler")
    if profiler == "cuda":
        raise ConfigError(FLAG, "profiler cuda is not supported: start the server under nsys, or use torch")
    if profiler is not None and profiler != _PROFILER:
        raise ConfigError(FLAG, f"profiler {profiler!r} is unknown; use torch")
    if profiler is None:
        if set_keys:
            raise ConfigError(FLAG, f"{next(iter(set_keys))} has no effect without profiler; set profiler to torch")
        return None
    folder = set_keys.get(_DIR, "")
    if not folder:
        raise ConfigError(FLAG, f"profiler torch needs {_DIR}; set it to a folder for the traces")
    if _URI.match(folder):
        raise ConfigError(FLAG, f"{_DIR} {folder!r} is no local path; name a folder")
    return ProfilerConfig(**set_keys)


def _check_types(set_keys: Mapping[str, Any]) -> None:
    for key, value in set_keys.items():
        if key in _SWITCHES:
            if not isinstance(value, bool):
                raise ConfigError(FLAG, f"{key} must be true or false, not {value!r}")
        elif key in _COUNTS:
            if type(value) is not int or value < 0:
                raise ConfigError(FLAG, f"{key} must be an integer of 0 or more, not {value!r}")
        elif not isinstance(value, str) or "\0" in value:
            raise ConfigError(FLAG, f"{key} must be a string, not {value!r}")


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """One profile to start."""

    prefix: str  # Prefix of the trace's name; empty: a default.
    delay_iterations: int
    max_iterations: int


def check_profile(
    config: ProfilerConfig | None,
    *,
    prefix: str | None,
    delay_iterations: int | None,
    max_iterations: int | None,
    profiler_kwargs: Mapping[str, Any] | None = None,
) -> ProfileRequest:
    """Return a profile to start; what is None is as configured.

    `profiler_kwargs`: the numbers of iterations that are None. Raises ConfigError without --profiler-config,
    RequestError naming an invalid parameter.
    """
    if config is None:
        raise ConfigError(FLAG, PROFILER_OFF)
    given = dict(profiler_kwargs or {})
    for key in given:
        if key not in _COUNTS:
            raise RequestError(
                "profiler_kwargs",
                f"profiler_kwargs: {str(key)[:50]!r} cannot be set for one profile; use {' or '.join(_COUNTS)}, or set "
                f"it in {FLAG}",
            )
    delay_iterations = given.get("delay_iterations") if delay_iterations is None else delay_iterations
    max_iterations = given.get("max_iterations") if max_iterations is None else max_iterations
    if prefix and not _PREFIX.fullmatch(prefix):
        raise RequestError(
            "profile_prefix",
            f"profile_prefix {prefix[:50]!r} is no beginning of a file name; use at most 100 letters, digits, _, - "
            "and ., the first no - or .",
        )
    delay = config.delay_iterations if delay_iterations is None else delay_iterations
    longest = config.max_iterations if max_iterations is None else max_iterations
    for name, value in (("delay_iterations", delay), ("max_iterations", longest)):
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise RequestError(name, f"{name} must be an integer of 0 or more, not {str(value)[:50]}")
    return ProfileRequest(prefix or "", delay, longest)
