"""What is compiled or captured before serving."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pagoda.common.config.fields import did_you_mean, json_object, option
from pagoda.common.errors import ConfigError

GRAPH_MODES: Final[Mapping[str, bool]] = {
    "NONE": False,
    "FULL_DECODE_ONLY": True,
    "FULL": True,
    "FULL_AND_PIECEWISE": True,
}
"""cudagraph_mode -> whether decode steps are captured. Prefill and mixed steps never are, here."""

_SIZES: Final = "cudagraph_capture_sizes"
_LARGEST: Final = "max_cudagraph_capture_size"
_HONOURED: Final = (_SIZES, _LARGEST, "cudagraph_mode", "use_cudagraph")
_OF_TORCH_COMPILE: Final = (
    *("level", "mode", "backend", "cache_dir", "local_cache_dir", "debug_dump_path", "compile_cache_save_format"),
    *("custom_ops", "splitting_ops", "use_inductor", "use_inductor_graph_partition", "inductor_compile_config"),
    *("inductor_passes", "pass_config", "compile_sizes", "compile_mm_encoder", "dynamic_shapes_config"),
    *("cudagraph_num_of_warmups", "cudagraph_copy_inputs", "cudagraph_specialize_lora"),
)
"""Keys of --compilation-config that ask for nothing here: nothing goes through torch.compile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilationConfig:
    """Graphs and compilers."""

    enforce_eager: bool = option(False, "Capture no CUDA graphs: less memory, slower decode steps.")
    cudagraph_capture_sizes: tuple[int, ...] = option(
        (),
        "Batch sizes of which torch_cuda captures CUDA graphs; default: 1, 2, 4, every 8th to 256, every 16th above, "
        "--max-num-seqs.",
    )
    max_cudagraph_capture_size: int | None = option(
        None, "Largest batch size of which torch_cuda captures a CUDA graph; default: --max-num-seqs."
    )
    compilation_config: Mapping[str, Any] = option(
        {},
        "Settings of CUDA graphs as JSON: cudagraph_mode (NONE, FULL, FULL_DECODE_ONLY or FULL_AND_PIECEWISE; only "
        "decode steps are captured), cudagraph_capture_sizes, max_cudagraph_capture_size.",
        aliases=("-cc",),
        parse=json_object,
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
    optimization_level: int | None = option(
        None, "0 to 3; also -O0 to -O3.", no_effect="nothing goes through torch.compile, whose effort this is"
    )

    def __post_init__(self) -> None:
        if self.optimization_level is not None and not 0 <= self.optimization_level <= 3:
            raise ConfigError("--optimization-level", f"{self.optimization_level} is not 0, 1, 2 or 3")
        for name in (_SIZES, _LARGEST):
            if getattr(self, name) and name in self.compilation_config:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(flag, f"is also in --compilation-config as {name}; give it once")
        known = (*_HONOURED, *_OF_TORCH_COMPILE)
        for key in self.compilation_config:
            if key not in known:
                raise ConfigError("--compilation-config", f"{key} is unknown{did_you_mean(key, known)}; drop it")
        self._check_graphs()

    def _check_graphs(self) -> None:
        if self.graph_mode not in GRAPH_MODES:
            raise ConfigError(
                "--compilation-config",
                f"cudagraph_mode {self.graph_mode} is not supported: a decode step is captured whole or not at all; "
                f"use {', '.join(GRAPH_MODES)}",
            )
        flag, sizes = self._stated(_SIZES)
        if not isinstance(sizes, list | tuple) or not all(type(size) is int and size > 0 for size in sizes):
            raise ConfigError(flag, f"{sizes} is no list of positive numbers; give batch sizes such as 1 2 4 8")
        flag, largest = self._stated(_LARGEST)
        if largest is not None and (type(largest) is not int or largest < 1):
            raise ConfigError(flag, f"{largest} is not positive; use 1 or more, or --enforce-eager to capture nothing")
        if sizes and largest is not None and max(sizes) != largest:
            raise ConfigError(flag, f"{largest} is not the largest of the sizes stated, {max(sizes)}; drop one of both")

    @property
    def graph_mode(self) -> str:
        """One of GRAPH_MODES."""
        if not self.compilation_config.get("use_cudagraph", True):
            return "NONE"
        mode = self.compilation_config.get("cudagraph_mode")
        return "FULL_DECODE_ONLY" if mode is None else str(mode).upper()

    @property
    def captures_graphs(self) -> bool:
        """Whether decode steps are captured where the device can."""
        return GRAPH_MODES[self.graph_mode] and not self.enforce_eager

    @property
    def capture_sizes(self) -> tuple[int, ...]:
        """Those stated, ascending; empty: the usual ones."""
        return tuple(sorted(set(self._stated(_SIZES)[1])))

    @property
    def max_capture_size(self) -> int | None:
        """The largest to capture, if it is stated."""
        largest: int | None = self._stated(_LARGEST)[1]
        return largest

    @property
    def without_effect(self) -> tuple[str, ...]:
        """Keys of --compilation-config that change nothing."""
        return tuple(key for key in self.compilation_config if key in _OF_TORCH_COMPILE)

    @property
    def about_graphs(self) -> tuple[str, ...]:
        """The flags that say something about CUDA graphs, as they were stated."""
        stated = {
            "--enforce-eager": self.enforce_eager,
            "--cudagraph-capture-sizes": self.cudagraph_capture_sizes,
            "--max-cudagraph-capture-size": self.max_cudagraph_capture_size,
            "--compilation-config": any(key in _HONOURED for key in self.compilation_config),
        }
        return tuple(flag for flag, said in stated.items() if said)

    def _stated(self, name: str) -> tuple[str, Any]:
        """A setting of graphs, and where it was stated: its flag or the JSON."""
        if name in self.compilation_config:
            return "--compilation-config", self.compilation_config[name]
        return "--" + name.replace("_", "-"), getattr(self, name)
