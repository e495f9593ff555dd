"""Plugins: third-party code named by entry points, qualified names or files.

Entry point groups:

    pagoda.general_plugins      functions called with the EngineConfig at start-up, in the API and the engine process;
                                --plugins selects them by name
    vllm.general_plugins        functions called without arguments; a failing one is logged and left out; selected by
                                --plugins or VLLM_PLUGINS, too
    pagoda.logits_processors    classes for --logits-processors: either called with the EngineConfig, to return a
                                common.engine.sampling.processors.LogitsProcessor, or of vLLM's interface, see
                                server.vllm.logits_processors; also those of vllm.logits_processors
    pagoda.schedulers           classes for --scheduler-cls: called like common.engine.scheduling.scheduler.Scheduler,
                                they return a common.engine.core.StepScheduler
    pagoda.tool_parsers         server.parsers.parser.ToolFormat objects for --tool-call-parser
    pagoda.reasoning_parsers    server.parsers.parser.ReasoningFormat objects for --reasoning-parser; modules of
                                --tool-parser-plugin and --reasoning-parser-plugin may register classes of vLLM's
                                interface instead, see server.vllm.parser_interface
    pagoda.models               common.models.family.Family objects by architecture, read by common.models.registry

Flags also take qualified names, `package.module.Class`; --tool-parser-plugin and --reasoning-parser-plugin take a
module or a file. Plugins read --additional-config as `config.extension.additional_config`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import pkgutil
import re
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.model import ModelConfig
from pagoda.common.engine.core import MakeScheduler
from pagoda.common.engine.sampling.processors import LogitsProcessor, SamplerOptions
from pagoda.common.engine.scheduling.scheduler import Scheduler
from pagoda.common.engine.speculative.proposer import DraftPlanner
from pagoda.common.errors import ConfigError
from pagoda.common.sampling_params import SamplingParams, params_of
from pagoda.server.settings.extra_samplers import EXTRA_SAMPLERS
from pagoda.server.vllm.logits_processors import BatchLogitsProcessor, LogitsBatch

GENERAL: Final = "pagoda.general_plugins"
VLLM_GENERAL: Final = "vllm.general_plugins"
LOGITS_PROCESSORS: Final = "pagoda.logits_processors"
SCHEDULERS: Final = "pagoda.schedulers"

_PLUGINS: Final = "--plugins"
_PROCESSORS: Final = "--logits-processors"
_SCHEDULER_METHODS: Final = ("add", "abort", "num_unfinished", "schedule", "update", "stats", "check_integrity")

logger = logging.getLogger(__name__)


def load_general_plugins(config: EngineConfig) -> None:
    """Import and call every installed general plugin, or those of --plugins, once per process. Raise ConfigError."""
    plugins = installed(GENERAL)
    of_vllm = installed(VLLM_GENERAL)
    selected = config.extension.plugins
    for name in {**plugins, **of_vllm} if selected is None else selected:
        if name in plugins:
            _run(name, _imported(_PLUGINS, name, plugins[name]), config)
        elif name in of_vllm:
            _run_of_vllm(name, of_vllm[name])
        else:
            names = _names({**plugins, **of_vllm})
            raise ConfigError(_PLUGINS, f"plugin {name!r} is not installed; installed: {names}")


def _run(name: str, plugin: Any, config: EngineConfig) -> None:
    try:
        plugin(config)
    except Exception as error:
        raise ConfigError(_PLUGINS, f"plugin {name!r} failed: {_shown(error)}; drop or fix it") from error
    logger.info("loaded plugin %s", name)


def _run_of_vllm(name: str, point: EntryPoint) -> None:
    """Import and call a plugin that was written for vLLM; one that fails may need vLLM itself."""
    try:
        point.load()()
    except Exception as error:
        logger.warning("plugin %s of %s is left out: %s", name, VLLM_GENERAL, _shown(error))
    else:
        logger.info("loaded plugin %s", name)


def sampler_options(config: EngineConfig, vllm_config: object = None, backend: str = "reference") -> SamplerOptions:
    """Return --logprobs-mode and the --logits-processors. Raise ConfigError.

    `vllm_config`: for processors of vLLM's interface, which are constructed for the device of `backend`.
    """
    processors: list[LogitsProcessor] = []
    of_batch: dict[str, Callable[[], BatchLogitsProcessor]] = {}
    for name in config.model.logits_processors:
        make = load(_PROCESSORS, name, LOGITS_PROCESSORS)
        if _is_batched(make):
            of_batch[name] = partial(make, vllm_config, *_device(backend))
            if backend != "jax_tpu":
                _constructed(name, of_batch[name])  # This raises at start instead of in the first step.
            continue
        processor = _constructed(name, partial(make, config))
        if not callable(getattr(processor, "apply", None)):
            raise ConfigError(
                _PROCESSORS,
                f"{name} has no method apply(logits, token_ids, num_prompt, extra_args), nor update_state and "
                "apply(logits) of vLLM's interface",
            )
        processors.append(processor)
    return SamplerOptions(
        logprobs_mode=config.model.logprobs_mode,
        processors=tuple(processors),
        make_batch_processor=partial(LogitsBatch, of_batch, params_of) if of_batch else None,
    )


def read_arguments(model: ModelConfig) -> frozenset[str] | None:
    """Return the entries of `extra_args` that the --logits-processors read; None: any. Raise ConfigError."""
    classes = [load(_PROCESSORS, name, LOGITS_PROCESSORS) for name in model.logits_processors]
    built_in = [sampler for sampler in EXTRA_SAMPLERS.values() if sampler in classes]
    return (
        frozenset(name for sampler in built_in for name in sampler.arguments)
        if len(built_in) == len(set(classes))
        else None
    )


def param_checks(model: ModelConfig) -> list[Callable[[SamplingParams], object]]:
    """Return validate_params of the --logits-processors that have one. Raise ConfigError."""
    classes = [load(_PROCESSORS, name, LOGITS_PROCESSORS) for name in model.logits_processors]
    return [processor.validate_params for processor in classes if callable(getattr(processor, "validate_params", None))]


def _is_batched(make: Any) -> bool:
    return inspect.isclass(make) and callable(getattr(make, "update_state", None))


def _constructed(name: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:
        raise ConfigError(_PROCESSORS, f"{name}: its constructor failed: {_shown(error)}") from error


def _device(backend: str) -> tuple[Any, bool]:
    """Return the torch device of a backend's logits, and whether host memory is pinned for it."""
    if backend == "jax_tpu":
        return None, False  # Its `create` refuses processors.
    torch = importlib.import_module("torch")
    on_gpu = backend == "torch_cuda" and bool(torch.cuda.is_available())
    return torch.device("cuda" if on_gpu else "cpu"), on_gpu


