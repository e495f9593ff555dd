"""Resolve a configuration for a model and a machine: backend, architecture, dtype, limits. No weights are read.

The engine's start-up and `--explain-config` both use it, so that the explanation is what the engine does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pagoda.backends.registry import (
    check_batch_invariant,
    check_checkpoints,
    check_drafters,
    choose_backend,
    load_rank_runtime,
    load_schemes,
    load_simulator,
    parallel_sizes,
    pooling_parallel_sizes,
    runs_ranks,
)
from pagoda.common.backend import ParallelSizes
from pagoda.common.config import backend_support
from pagoda.common.config.defaults import (
    BLOCK_SIZES,
    KINDS,
    ModelLimits,
    Platform,
    ResolvedRow,
    Usage,
    detect,
    resolve_limits,
)
from pagoda.common.config.engine import EngineConfig, Limits
from pagoda.common.config.groups.cache import CacheConfig, CacheDType
from pagoda.common.config.groups.model import PRE_QUANTIZED, LoRAConfig
from pagoda.common.engine.kv_cache.spec import KvLayout, kv_layout
from pagoda.common.engine.structured_output.grammar import is_installed, not_installed
from pagoda.common.errors import ConfigError, ModelError
from pagoda.common.models import token_classifier
from pagoda.common.models.family import AnswerFormat, Family
from pagoda.common.models.mixers.caches import StateCache
from pagoda.common.models.registry import (
    FLOAT16_OVERFLOWS,
    overridden,
    pooling_spec,
    spec_from_config,
    within_context,
    without_windows,
)
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import ModelSpec
from pagoda.common.models.towers import text_model, with_text_keys
from pagoda.common.models.transformers_spec import AnySpec, TransformersSpec, own_spec
from pagoda.common.weights.checkpoint import Checkpoint, open_checkpoint
from pagoda.common.weights.folder import code_files
from pagoda.common.weights.hub import is_local
from pagoda.common.weights.quantization.config import QuantizationConfig, parameter_schemes
from pagoda.common.weights.quantization.on_the_fly import schemes_on_the_fly
from pagoda.common.weights.quantization.read import read_quantization, without_quantization
from pagoda.common.weights.quantization.schemes import Scheme
from pagoda.common.weights.rules import sources as tensor_sources
from pagoda.common.weights.rules import stored_schemes
from pagoda.common.weights.sharded import ShardedCheckpoint
from pagoda.server.core_client.ipc_messages import PoolingInfo
from pagoda.server.settings.drafter import ResolvedDrafter, resolve_drafter
from pagoda.server.settings.generation_config import GenerationDefaults, read_generation
from pagoda.server.settings.implementation import implementation_row, transformers_spec, uses_transformers
from pagoda.server.settings.runner import PoolingRunner, check_pooling, pooling_info, resolve_runner
from pagoda.server.settings.tokenizer import open_tokenizer

if TYPE_CHECKING:
    from pagoda.common.config.settings import Setting

logger = logging.getLogger(__name__)

SIMULATED: Final = "simulated"
"""The backend whose devices are those of the settings."""

_DTYPE_ALIASES: Final = {"float": "float32", "half": "float16"}
_RESOLVED_LATER: Final = {
    "num_gpu_blocks_override": "computed after the weights are loaded",
    "kv_cache_memory_bytes": "computed from the memory left by the weights",
    "download_dir": "the Hub client's cache",
}
"""Settings that are resolved after this stage if unset -> how."""

_ENCODER_DECODER_SEQS: Final = 32
"""Default --max-num-seqs of encoder-decoder models: each row has memory for the longest encoder prompt."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """Everything about an engine that is known before its weights are loaded."""

    config: EngineConfig
    sources: Mapping[str, str]  # Setting -> source, for settings that are set.
    checkpoint: Checkpoint
    hf_config: Mapping[str, Any]  # The config.json with overrides, without the quantisation.
    quantization: QuantizationConfig | None  # Quantisation of the checkpoint; None: its weights are dense.
    spec: AnySpec
    family: Family | None  # None: transformers computes the model.
    backend: str
    dtype: str
    limits: Limits
    layout: KvLayout
    generation: GenerationDefaults
    runner: PoolingRunner | None  # None: the model generates.
    pooling: PoolingInfo | None
    parallel_sizes: ParallelSizes
    derived: tuple[ResolvedRow, ...]
    drafter: ResolvedDrafter | None = None  # The model on the device that guesses drafts.
    platform: Platform = Platform("cpu")  # The devices that limits were resolved for.

    @property
    def cache(self) -> CacheConfig:
        """The settings of the KV cache, its data type resolved."""
        cache = self.config.cache
        quantization = None if self.runner is not None else self.quantization
        return replace(cache, cache_dtype=_cache_dtype(cache, quantization, self.spec, self.backend))

    @property
    def runtime_quantization(self) -> str | None:
        """The method by which the backend quantises dense weights on its devices; None: it gets them as they are."""
        method = self._dense_quantization
        return method if method is not None and method in load_schemes(self.backend).ROUNDED_ON_DEVICE else None

    @property
    def _dense_quantization(self) -> str | None:
        """The method that quantises dense weights while loading."""
        return self.config.model.runtime_quantization if self.quantization is None else None

    @property
    def schemes(self) -> Mapping[str, Scheme]:
        """The scheme of each parameter that the backend gets quantised: by the checkpoint, or while it is read."""
        if self.family is None:
            return {}
        parameters = params(own_spec(self.spec, self.backend))
        if self.quantization is not None:
            sources = tensor_sources(self.family.rules, parameters)
            return parameter_schemes(self.quantization, parameters, sources, self.checkpoint.names)
        if (method := self._dense_quantization) is not None:
            has_head = self.spec.pooler is None
            return schemes_on_the_fly(method, parameters, has_head) if self.quantizes_on_host else {}
        stored = self.checkpoint.schemes
        return stored_schemes(self.checkpoint.family(self.family).rules, parameters, stored) if stored else {}

    @property
    def quantizes_on_host(self) -> bool:
        """Whether dense weights are quantised while they are read, before the backend gets them."""
        return self._dense_quantization is not None and self.runtime_quantization is None

    @property
    def answers(self) -> AnswerFormat:
        """How the model marks up its answers."""
        return AnswerFormat() if self.family is None else self.family.answers

    @property
    def rows(self) -> tuple[ResolvedRow, ...]:
        """One row per engine setting, in the order of the documentation."""
        derived = {row.name: row for row in self.derived}
        return tuple(engine_rows(self.config, self.sources, derived))


def resolve(
    config: EngineConfig,
    usage: Usage,
    sources: Mapping[str, str] | None = None,
    *,
    weights: bool = False,
    platform: Platform | None = None,
) -> Resolved:
    """Open the checkpoint and resolve every setting that the configuration leaves open.

    `sources`: setting -> source. `weights`: download and open the weights too, not only the configuration files.
    `platform`: devices that the engine will run on; default: this machine's.
    Raise ConfigError, ModelError or WeightError.
    """
    backend, parallel_sizes = check_machine(config)
    for note in backend_support.notes(config, backend):
        logger.warning("%s", note)
    checkpoint = open_model(config, weights=weights)
    if isinstance(checkpoint, ShardedCheckpoint):
        check_checkpoints(backend)
    hf_config, quantization = model_config(config, checkpoint)
    _check_quantization(config, checkpoint, quantization)
    _log_text_only(config, hf_config)
    runner, spec, family = _architecture(config, checkpoint, hf_config, backend, quantization)
    if config.model.enable_prompt_embeds and isinstance(spec, ModelSpec) and spec.per_layer is not None:
        raise ConfigError("--enable-prompt-embeds", "each layer of the model embeds the token ids, too; drop it")
    _check_lora(config, pooling=runner is not None)
    if runner is not None:
        parallel_sizes = pooling_parallel_sizes(backend, config.parallel)
        check_pooling(config, checkpoint, backend)
    model = _model_limits(spec)
    if config.model.disable_sliding_window:
        spec, model = _without_windows(spec, model)
    world_size = config.parallel.tensor_parallel_size * config.parallel.pipeline_parallel_size
    detected, block_size = _machine(config, backend, world_size)
    platform = platform or detected
    resolved = resolve_limits(config, platform=platform, usage=usage, block_size=block_size, model=model)
    limits = resolved.limits
    if isinstance(spec, ModelSpec):
        spec = within_context(spec, limits.max_model_len)
    drafter = resolve_drafter(config, spec, family, hf_config, checkpoint, quantization, limits.max_model_len)
    if drafter is not None:
        limits = replace(limits, max_drafts=drafter.num_tokens, device_drafts=True)
        if family is not None and drafter.family.only:
            family = replace(family, ignored=(*family.ignored, f"{drafter.family.only}*", *drafter.family.unread))
    if runs_ranks(backend, config.parallel):
        sharded = own_spec(spec, "several ranks")
        size = config.parallel.tensor_parallel_size
        load_rank_runtime(backend).check(sharded, size, None if drafter is None else drafter.spec)
    hybrid = not config.scheduler.disable_hybrid_kv_cache_manager
    dtype, dtype_reason = _dtype(config.model.dtype, hf_config, backend, pooling=runner is not None)
    generation = read_generation(config.model, checkpoint, hf_config)
    result = Resolved(
        config=config,
        sources=sources or {},
        checkpoint=checkpoint,
        hf_config=hf_config,
        quantization=quantization,
        spec=spec,
        family=family,
        backend=backend,
        dtype=dtype,
        limits=limits,
        layout=kv_layout(
            spec,
            limits.block_size,
            hybrid=hybrid,
            drafter=() if drafter is None else drafter.spec.caches,
            drafts=limits.max_drafts,
        ),
        generation=generation,
        runner=runner,
        pooling=None if runner is None else pooling_info(runner, spec, hf_config),
        parallel_sizes=parallel_sizes,
        derived=(
            *resolved.rows,
            ResolvedRow("dtype", dtype, "model", dtype_reason),
            *_cache_rows(config.cache, None if runner is not None else quantization, spec, backend),
            ResolvedRow("backend", backend, "platform default", "the first that can run on this machine"),
            implementation_row(config, spec),
            executor_row(config, backend),
            *runner_rows(runner),
            *answer_rows(config, family),
            *model_rows(config, checkpoint, generation, quantization),
        ),
        drafter=drafter,
        platform=platform,
    )
    _log_cache(result)
    if runner is None:
        _warn_snapshots(result)
    if quantization is None:
        _check_schemes(backend, config.model.runtime_quantization, result.schemes)
    return result


def _machine(config: EngineConfig, backend: str, world_size: int) -> tuple[Platform, int]:
    """Return the devices, this machine's or simulated ones, and the block size that their backend prefers."""
    if backend != SIMULATED:
        return detect(KINDS[backend], world_size), BLOCK_SIZES[backend]
    device = load_simulator().open_device(config.simulation)
    return replace(device.platform, world_size=world_size), BLOCK_SIZES[device.backend]


