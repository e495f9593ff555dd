"""AsyncLLM: the engine for servers. Each request is an asynchronous stream; leaving the stream ends the request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final, Protocol, Self, overload

from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.model import ModelConfig
from pagoda.common.config.groups.scheduler import SchedulerConfig
from pagoda.common.engine.core import ASLEEP, PAUSE_MODES, SLEEP_TAGS, check_sleep, check_wake_up
from pagoda.common.engine.messages import QUEUED_REQUESTS, EngineOutput, EngineStats, RequestEvents, StepOutputs
from pagoda.common.errors import AbortedError, ConfigError, EngineDeadError, QueueFullError, RequestError, SleepError
from pagoda.common.observe.logs import configure_unless_done
from pagoda.common.pooling_params import PoolingParams
from pagoda.common.sampling_params import SamplingParams
from pagoda.common.text.hf_tokenizer import HfTokenizer
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.core_client import start_engine
from pagoda.server.core_client.client import Command, CoreClientAsync, EngineClient
from pagoda.server.ipc_messages import (
    Abort,
    AddRequest,
    EngineInfo,
    FromEngine,
    Refused,
    ResetPrefixCache,
    Sleep,
    SleepState,
    StepReply,
    WakeUp,
)
from pagoda.server.outputs import RawPoolingOutput, RequestOutput
from pagoda.server.processing.grammar_check import GrammarCheck, check_of
from pagoda.server.processing.inputs import (
    InputProcessor,
    PreparedRequest,
    Prompt,
    PromptType,
    TextOptions,
    check_extras,
    max_prompt_tokens,
    text_options,
)
from pagoda.server.processing.output_processor import OutputProcessor, RequestStream
from pagoda.server.settings.flags import EngineArgs
from pagoda.server.settings.tokenizer import open_tokenizer

LONG_TEXT: Final = 16_384
"""Characters or token ids from which a prompt is prepared in a thread, so that other requests keep streaming."""

POLL_SECONDS: Final = 0.01
"""Interval at which pause_generation checks whether all requests have finished."""


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


class AsyncLLM:
    """An engine for many concurrent requests, in one event loop.

    The engine starts at once, in its own process, or with `in_process` in a thread. With `wait` the constructor returns
    when it is warm and raises what kept it from starting; without, await wait_until_ready(). `metrics` records what
    happens, in the event loop; it may be set later. `client` and `open_text` replace engine and tokenizer in tests.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        in_process: bool = False,
        wait: bool = True,
        metrics: MetricsRecorder | None = None,
        client: EngineClient | None = None,
        open_text: Callable[[EngineConfig], Tokenizer | None] = open_tokenizer,
    ) -> None:
        if client is None:
            configure_unless_done(config.logging)
        self.config = config
        self.stats = EngineStats()
        self.metrics = metrics
        self._open_text = open_text
        self._engine = CoreClientAsync(
            client or start_engine(config, in_process=in_process), self._receive, self._fail_all
        )
        self._warm: WarmEngine | None = None
        self._sleep = AsyncSleep(config.model, self._engine)
        self._admission = Admission(
            config.scheduler, self._engine, self._sleep, lambda: self._ready().requests.num_sequences, self._on_rejected
        )
        self._gate = Gate()
        if wait:
            self._finish_start()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Start an engine and wait until it is warm. Raises ConfigError, ModelError or WeightError."""
        return cls(engine_args.create_engine_config())

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
        self._warm = WarmEngine.of(self.config, info, tokenizer)

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
    def errored(self) -> bool:
        """True if the engine died."""
        return self._engine.dead is not None

    @property
    def dead_error(self) -> EngineDeadError:
        """Why the engine died."""
        return self._engine.dead or EngineDeadError("the engine is alive")

    @property
    def text(self) -> Tokenizer:
        """The model's tokenizer. Raises ConfigError with skip_tokenizer_init."""
        tokenizer = self._ready().tokenizer
        if tokenizer is None:
            raise ConfigError("--skip-tokenizer-init", "the tokenizer is switched off; drop this flag")
        return tokenizer

    def get_tokenizer(self) -> HfTokenizer:
        """Return the model's tokenizer, with Hugging Face's interface; it may be awaited.

        Raises ConfigError with skip_tokenizer_init.
        """
        return self._hf_tokenizer

    @cached_property
    def _hf_tokenizer(self) -> HfTokenizer:
        return HfTokenizer(self.text, str(self.config.model.model), self.max_model_len)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return SamplingParams with what generation_config.json sets."""
        return SamplingParams.from_optional(**{"max_tokens": SamplingParams.max_tokens} | self.info.sampling_defaults)

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of one prompt; closing or cancelling the generator ends the request.

        `tokenization_kwargs`: as of encode. No effect have `trace_headers` (requests are not traced),
        `data_parallel_rank` and `session_id` (the replica is chosen by load and cached prefixes).

        Raises RequestError (before the first output) for a prompt that cannot be served, QueueFullError if the queue is
        full, EngineDeadError with the cause when the engine dies.
        """
        stream = await self.add_request(
            request_id,
            prompt,
            sampling_params,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            priority=priority,
        )
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
    ) -> AsyncGenerator[RawPoolingOutput, None]:
        """Yield the one output of a prompt on a pooling model; closing or cancelling the generator ends the request.

        `tokenization_kwargs`: add_special_tokens, truncate_prompt_tokens, truncation_side. `trace_headers` have no
        effect: requests are not traced. Raises as generate does.
        """
        check_extras(lora_request=lora_request)
        options = TextOptions.of(tokenization_kwargs)
        parsed = await asyncio.to_thread(self.pooling_inputs.parse, prompt, options)
        stream = await self.add_request(request_id, parsed, pooling_params, priority=priority)
        try:
            yield await stream.get()
        finally:
            self._abort(self._ready().requests.drop(request_id))

    @overload
    async def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> RequestStream[RequestOutput]: ...

    @overload
    async def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: PoolingParams,
        arrival_time: float | None = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> RequestStream[RawPoolingOutput]: ...

    async def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> RequestStream[Any]:
        """Queue a prompt to generate or to pool. A caller that stops reading the stream must abort the request.

        `arrival_time`: Unix seconds; None: now. The others, and what is raised, are as of generate.
        """
        check_extras(lora_request=lora_request)
        self._engine.attach()
        warm = self._ready()
        sequences = 1 if isinstance(params, PoolingParams) else params.n
        if isinstance(params, SamplingParams):
            self.check_generates()
        await self._gate.passed()
        self._admission.check(sequences)
        text = text_options(tokenization_kwargs)
        prepared = await self._prepare(request_id, prompt, params, priority, text=text, arrival_time=arrival_time)
        await warm.inputs.check_grammar(prepared)
        await self._gate.passed()  # preparing a long prompt takes time: check again
        self._admission.check(sequences)
        stream = warm.requests.add(prepared)
        for child in prepared.children:
            self._engine.send(AddRequest(child))
        return stream

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
        """Raise EngineDeadError if the engine is dead, silent or stuck in a step."""
        self._engine.raise_if_dead()
        self._ready()
        self._engine.check()

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Drop all cached prefixes; running requests keep their blocks. Returns True. See LLMEngine's."""
        await self._engine.call(ResetPrefixCache)
        return True

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
        finish first.

        `clear_cache`: drop cached prefixes then. Raises RequestError for another mode.
        """
        if mode not in PAUSE_MODES:
            raise RequestError(
                "mode", f"mode {mode[:50]} is not {' or '.join(PAUSE_MODES)}: requests cannot be suspended"
            )
        self._gate.close()
        if mode == "abort":
            await self.abort(self.request_ids)
        while self.num_unfinished and self._engine.dead is None:
            await asyncio.sleep(POLL_SECONDS)
        if clear_cache:
            await self.reset_prefix_cache()

    async def resume_generation(self) -> None:
        """Accept requests again."""
        self._gate.open()

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

    def shutdown(self, timeout: float = 2.0) -> None:
        """End the engine; running requests fail. Idempotent."""
        self._engine.close(timeout)
        if self._warm is not None:
            self._warm.inputs.close()
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
            case _:
                pass

    def _take(self, step: StepOutputs) -> None:
        self.stats = step.stats
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
        for each in (events.tokens, events.first_tokens, events.sequences, events.requests):
            each.clear()

    def _on_rejected(self, reason: str) -> None:
        if self.metrics is not None:
            self.metrics.on_rejected(reason)

    def _refuse(self, child_id: str, error: RequestError) -> None:
        self._abort(self._ready().requests.refuse(child_id, error))

    def _fail_all(self, error: EngineDeadError) -> None:
        if self._warm is not None:
            self._warm.requests.die(error)
            self._report_events()


# What an AsyncLLM consists of, all in one event loop; only it sends to the engine.


@dataclass(frozen=True, slots=True)
class WarmEngine:
    """What an AsyncLLM needs for requests once the engine is warm."""

    info: EngineInfo
    tokenizer: Tokenizer | None  # None with skip_tokenizer_init
    inputs: AsyncInputs
    requests: AsyncRequests

    @classmethod
    def of(cls, config: EngineConfig, info: EngineInfo, tokenizer: Tokenizer | None) -> Self:
        """Build it from the engine's description."""
        tokenizer = None if tokenizer is None else tokenizer.with_context(max_prompt_tokens(info))
        processor = InputProcessor(config.model, info, tokenizer, config.structured_outputs)
        return cls(
            info=info,
            tokenizer=tokenizer,
            inputs=AsyncInputs(processor, check_of(tokenizer, info)),
            requests=AsyncRequests(tokenizer, config.scheduler.stream_interval),
        )