def scheduler_of(config: EngineConfig, make_drafter: Callable[[], DraftPlanner] | None = None) -> MakeScheduler:
    """Return what makes schedulers, of --scheduler-cls if it is set. Raise ConfigError if that is unsuitable.

    `make_drafter`: returns the drafter of each; None: no speculative decoding.
    """
    name = config.scheduler.scheduler_cls
    if name is None:
        return Scheduler if make_drafter is None else lambda limits, kv: Scheduler(limits, kv, drafter=make_drafter())
    flag = "--scheduler-cls"
    scheduler = load(flag, name, SCHEDULERS)
    is_class = inspect.isclass(scheduler)
    missing = [method for method in _SCHEDULER_METHODS if not hasattr(scheduler, method)]
    if missing or not is_class:
        problem = f"it has no {', '.join(missing)}" if missing else "it is not a class"
        raise ConfigError(flag, f"{name} is not a scheduler, {problem}; subclass {Scheduler.__module__}.Scheduler")
    settings = config.extension.additional_config
    if make_drafter is None:
        return partial(scheduler, settings=settings)
    if not issubclass(scheduler, Scheduler):
        raise ConfigError(flag, f"{name} is no subclass of {Scheduler.__module__}.Scheduler; drop --speculative-config")
    return lambda limits, kv: scheduler(limits, kv, settings=settings, drafter=make_drafter())


def load(flag: str, name: str, group: str | None = None) -> Any:
    """Import a qualified name or an entry point of `group`. Raise ConfigError naming `flag`."""
    if group is not None and "." not in name and ":" not in name:
        points = {**installed(group.replace("pagoda.", "vllm.")), **installed(group)}
        if group == LOGITS_PROCESSORS and name not in points and name in EXTRA_SAMPLERS:
            return EXTRA_SAMPLERS[name]
        if name not in points:
            raise ConfigError(
                flag, f"no {group} entry point {name!r}; installed: {_names(points)}; or use package.module.Name"
            )
        return _imported(flag, name, points[name])
    try:
        return pkgutil.resolve_name(name)
    except Exception as error:
        raise ConfigError(flag, f"{name} cannot be imported: {_shown(error)}") from error


def table(flag: str, source: str, name: str) -> dict[str, Any] | None:
    """Import a module, given by name or file, and return its dictionary `name`; None if it has none.

    Raise ConfigError if it cannot be imported, or if `name` is something else.
    """
    try:
        module = _file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except Exception as error:
        raise ConfigError(flag, f"{source} cannot be imported: {_shown(error)}") from error
    formats = getattr(module, name, None)
    if formats is not None and not isinstance(formats, dict):
        raise ConfigError(flag, f"{source} defines no dictionary {name}; map format names to formats in one")
    return formats


def installed(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name."""
    return {point.name: point for point in entry_points(group=group)}


def _file(path: Path) -> ModuleType:
    """Import a file as a module, once."""
    name = "pagoda_plugin_" + re.sub(r"\W", "_", str(path.resolve()))
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _imported(flag: str, name: str, point: EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:
        raise ConfigError(flag, f"plugin {name!r} ({point.value}) cannot be imported: {_shown(error)}") from error


def _names(points: dict[str, EntryPoint]) -> str:
    return ", ".join(sorted(points)) or "none"


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
