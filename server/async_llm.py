"""AsyncLLM: the face for servers. Each request is an asynchronous stream; leaving the stream ends the request.

Runs in one event loop. Knows no HTTP and no device; the engine is behind an EngineLink.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import Any, Final, Self

from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.model import ModelConfig
from pagoda.common.config.groups.scheduler import SchedulerConfig
from pagoda.common.engine.messages import EngineStats, StepOutputs
from pagoda.common.engine.sleep import ASLEEP, MODES, TAGS, check_sleep, check_wake_up
from pagoda.common.errors import AbortedError, ConfigError, EngineDeadError, QueueFullError, RequestError, SleepError
from pagoda.common.observe.logs import configure_unless_done
from pagoda.common.pooling_params import PoolingParams
from pagoda.common.sampling_params import SamplingParams
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.async_requests import AsyncPooling, Gate, PoolingAnswer, WarmEngine
from pagoda.server.core_client.async_client import CoreClientAsync, Question
from pagoda.server.core_client.client import EngineClient, start_engine
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
from pagoda.server.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from pagoda.server.processing.inputs import PreparedRequest, Prompt, PromptType, open_tokenizer
from pagoda.server.processing.pooling_inputs import NO_GENERATION, NO_POOLING, PooledPrompt, PoolingInputs, TextOptions
from pagoda.server.processing.request_stream import RequestStream
from pagoda.server.settings.args import EngineArgs

# The sleep of the engine behind one AsyncLLM, as the API's side knows it.


class AsyncSleep:
    """Which parts of the engine's memory are away."""

    def __init__(self, config: ModelConfig, engine: CoreClientAsync) -> None:
        self._config, self._engine = config, engine
        self._asleep: tuple[str, ...] = ()

    @property
    def is_asleep(self) -> bool:
        """True while a part is away, or on its way there."""
        return bool(self._asleep)

    def raise_if_asleep(self) -> None:
        """Raise SleepError while a part is away."""
        if self._asleep:
            raise SleepError(ASLEEP)

    def begin(self, level: int, mode: str) -> None:
        """From here on the engine counts as asleep; `sleep` must follow.

        Raises RequestError for a level or mode that there is not, ConfigError for an engine that cannot sleep.
        """
        check_sleep(self._config, level, mode)
        self._asleep = TAGS

    async def sleep(self, level: int) -> None:
        """Give the memory back once nothing runs. Raises SleepError, EngineDeadError."""
        await self._change(lambda ticket: Sleep(ticket, level))

    async def wake_up(self, tags: Iterable[str] | None) -> None:
        """Have the named parts again, or all. Raises RequestError, ConfigError, SleepError, EngineDeadError."""
        named = check_wake_up(self._config, tags)
        await self._change(lambda ticket: WakeUp(ticket, named))

    def hear(self, state: SleepState) -> None:
        """Take in what the engine says."""
        self._asleep = state.asleep

    async def _change(self, question: Callable[[int], Question]) -> None:
        answer = await self._engine.ask(question)
        if isinstance(answer, SleepState) and answer.error:
            raise SleepError(answer.error)


# Whether another request may come in: engine awake and alive, not too much to do already.


class Admission:
    """The door of one AsyncLLM. `count`: answers under way, running or waiting."""

    def __init__(
        self, config: SchedulerConfig, engine: CoreClientAsync, sleep: AsyncSleep, count: Callable[[], int]
    ) -> None:
        self._config, self._engine, self._sleep, self._count = config, engine, sleep, count

    def check(self, answers: int) -> None:
        """Raise EngineDeadError, SleepError, QueueFullError, or RequestError for more answers than may ever run."""
        self._engine.raise_if_dead()
        self._sleep.raise_if_asleep()
        most = self._config.max_num_queued_reqs
        if most is None:
            return
        if answers > most:
            raise RequestError(
                "n", f"n {answers} is above the {most} answers that may be under way (--max-num-queued-reqs)"
            )
        under_way = self._count()
        if under_way + answers > most:
            raise QueueFullError(f"the server has {under_way} of {most} answers under way; try again")

    def check_priority(self, priority: int) -> None:
        """Raise RequestError for a priority that nothing heeds."""
        if priority and self._config.policy != "priority":
            raise RequestError("priority", "priority needs --scheduling-policy priority")


_LOOK: Final = 0.01
"""Seconds between two looks at whether all requests have finished."""


