"""The prompts of one HTTP request in the engine: queued, logged, and aborted when the client disconnects.

Generation merges the outputs of its prompts into one stream, BeamGeneration searches beams, one step of all prompts
after the other, and PoolingBatch returns a list.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, Final

from pagoda.common.beam_search import Beam, BeamSearch, BeamSearchParams
from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.errors import AbortedError, EngineDeadError, QueueFullError, RequestError, RequestTimeoutError
from pagoda.common.observe.logs import shortened
from pagoda.common.pooling_params import PoolingParams
from pagoda.common.request_bounds import MAX_N
from pagoda.common.sampling_params import RequestOutputKind, SamplingParams
from pagoda.server.async_llm import LONG_TEXT
from pagoda.server.core_client.client import Load, NeverFitsError
from pagoda.server.http.body import Ignored
from pagoda.server.http.fields import SamplingFields
from pagoda.server.http.state import OWNER, ServerState
from pagoda.server.outputs import RawPoolingOutput, RequestOutput
from pagoda.server.processing.beams import BeamText, candidates_of, check_engine, check_prompts, step_params
from pagoda.server.processing.inputs import Prompt, PromptType, RequestOrigin, cache_key_of
from pagoda.server.processing.output_processor import RequestStream
from pagoda.server.processing.pooling_rules import resolve_task
from pagoda.server.settings.extra_samplers import sampler_of

logger = logging.getLogger(__name__)

MAX_SEQUENCES: Final = MAX_N
"""Maximum completions of all prompts of one request."""

_OWNER_DIGITS: Final = 16
"""Hexadecimal digits of a key's digest that tell the keys apart in the engine."""

MAX_TOKENS: Final = 1 << 20
"""Maximum tokens in all prompts of one pooling request."""

MAX_NUMBERS: Final = 1 << 26
"""Maximum numbers in the token embeddings of one pooling request."""


def num_prompt_tokens(output: RequestOutput) -> int:
    """Return the tokens of the prompt, the encoder's included."""
    return len(output.prompt_token_ids or ()) + len(output.encoder_prompt_token_ids or ())


class RequestLog:
    """Logs prompts and, with --enable-log-outputs, outputs of one HTTP request. Texts are cut to --max-log-len."""

    def __init__(self, config: ServerConfig, params: SamplingParams | PoolingParams) -> None:
        self._limit = config.max_log_len
        self._params = params
        self.logs_outputs = config.enable_log_outputs
        self._logs_deltas = config.enable_log_deltas and params.output_kind is RequestOutputKind.DELTA
        self._texts: dict[tuple[str, int], list[str]] = {}

    def log_prompt(self, request_id: str, prompt: PromptType, user: str | None) -> None:
        """Log a prompt that is submitted."""
        shown = _shown_prompt(prompt, self._limit)
        params = shortened(repr(self._params), 1000)
        logger.info("request %s: %s, params %s, user %r", request_id, shown, params, user)

    def log_output(self, request_id: str, output: RequestOutput) -> None:
        """Log the deltas of an output, and the whole text of each choice that it finishes."""
        if not self.logs_outputs:
            return
        for choice in output.outputs:
            self._texts.setdefault((request_id, choice.index), []).append(choice.text)
            if choice.finish_reason is not None:
                self._log_whole(request_id, choice.index, choice.finish_reason)
            elif self._logs_deltas:
                text = shortened(choice.text, self._limit)
                logger.info("request %s: choice %d delta %r", request_id, choice.index, text)

    def log_abort(self, request_id: str, reason: str) -> None:
        """Log the partial outputs of a request that ended early."""
        for answer, index in list(self._texts):
            if answer == request_id:
                self._log_whole(request_id, index, reason)

    def _log_whole(self, request_id: str, index: int, reason: str) -> None:
        text = shortened("".join(self._texts.pop((request_id, index))), self._limit)
        logger.info("request %s: choice %d output %r, finish reason %s", request_id, index, text, reason)


