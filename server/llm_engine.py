"""LLMEngine: an engine in this process, driven step by step by its caller."""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from pagoda.common.config.defaults import Usage
from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.nested.profiler import FLAG as PROFILER_FLAG
from pagoda.common.config.groups.nested.profiler import PROFILER_OFF, check_profile
from pagoda.common.engine.core import ASLEEP, check_sleep, check_wake_up
from pagoda.common.engine.messages import EngineStats, RequestEvents, StepOutputs
from pagoda.common.engine.steps.profiling import StepProfiler
from pagoda.common.engine.structured_output.schemas import answer_error
from pagoda.common.errors import ConfigError, RequestError, SleepError
from pagoda.common.observe.logs import configure_unless_done
from pagoda.common.pooling_params import PoolingParams
from pagoda.common.sampling_params import RequestOutputKind, SamplingParams
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.core_client import check_first_host, check_one_engine
from pagoda.server.core_client.ipc_messages import EngineInfo
from pagoda.server.outputs import RawPoolingOutput, RequestOutput
from pagoda.server.parsers.registry import check_format_is_named
from pagoda.server.processing.adapters import NO_PINS, AdapterRegistry
from pagoda.server.processing.answer_check import EndedAnswers, ended_answers, with_grammar
from pagoda.server.processing.inputs import (
    InputProcessor,
    PreparedRequest,
    PromptType,
    RequestOrigin,
    cache_key_of,
    check_extras,
    max_prompt_tokens,
    text_options,
    with_text,
)
from pagoda.server.processing.output_processor import OutputProcessor, clear_events
from pagoda.server.settings.flags import EngineArgs
from pagoda.server.settings.tokenizer import open_tokenizer
from pagoda.server.startup.engine import BuiltEngine, build_engine
from pagoda.server.vllm.config_views import VllmConfigView
from pagoda.server.vllm.engine_views import EngineViews
from pagoda.server.vllm.request_types import LoRARequest
from pagoda.server.vllm.script_helpers import UsageContext

if TYPE_CHECKING:
    from pagoda.common.observe.metrics import Metrics
    from pagoda.common.observe.tracing import Tracer
    from pagoda.server.vllm.metrics_reader import Metric

logger = logging.getLogger(__name__)


class MetricsRecorder(Protocol):
    """What observe.metrics.Metrics implements."""

    def on_step(self, step: StepOutputs) -> None:
        """Record an engine step, or several merged ones."""
        ...

    def on_events(self, events: RequestEvents) -> None:
        """Record what happened to requests."""
        ...

    def on_rejected(self, reason: str) -> None:
        """Record a request that exceeds a limit of the queue, by the limit."""
        ...

    def on_restart(self) -> None:
        """Count an engine that ended and is being replaced."""
        ...

    def forget_adapter(self, name: str) -> None:
        """Remove the series of an adapter that is served no longer."""
        ...