def _cache_dtype(
    cache: CacheConfig, quantization: QuantizationConfig | None, spec: AnySpec, backend: str
) -> CacheDType:
    """Return the data type of the KV cache; of auto fp8 where the checkpoint says so and the backend has it."""
    if cache.cache_dtype != "auto" or quantization is None or not quantization.fp8_cache:
        return cache.cache_dtype
    return "fp8" if backend in ("torch_cuda", "jax_tpu") and isinstance(spec, ModelSpec) and _plain(spec) else "auto"


def _cache_rows(
    cache: CacheConfig, quantization: QuantizationConfig | None, spec: AnySpec, backend: str
) -> Iterator[ResolvedRow]:
    dtype = _cache_dtype(cache, quantization, spec, backend)
    if dtype != cache.cache_dtype:
        yield ResolvedRow("kv_cache_dtype", dtype, "model", "the checkpoint has an FP8 KV cache")


def _plain(spec: ModelSpec) -> bool:
    """Whether every backend with 8-bit caches has one for a model: keys and values of each layer's own."""
    return not spec.block_owners and all(mixer.has_plain_cache for mixer in spec.mixers)


def _log_cache(resolved: Resolved) -> None:
    """Log that the KV cache is fp8 as the checkpoint says, or that it is not."""
    quantization = resolved.quantization
    if quantization is None or not quantization.fp8_cache or resolved.config.cache.cache_dtype != "auto":
        return
    if resolved.cache.cache_dtype == "fp8":
        logger.info("KV cache: fp8, as the checkpoint says; --kv-cache-dtype bfloat16 keeps the model's data type")
    else:
        logger.info(
            "KV cache: the model's data type; %s has no fp8 cache for it, which the checkpoint asks for",
            resolved.backend,
        )