class AsyncInputs:
    """An InputProcessor with a thread for long prompts and embeddings, and a process that compiles grammars first."""

    def __init__(self, processor: InputProcessor, grammars: GrammarCheck) -> None:
        self.processor, self._grammars = processor, grammars

    async def prepare(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams,
        priority: int,
        *,
        text: TextOptions | None = None,
        arrival_time: float | None = None,
    ) -> PreparedRequest:
        """Return the engine requests of a prompt, see InputProcessor.prepare. Raises RequestError."""
        prepare = partial(
            self.processor.prepare, request_id, prompt, params, priority, text=text, arrival_time=arrival_time
        )
        given = (prompt.get("prompt_token_ids") or prompt.get("prompt")) if isinstance(prompt, Mapping) else prompt
        long = isinstance(given, str | list) and len(given) > LONG_TEXT
        embedded = isinstance(prompt, Mapping) and prompt.get("prompt_embeds") is not None
        structured = isinstance(params, SamplingParams) and params.structured_outputs is not None
        if long or embedded or structured:
            return await asyncio.to_thread(prepare)
        return prepare()

    async def check_grammar(self, prepared: PreparedRequest) -> None:
        """Compile the grammar of a request, if any, in another process. Raises RequestError if that fails."""
        grammar = prepared.children[0].grammar
        if grammar is not None:
            await self._grammars.check(grammar)

    def close(self) -> None:
        """End the process. Idempotent."""
        self._grammars.close()


