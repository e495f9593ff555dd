"""The generation requests of one AsyncLLM: a stream for each, which has its outputs.

Runs in one event loop. Does not know how commands reach the engine: what the engine is to abort is returned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Self, TypeAlias

from pagoda.common.config.engine import EngineConfig
from pagoda.common.engine.messages import EngineOutput
from pagoda.common.errors import EngineDeadError, RequestError
from pagoda.common.sampling_params import SamplingParams
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.ipc_messages import EngineInfo
from pagoda.server.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from pagoda.server.processing.grammar_check import GrammarCheck, check_of
from pagoda.server.processing.inputs import InputProcessor, PreparedRequest, Prompt, PromptType
from pagoda.server.processing.output_processor import OutputProcessor, PoolingProcessor
from pagoda.server.processing.pooling_inputs import PoolingInputs, PreparedPooling
from pagoda.server.processing.request_stream import RequestStream


class AsyncGeneration:
    """Requests that have not finished."""

    def __init__(self, processor: OutputProcessor) -> None:
        self._processor = processor
        self._streams: dict[str, RequestStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def request_ids(self) -> list[str]:
        """All of them."""
        return list(self._streams)

    @property
    def num_sequences(self) -> int:
        """Answers under way, n for a request that asked for n."""
        return self._processor.num_sequences

    def add(self, prepared: PreparedRequest) -> RequestStream:
        """Follow a request. Raises RequestError when its id is in use."""
        self._processor.add(prepared)
        stream = self._streams[prepared.request_id] = RequestStream(prepared.params.output_kind)
        return stream

    def take(self, outputs: Iterable[EngineOutput]) -> list[str]:
        """Hand out what a step brought; the engine requests to abort, which a stop string ended."""
        ready, stopped = self._processor.process(outputs)
        for output in ready:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output)
                if output.finished:
                    del self._streams[output.request_id]
        return stopped

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End requests; their streams close with finish_reason "abort". Returns the engine requests to abort."""
        ids = list(request_ids)
        streams = {each: self._streams.get(each) for each in ids}
        outputs, children = self._end(ids)
        for output in outputs:
            stream = streams[output.request_id]
            if stream is not None:
                stream.put(output)
        return children

    def drop(self, request_id: str) -> list[str]:
        """Forget a request whose stream nobody reads any more. Returns the engine requests to abort."""
        return self._end([request_id])[1]

    def refuse(self, child_id: str, error: RequestError) -> list[str] | None:
        """The engine refused a request: the engine requests to abort; None for one that is not here."""
        request_id = self._processor.parent_of(child_id)
        if request_id is None:
            return None
        stream = self._streams.get(request_id)
        children = self.drop(request_id)
        if stream is not None:
            stream.fail(error)
        return children

    def die(self, error: EngineDeadError) -> None:
        """The engine is dead: fail all."""
        for stream in self._streams.values():
            stream.fail(EngineDeadError(str(error)))
        self._streams.clear()

    def _end(self, request_ids: list[str]) -> tuple[list[RequestOutput], list[str]]:
        """Forget requests: their last outputs, and the engine requests to abort."""
        ended = self._processor.abort(request_ids)
        for request_id in request_ids:
            self._streams.pop(request_id, None)
        return ended


# The pooling requests of one AsyncLLM: a future for each, which has its one answer.
#
# Runs in one event loop. Does not know how commands reach the engine.

PoolingAnswer: TypeAlias = "asyncio.Future[PoolingRequestOutput[PoolingOutput]]"


