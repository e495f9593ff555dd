"""Prompts made ready beside an event loop: what takes long is done elsewhere, so that other requests keep streaming."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from pagoda.common.sampling_params import SamplingParams
from pagoda.server.grammars.check import GrammarCheck
from pagoda.server.requests.inputs import InputProcessor, PreparedRequest, PromptType

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
        given = (prompt.get("prompt_token_ids") or prompt.get("prompt")) if isinstance(prompt, Mapping) else prompt
        long = isinstance(given, str | list) and len(given) > LONG_TEXT
        embedded = isinstance(prompt, Mapping) and prompt.get("prompt_embeds") is not None
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
