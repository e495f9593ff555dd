"""What is compiled or captured before serving."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pagoda.common.config.numbers import json_object
from pagoda.common.config.option import option
from pagoda.common.errors import ConfigError

_NOTHING: Final = "this version's backend compiles and captures nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilationConfig:
    """Graphs and compilers."""

    enforce_eager: bool = option(False, "Capture no graphs.", no_effect=_NOTHING)
    cudagraph_capture_sizes: tuple[int, ...] = option((), "Batch sizes to capture.", no_effect=_NOTHING)
    max_cudagraph_capture_size: int | None = option(None, "Largest batch size to capture.", no_effect=_NOTHING)
    compilation_config: Mapping[str, Any] = option(
        {}, "Settings of compilation as JSON.", aliases=("-cc",), parse=json_object, no_effect=_NOTHING
    )
    compiled_bundle: str | None = option(
        None,
        "Folder that pagoda compile --output wrote: start from its programs instead of compiling. Loading it runs what "
        "is in it, so name only a folder that you trust.",
    )
    xla_cache_path: str | None = option(
        None,
        "Folder in which jax_tpu keeps compiled programs for the next start; default: pagoda/xla in the user's cache "
        "folder; empty: keep none. What is in it is run.",
    )
    xla_check_recompilation: bool = option(
        False, "A program that jax_tpu has to compile while serving is an error, not a count in the metrics."
    )
    optimization_level: int | None = option(None, "0 to 3; also -O0 to -O3.", no_effect=_NOTHING)

    def __post_init__(self) -> None:
        if self.optimization_level is not None and not 0 <= self.optimization_level <= 3:
            raise ConfigError("--optimization-level", f"{self.optimization_level} is not 0, 1, 2 or 3")
        for name in ("cudagraph_capture_sizes", "max_cudagraph_capture_size"):
            if getattr(self, name) and name in self.compilation_config:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(flag, f"is also in --compilation-config as {name}; give it once")
