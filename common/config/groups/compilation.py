"""CUDA graph and compilation settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pagoda.common.config.fields import did_you_mean, json_object, option
from pagoda.common.errors import ConfigError

GRAPH_MODES: Final[Mapping[str, tuple[bool, bool]]] = {
    "NONE": (False, False),
    "FULL_DECODE_ONLY": (True, False),
    "FULL": (True, True),
    "FULL_AND_PIECEWISE": (True, True),
}
"""cudagraph_mode -> whether decode steps are captured, and short prefill and mixed steps, too, each as one graph."""

_SIZES: Final = "cudagraph_capture_sizes"
_LARGEST: Final = "max_cudagraph_capture_size"
_GRAPH_KEYS: Final = (_SIZES, _LARGEST, "cudagraph_mode", "use_cudagraph")
_TORCH_COMPILE_KEYS: Final = (
    *("level", "mode", "backend", "cache_dir", "local_cache_dir", "debug_dump_path", "compile_cache_save_format"),
    *("custom_ops", "splitting_ops", "use_inductor", "use_inductor_graph_partition", "inductor_compile_config"),
    *("inductor_passes", "pass_config", "compile_sizes", "compile_mm_encoder", "dynamic_shapes_config"),
    *("cudagraph_num_of_warmups", "cudagraph_copy_inputs", "cudagraph_specialize_lora", "full_cuda_graph"),
    "max_capture_size",
)
"""Keys of --compilation-config without effect: torch.compile is not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilationConfig:
    """CUDA graphs and ahead-of-time compiled XLA programs."""

    enforce_eager: bool = option(False, "Disable CUDA graphs, which saves memory but makes decode steps slower.")
    cudagraph_capture_sizes: tuple[int, ...] = option(
        (),
        "Batch sizes for which torch_cuda captures CUDA graphs; default: 1, 2, 4, multiples of 8 up to 256, then "
        "multiples of 16, and --max-num-seqs.",
    )
    max_cudagraph_capture_size: int | None = option(
        None, "Largest batch size for which torch_cuda captures a CUDA graph; default: --max-num-seqs."
    )
    compilation_config: Mapping[str, Any] = option(
        {},
        "Compilation settings as JSON: cudagraph_mode, cudagraph_capture_sizes and max_cudagraph_capture_size. "
        "cudagraph_mode is NONE, FULL_DECODE_ONLY (capture decode steps), or FULL or FULL_AND_PIECEWISE (the default:"
        " also prefill and mixed steps of up to 1024 tokens).",
        aliases=("-cc",),
        parse=json_object,
    )
    compiled_bundle: str | None = option(
        None,
        "Directory written by `pagoda compile --output`, from which jax_tpu loads its programs instead of compiling "
        "them. Loading executes code from it: use trusted directories only.",
    )
    xla_cache_path: str | None = option(
        None,
        "Directory of jax_tpu's persistent compilation cache; default: pagoda/xla in the user's cache directory; "
        "empty: no cache. Compiled code is loaded from it: use trusted directories only.",
    )
    xla_check_recompilation: bool = option(
        False, "Raise an error if jax_tpu compiles a program after start-up, instead of counting it in the metrics."
    )
    xla_profiler_port: int | None = option(
        None,
        "Port of JAX's profiler server, from which XProf and TensorBoard capture traces of jax_tpu; default: none. It "
        "listens on all interfaces, without authentication.",
    )
    optimization_level: int | None = option(
        None, "Optimization level, 0 to 3; also -O0 to -O3.", no_effect="it configures torch.compile, which is not used"
    )

    def __post_init__(self) -> None:
        if self.xla_profiler_port is not None and not 1 <= self.xla_profiler_port <= 65535:
            raise ConfigError("--xla-profiler-port", f"{self.xla_profiler_port} is not a port; use 1 to 65535")
        if self.optimization_level is not None and not 0 <= self.optimization_level <= 3:
            raise ConfigError("--optimization-level", f"{self.optimization_level} is not 0, 1, 2 or 3")
        for name in (_SIZES, _LARGEST):
            if getattr(self, name) and name in self.compilation_config:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(flag, f"is also set in --compilation-config as {name}; drop one of them")
        keys = (*_GRAPH_KEYS, *_TORCH_COMPILE_KEYS)
        for key in self.compilation_config:
            if key not in keys:
                raise ConfigError("--compilation-config", f"{key} is unknown{did_you_mean(key, keys)}; drop it")
        self._check_graphs()

    def _check_graphs(self) -> None:
        if self.graph_mode not in GRAPH_MODES:
            raise ConfigError(
                "--compilation-config",
                f"cudagraph_mode {self.graph_mode} is not supported: a step is captured as one graph; "
                f"use {', '.join(GRAPH_MODES)}",
            )
        flag, sizes = self._graph_setting(_SIZES)
        if not isinstance(sizes, list | tuple) or not all(type(size) is int and size > 0 for size in sizes):
            raise ConfigError(flag, f"{sizes} is not a list of positive integers; give batch sizes such as 1 2 4 8")
        flag, largest = self._graph_setting(_LARGEST)
        if largest is not None and (type(largest) is not int or largest < 1):
            raise ConfigError(flag, f"{largest} is not positive; use 1 or more, or --enforce-eager for no CUDA graphs")
        if sizes and largest is not None and max(sizes) != largest:
            raise ConfigError(flag, f"{largest} differs from the largest capture size, {max(sizes)}; drop one of them")

    @property
    def graph_mode(self) -> str:
        """One of GRAPH_MODES."""
        if not self.compilation_config.get("use_cudagraph", True):
            return "NONE"
        mode = self.compilation_config.get("cudagraph_mode")
        return "FULL_AND_PIECEWISE" if mode is None else str(mode).upper()

    @property
    def captures_graphs(self) -> bool:
        """True if decode steps are captured, on devices that support it."""
        return GRAPH_MODES[self.graph_mode][0] and not self.enforce_eager

    @property
    def captures_mixed_steps(self) -> bool:
        """True if prefill and mixed steps are captured, too, on devices and with models that support it."""
        return GRAPH_MODES[self.graph_mode][1] and not self.enforce_eager

    @property
    def capture_sizes(self) -> tuple[int, ...]:
        """The configured batch sizes, ascending; empty: the backend's default sizes."""
        return tuple(sorted(set(self._graph_setting(_SIZES)[1])))

    @property
    def max_capture_size(self) -> int | None:
        """The configured largest batch size to capture."""
        largest: int | None = self._graph_setting(_LARGEST)[1]
        return largest

    @property
    def ignored_keys(self) -> tuple[str, ...]:
        """The given keys of --compilation-config that have no effect."""
        items = self.compilation_config.items()
        return tuple(key for key, value in items if key in _TORCH_COMPILE_KEYS and value is not None)

    def _graph_setting(self, name: str) -> tuple[str, Any]:
        """Return a CUDA graph setting and the flag that set it: its own or --compilation-config."""
        if self.compilation_config.get(name) is not None:
            return "--compilation-config", self.compilation_config[name]
        return "--" + name.replace("_", "-"), getattr(self, name)
