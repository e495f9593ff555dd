"""The one place that turns a configuration into a running engine.

    checkpoint -> model spec -> backend -> limits -> KV layout -> weights -> memory plan -> KV cache -> warm-up

The backend's framework is imported in a thread while the checkpoint is opened and its weights are read ahead.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from pagoda.backends.registry import BackendModule, choose_backend, load_backend
from pagoda.common.backend import Backend, Weight
from pagoda.common.config.defaults import Usage, resolve_limits
from pagoda.common.config.engine import EngineConfig, Limits
from pagoda.common.config.load import LoadConfig
from pagoda.common.config.model import ModelConfig
from pagoda.common.engine.core import EngineCore
from pagoda.common.engine.kv_spec import FullCache, KvLayout, LatentCache, kv_layout
from pagoda.common.errors import ConfigError, ModelError
from pagoda.common.models.family import Family
from pagoda.common.models.registry import spec_from_config
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import ModelSpec
from pagoda.common.weights.checkpoint import Checkpoint, open_checkpoint
from pagoda.common.weights.dummy import dummy_weights
from pagoda.common.weights.progress import with_progress
from pagoda.server.affinity import pinned
from pagoda.server.plugins import load_general_plugins, sampler_options, scheduler_of
from pagoda.server.prefetch import Prefetch
from pagoda.server.wire import EngineInfo

READ_AHEAD_BYTES: Final = 512 << 20

_SAMPLING_KEYS: Final = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p", "max_new_tokens")
"""What generation_config.json may set as a default, as in vLLM."""

_DTYPES: Final = {"float": "float32", "half": "float16"}


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """A warm engine and what is known about it. `backend` is closed by whoever ends the engine."""

    core: EngineCore
    backend: Backend
    info: EngineInfo


class _Phases:
    """Start-up phases and their seconds."""

    def __init__(self) -> None:
        self.seconds: list[tuple[str, float]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds.append((name, time.perf_counter() - begin))


def build_engine(config: EngineConfig, usage: Usage) -> BuiltEngine:
    """Load the model and warm it up. Raises ConfigError, ModelError or WeightError: one line, cause and remedy."""
    with pinned(config.runtime.cores):
        return _build(config, usage)


def _build(config: EngineConfig, usage: Usage) -> BuiltEngine:
    phases = _Phases()
    load_general_plugins(config)
    name = choose_backend(config.model.backend)
    importing = _import(name)
    with phases("open checkpoint"):
        checkpoint = _open(config.model, config.load)
        hf_config = checkpoint.config()
        spec, family = spec_from_config(hf_config)
        dtype = _dtype(config.model.dtype, hf_config)
    weights = Prefetch(_weights(config, checkpoint, spec, family, dtype), READ_AHEAD_BYTES)
    try:
        with phases(f"import {name}"):
            module = importing.result()
        return _assemble(config, usage, phases, module, checkpoint, spec, dtype, weights)
    finally:
        weights.close()


def _import(name: str) -> Future[BackendModule]:
    """Import a backend in a thread that nobody waits for when the model cannot be served."""
    importing: Future[BackendModule] = Future()

    def run() -> None:
        try:
            importing.set_result(load_backend(name))
        except BaseException as error:
            importing.set_exception(error)

    threading.Thread(target=run, name="pagoda-import", daemon=True).start()
    return importing


def _assemble(
    config: EngineConfig,
    usage: Usage,
    phases: _Phases,
    module: BackendModule,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    dtype: str,
    weights: Prefetch,
) -> BuiltEngine:
    facts = module.CAPABILITIES
    sampling, make_scheduler = sampler_options(config), scheduler_of(config)
    limits = resolve_limits(
        config, device=facts.device, usage=usage, block_size=facts.block_size, model_max_len=spec.max_positions
    )
    layout = kv_layout(spec, limits.block_size)
    backend = module.create(spec, limits=limits, layout=layout, cache=config.cache, dtype=dtype, sampling=sampling)
    try:
        with phases("load weights"):
            backend.load(weights)
        with phases("allocate KV cache"):
            memory = backend.plan_memory()
            num_blocks = config.cache.num_gpu_blocks_override or memory.num_blocks
            limits = _fit(config, limits, layout, num_blocks)
            backend.init_cache(num_blocks)
        with phases("warm up"):
            backend.warmup()
    except BaseException:
        backend.close()
        raise
    generation = _generation_config(config.model, checkpoint)
    info = EngineInfo(
        names=config.model.names,
        limits=limits,
        vocab_size=spec.vocab,
        eos_token_ids=_eos(checkpoint.config(), generation),
        sampling_defaults=_sampling_defaults(generation),
        backend=facts.name,
        device=facts.device,
        dtype=dtype,
        num_blocks=num_blocks,
        memory=str(memory),
        phases=tuple(phases.seconds),
    )
    return BuiltEngine(EngineCore(backend, layout, limits, num_blocks, make_scheduler), backend, info)


def _open(model: ModelConfig, load: LoadConfig) -> Checkpoint:
    return open_checkpoint(
        model.model, load.load_format, revision=model.revision, token=model.hf_token, download_dir=load.download_dir
    )


def _weights(
    config: EngineConfig, checkpoint: Checkpoint, spec: ModelSpec, family: Family, dtype: str
) -> Iterator[Weight]:
    if config.load.load_format == "dummy":
        return dummy_weights(params(spec), config.model.seed, dtype)
    return family.weights(params(spec), with_progress(checkpoint.tensors(), checkpoint.num_bytes))


def _dtype(asked: str, hf_config: Mapping[str, Any]) -> str:
    """The dtype to run in; `auto` is what the checkpoint says, bfloat16 where it says nothing."""
    if asked != "auto":
        return _DTYPES.get(asked, asked)
    stated = hf_config.get("dtype") or hf_config.get("torch_dtype") or "bfloat16"
    return stated if stated in ("float32", "bfloat16", "float16") else "bfloat16"


def _fit(config: EngineConfig, limits: Limits, layout: KvLayout, num_blocks: int) -> Limits:
    """Limits whose longest sequence fits the KV cache: shortened when nobody asked for a length, else an error."""
    groups = sum(isinstance(group.spec, FullCache | LatentCache) for group in layout.groups)
    if not groups:
        return limits
    room = (num_blocks - 1) // groups * layout.block_size
    if room >= limits.max_model_len:
        return limits
    if config.model.max_model_len is None and room > 0:
        return replace(limits, max_model_len=room)
    raise ConfigError(
        "--max-model-len",
        f"a sequence of {limits.max_model_len} tokens needs more KV cache than there is: {num_blocks} blocks hold "
        f"{room} tokens; lower --max-model-len to {room} or raise --kv-cache-memory-bytes",
    )


def _generation_config(model: ModelConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    if model.generation_config == "vllm":
        return {}
    if model.generation_config == "auto":
        return checkpoint.generation_config()
    path = Path(model.generation_config) / "generation_config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("--generation-config", f"{path}: {error}; give its folder, auto or vllm") from None
    if not isinstance(found, dict):
        raise ConfigError("--generation-config", f"{path}: not a JSON object")
    return found


def _eos(hf_config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """End-of-sequence ids, those of generation_config first, each once."""
    ids: list[int] = []
    for source in (generation, hf_config):
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int) and token >= 0 and token not in ids:
                ids.append(token)
        if ids:
            break
    return tuple(ids)


def _sampling_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: generation[key] for key in _SAMPLING_KEYS if generation.get(key) is not None}
    for key, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"generation_config.json: {key} is {value!r}, not a number; try --generation-config vllm")
    if "max_new_tokens" in found:
        found["max_tokens"] = found.pop("max_new_tokens")
    return found