def _warn_snapshots(resolved: Resolved) -> None:
    """Warn about settings of recurrent state that concern no state, or none that is kept."""
    flags = ", ".join(resolved.config.cache.snapshot_flags())
    if flags and not resolved.layout.has_states:
        logger.warning("%s: no effect on a model without recurrent state", flags)
    elif flags and not resolved.limits.prefix_caching and resolved.config.cache.mamba_cache_mode != "none":
        logger.warning("%s: no effect without prefix caching", flags)


def _check_lora(config: EngineConfig, *, pooling: bool) -> None:
    """Raise ConfigError for LoRA adapters on a pooling model, warn about their settings without --enable-lora."""
    lora = config.lora
    if lora.enable_lora and pooling:
        raise ConfigError(
            "--enable-lora", "pooling models have no LoRA adapters; merge the adapter into the checkpoint"
        )
    if not lora.enable_lora and lora != LoRAConfig():
        logger.warning("--max-loras, --max-lora-rank and the other settings of LoRA: no effect without --enable-lora")


def _check_schemes(backend: str, method: str | None, schemes: Mapping[str, Scheme]) -> None:
    """Raise ConfigError for a scheme that the backend refuses, warn if it computes with none of those of `method`."""
    declared = load_schemes(backend).scheme_support
    supports = {declared(scheme, ".experts." in name) for name, scheme in schemes.items()}
    for support in supports:
        if support.kind == "refused" and method is not None:
            raise ConfigError("--quantization", f"{method}: {support.how}")
        if support.kind == "refused":
            raise ModelError(f"{backend} does not read the model's quantised weights: {support.how}")
    if method is not None and supports and all(support.kind == "dequantises" for support in supports):
        logger.warning(
            "--quantization %s: %s has no product for it: the weights are rounded, but take as much memory as without "
            "the flag",
            method,
            backend,
        )