def _shown_prompt(prompt: PromptType, limit: int | None) -> str:
    """Return the text and the token ids of a prompt for the log, each cut to its first `limit`."""
    match prompt:
        case Prompt():
            salt = f", cache_salt {prompt.cache_salt!r}" if prompt.cache_salt else ""
            ids = _shown_ids(prompt.token_ids, limit) if prompt.embeds is None else "prompt_embeds"
            text = "" if prompt.text is None else f"prompt {shortened(prompt.text, limit)!r}, "
            return f"{text}{ids}{salt}"
        case str():
            return f"prompt {shortened(prompt, limit)!r}"
        case Mapping():
            field_prefixes = {
                "prompt": "",
                "prompt_token_ids": "",
                "encoder_prompt": "encoder ",
                "decoder_prompt": "decoder ",
            }
            parts = [
                field_prefixes[name] + _shown_prompt(prompt[name], limit)
                for name in field_prefixes
                if prompt.get(name) is not None
            ]
            return ", ".join(parts) or ", ".join(prompt)
        case _:
            return _shown_ids(prompt, limit)


def _shown_ids(ids: Sequence[int], limit: int | None) -> str:
    shown = ", ".join(map(str, ids[:limit]))
    return f"prompt_token_ids [{shown}{', ...' if limit is not None and len(ids) > limit else ''}]"


class PromptBatch:
    """The prompts of one HTTP request. `request_id` is what the client sees; the engine's ids are made unique.

    `began`: when --request-timeout began, on the event loop's clock; None: now. `cache_hint`: what the client names its
    conversation or its user by, if anything.
    """

    def __init__(
        self,
        state: ServerState,
        request_id: str,
        params: SamplingParams | PoolingParams,
        priority: int,
        user: str | None,
        began: float | None = None,
        cache_hint: str | None = None,
    ) -> None:
        self.id = request_id
        self._state = state
        self._llm = state.llm()
        self._priority = priority
        self._user = user
        self._stem = f"{request_id}-{secrets.token_hex(4)}"
        owner = OWNER.get().hex()[:_OWNER_DIGITS]
        self._origin = RequestOrigin(owner, self._stem, cache_key=cache_key_of(cache_hint, owner))
        self._unfinished: list[str] = []  # Ids of the unfinished requests in the engine.
        began = asyncio.get_running_loop().time() if began is None else began
        seconds = state.config.request_timeout
        self._deadline = began + seconds if seconds else None  # None: the time is unlimited.
        logs = self._llm.config.observability.enable_log_requests
        self._log = RequestLog(state.config, params) if logs else None

    @asynccontextmanager
    async def _running(self) -> AsyncGenerator[None, None]:
        """A context in which the request counts as running. Leaving it aborts unfinished prompts.

        Those in the engine fail with RequestTimeoutError when their time is over.
        """
        self._state.running += 1
        reason: str | None = "error"
        timer = None
        if self._deadline is not None:
            timer = asyncio.get_running_loop().call_at(self._deadline, self._expire)
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit, AbortedError):
            reason = "abort"
            raise
        except (RequestError, QueueFullError):
            reason = None  # The request was refused: it never ran.
            raise
        finally:
            self._state.running -= 1
            if timer is not None:
                timer.cancel()
            if self._unfinished:
                with suppress(EngineDeadError):
                    await self._llm.abort(self._unfinished)
            if reason is not None and self._log is not None:
                for engine_id in self._unfinished:
                    self._log.log_abort(engine_id, reason)

    def _expire(self) -> None:
        self._llm.fail_requests(self._unfinished, self._timeout_error())

    def _timeout_error(self) -> RequestTimeoutError:
        seconds = self._state.config.request_timeout
        return RequestTimeoutError(f"the request took longer than {seconds:g} s (--request-timeout) and was aborted")

    @asynccontextmanager
    async def _submitting(self) -> AsyncGenerator[None, None]:
        """A context for what precedes the engine. Raise RequestTimeoutError when the time of the request is over."""
        try:
            async with asyncio.timeout_at(self._deadline):
                yield
        except TimeoutError:
            raise self._timeout_error() from None