class AsyncRequests:
    """The unfinished requests, each with the stream of its outputs. Methods return the engine requests to abort."""

    def __init__(self, tokenizer: Tokenizer | None, stream_interval: int) -> None:
        self.events = RequestEvents()
        self._processor = OutputProcessor(tokenizer, stream_interval, self.events)
        self._streams: dict[str, RequestStream[Any]] = {}

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def request_ids(self) -> list[str]:
        """Ids of all unfinished requests."""
        return list(self._streams)

    @property
    def num_sequences(self) -> int:
        """Number of unfinished sequences: n for a request with n completions."""
        return self._processor.num_sequences

    def add(self, prepared: PreparedRequest) -> RequestStream[Any]:
        """Track a request and return its stream. Raises RequestError if its id is in use."""
        self._processor.add(prepared)
        stream = self._streams[prepared.request_id] = RequestStream[Any](prepared.params.output_kind)
        return stream

    def take(self, outputs: Iterable[EngineOutput]) -> list[str]:
        """Distribute the outputs of a step. Return the engine requests to abort because a stop string ended them."""
        ready, stopped = self._processor.process(outputs)
        for output in ready:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output)
                if output.finished:
                    del self._streams[output.request_id]
        return stopped

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End requests. Return the engine requests to abort.

        Streams of generation close with finish_reason "abort", those of pooling fail with AbortedError.
        """
        ids = list(request_ids)
        streams = {each: self._streams.get(each) for each in ids}
        outputs, children = self._end(ids)
        for output in outputs:
            if (stream := streams.pop(output.request_id, None)) is not None:
                stream.put(output)
        for stream in streams.values():
            if stream is not None:
                stream.fail(AbortedError("the request was aborted before it finished"))
        return children

    def drop(self, request_id: str) -> list[str]:
        """Forget a request whose stream is no longer read. Return the engine requests to abort."""
        return self._end([request_id])[1]

    def refuse(self, child_id: str, error: RequestError) -> list[str]:
        """Fail the request whose engine request was refused. Return the engine requests to abort."""
        request_id = self._processor.parent_of(child_id)
        if request_id is None:
            return []
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.fail(error)
        return self._processor.drop(request_id)

    def die(self, error: EngineDeadError) -> None:
        """Fail all requests: the engine is dead."""
        for stream in self._streams.values():
            stream.fail(EngineDeadError(str(error)))
        self._streams.clear()
        self._processor.fail()

    def _end(self, request_ids: list[str]) -> tuple[list[RequestOutput], list[str]]:
        """Forget requests. Return their last outputs and the engine requests to abort."""
        ended = self._processor.abort(request_ids)
        for request_id in request_ids:
            self._streams.pop(request_id, None)
        return ended


class Admission:
    """Decides whether a request is accepted. `count_sequences`: unfinished sequences, running and queued. `on_rejected`
    is called with the limit that a request exceeds.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        engine: CoreClientAsync,
        sleep: AsyncSleep,
        count_sequences: Callable[[], int],
        on_rejected: Callable[[str], None],
    ) -> None:
        self._config, self._engine, self._sleep, self._count_sequences = config, engine, sleep, count_sequences
        self._on_rejected = on_rejected

    def check(self, sequences: int) -> None:
        """Raise EngineDeadError, SleepError, QueueFullError, or RequestError if the queue can never hold them."""
        self._engine.raise_if_dead()
        self._sleep.raise_if_asleep()
        limit = self._config.max_num_queued_reqs
        if limit is None:
            return
        if sequences > limit:
            raise RequestError("n", f"n {sequences} is above the limit of {limit} sequences (--max-num-queued-reqs)")
        unfinished = self._count_sequences()
        if unfinished + sequences > limit:
            self._on_rejected(QUEUED_REQUESTS)
            raise QueueFullError(f"the server has {unfinished} of {limit} sequences in progress; try again")

    def check_priority(self, priority: int) -> None:
        """Raise RequestError for a priority that the scheduling policy ignores."""
        if priority and self._config.policy != "priority":
            raise RequestError("priority", "priority needs --scheduling-policy priority")


