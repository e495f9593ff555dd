"""What each backend does with a setting, where backends differ: one table for start-up, warnings and documentation.

A setting without a rule here has the status of its declaration on every backend. `check_settings` refuses, `notes`
warns; `status_on` is what docs/reference shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.env import EnvVar
from pagoda.common.config.fields import Status
from pagoda.common.config.groups.attention import AUTO, KERNELS
from pagoda.common.config.settings import ENGINE_GROUPS, ENGINE_SETTINGS, Setting, settings_of
from pagoda.common.errors import ConfigError

BACKENDS: Final = ("reference", "torch_cuda", "jax_tpu")


@dataclass(frozen=True, slots=True)
class BackendRule:
    """What some backends do with a setting, or with some of its values."""

    setting: str
    backends: tuple[str, ...]
    status: Literal["no effect", "refused"]
    reason: str  # Why, with the remedy if it is refused; {backend} stands for the backend's name.
    values: tuple[Any, ...] = ()  # Values that the rule concerns; empty: all but the default and `accepts`.
    accepts: tuple[Any, ...] = ()

    def concerns(self, value: Any, default: Any) -> bool:
        """Return whether it applies to a value of the setting."""
        return value in self.values if self.values else value != default and value not in self.accepts

    def text(self, backend: str) -> str:
        """Return the reason for a backend."""
        return self.reason.format(backend=backend)


_NOT_CUDA: Final = ("reference", "jax_tpu")
_NOT_TPU: Final = ("reference", "torch_cuda")
_ONE_HOST: Final = "{backend} runs a model on one host; "
_KEEPS_WEIGHTS: Final = "{backend} cannot move its weights; drop it, or use --backend torch_cuda"
_NO_GRAPHS: Final = "it captures no CUDA graphs"
_NO_PROGRAMS: Final = "it compiles no XLA programs"
_NO_BUNDLES: Final = "not supported by {backend}; drop it, or use --backend jax_tpu"
_SIMULATED: Final = "it is for --backend simulated and `pagoda simulate`; drop it"
_NOT_SIMULATED: Final = "is not simulated; drop it"
_NO_KERNELS: Final = "{backend} has one attention kernel; use auto, " + " or ".join(KERNELS["reference"])

RULES: Final = (
    BackendRule(
        "tensor_parallel_size",
        ("reference",),
        "refused",
        "{backend} runs a model on one device; use 1, or --backend jax_tpu or torch_cuda",
    ),
    BackendRule(
        "data_parallel_mode",
        _NOT_TPU,
        "refused",
        "{backend} has no program over several copies of a model; use engines",
        values=("program",),
    ),
    BackendRule("nnodes", ("reference",), "refused", f"{_ONE_HOST}use 1, or --backend jax_tpu on every host"),
    BackendRule(
        "nnodes",
        ("torch_cuda",),
        "refused",
        "{backend} spans several hosts through Ray; use 1 with --distributed-executor-backend ray, or --backend "
        "jax_tpu on every host",
    ),
    *(
        BackendRule(setting, _NOT_TPU, "no effect", "it takes no part in a meeting of hosts (--nnodes)")
        for setting in ("master_addr", "master_port")
    ),
    BackendRule(
        "distributed_executor_backend",
        _NOT_CUDA,
        "refused",
        "{backend} drives all devices of a host from one process; use uni, or drop it",
        values=("ray",),
    ),
    BackendRule(
        "distributed_executor_backend",
        _NOT_CUDA,
        "no effect",
        "it drives all devices of a host from one process",
        values=("mp",),
    ),
    BackendRule("enable_sleep_mode", ("reference",), "refused", _KEEPS_WEIGHTS + " or jax_tpu"),
    BackendRule("cpu_offload_gb", _NOT_CUDA, "refused", _KEEPS_WEIGHTS),
    BackendRule("gpu_memory_utilization", ("reference",), "no effect", "on a CPU use --kv-cache-memory-bytes"),
    BackendRule(
        "kv_cache_dtype",
        ("reference",),
        "refused",
        "the reference backend's cache has the activations' dtype; use auto, or --backend torch_cuda or jax_tpu",
    ),
    BackendRule(
        "kv_cache_dtype",
        ("torch_cuda",),
        "refused",
        "{backend} has 8-bit caches of type fp8_e4m3 only; use auto, fp8 or fp8_e4m3",
        values=("fp8_e5m2", "int8"),
    ),
    BackendRule(
        "calculate_kv_scales", ("reference",), "refused", "the reference backend has no 8-bit KV cache; drop it"
    ),
    BackendRule(
        "dtype",
        ("jax_tpu",),
        "refused",
        "{backend} does not support float16; use bfloat16 or float32",
        values=("float16", "half"),
    ),
    BackendRule(
        "load_format",
        _NOT_TPU,
        "refused",
        "sharded_state is not read by {backend}; use --backend jax_tpu, or serve the model that was converted",
        values=("sharded_state",),
    ),
    *(
        BackendRule("attention_backend", (backend,), "refused", _NO_KERNELS, accepts=(AUTO, *KERNELS[backend]))
        for backend in _NOT_CUDA
    ),
    BackendRule(
        "attention_backend",
        ("torch_cuda",),
        "refused",
        f"it is a kernel of CPUs; use one of {AUTO}, {', '.join(KERNELS['torch_cuda'])}, or drop it",
        values=tuple(name for name in KERNELS["reference"] if name not in KERNELS["torch_cuda"]),
    ),
    BackendRule(
        "logits_processors",
        ("jax_tpu",),
        "refused",
        "jax_tpu keeps logits on the device; use --backend reference or torch_cuda, or logit_bias in requests",
    ),
    *(
        BackendRule(setting, _NOT_CUDA, "no effect", _NO_GRAPHS)
        for setting in ("enforce_eager", "cudagraph_capture_sizes", "max_cudagraph_capture_size", "compilation_config")
    ),
    BackendRule("fully_sharded_loras", ("reference",), "refused", "{backend} runs a model on one device; drop it"),
    BackendRule(
        "lora_dtype",
        ("jax_tpu",),
        "refused",
        "{backend} does not support float16; use auto or bfloat16",
        values=("float16",),
    ),
    *(
        BackendRule(setting, BACKENDS, "refused", _SIMULATED)
        for setting in ("calibration", "hardware", "compile_report", "acceptance_rate", "simulated_time")
    ),
    *(
        BackendRule(setting, ("simulated",), "refused", _NOT_SIMULATED)
        for setting in (
            *(
                "data_parallel_size",
                "data_parallel_mode",
                "nnodes",
                "enable_sleep_mode",
                "cpu_offload_gb",
                "calculate_kv_scales",
            ),
            *("enable_lora", "logits_processors", "enable_prompt_embeds", "compiled_bundle"),
        )
    ),
    BackendRule("load_format", ("simulated",), "refused", _NOT_SIMULATED, values=("sharded_state",)),
    BackendRule("distributed_executor_backend", ("simulated",), "refused", _NOT_SIMULATED, values=("ray",)),
    BackendRule("compiled_bundle", _NOT_TPU, "refused", _NO_BUNDLES),
    *(
        BackendRule(setting, _NOT_TPU, "no effect", _NO_PROGRAMS)
        for setting in ("xla_cache_path", "xla_check_recompilation", "xla_profiler_port")
    ),
)


def rules_of(setting: str, backend: str) -> Iterator[BackendRule]:
    """Yield the rules of a setting on a backend."""
    yield from (rule for rule in RULES if rule.setting == setting and backend in rule.backends)


def _concerned(config: EngineConfig, backend: str) -> Iterator[tuple[Setting, BackendRule]]:
    settings = {
        setting.name: (part, setting) for part, group in ENGINE_GROUPS.items() for setting in settings_of(group)
    }
    for rule in RULES:
        part, setting = settings[rule.setting]
        if backend in rule.backends and rule.concerns(getattr(getattr(config, part), setting.field), setting.default):
            yield setting, rule


def check_settings(config: EngineConfig, backend: str) -> None:
    """Raise ConfigError for the first setting that the backend refuses."""
    for setting, rule in _concerned(config, backend):
        if rule.status == "refused":
            raise ConfigError(setting.flag, rule.text(backend))


def notes(config: EngineConfig, backend: str) -> Iterator[str]:
    """Yield one warning per reason for the settings that have no effect on the backend."""
    flags: dict[str, list[str]] = {}
    for setting, rule in _concerned(config, backend):
        if rule.status == "no effect":
            flags.setdefault(rule.text(backend), []).append(setting.flag)
    for reason, given in flags.items():
        yield f"{' and '.join(given)}: no effect on {backend}: {reason}"


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """Status of a setting or variable on a backend; `reason` is empty if it is implemented with every value."""

    status: Status
    reason: str = ""


def status_on(setting: Setting, backend: str) -> BackendStatus:
    """Return what the documentation says of a setting on a backend."""
    option = setting.option
    if option.status != "implemented":
        return BackendStatus(option.status, option.reason)
    rules = list(rules_of(setting.name, backend)) if setting.config in ENGINE_GROUPS.values() else []
    general_rule = next((rule for rule in rules if not rule.values), None)
    if general_rule is not None:
        accepted = f" (accepted: {_words(general_rule.accepts)})" if general_rule.accepts else ""
        return BackendStatus(general_rule.status, general_rule.text("it") + accepted)
    return BackendStatus(
        "implemented", "; ".join(f"{_words(rule.values)} {rule.status}: {rule.text('it')}" for rule in rules)
    )


def variable_status_on(variable: EnvVar, backend: str) -> BackendStatus:
    """Return what the documentation says of an environment variable on a backend."""
    if variable.setting in ENGINE_SETTINGS:
        return status_on(ENGINE_SETTINGS[variable.setting], backend)
    if variable.only and backend not in variable.only:
        return BackendStatus("no effect", variable.elsewhere)
    return BackendStatus(variable.status, variable.reason)


def _words(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))


def by_backend(statuses: Mapping[str, BackendStatus]) -> tuple[str, ...]:
    """Return the cells of a table: the status on each of BACKENDS, and the reasons, said once if they are the same."""
    cells = [statuses[backend].status for backend in BACKENDS]
    reasons = {backend: statuses[backend].reason for backend in BACKENDS}
    if len(set(reasons.values())) == 1:
        return (*cells, reasons[BACKENDS[0]])
    grouped: dict[str, list[str]] = {}
    for backend, reason in reasons.items():
        if reason:
            grouped.setdefault(reason, []).append(f"`{backend}`")
    return (*cells, "; ".join(f"{', '.join(names)}: {reason}" for reason, names in grouped.items()))
