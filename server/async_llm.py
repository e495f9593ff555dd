"""AsyncLLM: the engine for servers. Each request is an asynchronous stream; leaving the stream ends the request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, Unpack, overload

from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.nested.profiler import FLAG as PROFILER_FLAG
from pagoda.common.config.groups.nested.profiler import PROFILER_OFF, check_profile
from pagoda.common.engine.core import PAUSE_MODES
from pagoda.common.engine.lora.adapter import Adapter, AdapterRequest
from pagoda.common.engine.messages import OVERLOAD, EngineRequest, EngineStats, StepOutputs
from pagoda.common.errors import (
    AnswerError,
    ConfigError,
    EngineDeadError,
    EngineUnavailableError,
    RequestError,
    RequestLostError,
)
from pagoda.common.observe.logs import configure_unless_done
from pagoda.common.pooling_params import PoolingParams
from pagoda.common.sampling_params import SamplingParams
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.core_client import start_engine
from pagoda.server.core_client.client import (
    Admission,
    AsyncSleep,
    CoreClientAsync,
    EngineClient,
    Gate,
    Load,
    QueueLimits,
    displaced,
)
from pagoda.server.core_client.ipc_messages import (
    UNAWAITED,
    Abort,
    AdapterState,
    AddRequest,
    EngineInfo,
    FromEngine,
    LoadAdapter,
    ProfileState,
    Ready,
    Refused,
    RemoveAdapter,
    ResetPrefixCache,
    Restarting,
    Resume,
    SleepState,
    SnapshotTaken,
    StartProfile,
    StepReply,
    StopProfile,
    Suspend,
    TakeSnapshot,
)
from pagoda.server.llm_engine import MetricsRecorder, check_stat_loggers, log_engine_stats, open_tracer
from pagoda.server.outputs import RawPoolingOutput, RequestOutput, with_tensor
from pagoda.server.parsers.parser import ReasoningFormat
from pagoda.server.parsers.registry import check_format_is_named
from pagoda.server.processing.adapters import NO_PINS, AdapterRegistry
from pagoda.server.processing.answer_check import ended_answers, with_grammar
from pagoda.server.processing.inputs import (
    ALONE,
    InputProcessor,
    PreparedRequest,
    Prompt,
    PromptType,
    RequestOrigin,
    TextOptions,
    cache_key_of,
    check_extras,
    max_prompt_tokens,
    text_options,
    with_text,
)
from pagoda.server.processing.output_processor import AsyncRequests, OutputCheck, RequestStream, clear_events
from pagoda.server.processing.workers.grammar_check import MAX_WAITING, GrammarCheck, check_of
from pagoda.server.processing.workers.waiting_lines import TextThreads
from pagoda.server.processing.workers.worker import TemplateRenderer
from pagoda.server.settings.flags import EngineArgs
from pagoda.server.settings.tokenizer import open_tokenizer
from pagoda.server.vllm.config_views import ModelView, VllmConfigView
from pagoda.server.vllm.engine_views import EngineViews
from pagoda.server.vllm.request_types import LoRARequest, RequestOptions, shows_options
from pagoda.server.vllm.script_helpers import UsageContext

if TYPE_CHECKING:
    from pagoda.common.observe.tracing import Tracer

LONG_TEXT: Final = 16_384
"""Characters or token ids from which a prompt is prepared in a thread, so that other requests keep streaming."""

POLL_SECONDS: Final = 0.01
"""Interval at which pause_generation checks whether all requests have finished."""


class AsyncLLM(EngineViews):
    """An engine for many concurrent requests, in one event loop.

    The engine starts at once, in its own process, or with `in_process` in a thread. With `wait` the constructor returns
    when it is warm and raises what kept it from starting; without, await wait_until_ready(). `metrics` records what
    happens, in the event loop; it may be set later. `client`, `open_text` and `clock`, that of overloads, replace the
    usual ones in tests.
    vLLM's further parameters have no effect, but for `stat_loggers` and `client_count`, which are refused.
    """

    def __init__(
        self,
        vllm_config: EngineConfig,
        executor_class: object = None,
        log_stats: bool = True,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        mm_registry: object = None,
        log_requests: bool = True,
        start_engine_loop: bool = True,
        stat_loggers: Sequence[object] | None = None,
        aggregate_engine_logging: bool = False,
        client_addresses: Mapping[str, str] | None = None,
        client_count: int = 1,
        client_index: int = 0,
        profiler: object = None,
        *,
        in_process: bool = False,
        wait: bool = True,
        metrics: MetricsRecorder | None = None,
        client: EngineClient | None = None,
        open_text: Callable[[EngineConfig], Tokenizer | None] = open_tokenizer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config = vllm_config
        check_stat_loggers(stat_loggers)
        if client_count > 1:
            raise ConfigError(
                "client_count", f"{client_count} clients cannot share an engine; use --api-server-count 1"
            )
        if client is None:
            configure_unless_done(config.logging)
        self.config = config
        self.log_stats = log_stats
        self.log_requests = log_requests
        self.stats = EngineStats()
        self.metrics = metrics
        self._open_text = open_text
        self.tracer = open_tracer(config)
        self._engine = CoreClientAsync(
            client or start_engine(config, in_process=in_process),
            self._receive,
            self._fail_all,
            self._fail_running,
            kills_stuck=bool(config.runtime.restart_engine) or config.runtime.exit_on_stuck_engine,
        )
        self._warm: WarmEngine | None = None
        self._sleep = AsyncSleep(config.model, self._engine)
        self._admission = Admission(
            config.scheduler, self._engine, self._sleep, lambda: self._ready().requests.use, self._on_rejected, clock
        )
        self._gate = Gate()
        self._suspended = False  # By pause_generation(mode="keep").
        self.text_threads = TextThreads(self._on_rejected)
        self.adapters = AdapterRegistry(config.lora)
        if wait:
            self._finish_start()

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        start_engine_loop: bool = True,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: Sequence[object] | None = None,
    ) -> Self:
        """Start an engine and wait until it is warm. Raises ConfigError, ModelError or WeightError."""
        config = engine_args.create_engine_config()
        check_format_is_named(config)
        return cls(config, stat_loggers=stat_loggers)

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: EngineConfig,
        start_engine_loop: bool = True,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: Sequence[object] | None = None,
        enable_log_requests: bool = False,
        aggregate_engine_logging: bool = False,
        disable_log_stats: bool = False,
        client_addresses: Mapping[str, str] | None = None,
        client_count: int = 1,
        client_index: int = 0,
    ) -> Self:
        """Start an engine from what EngineArgs.create_engine_config returned, and wait until it is warm."""
        return cls(
            vllm_config,
            log_stats=not disable_log_stats,
            log_requests=enable_log_requests,
            stat_loggers=stat_loggers,
            client_count=client_count,
        )

    async def wait_until_ready(self) -> EngineInfo:
        """Wait until the engine is warm. Raises what kept it from starting."""
        if self._warm is None:
            await asyncio.to_thread(self._finish_start)
        self._engine.attach()
        return self.info

    def _finish_start(self) -> None:
        try:
            tokenizer = self._open_text(self.config)
            info = self._engine.wait_ready()
            if tokenizer is not None:
                tokenizer = tokenizer.with_vocab(info.vocab_size)
        except BaseException:
            self._engine.close()
            raise
        self._warm = WarmEngine.of(self.config, info, tokenizer, self.text_threads, self.tracer)

    def _ready(self) -> WarmEngine:
        """Return what exists once the engine is warm. Raises EngineDeadError before."""
        if self._warm is None:
            raise EngineDeadError("the engine is not ready yet")
        return self._warm

    @property
    def info(self) -> EngineInfo:
        """Limits, names, vocabulary and start-up times. Raises EngineDeadError before the engine is ready."""
        return self._ready().info

    @property
    def text_or_none(self) -> Tokenizer | None:
        """The tokenizer; None with skip_tokenizer_init. Raises EngineDeadError before the engine is ready."""
        return self._ready().tokenizer

    @property
    def max_model_len(self) -> int:
        """Maximum prompt plus output, in tokens."""
        return self.info.limits.max_model_len

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end a sequence, unless a request ignores them."""
        return self._ready().inputs.processor.end_token_ids

    @property
    def names(self) -> tuple[str, ...]:
        """The names the model is served under."""
        return self.config.model.names

    @property
    def is_running(self) -> bool:
        """True once the engine is warm, while it lives."""
        return self._warm is not None and self._engine.dead is None

    @property
    def is_stopped(self) -> bool:
        """True once the engine has ended."""
        return self._engine.dead is not None

    @property
    def errored(self) -> bool:
        """True if the engine died."""
        return self._engine.dead is not None

    @property
    def dead_error(self) -> EngineDeadError:
        """Why the engine died."""
        return self._engine.dead or EngineDeadError("the engine is alive")

    def read_reasoning_as(self, format: ReasoningFormat | None) -> None:
        """Take the reasoning of later requests to have this format. None: there is no reasoning."""
        self._ready().inputs.processor.read_reasoning_as(format)

    @property
    def templates(self) -> TemplateRenderer:
        """Renders chat templates."""
        return self._ready().inputs.processor.templates

    async def get_model_config(self) -> ModelView:
        """Return `model_config`."""
        return self.model_config

    async def get_vllm_config(self) -> VllmConfigView:
        """Return `vllm_config`."""
        return self.vllm_config

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """Return "generate", or the tasks of a pooling model."""
        return self.tasks

    @shows_options(RequestOptions, priority=0)
    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of one prompt; closing or cancelling the generator ends the request.

        Raises RequestError (before the first output) for a prompt that cannot be served, QueueFullError if the queue is
        full, EngineDeadError with the cause when the engine dies.
        """
        stream = await self.add_request(request_id, prompt, sampling_params, **options)
        finished = False
        try:
            while not finished:
                output = await stream.get()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._abort(self._ready().requests.drop(request_id))

    async def encode(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        reasoning_ended: bool | None = None,
    ) -> AsyncGenerator[RawPoolingOutput, None]:
        """Yield the one output of a prompt on a pooling model; closing or cancelling the generator ends the request.

        The options are those of RequestOptions; raises as generate does.
        """
        check_extras(lora_request=lora_request)
        options = TextOptions.of(tokenization_kwargs)
        parsed = await asyncio.to_thread(self.pooling_inputs.parse, prompt, options)
        stream = await self.add_request(
            request_id, parsed, pooling_params, priority=priority, trace_headers=trace_headers
        )
        try:
            yield with_tensor(await stream.get())
        finally:
            self._abort(self._ready().requests.drop(request_id))

    @overload
    async def add_request(
        self, request_id: str, prompt: PromptType, params: SamplingParams, **options: Unpack[RequestOptions]
    ) -> RequestStream[RequestOutput]: ...

    @overload
    async def add_request(
        self, request_id: str, prompt: PromptType, params: PoolingParams, **options: Unpack[RequestOptions]
    ) -> RequestStream[RawPoolingOutput]: ...

    async def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        prompt_text: str | None = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: Mapping[str, Any] | None = None,
        kv_hints: object = None,
    ) -> RequestStream[Any]:
        """Queue a prompt to generate or to pool. A caller that stops reading the stream must abort the request.

        The options are those of RequestOptions; raises as generate does.
        """
        if isinstance(params, PoolingParams):
            check_extras(lora_request=lora_request)
        adapter = self.adapters.adapter(lora_request)
        text = text_options(tokenization_kwargs)
        prompt = with_text(prompt, prompt_text)
        return await self.submit(
            request_id,
            prompt,
            params,
            priority,
            text=text,
            arrival_time=arrival_time,
            adapter=adapter,
            lora_request=lora_request,
            trace_headers=trace_headers,
            origin=RequestOrigin(cache_key=cache_key_of(session_id)),
        )

    async def submit(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams,
        priority: int = 0,
        *,
        text: TextOptions | None = None,
        arrival_time: float | None = None,
        adapter: Adapter | None = None,
        lora_request: AdapterRequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        origin: RequestOrigin = ALONE,
    ) -> RequestStream[Any]:
        """As `add_request`; `adapter`: one that was resolved before. `lora_request`: what outputs name; `origin`: the
        caller's request that this is of.
        """
        self._engine.attach()
        warm = self._ready()
        sequences = 1 if isinstance(params, PoolingParams) else params.n
        if isinstance(params, SamplingParams):
            self.check_generates()
        await self._gate.passed()
        self._admission.check(Load(sequences), origin.owner)
        details = {"text": text, "arrival_time": arrival_time, "adapter": adapter, "origin": origin}
        prepared = await self._prepare(request_id, prompt, params, priority, **details)
        prepared = replace(prepared, lora_request=lora_request)
        if self.tracer is not None:
            prepared = replace(prepared, trace_parent=self.tracer.parent(trace_headers))
        self._admission.check(prepared.load, origin.owner, origin.group)
        warm.requests.use.add(request_id, prepared.load, origin.owner, origin.group)
        try:
            with self._admission.counting():
                prepared, check = await warm.inputs.check_grammar(prepared, origin.owner, self._admission.limits)
            await self._gate.passed()  # Preparing takes time, so it is checked again.
            self._admission.check(Load())
            stream = warm.requests.add(prepared)
            stream.check_answers(check)
        except BaseException:
            warm.requests.use.remove([request_id])
            raise
        self._send(prepared.children)
        return stream

    def _send(self, children: Sequence[EngineRequest]) -> None:
        """Send engine requests of a stream that is registered; an engine that restarts gets them once it is warm."""
        with suppress(EngineUnavailableError):
            messages = AddRequest.several(children) if len(children) > 1 else map(AddRequest, children)
            for message in messages:
                self._engine.send(message)

    def check_generates(self) -> None:
        """Raise RequestError if the model was started for pooling."""
        if self._warm is not None:
            self._warm.inputs.processor.check_generates()

    @property
    def pooling_inputs(self) -> InputProcessor:
        """The input processor of a pooling model. Raises RequestError if the model generates."""
        processor = self._ready().inputs.processor
        processor.check_pools()
        return processor

    async def preview(self, prompt: PromptType, params: SamplingParams) -> Prompt:
        """Return a prompt as it would run: tokenised, truncated and checked. Raises RequestError."""
        return (await self._prepare("preview", prompt, params, 0)).prompt

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """End requests; unknown ids are skipped. `internal` has no effect: a request has one id.

        Streams of generation close with finish_reason "abort", those of pooling fail with AbortedError.
        """
        if self._warm is not None:
            ids = [request_id] if isinstance(request_id, str) else list(request_id)
            self._abort(self._warm.requests.abort(ids))

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine is dead, EngineUnavailableError if it is stuck or restarts."""
        self._engine.raise_if_dead()
        self._ready()
        self._engine.check()

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Drop all cached prefixes; running requests keep their blocks. Returns True. See LLMEngine's."""
        await self._engine.call(ResetPrefixCache)
        return True

    async def reset_mm_cache(self) -> None:
        """Return: there is no cache of media."""

    async def reset_encoder_cache(self) -> None:
        """Return: no output of an encoder is cached."""

    async def is_tracing_enabled(self) -> bool:
        """Return True with --otlp-traces-endpoint."""
        return self.tracer is not None

    async def do_log_stats(self) -> None:
        """Log what runs, what waits, and how full the KV cache is."""
        log_engine_stats(self.stats)

    def get_num_unfinished_requests(self) -> int:
        """Return the number of unfinished requests."""
        return self.num_unfinished

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Raise QueueFullError, SleepError, EngineDeadError or RequestError if n sequences would be refused now."""
        self._admission.check(Load(n))

    def check_load(self, load: Load, owner: str) -> None:
        """As check_admission, for all that an owner's new request asks for; none is accepted during an overload."""
        self._admission.check_new(load, owner)

    def unread_extra_args(self, extra_args: Mapping[str, Any]) -> list[str]:
        """Return the entries of SamplingParams.extra_args that no logits processor reads."""
        return self._ready().inputs.processor.unread(extra_args)

    def check_overload(self) -> None:
        """Raise QueueFullError during an overload, in which no new request is accepted whatever it asks for."""
        if self._warm is not None:
            self._admission.check_overload()

    def limit_queue(self, limits: QueueLimits) -> None:
        """Refuse requests beyond these limits from now on."""
        self._admission.limits = limits

    def fail_requests(self, request_ids: Iterable[str], error: Exception) -> None:
        """End requests, whose streams raise `error`; unknown ids are skipped."""
        if self._warm is not None:
            self._abort(self._warm.requests.fail(request_ids, error))

    async def get_status(self) -> dict[str, Any]:
        """Return whether the engine runs, and its statistics."""
        return {"is_running": self.is_running, "is_paused": self._gate.closed, "errored": self.errored}

    async def wait_for_requests_to_drain(self, drain_timeout: int = 300) -> None:
        """Wait until no request is unfinished. Raises TimeoutError after `drain_timeout` seconds."""
        async with asyncio.timeout(drain_timeout):
            while self.num_unfinished and self._engine.dead is None:
                await asyncio.sleep(POLL_SECONDS)

    async def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
        profiler_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Trace the engine's steps from now on. See LLMEngine.start_profile; raises EngineDeadError, too."""
        request = check_profile(
            self.config.extension.profiler,
            prefix=profile_prefix,
            delay_iterations=delay_iterations,
            max_iterations=max_iterations,
            profiler_kwargs=profiler_kwargs,
        )
        await self._call_profiler(lambda ticket: StartProfile(ticket, request))

    async def stop_profile(self) -> str:
        """Write the trace and return its path. See LLMEngine.stop_profile; raises EngineDeadError, too."""
        if self.config.extension.profiler is None:
            raise ConfigError(PROFILER_FLAG, PROFILER_OFF)
        return await self._call_profiler(StopProfile)

    async def _call_profiler(self, command: Callable[[int], StartProfile | StopProfile]) -> str:
        reply = await self._engine.call(command)
        assert isinstance(reply, ProfileState)
        if reply.error is not None:
            raise RequestError(*reply.error)
        return reply.path

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Raise RequestError: the engine runs in another process, to which no functions are sent."""
        raise RequestError(
            "method", "collective_rpc needs the worker in this process; use it on LLM or LLMEngine instead of AsyncLLM"
        )

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read a LoRA adapter to host memory; again if its `load_inplace` is set. False if its id was loaded before.

        Raises RequestError for an adapter that cannot be used, or without enable_lora.
        """
        adapters = self.adapters
        adapter = adapters.reload(lora_request) if lora_request.load_inplace else adapters.adapter(lora_request)
        await self.load_adapter(adapter)
        return adapters.add(adapter)

    async def load_adapter(self, adapter: Adapter) -> None:
        """Read a LoRA adapter to the engine's host memory. Raises RequestError, EngineDeadError."""
        reply = await self._engine.call(lambda ticket: LoadAdapter(ticket, adapter))
        if isinstance(reply, AdapterState) and reply.error is not None:
            raise RequestError(*reply.error)

    async def take_snapshot(self) -> str:
        """Write an incident snapshot and return its path. Raises EngineDeadError, ConfigError if it cannot be."""
        reply = await self._engine.call(TakeSnapshot)
        assert isinstance(reply, SnapshotTaken)
        if reply.error:
            raise ConfigError("--incident-dir", reply.error)
        return reply.path

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget a loaded adapter; running requests keep it. False if there is none."""
        self._engine.send(RemoveAdapter(lora_id))
        return self.adapters.remove(lora_id)

    async def list_loras(self) -> set[int]:
        """Return the ids of the loaded adapters."""
        return self.adapters.numbers

    async def pin_lora(self, lora_id: int) -> bool:
        """Raise RequestError: every adapter may be replaced when its slot is needed."""
        raise RequestError("lora_id", NO_PINS)

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Free the device's memory; the KV cache, prefixes included, is dropped. Requests are refused meanwhile.

        `level` 1 keeps the weights in host memory, 2 reads them again from the checkpoint on wake-up. With `mode`
        "abort" running requests end with finish_reason "abort", with "wait" they finish first. Raises RequestError,
        ConfigError without --enable-sleep-mode, SleepError if host memory is too small for the weights.
        """
        self._sleep.begin(level, mode)
        if mode == "abort":
            await self.abort(self.request_ids)
        await self._sleep.sleep(level)

    async def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Restore the memory, or only the named parts of `weights` and `kv_cache`; requests need both.

        Raises RequestError, ConfigError without --enable-sleep-mode, SleepError if memory is short: the part stays
        asleep, and may be woken up later.
        """
        await self._sleep.wake_up(tags)

    async def is_sleeping(self) -> bool:
        """Return True while a part of the memory is offloaded."""
        return self._sleep.is_asleep

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Hold back new requests until resume_generation(). With `mode` "abort" running requests end, with "wait" they
        finish first, with "keep" they stop where they are and continue afterwards.

        `clear_cache`: drop cached prefixes then; requests that are kept keep their KV. With "keep" no step runs when
        this returns, and sleep() raises SleepError as long as requests are kept. Raises RequestError for another mode.
        """
        if mode not in PAUSE_MODES:
            raise RequestError("mode", f"mode {mode[:50]} is not one of {', '.join(PAUSE_MODES)}")
        self._gate.close()
        if mode == "keep":
            self._suspended = True
            await self._engine.call(Suspend)
        else:
            self._resume_suspended()
            if mode == "abort":
                await self.abort(self.request_ids)
            while self.num_unfinished and self._engine.dead is None:
                await asyncio.sleep(POLL_SECONDS)
        if clear_cache:
            await self.reset_prefix_cache()

    async def resume_generation(self) -> None:
        """Accept requests again, and continue suspended ones."""
        self._resume_suspended()
        self._gate.open()

    def _resume_suspended(self) -> None:
        if self._suspended:
            self._suspended = False
            self._engine.send_if_alive(Resume())

    async def is_paused(self) -> bool:
        """Return True while new requests wait."""
        return self._gate.closed

    @property
    def request_ids(self) -> list[str]:
        """Ids of unfinished requests."""
        return [] if self._warm is None else self._warm.requests.request_ids

    @property
    def num_unfinished(self) -> int:
        """Number of unfinished requests."""
        return 0 if self._warm is None else len(self._warm.requests)

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine; running requests fail. `timeout`: seconds for it to end by itself; None: 2. Idempotent."""
        self._engine.close(2.0 if timeout is None else timeout)
        if self._warm is not None:
            self._warm.inputs.close()
        self.text_threads.close()
        if self.tracer is not None:
            self.tracer.close()
        self._engine.die(EngineDeadError("the engine was shut down"))

    async def _prepare(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams,
        priority: int,
        **details: Any,
    ) -> PreparedRequest:
        self._admission.check_priority(priority)
        return await self._ready().inputs.prepare(request_id, prompt, params, priority, **details)

    def _abort(self, children: list[str]) -> None:
        """Stop engine requests that are no longer tracked."""
        if children:
            self._engine.send_if_alive(Abort(children))
            self._report_events()

    def _receive(self, message: FromEngine) -> None:
        match message:
            case StepReply(step):
                self._take(step)
            case Refused(child_id, field, text):
                self._refuse(child_id, RequestError(field, text))
            case SleepState():
                self._sleep.update(message)
            case Restarting(cause, child_ids):
                if self.metrics is not None:
                    self.metrics.on_restart()
                self._lose(cause, child_ids)
            case Ready():
                self._sleep.reset()
                if self._suspended:
                    self._engine.send(Suspend(UNAWAITED))
                self._send(self._ready().requests.children)
            case _:
                pass

    def _take(self, step: StepOutputs) -> None:
        self.stats = step.stats
        self._admission.observe(step.stats)
        if surplus := self._admission.surplus():
            self._refuse_waiting(surplus)
        for output in step.outputs:
            if output.error is not None:
                self._refuse(output.request_id, RequestError(*output.error))
        self._abort(self._ready().requests.take(step.outputs))
        if self.metrics is not None:
            self.metrics.on_step(step)
        self._report_events()

    def _report_events(self) -> None:
        events = self._ready().requests.events
        if self.metrics is not None:
            self.metrics.on_events(events)
        clear_events(events)

    def _on_rejected(self, reason: str) -> None:
        if self.metrics is not None:
            self.metrics.on_rejected(reason)

    def _refuse_waiting(self, count: int) -> None:
        """Refuse callers' requests, of which no token was generated, in favour of those that came before them."""
        refused, children = self._ready().requests.refuse_waiting(count, displaced)
        for _ in range(refused):
            self._on_rejected(OVERLOAD)
        self._abort(children)

    def _refuse(self, child_id: str, error: RequestError) -> None:
        self._abort(self._ready().requests.refuse(child_id, error))

    def _lose(self, cause: str, child_ids: list[str] | None) -> None:
        """Fail the requests that another engine cannot run: something of them has been sent, or they ran twice.

        The others run again, at once in other replicas; without `child_ids` once the engine is warm.
        """
        error = RequestLostError(f"the engine ended while it ran this request and is being restarted: {cause}")
        if child_ids is None:
            self.stats = EngineStats()
            self._admission.observe(self.stats)
        if self._warm is not None:
            running, again = self._warm.requests.fail_lost(error, child_ids)
            self._abort(running)
            if child_ids is not None:
                self._send(again)
            self._report_events()

    def _fail_running(self, error: EngineUnavailableError) -> None:
        """Fail all requests: the engine is stuck. It drops them should it continue."""
        if self._warm is not None:
            self._abort(self._warm.requests.fail_all(error))

    def raise_if_unavailable(self) -> None:
        """Raise EngineDeadError if the engine is dead, EngineUnavailableError if it is stuck or restarts."""
        self._engine.raise_if_unavailable()

    def _fail_all(self, error: EngineDeadError) -> None:
        if self._warm is not None:
            self._warm.requests.fail_all(error)
            self._report_events()