class Gate:
    """Requests wait while it is closed. Open at first; belongs to the event loop in which it is first awaited."""

    def __init__(self) -> None:
        self._open: asyncio.Event | None = None

    @property
    def closed(self) -> bool:
        """True while requests wait."""
        return self._open is not None

    def close(self) -> None:
        """Make requests wait."""
        if self._open is None:
            self._open = asyncio.Event()

    def open(self) -> None:
        """Let waiting requests continue."""
        if self._open is not None:
            self._open.set()
            self._open = None

    async def passed(self) -> None:
        """Wait until the gate is open."""
        while self._open is not None:
            await self._open.wait()


class AsyncSleep:
    """The API process's view of which parts of the engine's memory are offloaded."""

    def __init__(self, config: ModelConfig, engine: CoreClientAsync) -> None:
        self._config, self._engine = config, engine
        self._asleep: tuple[str, ...] = ()

    @property
    def is_asleep(self) -> bool:
        """True while a part is offloaded or about to be."""
        return bool(self._asleep)

    def raise_if_asleep(self) -> None:
        """Raise SleepError while a part is offloaded."""
        if self._asleep:
            raise SleepError(ASLEEP)

    def begin(self, level: int, mode: str) -> None:
        """Count the engine as asleep from now on; `sleep` must follow.

        Raises RequestError for an unknown level or mode, ConfigError for an engine that cannot sleep.
        """
        check_sleep(self._config, level, mode)
        self._asleep = SLEEP_TAGS

    async def sleep(self, level: int) -> None:
        """Free the memory once no request runs. Raises SleepError, EngineDeadError."""
        await self._change(lambda ticket: Sleep(ticket, level))

    async def wake_up(self, tags: Iterable[str] | None) -> None:
        """Restore the named parts, or all. Raises RequestError, ConfigError, SleepError, EngineDeadError."""
        checked = check_wake_up(self._config, tags)
        await self._change(lambda ticket: WakeUp(ticket, checked))

    def update(self, state: SleepState) -> None:
        """Take over the engine's state."""
        self._asleep = state.asleep

    async def _change(self, command: Callable[[int], Command]) -> None:
        reply = await self._engine.call(command)
        if isinstance(reply, SleepState) and reply.error:
            raise SleepError(reply.error)
