"""Requests prepared without holding up the event loop: long prompts in threads, grammars in another process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Final

from pagoda.common.engine.lora.adapter import Adapter
from pagoda.common.errors import AnswerError
from pagoda.common.pooling_params import PoolingParams
from pagoda.common.sampling_params import SamplingParams
from pagoda.server.core_client.client import QueueLimits
from pagoda.server.outputs import RequestOutput
from pagoda.server.processing.answer_check import ended_answers, with_grammar
from pagoda.server.processing.inputs import (
    ALONE,
    InputProcessor,
    PreparedRequest,
    PromptType,
    RequestOrigin,
    TextOptions,
)
from pagoda.server.processing.output_processor import OutputCheck
from pagoda.server.processing.workers.grammar_check import MAX_WAITING, GrammarCheck
from pagoda.server.processing.workers.waiting_lines import TextThreads

LONG_TEXT: Final = 16_384
"""Characters or token ids from which a prompt is prepared in a thread, so that other requests keep streaming."""

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
        ended = ended_answers(prepared, resolved, tokenizer)

        async def check(output: RequestOutput) -> None:
            for _, answer in ended.add(output):
                if error := await self._grammars.answer_error(resolved, answer, owner):
                    raise AnswerError(error)

        return prepared, check

    def close(self) -> None:
        """End the processes. Idempotent."""
        self._grammars.close()
        self.processor.templates.close()