class Generation(PromptBatch):
    """The prompts of a request to generate. `accepted` is set once the engine has all prompts. `model`: the name in the
    request, which may be a LoRA adapter's. `extra_args_name`: of SamplingParams.extra_args in the request.

    Raises RequestError for too many completions or stop strings.
    """

    def __init__(
        self,
        state: ServerState,
        request_id: str,
        prompts: Sequence[PromptType],
        params: SamplingParams,
        *,
        model: str | None,
        priority: int = 0,
        user: str | None = None,
        began: float | None = None,
        extra_args_name: str = "vllm_xargs",
        cache_hint: str | None = None,
    ) -> None:
        self.extra_args_name = extra_args_name
        sequences = len(prompts) * params.n
        if sequences > MAX_SEQUENCES:
            raise RequestError(
                "n",
                f"n {params.n} for {len(prompts)} prompts makes {sequences} sequences; "
                f"at most {MAX_SEQUENCES} are allowed in one request",
            )
        stops = len(params.stop_strings)
        limit = state.config.max_stop_strings
        if stops > limit:
            raise RequestError("stop", f"stop has {stops} strings; at most {limit} are allowed (--max-stop-strings)")
        super().__init__(state, request_id, params, priority, user, began, cache_hint)
        self.ignored = self._unread(params.extra_args or {}, strict=state.config.strict_requests)
        self._prompts = prompts
        self._sequences = sequences
        self._origin = replace(self._origin, prompts=len(prompts))
        self._params = params
        self._adapter = state.adapter(model)
        self.accepted = asyncio.Event()
        self._ids = [f"{self._stem}-{index}" for index in range(len(prompts))]

    def _unread(self, extra_args: Mapping[str, Any], *, strict: bool) -> tuple[Ignored, ...]:
        """Return extra_args as ignored if no logits processor reads some of them. Raise RequestError if `strict`.

        Those of samplers that are not loaded are refused with the prompt.
        """
        unread = self._llm.unread_extra_args(extra_args) if extra_args else []
        if not unread or any(map(sampler_of, unread)):
            return ()
        reason = "has no effect: no logits processor reads it (--logits-processors); leave it out"
        if strict:
            raise RequestError("extra_args", f"extra_args {reason}")
        return (Ignored(self.extra_args_name, "hint", f"{self.extra_args_name} {reason}"),)

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yield (prompt index, output) until all prompts are finished. Leaving aborts the others.

        Raises RequestError or QueueFullError before the first output, EngineDeadError with the cause when the engine
        dies.
        """
        log = self._log if self._log is not None and self._log.logs_outputs else None
        async with self._running():
            async with self._submitting():
                streams = await self._start()
            self.accepted.set()
            async with aclosing(_merged(streams)) as merged:
                async for index, output in merged:
                    if output.finished:
                        self._unfinished.remove(self._ids[index])
                    if log is not None:
                        log.log_output(self._ids[index], output)
                    yield index, output

    async def final_outputs(self) -> list[RequestOutput]:
        """Return the last output of each prompt. Raises as `outputs` does."""
        final: dict[int, RequestOutput] = {}
        async with aclosing(self.outputs()) as outputs:
            async for index, output in outputs:
                final[index] = output
        return [final[index] for index in range(len(self._prompts))]

    async def _start(self) -> list[RequestStream[RequestOutput]]:
        if self._log is not None:
            for engine_id, prompt in zip(self._ids, self._prompts):
                self._log.log_prompt(engine_id, prompt, self._user)
        # The load is that of all prompts, before the first one runs.
        self._llm.check_load(Load(self._sequences), self._origin.owner)
        streams = []
        for index, (engine_id, prompt) in enumerate(zip(self._ids, self._prompts)):
            # Let other tasks run between thousands of prompts. Also, requests that arrived together are all read before
            # the engine gets the first of them, and so start in one step.
            await asyncio.sleep(0)
            submitted = self._llm.submit(
                engine_id, prompt, self._params, self._priority, adapter=self._adapter, origin=self._origin
            )
            try:
                streams.append(await submitted)
            except RequestError as error:
                embedded = sum(isinstance(prompt, Mapping) and "prompt_embeds" in prompt for prompt in self._prompts)
                field = "prompt_embeds" if index < embedded else "prompt"
                number = index if index < embedded else index - embedded
                raise error if len(self._prompts) == 1 else in_prompt(error, f"{field}[{number}]") from None
            self._unfinished.append(engine_id)
        return streams


def in_prompt(error: RequestError, field: str) -> RequestError:
    """Return an error about a prompt as one about `field`, one of several prompts of a request."""
    is_of_one = error.field in ("prompt", "prompt_token_ids") and not isinstance(error, NeverFitsError)
    return error.renamed(field, f"{field}: {error}") if is_of_one else error


class PoolingBatch(PromptBatch):
    """The prompts of a request to pool."""

    def __init__(
        self,
        state: ServerState,
        request_id: str,
        params: PoolingParams,
        *,
        priority: int = 0,
        user: str | None = None,
    ) -> None:
        super().__init__(state, request_id, params, priority, user)
        self._params = params
        self._streams: list[RequestStream[RawPoolingOutput]] = []

    async def run(self, make: Callable[[], list[Prompt]], characters: int) -> list[RawPoolingOutput]:
        """Return the outputs of the prompts that `make` returns, in order. `characters`: the length of their texts.

        Raises RequestError, QueueFullError, or EngineDeadError with the cause when the engine dies.
        """
        async with self._running():
            async with self._submitting():
                threads = self._llm.text_threads
                prompts = await threads.run(characters, make) if characters > LONG_TEXT else make()
                self._check(prompts)
                for index, prompt in enumerate(prompts):
                    try:
                        await self._start(f"{self._stem}-{index}", prompt)
                    except RequestError as error:
                        raise error if len(prompts) == 1 else in_prompt(error, f"prompt[{index}]") from None
            outputs = [await stream.get() for stream in self._streams]
            self._unfinished.clear()
            return outputs

    def _check(self, prompts: Sequence[Prompt]) -> None:
        """Raise RequestError for more prompts, tokens or numbers than one request may have."""
        total = sum(len(prompt.token_ids) for prompt in prompts)
        try:
            self._llm.check_load(Load(len(prompts), total), self._origin.owner)
        except RequestError as error:
            raise RequestError("prompt", str(error)) from None
        if total > MAX_TOKENS:
            raise RequestError("prompt", f"the request has {total} tokens in all; at most {MAX_TOKENS} are allowed")
        info = self._llm.pooling_inputs.pooling
        if resolve_task(info, self._params.task) == "token_embed":
            numbers = total * (self._params.dimensions or info.embedding_size)
            if numbers > MAX_NUMBERS:
                raise RequestError(
                    "prompt", f"vectors of {total} tokens have {numbers} numbers; at most {MAX_NUMBERS} are allowed"
                )

    async def _start(self, request_id: str, prompt: Prompt) -> None:
        if self._log is not None:
            self._log.log_prompt(request_id, prompt, self._user)
        submitted = self._llm.submit(request_id, prompt, self._params, self._priority, origin=self._origin)
        self._streams.append(await submitted)
        self._unfinished.append(request_id)


def output_source(
    state: ServerState, body: SamplingFields, request_id: str, prompts: Sequence[PromptType], params: SamplingParams
) -> Generation | BeamGeneration:
    """Return the sampling generation or the beam search of a request. Raise RequestError."""
    body.check_generation_fields()
    priority = body.priority or 0
    if not body.use_beam_search:
        return Generation(
            state,
            request_id,
            prompts,
            params,
            model=body.model,
            priority=priority,
            user=body.user,
            cache_hint=body.cache_hint,
        )
    search = body.beam_search_params(params, state.llm().max_model_len)
    text = BeamText(
        state.tokenizer(),
        params.skip_special_tokens,
        params.spaces_between_special_tokens,
        search.include_stop_str_in_output,
    )
    return BeamGeneration(
        state,
        request_id,
        prompts,
        search,
        text,
        model=body.model,
        cache_salt=body.cache_salt,
        priority=priority,
        user=body.user,
        cache_hint=body.cache_hint,
    )


class BeamGeneration:
    """The beam search of one HTTP request, an OutputSource with one final output per prompt.

    Each step generates one token for every live beam, whose prefix is in the prefix cache.
    """

    ignored: tuple[Ignored, ...] = ()

    def __init__(
        self,
        state: ServerState,
        request_id: str,
        prompts: Sequence[PromptType],
        params: BeamSearchParams,
        text: BeamText,
        *,
        model: str | None,
        cache_salt: str | None = None,
        priority: int = 0,
        user: str | None = None,
        cache_hint: str | None = None,
    ) -> None:
        check_engine(state.llm().config.model, params, state.llm().info)
        check_prompts(prompts)
        self._state = state
        self._prompts = prompts
        self._params = params
        self._text = text
        self._salt = cache_salt
        self._model = model
        self._priority = priority
        self._user = user
        self._cache_hint = cache_hint
        self.id = request_id
        self._began = asyncio.get_running_loop().time()

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yield (prompt index, output with all beams) at the end. Raises as Generation.outputs does."""
        first = await self._step(self._prompts)
        ids = [output.prompt_token_ids or [] for output in first]
        llm = self._state.llm()
        searches = [
            BeamSearch(self._params, llm.end_token_ids, llm.max_model_len - len(prompt_ids)) for prompt_ids in ids
        ]
        for search, output in zip(searches, first):
            search.take([candidates_of(output)])
        while any(not search.finished for search in searches):
            owners = [index for index, search in enumerate(searches) if not search.finished for _ in search.live]
            beams = [beam for search in searches if not search.finished for beam in search.live]
            outputs = await self._step(
                [self._prompt(ids[owner], beam) for owner, beam in zip(owners, beams, strict=True)]
            )
            for index in dict.fromkeys(owners):
                searches[index].take([candidates_of(o) for o, owner in zip(outputs, owners) if owner == index])
        for index, (search, output) in enumerate(zip(searches, first)):
            output.outputs = self._text.completions(ids[index], search.best())
            yield index, output

    def _prompt(self, prompt_token_ids: list[int], beam: Beam) -> Prompt:
        return Prompt(None, [*prompt_token_ids, *beam.token_ids], self._salt)

    async def _step(self, prompts: Sequence[PromptType]) -> list[RequestOutput]:
        generation = Generation(
            self._state,
            self.id,
            prompts,
            step_params(self._params),
            model=self._model,
            priority=self._priority,
            user=self._user,
            cache_hint=self._cache_hint,
            began=self._began,
        )
        outputs = await generation.final_outputs()
        if any(output.outputs[0].finish_reason == "abort" for output in outputs):
            raise RequestError("", "the beam search was aborted")
        return outputs


async def _merged(streams: Sequence[RequestStream[RequestOutput]]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield the outputs of all streams as they arrive, until every stream has finished."""
    if len(streams) == 1:
        finished = False
        while not finished:
            output = await streams[0].get()
            finished = output.finished
            yield 0, output
        return
    arrived: asyncio.Queue[tuple[int, RequestOutput | Exception]] = asyncio.Queue(maxsize=len(streams))
    pumps = [asyncio.ensure_future(_pump(index, stream, arrived)) for index, stream in enumerate(streams)]
    try:
        left = len(streams)
        while left:
            index, item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            left -= item.finished
            yield index, item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    index: int,
    stream: RequestStream[RequestOutput],
    arrived: asyncio.Queue[tuple[int, RequestOutput | Exception]],
) -> None:
    try:
        finished = False
        while not finished:
            output = await stream.get()
            finished = output.finished
            await arrived.put((index, output))
    except Exception as error:
        await arrived.put((index, error))
