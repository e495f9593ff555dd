"""What responses of chat and text completions have in common: metadata, usage, encoded text events, output sources."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, ClassVar, Final

from msgspec.structs import replace

from pagoda.common.beam_search import Beam, BeamSearch, BeamSearchParams
from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import SamplingParams
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.http.body import Ignored
from pagoda.server.http.fields import SamplingFields, TokenNames
from pagoda.server.http.generation import Generation
from pagoda.server.http.response import OutputSource, ResponseBuilder, Usage, encode_json
from pagoda.server.http.state import ServerState
from pagoda.server.outputs import CompletionOutput, RequestOutput
from pagoda.server.processing.beams import BeamText, candidates_of, check_engine, check_prompts, step_params
from pagoda.server.processing.inputs import Prompt, PromptType

_MARK: Final = "\ufdd0"
"""Placeholder of the text in an event's frame: no other string of the frame is exactly this noncharacter."""


class TextEvent:
    """Encodes stream events that differ in one text only, as most tokens' do: the frame is encoded once."""

    __slots__ = ("_after", "_before")

    def __init__(self, chunk: Callable[[str], dict[str, Any]]) -> None:
        parts = encode_json(chunk(_MARK)).split(encode_json(_MARK))
        self._before = b"data: " + parts[0]
        self._after = parts[-1] + b"\n\n"

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
        self._id = response_id
        self._created = int(time.time())
        self._model = model
        self._n = request.n or 1
        as_ids = request.return_tokens_as_token_ids
        self._as_ids = config.return_tokens_as_token_ids if as_ids is None else as_ids
        self._tokenizer = tokenizer
        options = request.stream_options or None  # of batches, which are not streamed, at most {}
        self._reports_usage = config.enable_force_include_usage or bool(options is not None and options.include_usage)
        self._reports_running_usage = config.enable_force_include_usage or (
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
        unset = dict.fromkeys(
            ("service_tier", "system_fingerprint", "kv_transfer_params", "ec_transfer_params", "metrics")
        )
        usage = {"prompt_tokens_details": None, "completion_tokens_details": None} | self.usage.as_dict()
        return self._frame(self.whole_object, choices) | unset | {"usage": usage}


def output_source(
    state: ServerState, body: SamplingFields, request_id: str, prompts: Sequence[PromptType], params: SamplingParams
) -> OutputSource:
    """Return the sampling generation or the beam search of a request. Raise RequestError."""
    body.check_generation_fields()
    priority = body.priority or 0
    if not body.use_beam_search:
        return Generation(state, request_id, prompts, params, model=body.model, priority=priority, user=body.user)
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
    )


def best_of(builder: CompletionBuilder, body: SamplingFields) -> ResponseBuilder:
    """Return a builder that keeps the n best of `best_of` choices, if requested."""
    return BestOf(builder, body.n or 1, builder.usage) if body.selects_best else builder


# Requests that generate more candidates than they return: beam search and best_of.


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
        self.request_id = request_id
        self._began = asyncio.get_running_loop().time()

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yield (prompt index, output with all beams) at the end. Raises as Generation.outputs does."""
        first = await self._step(self._prompts)
        ids = [output.prompt_token_ids or [] for output in first]
        llm = self._state.llm()
        searches = [BeamSearch(self._params, llm.end_token_ids, llm.max_model_len - len(each)) for each in ids]
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
            self.request_id,
            prompts,
            step_params(self._params),
            model=self._model,
            priority=self._priority,
            user=self._user,
            began=self._began,
        )
        outputs = await generation.final_outputs()
        if any(output.outputs[0].finish_reason == "abort" for output in outputs):
            raise RequestError("", "the beam search was aborted")
        return outputs


class BestOf:
    """A ResponseBuilder that keeps the `n` choices with the highest cumulative log-probability. Not for streams."""

    def __init__(self, builder: ResponseBuilder, n: int, usage: Usage) -> None:
        self._builder = builder
        self._n = n
        self._usage = usage  # counts the dropped choices, too

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterable[dict[str, Any]]:
        """Raise: the best are only known at the end."""
        raise NotImplementedError("best_of is not streamed")

    def usage_chunk(self) -> dict[str, Any] | None:
        return self._builder.usage_chunk()

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Add the best choices of a final output."""
        ranked = sorted(output.outputs, key=_negative_logprob)
        kept = ranked[: self._n]
        dropped = ranked[self._n :]
        self._usage.count_dropped(sum(len(each.token_ids) for each in dropped))
        outputs = [replace(each, index=index) for index, each in enumerate(kept)]
        self._builder.add(prompt_index, replace(output, outputs=outputs))

    def whole(self) -> dict[str, Any]:
        return self._builder.whole()


def _negative_logprob(choice: CompletionOutput) -> float:
    return -(choice.cumulative_logprob or 0.0)