class AsyncPooling:
    """Requests that have not finished."""

    def __init__(self) -> None:
        self._processor = PoolingProcessor()
        self._answers: dict[str, PoolingAnswer] = {}

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def request_ids(self) -> list[str]:
        """All of them."""
        return list(self._answers)

    def add(self, prepared: PreparedPooling) -> PoolingAnswer:
        """Follow a request. Raises RequestError when its id is in use."""
        self._processor.add(prepared)
        answer = self._answers[prepared.request_id] = asyncio.get_running_loop().create_future()
        return answer

    def take(self, outputs: Iterable[EngineOutput]) -> None:
        """Hand out what a step brought."""
        for output in self._processor.process(outputs):
            answer = self._answers.pop(output.request_id)
            if not answer.done():
                answer.set_result(output)

    def fail(self, request_ids: Iterable[str], error: Exception | None = None) -> list[str]:
        """End requests with an error, or without anybody hearing of it; those of them that were known."""
        known = self._processor.drop(request_ids)
        for request_id in known:
            answer = self._answers.pop(request_id)
            if error is None:
                answer.cancel()
            elif not answer.done():
                answer.set_exception(error)
                answer.exception()  # it is nobody's fault when nobody waits for it any more
        return known

    def refuse(self, request_id: str, error: RequestError) -> bool:
        """The engine refused a request; False for one that is not here."""
        return bool(self.fail([request_id], error))


# Prompts made ready beside an event loop: what takes long is done elsewhere, so that other requests keep streaming.

LONG_TEXT: Final = 16_384
"""Characters or token ids from which a prompt is prepared in a thread."""


class AsyncInputs:
    """An InputProcessor, with a thread for long prompts and embeddings, and a process that tries grammars."""

    def __init__(self, processor: InputProcessor, grammars: GrammarCheck) -> None:
        self._processor, self._grammars = processor, grammars

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer, unless a request ignores them."""
        return self._processor.end_token_ids

    async def prepare(
        self, request_id: str, prompt: PromptType, params: SamplingParams, priority: int
    ) -> PreparedRequest:
        """One engine request per answer. Raises RequestError."""
        embedded = False
        if isinstance(prompt, Mapping):
            embedded = prompt.get("prompt_embeds") is not None
            given = prompt.get("prompt_token_ids") or prompt.get("prompt")
        else:
            given = prompt.token_ids if isinstance(prompt, Prompt) else prompt
        long = isinstance(given, str | list) and len(given) > LONG_TEXT
        if long or embedded or params.structured_outputs is not None:
            return await asyncio.to_thread(self._processor.prepare, request_id, prompt, params, priority)
        return self._processor.prepare(request_id, prompt, params, priority)

    async def check_grammar(self, prepared: PreparedRequest) -> None:
        """Try the grammar of a request, if it has one. Raises RequestError when it cannot be had."""
        grammar = prepared.children[0].grammar
        if grammar is not None:
            await self._grammars.check(grammar)

    def close(self) -> None:
        """End the process. Idempotent."""
        self._grammars.close()


# What the API's side knows and has once the engine is warm.


@dataclass(frozen=True, slots=True)
class WarmEngine:
    """What an AsyncLLM needs for requests. `pooling_inputs`: None for a model that generates."""

    info: EngineInfo
    tokenizer: Tokenizer | None
    inputs: AsyncInputs
    generation: AsyncGeneration
    pooling_inputs: PoolingInputs | None

    @classmethod
    def of(cls, config: EngineConfig, info: EngineInfo, tokenizer: Tokenizer | None) -> Self:
        """Built from what the engine says about itself. `tokenizer`: None with skip_tokenizer_init."""
        tokenizer = None if tokenizer is None else tokenizer.with_context(info.max_model_len)
        processor = InputProcessor(config.model, info, tokenizer, config.structured_outputs)
        return cls(
            info=info,
            tokenizer=tokenizer,
            inputs=AsyncInputs(processor, check_of(tokenizer, info)),
            generation=AsyncGeneration(OutputProcessor(tokenizer, config.scheduler.stream_interval)),
            pooling_inputs=None if info.pooling is None else PoolingInputs(info, tokenizer),
        )


# A gate that requests pass on their way to the engine; while it is closed they wait.


class Gate:
    """Open at first. Belongs to the event loop in which it is first waited for."""

    def __init__(self) -> None:
        self._open: asyncio.Event | None = None

    @property
    def closed(self) -> bool:
        """Whether requests wait."""
        return self._open is not None

    def close(self) -> None:
        """Let requests wait."""
        if self._open is None:
            self._open = asyncio.Event()

    def open(self) -> None:
        """Let those that wait go on."""
        if self._open is not None:
            self._open.set()
            self._open = None

    async def passed(self) -> None:
        """Wait until the gate is open."""
        while self._open is not None:
            await self._open.wait()
