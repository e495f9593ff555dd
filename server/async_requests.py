"""The requests of one AsyncLLM between its callers and the engine: prepared, streamed, paused.

Runs in one event loop. Sends nothing to the engine: methods return the engine requests to abort.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from pagoda.common.config.engine import EngineConfig
from pagoda.common.engine.messages import EngineOutput
from pagoda.common.errors import AbortedError, EngineDeadError, RequestError
from pagoda.common.pooling_params import PoolingParams
from pagoda.common.sampling_params import SamplingParams
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.ipc_messages import EngineInfo
from pagoda.server.outputs import RequestOutput
from pagoda.server.processing.grammar_check import GrammarCheck, check_of
from pagoda.server.processing.inputs import InputProcessor, PreparedRequest, PromptType
from pagoda.server.processing.output_processor import OutputProcessor
from pagoda.server.processing.request_stream import RequestStream

LONG_TEXT: Final = 16_384
"""Characters or token ids from which a prompt is prepared in a thread, so that other requests keep streaming."""


class AsyncRequests:
    """The unfinished requests, each with the stream of its outputs."""

    def __init__(self, processor: OutputProcessor) -> None:
        self._processor = processor
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
        stream = self._streams.get(request_id)
        children = self.drop(request_id)
        if stream is not None:
            stream.fail(error)
        return children

    def die(self, error: EngineDeadError) -> None:
        """Fail all requests: the engine is dead."""
        for stream in self._streams.values():
            stream.fail(EngineDeadError(str(error)))
        self._streams.clear()

    def _end(self, request_ids: list[str]) -> tuple[list[RequestOutput], list[str]]:
        """Forget requests. Return their last outputs and the engine requests to abort."""
        ended = self._processor.abort(request_ids)
        for request_id in request_ids:
            self._streams.pop(request_id, None)
        return ended


class AsyncInputs:
    """An InputProcessor with a thread for long prompts and embeddings, and a process that compiles grammars first."""

    def __init__(self, processor: InputProcessor, grammars: GrammarCheck) -> None:
        self.processor, self._grammars = processor, grammars

    async def prepare(
        self, request_id: str, prompt: PromptType, params: SamplingParams | PoolingParams, priority: int
    ) -> PreparedRequest:
        """Return the engine requests of a prompt, one per completion. Raises RequestError."""
        given = (prompt.get("prompt_token_ids") or prompt.get("prompt")) if isinstance(prompt, Mapping) else prompt
        long = isinstance(given, str | list) and len(given) > LONG_TEXT
        embedded = isinstance(prompt, Mapping) and prompt.get("prompt_embeds") is not None
        structured = isinstance(params, SamplingParams) and params.structured_outputs is not None
        if long or embedded or structured:
            return await asyncio.to_thread(self.processor.prepare, request_id, prompt, params, priority)
        return self.processor.prepare(request_id, prompt, params, priority)

    async def check_grammar(self, prepared: PreparedRequest) -> None:
        """Compile the grammar of a request, if any, in another process. Raises RequestError if that fails."""
        grammar = prepared.children[0].grammar
        if grammar is not None:
            await self._grammars.check(grammar)

    def close(self) -> None:
        """End the process. Idempotent."""
        self._grammars.close()


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
        tokenizer = None if tokenizer is None else tokenizer.with_context(info.max_model_len)
        processor = InputProcessor(config.model, info, tokenizer, config.structured_outputs)
        return cls(
            info=info,
            tokenizer=tokenizer,
            inputs=AsyncInputs(processor, check_of(tokenizer, info)),
            requests=AsyncRequests(OutputProcessor(tokenizer, config.scheduler.stream_interval)),
        )


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