# What an AsyncLLM consists of, all in one event loop; only it sends to the engine.


@dataclass(frozen=True, slots=True)
class WarmEngine:
    """What an AsyncLLM needs for requests once the engine is warm."""

    info: EngineInfo
    tokenizer: Tokenizer | None  # None with skip_tokenizer_init.
    inputs: AsyncInputs
    requests: AsyncRequests

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        info: EngineInfo,
        tokenizer: Tokenizer | None,
        threads: TextThreads,
        tracer: Tracer | None = None,
    ) -> Self:
        """Build it from the engine's description."""
        tokenizer = None if tokenizer is None else tokenizer.with_context(max_prompt_tokens(info))
        limit = config.scheduler.max_request_cost
        processor = InputProcessor(config.model, info, tokenizer, config.structured_outputs, limit)
        return cls(
            info=info,
            tokenizer=tokenizer,
            inputs=AsyncInputs(processor, check_of(tokenizer, info), threads),
            requests=AsyncRequests(tokenizer, config.scheduler.stream_interval, tracer),
        )


WORD_COST: Final = 16
"""Characters of a prompt that take as long to tokenise as what is done for a bad word beside tokenising its own."""


class AsyncInputs:
    """An InputProcessor with threads for long prompts and embeddings, and a process that compiles grammars first.

    Closing it ends the processes of both.
    """

    def __init__(self, processor: InputProcessor, grammars: GrammarCheck, threads: TextThreads) -> None:
        self.processor = processor
        self._grammars = grammars
        self._threads = threads
        self._turn = asyncio.Semaphore(1)  # Several threads of Python code slow down the event loop by their number.

    async def prepare(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams,
        priority: int,
        *,
        text: TextOptions | None = None,
        arrival_time: float | None = None,
        adapter: Adapter | None = None,
        origin: RequestOrigin = ALONE,
    ) -> PreparedRequest:
        """Return the engine requests of a prompt, see InputProcessor.prepare. Raises RequestError."""
        prepare = partial(
            self.processor.prepare,
            request_id,
            prompt,
            params,
            priority,
            text=text,
            arrival_time=arrival_time,
            adapter=adapter,
            origin=origin,
        )
        content = (prompt.get("prompt_token_ids") or prompt.get("prompt")) if isinstance(prompt, Mapping) else prompt
        length = len(content) if isinstance(content, str | list) else 0
        if isinstance(params, SamplingParams) and params.bad_words:
            length += sum(len(word) + WORD_COST for word in params.bad_words)
        embedded = isinstance(prompt, Mapping) and prompt.get("prompt_embeds") is not None
        structured = isinstance(params, SamplingParams) and params.structured_outputs is not None
        if length > LONG_TEXT:
            return await self._threads.run(length, prepare)
        if not embedded and not structured:
            return prepare()
        async with self._turn:
            return await asyncio.to_thread(prepare)

    async def check_grammar(
        self, prepared: PreparedRequest, owner: str, limits: QueueLimits
    ) -> tuple[PreparedRequest, OutputCheck | None]:
        """Compile the grammar of a request, if any, in another process.

        Returns the request with the grammar that the engine gets, and what is to check its outputs, if its grammar does
        not enforce all of its schema. Raises RequestError if it does not compile, QueueFullError if too many are in
        line, in all or of the owner.
        """
        grammar = prepared.children[0].grammar
        if grammar is None:
            return prepared, None
        resolved = await self._grammars.check(grammar, owner, limits.share(MAX_WAITING))
        prepared = with_grammar(prepared, resolved)
        if not resolved.unchecked:
            return prepared, None
        tokenizer = self.processor.tokenizer
        assert tokenizer is not None, "a grammar needs one"
        ended = ended_answers(prepared, resolved, tokenizer, self.processor.end_token_ids)

        async def check(output: RequestOutput) -> None:
            for _, answer in ended.add(output):
                if error := await self._grammars.answer_error(resolved, answer, owner):
                    raise AnswerError(error)

        return prepared, check

    def close(self) -> None:
        """End the processes. Idempotent."""
        self._grammars.close()
        self.processor.templates.close()