class LLMEngine(EngineViews):
    """Add requests, then call step() until has_unfinished_requests() is False.

    Raises ConfigError, ModelError or WeightError if the engine cannot start. `executor_class` (the backend decides),
    `usage_context`, `mm_registry` and `multiprocess_mode` have no effect; `stat_loggers` are refused. `log_stats`
    False: collect no metrics. `build` builds the engine and `open_text` opens the tokenizer, for tests.
    """

    def __init__(
        self,
        vllm_config: EngineConfig,
        executor_class: object = None,
        log_stats: bool = True,
        aggregate_engine_logging: bool = False,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: Sequence[object] | None = None,
        mm_registry: object = None,
        multiprocess_mode: bool = False,
        *,
        usage: Usage = "llm",
        build: Callable[[EngineConfig, Usage], BuiltEngine] = build_engine,
        open_text: Callable[[EngineConfig], Tokenizer | None] = open_tokenizer,
    ) -> None:
        config = vllm_config
        check_stat_loggers(stat_loggers)
        configure_unless_done(config.logging)
        check_first_host(config)
        check_one_engine(config)
        check_format_is_named(config)
        self.config = config
        with ThreadPoolExecutor(1, "pagoda-tokenizer") as executor:
            opening = executor.submit(open_text, config)
            self._built = build(config, usage)
            tokenizer = opening.result()
        if tokenizer is not None:
            tokenizer = tokenizer.with_vocab(self.info.vocab_size).with_context(max_prompt_tokens(self.info))
        if self._built.hosts is not None:  # A script need not call shutdown: the other hosts end with it.
            atexit.register(weakref.finalize(self, self._built.backend.close))
        self._text = tokenizer
        self._core = self._built.core
        self._sleeper = self._built.sleeper
        self.inputs = InputProcessor(config.model, self.info, tokenizer, config.structured_outputs)
        self.adapters = AdapterRegistry(config.lora)
        self.log_stats = log_stats and not config.observability.disable_log_stats
        self._metrics = _metrics_of(self.info, config) if self.log_stats else None
        self._events = RequestEvents() if self.log_stats else None
        self._tracer = open_tracer(config)
        self._ended: dict[str, EndedAnswers] = {}  # by request, where the grammar does not enforce all of the schema
        self._outputs = OutputProcessor(tokenizer, config.scheduler.stream_interval, self._events, tracer=self._tracer)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: Sequence[object] | None = None,
        enable_multiprocessing: bool = False,
    ) -> Self:
        """Build an engine from its arguments. See LLMEngine for those without effect."""
        return cls(engine_args.create_engine_config(), usage_context=usage_context, stat_loggers=stat_loggers)

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: EngineConfig,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: Sequence[object] | None = None,
        disable_log_stats: bool = False,
    ) -> Self:
        """Build an engine from what EngineArgs.create_engine_config returned."""
        return cls(vllm_config, log_stats=not disable_log_stats, usage_context=usage_context, stat_loggers=stat_loggers)

    @property
    def stats(self) -> EngineStats:
        """A snapshot: running, waiting, cache usage and totals."""
        return self._core.stats

    @property
    def info(self) -> EngineInfo:
        """Limits, names, vocabulary and start-up times."""
        return self._built.info

    @property
    def text_or_none(self) -> Tokenizer | None:
        """The model's tokenizer; None with skip_tokenizer_init."""
        return self._text

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Return "generate", or the tasks of a pooling model."""
        return self.tasks

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        session_id: str | None = None,
        prompt_text: str | None = None,
        kv_hints: object = None,
    ) -> str:
        """Queue a prompt to generate or to pool and return its id. Raises RequestError naming the field.

        The options are those of RequestOptions.
        """
        if isinstance(params, PoolingParams):
            check_extras(lora_request=lora_request)
        text = text_options(tokenization_kwargs)
        adapter = self.adapters.adapter(lora_request)
        prompt = with_text(prompt, prompt_text)
        prepared = self.inputs.prepare(
            request_id,
            prompt,
            params,
            priority,
            text=text,
            arrival_time=arrival_time,
            adapter=adapter,
            origin=RequestOrigin(cache_key=cache_key_of(session_id)),
        )
        prepared = replace(prepared, lora_request=lora_request)
        if self._tracer is not None:
            prepared = replace(prepared, trace_parent=self._tracer.parent(trace_headers))
        self.add_prepared(prepared)
        return request_id

    def add_prepared(self, prepared: PreparedRequest, kind: RequestOutputKind | None = None) -> None:
        """Queue a request that `inputs` prepared; `kind` overrides its params' output_kind.

        Raises RequestError, or SleepError while the engine is asleep. Compiles the request's grammar, and reads its
        LoRA adapter the first time.
        """
        if self.is_sleeping():
            raise SleepError(ASLEEP)
        if self._built.structured is not None and (grammar := prepared.children[0].grammar) is not None:
            resolved = self._built.structured.resolved(grammar)
            prepared = with_grammar(prepared, resolved)
            self._built.structured.mask_state(prepared.children[0]).release()
            if resolved.unchecked and self._text is not None:
                self._ended[prepared.request_id] = ended_answers(
                    prepared, resolved, self._text, self.inputs.end_token_ids
                )
        if (adapter := prepared.children[0].adapter) is not None:
            self._core.load_adapter_now(adapter)
        self._outputs.add(prepared, kind)
        added: list[str] = []
        try:
            for child in prepared.children:
                self._core.add_request(child)
                added.append(child.request_id)
        except BaseException:
            self._core.abort(added)
            self._outputs.drop(prepared.request_id)
            self._ended.pop(prepared.request_id, None)
            raise

    def step(self) -> list[RequestOutput | RawPoolingOutput]:
        """Run one engine step and return the new outputs."""
        if not self._core.has_work:
            return []
        step = self._core.step()
        outputs, stopped = self._outputs.process(step.outputs)
        if stopped:
            self._core.abort(stopped)
        if self._ended:
            self._check_answers(outputs)
        if self._metrics is not None:
            self._metrics.on_step(step)
        self._report_events()
        return outputs

    def _check_answers(self, outputs: Iterable[RequestOutput | RawPoolingOutput]) -> None:
        """Give answers that violate their schema the finish reason "error", with why as their stop reason."""
        for output in outputs:
            ended = self._ended.get(output.request_id)
            if ended is None or not isinstance(output, RequestOutput):
                continue
            for completion, answer in ended.add(output):
                if error := answer_error(ended.grammar, answer):
                    completion.finish_reason = "error"
                    completion.stop_reason = error
            if output.finished:
                del self._ended[output.request_id]

    def abort_request(self, request_ids: str | Iterable[str], internal: bool = False) -> list[RequestOutput]:
        """End requests and free their blocks. Return their last outputs (none for pooling); unknown ids are skipped.

        `internal` has no effect: a request has one id.
        """
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        outputs, children = self._outputs.abort(ids)
        self._core.abort(children)
        for request_id in ids:
            self._ended.pop(request_id, None)
        self._report_events()
        return outputs

    def _report_events(self) -> None:
        if self._metrics is not None and self._events is not None:
            self._metrics.on_events(self._events)
            clear_events(self._events)

    def abort_all(self) -> None:
        """End every request."""
        self.abort_request(self._outputs.request_ids)

    def has_unfinished_requests(self) -> bool:
        """Return True while a step may produce outputs."""
        return self.get_num_unfinished_requests() > 0

    def get_num_unfinished_requests(self) -> int:
        """Return the number of unfinished requests."""
        return len(self._outputs)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Drop all cached prefixes; running requests keep their blocks. Returns True.

        Both parameters have no effect: blocks in use need not be free for it, and there is no KV connector.
        """
        return self._core.reset_prefix_cache()

    def reset_mm_cache(self) -> None:
        """Return: there is no cache of media."""

    def reset_encoder_cache(self) -> None:
        """Return: no output of an encoder is cached."""

    def get_metrics(self) -> list[Metric]:
        """Return the present metrics: Counter, Gauge, Histogram and Vector of pagoda.v1.metrics.reader.

        Raises ConfigError with disable_log_stats.
        """
        if self._metrics is None:
            raise ConfigError("--disable-log-stats", "metrics are not collected; drop it to read them")
        from pagoda.server.vllm.metrics_reader import snapshot

        return snapshot(self._metrics.registry)

    def do_log_stats(self) -> None:
        """Log what runs, what waits, and how full the KV cache is."""
        log_engine_stats(self.stats)

    def do_log_stats_with_interval(self) -> None:
        """Log the statistics. The caller decides how often."""
        self.do_log_stats()

    def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
        profiler_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Trace the steps that follow, until `stop_profile`, with `profiler_config`.

        `profile_prefix`: beginning of the file's name. `delay_iterations`: steps that are skipped first.
        `max_iterations`: steps after which the trace is written without a stop; 0: none. None: as configured.
        `profiler_kwargs`: the same two as a dictionary. Raises RequestError, ConfigError without profiler_config.
        """
        request = check_profile(
            self.config.extension.profiler,
            prefix=profile_prefix,
            delay_iterations=delay_iterations,
            max_iterations=max_iterations,
            profiler_kwargs=profiler_kwargs,
        )
        self._profiler.start(request)

    def stop_profile(self) -> str:
        """Write the trace and return its path; after `max_iterations` it is written already.

        Raises RequestError if no profile was started or no trace could be written, ConfigError without
        profiler_config.
        """
        return self._profiler.stop()

    @property
    def _profiler(self) -> StepProfiler:
        if self._core.profiler is None:
            raise ConfigError(PROFILER_FLAG, PROFILER_OFF)
        return self._core.profiler

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a function with each worker, or a worker's method by name, and return the results.

        There is one worker, in this process; hence `timeout` has no effect. Raises ConfigError if the model is sharded
        over processes, RequestError for an unknown method.
        """
        return [self._worker().call(method, args, kwargs)]

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Call a function with each worker's model and return the results. It gets LocalWorker.get_model()."""
        return [func(self._worker().get_model())]

    def _worker(self) -> LocalWorker:
        if self._built.hosts is not None or self.config.parallel.data_parallel_size > 1:
            raise ConfigError(
                "--tensor-parallel-size",
                "workers of other processes and hosts cannot be called; use one device for collective_rpc and "
                "apply_model",
            )
        return LocalWorker(self._built.backend, self.vllm_config, self.get_supported_tasks())

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read a LoRA adapter to host memory; again if its `load_inplace` is set. False if its id was loaded before.

        Raises RequestError for an adapter that cannot be used, or without enable_lora.
        """
        adapters = self.adapters
        adapter = adapters.reload(lora_request) if lora_request.load_inplace else adapters.adapter(lora_request)
        self._core.load_adapter_now(adapter)
        return adapters.add(adapter)

    def remove_lora(self, lora_id: int) -> bool:
        """Forget a loaded adapter; running requests keep it. False if there is none."""
        self._core.remove_adapter(lora_id)
        return self.adapters.remove(lora_id)

    def list_loras(self) -> set[int]:
        """Return the ids of the adapters that `add_lora` loaded."""
        return self.adapters.numbers

    def pin_lora(self, lora_id: int) -> bool:
        """Raise RequestError: every adapter may be replaced when its slot is needed."""
        raise RequestError("lora_id", NO_PINS)

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Free the device's memory; the KV cache, prefixes included, is dropped.

        `level` 1 keeps the weights in host memory, 2 reads them again from the checkpoint on wake-up. With `mode`
        "abort" running requests end; "wait" is an error while there are any, because step() returns their outputs.
        Raises RequestError, ConfigError without enable_sleep_mode, SleepError if host memory is too small.
        """
        check_sleep(self.config.model, level, mode)
        assert self._sleeper is not None, "the engine was built with it"
        if mode == "wait" and self.has_unfinished_requests():
            raise RequestError("mode", "requests are unfinished; step() until they end, or use mode abort")
        self.abort_all()
        while self._core.has_work:
            self._core.step()
        self._sleeper.sleep(level)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Restore the memory, or only the named parts of `weights` and `kv_cache`; requests need both.

        Raises RequestError, ConfigError without enable_sleep_mode, SleepError if memory is short: the part stays
        asleep, and may be woken up later.
        """
        checked = check_wake_up(self.config.model, tags)
        assert self._sleeper is not None, "the engine was built with it"
        self._sleeper.wake_up(checked)

    def is_sleeping(self) -> bool:
        """Return True while a part of the memory is offloaded."""
        return self._sleeper is not None and bool(self._sleeper.asleep)

    def shutdown(self) -> None:
        """End all requests and release the device. Idempotent."""
        self.abort_all()
        self.inputs.templates.close()
        self._built.backend.close()
        if self._tracer is not None:
            self._tracer.close()


def open_tracer(config: EngineConfig) -> Tracer | None:
    """Return what exports traces; None without --otlp-traces-endpoint. Raises ConfigError without the extra otlp."""
    if config.observability.otlp_traces_endpoint is None:
        return None
    try:
        from pagoda.common.observe.tracing import Tracer
    except ImportError as error:
        raise ConfigError(
            "--otlp-traces-endpoint", f"opentelemetry is not installed ({error}); pip install 'pagoda[otlp]'"
        ) from None
    return Tracer(config.observability, config.model.names[0])


def check_stat_loggers(stat_loggers: Sequence[object] | None) -> None:
    """Raise ConfigError for loggers of statistics, which have no place to be called from."""
    if stat_loggers:
        raise ConfigError("stat_loggers", "custom loggers are not supported; read get_metrics() or /metrics")


def log_engine_stats(now: EngineStats) -> None:
    """Log what runs, what waits, and how full the KV cache is."""
    logger.info("running: %d, waiting: %d, KV cache: %.1f %%", now.running, now.waiting, 100 * now.kv_usage)


def _metrics_of(info: EngineInfo, config: EngineConfig) -> Metrics:
    from pagoda.common.observe.metrics import Metrics  # Generating does not need prometheus_client.

    return Metrics(info.names[0], config.parallel.data_parallel_size, config.lora.slots)


WORKER_METHODS: Final = ("check_health", "get_model", "get_supported_tasks")
"""Methods of a worker that `collective_rpc` takes by name."""


@dataclass(frozen=True, slots=True)
class LocalWorker:
    """One worker: functions given to `collective_rpc` get it as their first argument."""

    backend: Any
    vllm_config: VllmConfigView
    tasks: tuple[str, ...]
    rank: int = 0
    local_rank: int = 0

    @property
    def model_config(self) -> Any:
        """The model's part of `vllm_config`."""
        return self.vllm_config.model_config

    @property
    def device(self) -> Any:
        """The device: a torch.device, or its name for a backend other than torch's."""
        kind = self.vllm_config.device_config.device_type
        return import_module("torch").device(kind) if kind != "tpu" and find_spec("torch") else kind

    def get_model(self) -> Any:
        """Return the backend's model: its decoder (jax_tpu: StepModel), not a torch module as vLLM's."""
        return self.backend.model

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Return "generate", or the tasks of a pooling model."""
        return self.tasks

    def check_health(self) -> None:
        """Return: a worker in this process lives."""

    def call(self, method: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
        """Call a function with the worker, or a method by name. Raises RequestError for an unknown one."""
        if callable(method):
            return method(self, *args, **(kwargs or {}))
        if method not in WORKER_METHODS:
            raise RequestError(
                "method",
                f"the worker has no method {str(method)[:60]!r}; it has {', '.join(WORKER_METHODS)}; or pass a "
                "function, which gets the worker as its first argument",
            )
        return getattr(self, method)(*args, **(kwargs or {}))
