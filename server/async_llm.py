"""AsyncLLM: the engine for servers. Each request is an asynchronous stream; leaving the stream ends the request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import Any, Final, Self, overload

from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.model import ModelConfig
from pagoda.common.config.groups.scheduler import SchedulerConfig
from pagoda.common.engine.messages import EngineStats, StepOutputs
from pagoda.common.engine.sleep import ASLEEP, MODES, TAGS, check_sleep, check_wake_up
from pagoda.common.errors import ConfigError, EngineDeadError, QueueFullError, RequestError, SleepError
from pagoda.common.observe.logs import configure_unless_done
from pagoda.common.pooling_params import PoolingParams
from pagoda.common.sampling_params import SamplingParams
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.async_requests import Gate, WarmEngine
from pagoda.server.core_client.async_client import Command, CoreClientAsync
from pagoda.server.core_client.client import EngineClient
from pagoda.server.core_client.start import start_engine
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
from pagoda.server.processing.inputs import InputProcessor, PreparedRequest, Prompt, PromptType, open_tokenizer
from pagoda.server.processing.request_stream import RequestStream
from pagoda.server.processing.tokenization import TextOptions
from pagoda.server.settings.args import EngineArgs

POLL_SECONDS: Final = 0.01
"""Interval at which pause_generation checks whether all requests have finished."""


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
        self._asleep = TAGS

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


class Admission:
    """Decides whether a request is accepted. `count_sequences`: unfinished sequences, running and queued."""

    def __init__(
        self,
        config: SchedulerConfig,
        engine: CoreClientAsync,
        sleep: AsyncSleep,
        count_sequences: Callable[[], int],
    ) -> None:
        self._config, self._engine, self._sleep, self._count_sequences = config, engine, sleep, count_sequences

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
            raise QueueFullError(f"the server has {unfinished} of {limit} sequences in progress; try again")

    def check_priority(self, priority: int) -> None:
        """Raise RequestError for a priority that the scheduling policy ignores."""
        if priority and self._config.policy != "priority":
            raise RequestError("priority", "priority needs --scheduling-policy priority")


class AsyncLLM:
    """An engine for many concurrent requests, in one event loop.

    The engine starts at once, in its own process, or with `in_process` in a thread. With `wait` the constructor returns
    when it is warm and raises what kept it from starting; without, await wait_until_ready(). `on_step` is called for
    every engine step (for metrics), in the event loop. `client` and `open_text` replace engine and tokenizer in tests.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        in_process: bool = False,
        wait: bool = True,
        on_step: Callable[[StepOutputs], None] | None = None,
        client: EngineClient | None = None,
        open_text: Callable[[EngineConfig], Tokenizer | None] = open_tokenizer,
    ) -> None:
        if client is None:
            configure_unless_done(config.logging)
        self.config = config
        self.stats = EngineStats()
        self.on_step = on_step
        self._open_text = open_text
        self._engine = CoreClientAsync(
            client or start_engine(config, in_process=in_process), self._receive, self._fail_all
        )
        self._warm: WarmEngine | None = None
        self._sleep = AsyncSleep(config.model, self._engine)
        self._admission = Admission(
            config.scheduler, self._engine, self._sleep, lambda: self._ready().requests.num_sequences
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
        return self.info.max_model_len

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

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer. Raises ConfigError with skip_tokenizer_init."""
        tokenizer = self._ready().tokenizer
        if tokenizer is None:
            raise ConfigError("--skip-tokenizer-init", "the tokenizer is switched off; drop this flag")
        return tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return SamplingParams with what generation_config.json sets."""
        return SamplingParams.from_optional(**{"max_tokens": SamplingParams.max_tokens} | self.info.sampling_defaults)

    async def generate(
        self, prompt: PromptType, sampling_params: SamplingParams, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of one prompt; closing or cancelling the generator ends the request.

        Raises RequestError (before the first output) for a prompt that cannot be served, QueueFullError if the queue is
        full, EngineDeadError with the cause when the engine dies.
        """
        stream = await self.add_request(request_id, prompt, sampling_params, priority)
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
        *,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RawPoolingOutput, None]:
        """Yield the one output of a prompt on a pooling model; closing or cancelling the generator ends the request.

        `tokenization_kwargs`: add_special_tokens, truncate_prompt_tokens, truncation_side. Raises as generate does.
        """
        options = TextOptions.of(tokenization_kwargs)
        parsed = await asyncio.to_thread(self.pooling_inputs.parse, prompt, options)
        stream = await self.add_request(request_id, parsed, pooling_params, priority)
        try:
            yield await stream.get()
        finally:
            self._abort(self._ready().requests.drop(request_id))

    @overload
    async def add_request(
        self, request_id: str, prompt: PromptType, params: SamplingParams, priority: int = 0
    ) -> RequestStream[RequestOutput]: ...

    @overload
    async def add_request(
        self, request_id: str, prompt: PromptType, params: PoolingParams, priority: int = 0
    ) -> RequestStream[RawPoolingOutput]: ...

    async def add_request(
        self, request_id: str, prompt: PromptType, params: SamplingParams | PoolingParams, priority: int = 0
    ) -> RequestStream[Any]:
        """Queue a prompt to generate or to pool. A caller that stops reading the stream must abort the request.

        Raises as generate does.
        """
        self._engine.attach()
        warm = self._ready()
        sequences = 1 if isinstance(params, PoolingParams) else params.n
        if isinstance(params, SamplingParams):
            self.check_generates()
        await self._gate.passed()
        self._admission.check(sequences)
        prepared = await self._prepare(request_id, prompt, params, priority)
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

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; unknown ids are skipped.

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

    async def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes; running requests keep their blocks. Returns True."""
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
        if mode not in MODES:
            raise RequestError("mode", f"mode {mode[:50]} is not {' or '.join(MODES)}: requests cannot be suspended")
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
        self, request_id: str, prompt: PromptType, params: SamplingParams | PoolingParams, priority: int
    ) -> PreparedRequest:
        self._admission.check_priority(priority)
        return await self._ready().inputs.prepare(request_id, prompt, params, priority)

    def _abort(self, children: list[str]) -> None:
        """Stop engine requests that are no longer tracked."""
        if children:
            self._engine.send_if_alive(Abort(children))

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
        if self.on_step is not None:
            self.on_step(step)

    def _refuse(self, child_id: str, error: RequestError) -> None:
        self._abort(self._ready().requests.refuse(child_id, error))

    def _fail_all(self, error: EngineDeadError) -> None:
        if self._warm is not None:
            self._warm.requests.die(error)