def check_machine(config: EngineConfig) -> tuple[str, ParallelSizes]:
    """Return the backend and how it distributes a model. Raise ConfigError for what this machine lacks.

    Needs no model and imports no framework: it runs before the model's files are read.
    """
    backend = choose_backend(config.model.backend)
    backend_support.check_settings(config, backend)
    sizes = parallel_sizes(backend, config.parallel)
    if config.model.batch_invariant:
        check_batch_invariant(backend)
    speculative = config.extension.speculative
    if speculative is not None and speculative.runs_on_device:
        check_drafters(backend, speculative.method, config.parallel)
    structured = config.structured_outputs
    if structured.is_engine_explicit and not is_installed(structured.engine):
        raise ConfigError(
            "--structured-outputs-config", f"backend {structured.engine}: {not_installed(structured.engine)}"
        )
    return backend, sizes


def open_model(config: EngineConfig, *, weights: bool) -> Checkpoint:
    """Open the checkpoint of --model."""
    model = config.model
    load = config.load
    return open_checkpoint(
        model.model,
        load.load_format,
        weights=weights,
        revision=model.revision,
        token=model.hf_token,
        download_dir=load.download_dir,
        ignore_patterns=load.ignore_patterns,
        eager=load.safetensors_load_strategy == "eager",
    )


