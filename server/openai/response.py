"""What responses of chat and text completions have in common: metadata, usage, encoded text events, output sources."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar, Final

from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.sampling_params import SamplingParams
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.http.fields.logprobs import TokenNames
from pagoda.server.http.fields.sampling import SamplingFields
from pagoda.server.http.generation import Generation
from pagoda.server.http.response import OutputSource, ResponseBuilder, Usage, encode_json
from pagoda.server.http.state import ServerState
from pagoda.server.openai.candidates import BeamGeneration, BestOf
from pagoda.server.outputs import CompletionOutput
from pagoda.server.processing.beams import BeamText
from pagoda.server.processing.inputs import PromptType

_MARK: Final = "\ufdd0"
"""Placeholder of the text in an event's frame: no other string of the frame is exactly this noncharacter."""


class TextEvent:
    """Encodes stream events that differ in one text only, as most tokens' do: the frame is encoded once."""

    __slots__ = ("_after", "_before")

    def __init__(self, chunk: Callable[[str], dict[str, Any]]) -> None:
        parts = encode_json(chunk(_MARK)).split(encode_json(_MARK))
        self._before, self._after = b"data: " + parts[0], parts[-1] + b"\n\n"

    def __call__(self, text: str) -> bytes:
        """Return the event with this text."""
        return self._before + encode_json(text) + self._after


class CompletionBuilder(ResponseBuilder):
    """Base of the builders of chat and text completions."""

    whole_object: ClassVar[str]  # `object` of a whole response
    chunk_object: ClassVar[str]  # `object` of a stream chunk

    def __init__(
        self, request: SamplingFields, response_id: str, model: str, config: ServerConfig, tokenizer: Tokenizer | None
    ) -> None:
        self.usage = Usage(details=config.enable_prompt_tokens_details)
        self._id, self._created, self._model = response_id, int(time.time()), model
        self._n = request.n or 1
        as_ids = request.return_tokens_as_token_ids
        self._as_ids = config.return_tokens_as_token_ids if as_ids is None else as_ids
        self._tokenizer = tokenizer
        options = request.stream_options
        self._reports_usage = config.enable_force_include_usage or bool(options is not None and options.include_usage)
        self._reports_running_usage = (
            self._reports_usage and options is not None and bool(options.continuous_usage_stats)
        )

    @cached_property
    def _names(self) -> TokenNames:
        return TokenNames(self._tokenizer, as_ids=bool(self._as_ids))

    def usage_chunk(self) -> dict[str, Any] | None:
        """Return the last chunk of a stream, without choices; None when usage is not reported."""
        return self._frame(self.chunk_object, []) | {"usage": self.usage.as_dict()} if self._reports_usage else None

    def _index(self, prompt_index: int, completion: CompletionOutput) -> int:
        """Return the index of a choice: n per prompt."""
        return prompt_index * self._n + completion.index

    def _frame(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Return a stream chunk; its usage is null if only the last chunk reports it."""
        chunk = self._frame(self.chunk_object, [choice])
        if self._reports_usage:
            chunk["usage"] = self.usage.as_dict() if self._reports_running_usage else None
        return chunk

    def _whole(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return a whole response; fields that only other servers set are null."""
        unset = {"service_tier": None, "system_fingerprint": None, "kv_transfer_params": None}
        usage = {"prompt_tokens_details": None} | self.usage.as_dict()
        return self._frame(self.whole_object, choices) | unset | {"usage": usage}


def output_source(
    state: ServerState, body: SamplingFields, request_id: str, prompts: Sequence[PromptType], params: SamplingParams
) -> OutputSource:
    """Return the sampling generation or the beam search of a request. Raise RequestError."""
    body.check_answered()
    priority = body.priority or 0
    if not body.use_beam_search:
        return Generation(state, request_id, prompts, params, priority=priority, user=body.user)
    search = body.beam_search_params(params, state.llm().max_model_len)
    text = BeamText(
        state.tokenizer(),
        params.skip_special_tokens,
        params.spaces_between_special_tokens,
        search.include_stop_str_in_output,
    )
    return BeamGeneration(
        state, request_id, prompts, search, text, cache_salt=body.cache_salt, priority=priority, user=body.user
    )


def best_of(builder: CompletionBuilder, body: SamplingFields) -> ResponseBuilder:
    """Return a builder that keeps the n best of `best_of` choices, if requested."""
    return builder if body.best_of is None else BestOf(builder, body.n or 1, builder.usage)