class AsyncLLM:
    """An engine for many concurrent requests.

    The engine starts at once, in a process of its own, or with `in_process` in a thread. With `wait` the constructor
    returns when it is warm and raises what kept it from starting; without, await wait_until_ready(). `on_step` hears
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
            client or start_engine(config, in_process=in_process), self._hear, self._fail_all
        )
        self._warm: WarmEngine | None = None
        self._pooling = AsyncPooling()
        self._sleep = AsyncSleep(config.model, self._engine)
        self._admission = Admission(config.scheduler, self._engine, self._sleep, self._num_answers)
        self._gate = Gate()
        if wait:
            self._finish_start()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """The engine that the arguments describe, warm. Raises ConfigError, ModelError or WeightError."""
        return cls(engine_args.create_engine_config())

    async def wait_until_ready(self) -> EngineInfo:
        """Wait for the engine to be warm. Raises what kept it from starting."""
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
        """What there is once the engine is warm. Raises EngineDeadError before."""
        if self._warm is None:
            raise EngineDeadError("the engine is not ready yet")
        return self._warm

    @property
    def info(self) -> EngineInfo:
        """Limits, names, vocabulary and start-up times. Raises EngineDeadError before the engine is ready."""
        return self._ready().info

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer, in tokens."""
        return self.info.max_model_len

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer, unless a request ignores them."""
        return self._ready().inputs.end_token_ids

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
        """True when the engine died."""
        return self._engine.dead is not None

    @property
    def dead_error(self) -> EngineDeadError:
        """Why the engine died."""
        return self._engine.dead or EngineDeadError("the engine is alive")

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ConfigError with skip_tokenizer_init."""
        tokenizer = self._ready().tokenizer
        if tokenizer is None:
            raise ConfigError("--skip-tokenizer-init", "there is no tokenizer, because it was switched off")
        return tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What generation_config.json sets, on top of SamplingParams' own defaults."""
        return SamplingParams.from_optional(**{"max_tokens": SamplingParams.max_tokens} | self.info.sampling_defaults)

    async def generate(
        self, prompt: PromptType, sampling_params: SamplingParams, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one prompt until it is finished; closing or cancelling the generator ends the request.

        Raises RequestError (before the first output) for a prompt that cannot be served, QueueFullError when there is
        too much to do already, EngineDeadError with the cause when the engine dies.
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
                self._abort(self._ready().generation.drop(request_id))

    async def add_request(
        self, request_id: str, prompt: PromptType, params: SamplingParams, priority: int = 0
    ) -> RequestStream:
        """Queue a prompt. Whoever leaves the stream before its end must abort the request. Raises as generate does."""
        self._engine.attach()
        self.check_generates()
        warm = self._ready()
        await self._gate.passed()
        self._admission.check(params.n)
        prepared = await self._prepare(request_id, prompt, params, priority)
        await warm.inputs.check_grammar(prepared)
        await self._gate.passed()  # a pause, or others, may have come while a long prompt was tokenised
        self._admission.check(params.n)
        stream = warm.generation.add(prepared)
        for child in prepared.children:
            self._engine.send(AddRequest(child))
        return stream

    async def encode(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams,
        request_id: str,
        *,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """The one output of a prompt on a pooling model; closing or cancelling the generator ends the request.

        `tokenization_kwargs`: add_special_tokens, truncate_prompt_tokens, truncation_side. Raises as generate does.
        """
        options = TextOptions.of(tokenization_kwargs)
        ready = await asyncio.to_thread(self.pooling_inputs.parse, prompt, options)
        answer = self.pool(request_id, ready, pooling_params, priority)
        try:
            yield await answer
        finally:
            self.end_pooling([request_id])

    def pool(self, request_id: str, prompt: PooledPrompt, params: PoolingParams, priority: int = 0) -> PoolingAnswer:
        """Queue a prompt that `pooling_inputs` prepared. Whoever does not await the answer must end the request.

        Raises as generate does.
        """
        self._engine.attach()
        self._admission.check(1)
        self._admission.check_priority(priority)
        prepared = self.pooling_inputs.prepare(request_id, prompt, params, priority)
        answer = self._pooling.add(prepared)
        self._engine.send(AddRequest(prepared.child))
        return answer

    def end_pooling(self, request_ids: Iterable[str], error: Exception | None = None) -> None:
        """End pooling requests, here and in the engine; answers still waited for are cancelled, or get the error."""
        self._abort(self._pooling.fail(request_ids, error))

    def check_generates(self) -> None:
        """Raise RequestError when the model was started for pooling."""
        if self._warm is not None and self._warm.pooling_inputs is not None:
            raise RequestError("model", NO_GENERATION)

    @property
    def pooling_inputs(self) -> PoolingInputs:
        """What prepares prompts for a pooling model. Raises RequestError when the model generates."""
        inputs = self._ready().pooling_inputs
        if inputs is None:
            raise RequestError("model", NO_POOLING)
        return inputs

    async def preview(self, prompt: PromptType, params: SamplingParams) -> Prompt:
        """A prompt as it would run: tokenised, truncated and checked. Raises RequestError."""
        return (await self._prepare("preview", prompt, params, 0)).prompt

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; their streams close with finish_reason "abort". Unknown ids are no error.

        Pooling requests have nothing to close with: whoever waits for them gets AbortedError.
        """
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        self.end_pooling(ids, AbortedError("the request was ended before its answer was there"))
        if self._warm is not None:
            self._abort(self._warm.generation.abort(ids))

    async def check_health(self) -> None:
        """Raise EngineDeadError when the engine is dead, silent or stuck in a step."""
        self._engine.raise_if_dead()
        self._ready()
        self._engine.check()

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; running requests keep their blocks. Returns True once it is done."""
        await self._engine.ask(ResetPrefixCache)
        return True

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give the device's memory back; the KV cache, prefixes included, is forgotten. Requests are refused meanwhile.

        `level` 1 keeps the weights in host memory, 2 reads them again from the checkpoint on waking up. Requests under
        way end with finish_reason "abort", or are waited for with `mode` "wait". Raises RequestError, ConfigError
        without --enable-sleep-mode, SleepError when the host has no room for the weights.
        """
        self._sleep.begin(level, mode)
        if mode == "abort":
            await self.abort(self.request_ids)
        await self._sleep.sleep(level)

    async def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Have the memory again, or only the parts named of `weights` and `kv_cache`; requests need both.

        Raises RequestError, ConfigError without --enable-sleep-mode, SleepError when there is not enough memory: the
        part stays asleep, and may be woken up later.
        """
        await self._sleep.wake_up(tags)

    async def is_sleeping(self) -> bool:
        """True while a part of the memory is away."""
        return self._sleep.is_asleep

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Let new requests wait until resume_generation(). Those under way end, or are waited for with `mode` "wait".

        `clear_cache`: forget cached prefixes then. Raises RequestError for another mode.
        """
        if mode not in MODES:
            raise RequestError("mode", f"mode {mode[:50]} is not {' or '.join(MODES)}: requests are not kept half done")
        self._gate.close()
        if mode == "abort":
            await self.abort(self.request_ids)
        while self.num_unfinished and self._engine.dead is None:
            await asyncio.sleep(_LOOK)
        if clear_cache:
            await self.reset_prefix_cache()

    async def resume_generation(self) -> None:
        """Let requests go on."""
        self._gate.open()

    async def is_paused(self) -> bool:
        """True while requests wait."""
        return self._gate.closed

    @property
    def request_ids(self) -> list[str]:
        """Requests that have not finished."""
        generating = [] if self._warm is None else self._warm.generation.request_ids
        return [*generating, *self._pooling.request_ids]

    @property
    def num_unfinished(self) -> int:
        """Requests that have not finished."""
        return (0 if self._warm is None else len(self._warm.generation)) + len(self._pooling)

    def shutdown(self, timeout: float = 2.0) -> None:
        """End the engine; requests still running fail. Idempotent."""
        self._engine.close(timeout)
        if self._warm is not None:
            self._warm.inputs.close()
        self._engine.die(EngineDeadError("the engine was shut down"))

    async def _prepare(
        self, request_id: str, prompt: PromptType, params: SamplingParams, priority: int
    ) -> PreparedRequest:
        self._admission.check_priority(priority)
        return await self._ready().inputs.prepare(request_id, prompt, params, priority)

    def _num_answers(self) -> int:
        """Answers under way, running or waiting."""
        return self._ready().generation.num_sequences + len(self._pooling)

    def _abort(self, children: list[str]) -> None:
        """Stop engine requests, which nobody follows any more."""
        if children:
            self._engine.tell(Abort(children))

    def _hear(self, message: FromEngine) -> None:
        match message:
            case StepReply(step):
                self._take(step)
            case Refused(child_id, field, text):
                self._refuse(child_id, RequestError(field, text))
            case SleepState():
                self._sleep.hear(message)
            case _:
                pass

    def _take(self, step: StepOutputs) -> None:
        warm = self._ready()
        self.stats = step.stats
        for news in step.outputs:
            if news.error is not None:
                self._refuse(news.request_id, RequestError(*news.error))
        if warm.pooling_inputs is not None:
            self._pooling.take(step.outputs)
        self._abort(warm.generation.take(step.outputs))
        if self.on_step is not None:
            self.on_step(step)

    def _refuse(self, child_id: str, error: RequestError) -> None:
        children = self._ready().generation.refuse(child_id, error)
        if children is None:
            self._pooling.refuse(child_id, error)
        else:
            self._abort(children)

    def _fail_all(self, error: EngineDeadError) -> None:
        """The engine is dead: fail every request."""
        if self._warm is not None:
            self._warm.generation.die(error)
        self._pooling.fail(self._pooling.request_ids, EngineDeadError(str(error)))