def _architecture(
    config: EngineConfig,
    checkpoint: Checkpoint,
    hf_config: Mapping[str, Any],
    backend: str,
    quantization: QuantizationConfig | None,
) -> tuple[PoolingRunner | None, AnySpec, Family | None]:
    """Return the pooling runner (None: the model generates), the spec and the family. Raise ModelError."""
    try:
        if uses_transformers(config, hf_config):
            runner = resolve_runner(config.model, checkpoint, hf_config, by_name=True)
            return runner, transformers_spec(config, checkpoint, hf_config, backend, quantization, runner), None
        runner = resolve_runner(config.model, checkpoint, hf_config)
        code = partial(code_files, checkpoint.folder)
        if runner is None:
            return None, *spec_from_config(hf_config, code=code)
        hf_config = _with_token_ids(config, hf_config)
        return runner, *pooling_spec(hf_config, runner.use, runner.modules, runner.overrides, code=code)
    except ModelError as error:
        raise ModelError(f"{config.model.model}: {error}") from None


def _with_token_ids(config: EngineConfig, hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config with the ids of the tokens that a classifier is made of. Raise ModelError for unknown ones."""
    tokens = hf_config.get(token_classifier.KEY)
    if not isinstance(tokens, list) or not any(isinstance(token, str) for token in tokens):
        return hf_config
    tokenizer = open_tokenizer(config)
    if tokenizer is None:
        raise ConfigError("--skip-tokenizer-init", f"{token_classifier.KEY} names tokens; drop it, or give their ids")
    ids = [tokenizer.backend.token_to_id(token) if isinstance(token, str) else token for token in tokens]
    if None in ids:
        unknown = tokens[ids.index(None)]
        raise ModelError(f"{token_classifier.KEY} names {unknown!r}, which is not a token of the tokenizer")
    return {**hf_config, token_classifier.KEY: ids}


def read_hf_config(config: EngineConfig) -> dict[str, Any]:
    """Return the model's config.json with --hf-overrides applied. Raise ModelError."""
    return model_config(config, open_model(config, weights=False))[0]


def model_config(config: EngineConfig, checkpoint: Checkpoint) -> tuple[dict[str, Any], QuantizationConfig | None]:
    """Return config.json (the model's or that of --hf-config-path) with --hf-overrides applied, and its quantisation.

    Raise ModelError for a quantisation that is not supported.
    """
    model = config.model
    hf_config = checkpoint.config()
    if model.hf_config_path is not None:
        try:
            hf_config = open_checkpoint(
                model.hf_config_path, "dummy", token=model.hf_token, download_dir=config.load.download_dir
            ).config()
        except ModelError as error:
            raise ConfigError("--hf-config-path", str(error)) from None
    hf_config = overridden(hf_config, model.hf_overrides)
    try:
        hf_config = with_text_keys(hf_config)
        quantization = read_quantization(hf_config)
    except ModelError as error:
        raise ModelError(f"{model.model}: {error}") from None
    return without_quantization(hf_config), quantization


def _log_text_only(config: EngineConfig, hf_config: Mapping[str, Any]) -> None:
    """Log that a multimodal model is served without media, as a warning unless --language-model-only asks for it."""
    if text_model(hf_config).tower is None:
        return
    level = logging.INFO if config.multimodal.language_model_only else logging.WARNING
    logger.log(level, "%s is served text-only: requests with images, audio or video are refused", config.model.model)


def _model_limits(spec: AnySpec) -> ModelLimits:
    if isinstance(spec, TransformersSpec):
        limits = ModelLimits(spec.max_positions, extensible=False, pools=spec.pooler is not None)
        if spec.encoder is None:
            return limits
        return replace(limits, prefix_caching=False, default_seqs=_ENCODER_DECODER_SEQS)
    return ModelLimits(
        spec.max_positions,
        extensible=spec.embedding.positions is None,
        pools=spec.pooler is not None,
        has_states=any(isinstance(cache, StateCache) for cache in spec.caches),
    )


def _without_windows(spec: AnySpec, model: ModelLimits) -> tuple[AnySpec, ModelLimits]:
    full = spec.without_windows() if isinstance(spec, TransformersSpec) else without_windows(spec)
    if full == spec:
        logger.info("--disable-sliding-window: the model has no sliding windows")
        return spec, model
    logger.info("--disable-sliding-window: the context length is capped at the window size, %d", full.max_positions)
    return full, replace(model, max_len=full.max_positions, max_len_source="the size of the disabled sliding window")


def _check_quantization(config: EngineConfig, checkpoint: Checkpoint, quantization: QuantizationConfig | None) -> None:
    """Raise ConfigError if --quantization does not fit the checkpoint."""
    method = config.model.quantization
    if method == "gguf" and checkpoint.gguf_metadata is None:
        raise ConfigError(
            "--quantization", "the model is not a GGUF file; name one, such as org/name:Q4_K_M, or drop it"
        )
    if quantization is not None:
        if method not in (None, *quantization.names):
            raise ConfigError(
                "--quantization",
                f"{method}: the checkpoint is already quantised; drop it, or use {' or '.join(quantization.names)}",
            )
        return
    if method in PRE_QUANTIZED:
        raise ConfigError("--quantization", f"{method}: the checkpoint is not quantised by it; drop it, or use fp8")
    method = config.model.runtime_quantization
    if method is not None and isinstance(checkpoint, ShardedCheckpoint):
        raise ConfigError("--quantization", f"{method} cannot be applied to a checkpoint of `pagoda convert`; drop it")


def _dtype(configured: str, hf_config: Mapping[str, Any], backend: str, *, pooling: bool) -> tuple[str, str]:
    """Return the data type and the reason. Raise ConfigError for float16 with a model that overflows in it.

    `auto` is the checkpoint's if it has 16 bits and the backend computes in it. Else it is bfloat16; for pooling models
    float16, which keeps three more bits of an embedding, or float32 on CPUs, most of which emulate float16 by it.
    """
    model_type = str(hf_config.get("model_type"))
    overflows = model_type in FLOAT16_OVERFLOWS
    if configured != "auto":
        dtype = _DTYPE_ALIASES.get(configured, configured)
        if dtype == "float16" and overflows:
            raise ConfigError("--dtype", f"{model_type} models overflow in float16; use bfloat16 or float32")
        return dtype, f"{configured} is {dtype}" if dtype != configured else ""
    sixteen_bits = ("bfloat16",) if backend == "jax_tpu" or overflows else ("bfloat16", "float16")
    instead = {"torch_cuda": "float16", "reference": "float32"}.get(backend, "bfloat16") if pooling else "bfloat16"
    instead = "bfloat16" if overflows and instead == "float16" else instead
    checkpoint_dtype = hf_config.get("dtype") or hf_config.get("torch_dtype")
    if checkpoint_dtype in (*sixteen_bits, instead):
        return str(checkpoint_dtype), f"the checkpoint's dtype is {checkpoint_dtype}"
    if checkpoint_dtype == "float32":
        return instead, "the checkpoint's dtype is float32, which auto serves in 16 bits"
    if checkpoint_dtype:
        whose = f"{model_type} models do" if overflows else f"{backend} does"
        return instead, f"the checkpoint's dtype is {checkpoint_dtype}, which {whose} not support"
    return instead, "the checkpoint names no dtype"


# Rows of `--explain-config` for engine settings: resolved value, source and reason.


def engine_rows(
    config: EngineConfig, sources: Mapping[str, str], derived: Mapping[str, ResolvedRow]
) -> Iterator[ResolvedRow]:
    """Yield one row per engine setting, in the order of the documentation.

    `sources`: setting -> source. `derived`: setting -> its resolved row.
    """
    from pagoda.common.config.settings import ENGINE_GROUPS, settings_of

    for attribute, group in ENGINE_GROUPS.items():
        for setting in settings_of(group):
            yield _row(setting, getattr(getattr(config, attribute), setting.field), sources, derived)


def _row(setting: Setting, value: Any, sources: Mapping[str, str], derived: Mapping[str, ResolvedRow]) -> ResolvedRow:
    source = sources.get(setting.name) or ("default" if value == setting.default else "keyword")
    row = derived.get(setting.name)
    if setting.name == "hf_token" and value is not None:
        return ResolvedRow(setting.name, "***", source, "hidden")
    if row is None:
        return ResolvedRow(setting.name, value, source, _RESOLVED_LATER.get(setting.name, "") if value is None else "")
    if source == "default":
        return row
    return ResolvedRow(setting.name, row.value, source, row.reason if row.value != value else "")


def runner_rows(runner: PoolingRunner | None) -> Iterator[ResolvedRow]:
    """Yield the rows of --runner and --convert. `runner`: None for a generative model."""
    if runner is None:
        yield ResolvedRow("runner", "generate", "model", "the model has a language modeling head")
        yield ResolvedRow("convert", "none", "model", "the model generates")
    else:
        yield ResolvedRow("runner", "pooling", "model", runner.reason)
        yield ResolvedRow("convert", runner.use.removeprefix("token_"), "model", runner.reason)


def answer_rows(config: EngineConfig, family: Family | None) -> Iterator[ResolvedRow]:
    """Yield the row of --reasoning-parser if it is fixed by the family."""
    if family is not None and family.answers.fixed and not config.structured_outputs.reasoning_parser:
        yield ResolvedRow("reasoning_parser", family.answers.reasoning, "model", "the format of the model's answers")


def executor_row(config: EngineConfig, backend: str) -> ResolvedRow:
    """Return the row of --distributed-executor-backend."""
    name = "distributed_executor_backend"
    executor = config.parallel.distributed_executor_backend
    if not runs_ranks(backend, config.parallel):
        if executor == "ray":
            logger.warning("--distributed-executor-backend: ray has no effect with --tensor-parallel-size 1")
        return ResolvedRow(name, "uni", "default", "one process drives all devices")
    return ResolvedRow(name, executor or "mp", "default", "one process per GPU")


def model_rows(
    config: EngineConfig,
    checkpoint: Checkpoint,
    generation: GenerationDefaults,
    quantization: QuantizationConfig | None,
) -> Iterator[ResolvedRow]:
    """Yield the rows of settings derived from the checkpoint and its generation config."""
    model = config.model
    yield ResolvedRow("served_model_name", model.names, "model", "the value of --model")
    yield ResolvedRow("tokenizer", model.tokenizer or model.model, "model", "the model's tokenizer")
    if model.revision is not None and model.tokenizer in (None, model.model):
        revision = model.tokenizer_revision or model.revision
        yield ResolvedRow("tokenizer_revision", revision, "model", "the model's revision")
    if not is_local(model.model):
        yield ResolvedRow("revision", model.revision, "default", "the repository's default branch")
    defaults = ", ".join(f"{key} {value}" for key, value in generation.sampling.items())
    yield ResolvedRow("generation_config", model.generation_config, "default", f"sets {defaults or 'no defaults'}")
    is_dummy = config.load.load_format == "dummy"
    if checkpoint.gguf_metadata is not None:
        reason = "random blocks, of the types in the GGUF file" if is_dummy else "the model is a GGUF file"
        yield ResolvedRow("quantization", "gguf", "model", reason)
        if not is_dummy:
            yield ResolvedRow("load_format", "gguf", "model", reason)
    if quantization is not None:
        yield ResolvedRow("quantization", quantization.method, "model", "the checkpoint is quantised")
    if isinstance(checkpoint, ShardedCheckpoint):
        yield ResolvedRow("load_format", "sharded_state", "model", "the model was written by `pagoda convert`")
