"""`pagoda compile`: compile a model's programs for a TPU on any machine, and report their cost and memory budget.

With --output the programs are saved as a bundle, from which `pagoda serve --compiled-bundle` starts.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Final

from pagoda.backends.modules import CompileTarget
from pagoda.backends.registry import load_compiler
from pagoda.common.backend import BackendOptions, ParallelSizes
from pagoda.common.config.commands import COMMAND_SETTINGS, CompileConfig
from pagoda.common.config.defaults import Platform
from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.settings import ResolvedSettings, build
from pagoda.common.errors import ConfigError
from pagoda.server.bench.offline.engine import write_results
from pagoda.server.settings.flags import EngineArgs, resolve_settings
from pagoda.server.settings.plugins import sampler_options
from pagoda.server.settings.resolve import Resolved, resolve

SETTINGS: Final = COMMAND_SETTINGS["compile"]
_BACKEND: Final = "jax_tpu"


def run(args: argparse.Namespace) -> int:
    """Compile and print the report. Returns 0. Raises ConfigError if the model or topology cannot be compiled."""
    settings = resolve_settings(args, SETTINGS)
    config = build(CompileConfig, settings.values)
    if config.topology is None:
        raise ConfigError("--topology", "required: the chips to compile for, such as v6e:1x1")
    compiler = load_compiler()
    target = compiler.find_target(config.topology)
    data = settings.values["data_parallel_size"]
    tensor = config.tensor_parallel_size or max(1, len(target.devices) // data)
    resolved = resolve_for(settings, config, target, tensor)
    options = BackendOptions(
        spec=resolved.spec,
        limits=resolved.limits,
        layout=resolved.layout,
        cache=resolved.cache,
        dtype=resolved.dtype,
        sampling=sampler_options(resolved.config),
        parallel=ParallelSizes(tensor, data),
        quantization=resolved.runtime_quantization,
        schemes=resolved.schemes,
        batch_invariant=resolved.config.model.batch_invariant,
    )
    states_limit = ("max_model_len" if resolved.pooling is None else "max_num_batched_tokens") in settings.sources
    report = compiler.compile_ahead(target, options, largest=config.budget_only, stated=states_limit)
    print(report)
    write_results(config.output_json, report.as_json())
    if config.output is not None:
        print(report.save(Path(config.output)))
    return 0


def resolve_for(settings: ResolvedSettings, config: CompileConfig, target: CompileTarget, tensor: int) -> Resolved:
    """Resolve the model and its limits for the target. Raises ConfigError or ModelError."""
    values = {**settings.values, "tensor_parallel_size": tensor}
    engine = EngineArgs.from_resolved(replace(settings, values=values)).create_engine_config()
    if engine.model.backend not in ("auto", _BACKEND):
        raise ConfigError("--backend", f"{engine.model.backend} has no ahead-of-time compilation; drop it")
    engine = replace(engine, model=replace(engine.model, backend=_BACKEND))
    if config.config_only:
        engine = _config_only(engine)
    platform = Platform("tpu", target.hbm_bytes, target.device_name, tensor)
    return resolve(engine, "server", settings.sources, weights=not config.config_only, platform=platform)


def _config_only(engine: EngineConfig) -> EngineConfig:
    """Return the configuration of a model given as a config.json or its folder, without weights."""
    path = Path(engine.model.model)
    if path.suffix == ".json" and path.is_file():
        if path.name != "config.json":
            raise ConfigError("--config-only", f"{path} is not named config.json; rename it, or pass its folder")
        path = path.parent
    model = replace(engine.model, model=os.fspath(path))
    return replace(engine, model=model, load=replace(engine.load, load_format="dummy"))
