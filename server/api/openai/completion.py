"""POST /v1/completions: request body, response builder, route."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, WithJsonSchema

from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import SamplingParams
from pagoda.common.text.fill_in_middle import fill_ends, fill_format, fill_prompt
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.http.body import Int64
from pagoda.server.http.fields import (
    PROMPTS_SCHEMA,
    CompletionLogprobs,
    SamplingFields,
    is_prompts,
    is_token_ids,
    join_logprobs,
    prompt_logprobs,
)
from pagoda.server.http.generation import output_source
from pagoda.server.http.response import CompletionBuilder, TextEvent, best_of, respond
from pagoda.server.http.state import ServerState, read_for_model, request_id_of
from pagoda.server.outputs import CompletionOutput, PromptLogprobs, RequestOutput
from pagoda.server.processing.inputs import Prompt, PromptType, encode_kept, max_prompt_tokens
from pagoda.server.processing.prompt_embeds import from_base64

MAX_PROMPTS: Final = 4096
DEFAULT_MAX_TOKENS: Final = 16


class CompletionRequest(SamplingFields):
    """A text completion of one prompt or several, as text or token ids."""

    searches_beams: ClassVar[bool] = True

    prompt: Annotated[Any, WithJsonSchema(PROMPTS_SCHEMA)] = Field(
        None, description="A prompt or a list of prompts, as text or token ids."
    )
    echo: bool | None = Field(False, description="Put the prompt before the output.")
    logprobs: Int64 | None = Field(None, description="Number of best tokens to report for each token of the output.")
    max_tokens: Int64 | None = Field(DEFAULT_MAX_TOKENS, description="null: the default; -1: unlimited.")
    add_special_tokens: bool | None = Field(True, description="Add the tokenizer's special tokens to the prompt.")
    suffix: str | None = Field(
        None, description="Text after the completion, for models that fill in the middle; else refused."
    )
    prompt_embeds: str | list[str] | None = Field(
        None,
        description="Base64 of tensors saved with torch.save; needs --enable-prompt-embeds. Precede `prompt`.",
    )

    def check(self) -> None:
        """Raise RequestError for an invalid combination of fields."""
        if self.suffix:
            for name, is_set in (
                ("echo", self.echo),
                ("prompt_embeds", self.embeds),
                ("truncate_prompt_tokens", self.truncate_prompt_tokens is not None),
            ):
                if is_set:
                    raise RequestError(name, f"{name} is not supported together with suffix; drop one")
        if not self.embeds:
            return
        for name, is_set in (("echo", self.echo), ("prompt_logprobs", self.prompt_logprobs is not None)):
            if is_set:
                raise RequestError(name, f"{name} needs prompt tokens, which prompt_embeds do not have; drop one")

    @property
    def embeds(self) -> list[str]:
        """The prompts given as embeddings; their choices come first. Raises RequestError."""
        tensors = self.prompt_embeds
        embeds = [tensors] if isinstance(tensors, str) else tensors or []
        if len(embeds) > MAX_PROMPTS:
            raise RequestError(
                "prompt_embeds", f"prompt_embeds has {len(embeds)} prompts; at most {MAX_PROMPTS} are allowed"
            )
        return embeds

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts given as text or token ids. Raises RequestError."""
        prompt = self.prompt
        if self.embeds and (prompt is None or prompt in ("", [])):
            return []
        if prompt is None:
            raise RequestError("prompt", "prompt is missing")
        if isinstance(prompt, str):
            return [prompt]
        if not isinstance(prompt, list):
            raise RequestError("prompt", "prompt must be a string, a list of strings, or token ids")
        if not prompt:
            raise RequestError("prompt", "prompt is empty")
        if is_token_ids(prompt):
            return [prompt]
        if len(prompt) > MAX_PROMPTS:
            raise RequestError("prompt", f"prompt has {len(prompt)} prompts; at most {MAX_PROMPTS} are allowed")
        if is_prompts(prompt):
            return prompt
        raise RequestError("prompt", "prompt must be a string, a list of strings, token ids, or lists of token ids")

    @property
    def shows_prompt_only(self) -> bool:
        """Whether nothing generated is returned: echo with max_tokens 0."""
        return bool(self.echo) and self.token_limit == 0

    @property
    def adds_special_tokens(self) -> bool:
        """Whether a text gets the tokenizer's special tokens, such as that of the beginning."""
        return self.add_special_tokens is not False and self.add_bos_token is not False

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return the SamplingParams. `defaults`: the model's generation config. Raise RequestError."""
        limit = self.token_limit
        max_tokens = DEFAULT_MAX_TOKENS if limit is None else None if limit == -1 else limit
        values: dict[str, Any] = {"logprobs": self.logprobs, "max_tokens": 1 if self.shows_prompt_only else max_tokens}
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            values["prompt_logprobs"] = self.logprobs
        return self.sampling_params(defaults, **values)


# Response builder.


@dataclass(slots=True)
class _Piece:
    """The part of a choice that one output adds."""

    text: str
    token_ids: list[int]
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(slots=True)
class _CompletionChoice:
    logprobs: CompletionLogprobs
    text_event: TextEvent | None = None  # The text event of a stream.
    pieces: list[_Piece] = field(default_factory=list)  # Pieces of a response that is not streamed.


class TextCompletionBuilder(CompletionBuilder):
    """Builds one text completion: n choices per prompt."""

    whole_object = chunk_object = "text_completion"

    def __init__(
        self,
        request: CompletionRequest,
        response_id: str,
        model: str,
        config: ServerConfig,
        tokenizer: Tokenizer | None,
    ) -> None:
        super().__init__(request, response_id, model, config, tokenizer)
        self._request = request
        self._choices: dict[int, _CompletionChoice] = {}
        self._prompts: dict[int, RequestOutput] = {}
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}
        needs_frames = request.logprobs is not None or request.return_token_ids or request.shows_prompt_only
        # Chunks but a choice's last have text only.
        self._text_only = not (needs_frames or self._reports_running_usage)

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[dict[str, Any] | bytes]:
        self._note(prompt_index, output)
        for completion in output.outputs:
            index = self._index(prompt_index, completion)
            choice = self._choices.get(index)
            if choice is not None and self._text_only and completion.finish_reason is None:
                if completion.text:
                    yield (choice.text_event or self._text_event(index, choice))(completion.text)
                continue
            is_first = choice is None
            piece = self._piece(prompt_index, completion)
            ids = self._request.return_token_ids and (is_first or piece.token_ids)
            if not (piece.text or piece.logprobs or piece.finish_reason or ids):
                continue
            chunk = _chunk_choice(index, piece)
            if self._request.return_token_ids:
                chunk["token_ids"] = piece.token_ids
                chunk["prompt_token_ids"] = output.prompt_token_ids if is_first else None
            yield self._chunk(chunk)

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        self._note(prompt_index, output)
        for completion in output.outputs:
            piece = self._piece(prompt_index, completion)
            self._choices[self._index(prompt_index, completion)].pieces.append(piece)

    def whole(self) -> dict[str, Any]:
        return self._whole([self._whole_choice(index, self._choices[index].pieces) for index in sorted(self._choices)])

    def _text_event(self, index: int, choice: _CompletionChoice) -> TextEvent:
        choice.text_event = TextEvent(
            lambda text: self._chunk(_chunk_choice(index, _Piece(text, [], None, None, None)))
        )
        return choice.text_event

    def _whole_choice(self, index: int, pieces: list[_Piece]) -> dict[str, Any]:
        parts = [piece.logprobs for piece in pieces if piece.logprobs is not None]
        prompt_index = index // self._n
        positions = self._prompt_logprobs.get(prompt_index) if self._request.prompt_logprobs is not None else None
        returns_ids = bool(self._request.return_token_ids)
        return {
            "index": index,
            "text": "".join(piece.text for piece in pieces),
            "logprobs": join_logprobs(parts) if self._request.logprobs is not None else None,
            "finish_reason": pieces[-1].finish_reason,
            "stop_reason": pieces[-1].stop_reason,
            "prompt_logprobs": prompt_logprobs(positions) if positions is not None else None,
            "token_ids": [token for piece in pieces for token in piece.token_ids] if returns_ids else None,
            "prompt_token_ids": self._prompts[prompt_index].prompt_token_ids if returns_ids else None,
            "routed_experts": None,
        }

    def _note(self, prompt_index: int, output: RequestOutput) -> None:
        self.usage.count(prompt_index, output)
        if self._request.shows_prompt_only:
            self.usage.forget_generated()
        self._prompts[prompt_index] = output
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[prompt_index] = output.prompt_logprobs

    def _piece(self, prompt_index: int, completion: CompletionOutput) -> _Piece:
        """Return what a completion adds; with `echo`, the first piece of a choice starts with the prompt."""
        index = self._index(prompt_index, completion)
        text = completion.text
        ids = completion.token_ids
        positions = completion.logprobs or []
        if self._request.shows_prompt_only:
            text = ""
            ids = []
            positions = []
        choice = self._choices.get(index)
        prompt: dict[str, Any] | None = None
        if choice is None:
            # With logprob_token_ids all reported candidates are shown.
            count = -1 if self._request.logprob_token_ids else self._request.logprobs or 0
            choice = self._choices[index] = _CompletionChoice(CompletionLogprobs(count, self._names))
            if self._request.echo:
                text = self._prompt_text(self._prompts[prompt_index]) + text
                prompt = self._echoed_logprobs(prompt_index, choice)
        logprobs = choice.logprobs.take(ids, positions) if self._request.logprobs is not None and positions else None
        parts = [part for part in (prompt, logprobs) if part is not None]
        return _Piece(
            text, ids, join_logprobs(parts) if parts else None, completion.finish_reason, completion.stop_reason
        )

    def _echoed_logprobs(self, prompt_index: int, choice: _CompletionChoice) -> dict[str, Any] | None:
        if self._request.logprobs is None:
            return None
        ids = self._prompts[prompt_index].prompt_token_ids or []
        return choice.logprobs.take(ids, self._prompt_logprobs.get(prompt_index) or [None] * len(ids))

    def _prompt_text(self, output: RequestOutput) -> str:
        """Return the text of the prompt, decoded if it was truncated or given as token ids."""
        if output.prompt is not None and self._request.truncate_prompt_tokens is None:
            return output.prompt
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(output.prompt_token_ids or [], skip_special_tokens=False)


def _chunk_choice(index: int, piece: _Piece) -> dict[str, Any]:
    return {
        "index": index,
        "text": piece.text,
        "logprobs": piece.logprobs,
        "finish_reason": piece.finish_reason,
        "stop_reason": piece.stop_reason,
        "prompt_token_ids": None,
        "token_ids": None,
    }


router = APIRouter(tags=["completions"])


@router.post("/v1/completions", response_model=None)
async def completions(request: Request) -> Response:
    """Continue prompts, streamed or whole."""
    state, body, model = await read_for_model(request, CompletionRequest)
    try:
        params = body.params(state.llm().info.sampling_defaults)
        prompts: list[PromptType] = [await embeds_of(state, body, text) for text in body.embeds]
        prompts += [await prompt_of(state, body, prompt, params) for prompt in body.prompts]
        request_id = request_id_of(request, body, "cmpl")
        source = output_source(state, body, request_id, prompts, params)
        builder = TextCompletionBuilder(body, request_id, model, state.config, state.tokenizer())
        return await respond(request, state, source, best_of(builder, body), stream=bool(body.stream))
    except RequestError as error:
        raise body.in_own_names(error) from None


async def embeds_of(state: ServerState, body: CompletionRequest, text: str) -> PromptType:
    """Return the engine prompt of one base64-encoded tensor. Raise RequestError."""
    embeds = await asyncio.to_thread(from_base64, text, state.llm().info, body.truncate_prompt_tokens)
    return {"prompt_embeds": embeds, "cache_salt": body.cache_salt}


async def prompt_of(
    state: ServerState, body: CompletionRequest, prompt: str | list[int], params: SamplingParams
) -> PromptType:
    """Return the engine prompt of a text or of token ids. Raise RequestError."""
    salt = {"cache_salt": body.cache_salt}
    if body.suffix:
        size = len(prompt) + len(body.suffix)
        return await state.engine.text_threads.run(size, _fill_prompt, state, body, prompt, params)
    if not isinstance(prompt, str):
        body.check_context(len(prompt))
        return {"prompt_token_ids": prompt} | salt
    if body.adds_special_tokens and not body.limits_context:
        return {"prompt": prompt} | salt
    tokenizer = state.tokenizer()
    if tokenizer is None:
        raise RequestError("prompt", "the tokenizer is disabled (--skip-tokenizer-init); give token ids")
    special = body.adds_special_tokens
    context = max_prompt_tokens(state.llm().info)
    ids = await state.engine.text_threads.run(len(prompt), encode_kept, tokenizer, prompt, params, context, special)
    body.check_context(len(ids))
    return Prompt(prompt, ids, body.cache_salt)


def _fill_prompt(
    state: ServerState, body: CompletionRequest, prompt: str | list[int], params: SamplingParams
) -> PromptType:
    """Return the prompt of a completion between `prompt` and the suffix, and add the tokens that end it to `params`.

    Raise RequestError for a model that does not fill in the middle.
    """
    tokenizer = state.tokenizer()
    form = None if tokenizer is None else fill_format(tokenizer)
    if tokenizer is None or form is None:
        raise RequestError(
            "suffix", "suffix is not supported: the model's tokenizer has no fill-in-the-middle tokens; leave it out"
        )
    adds_bos = body.adds_special_tokens
    ids = fill_prompt(tokenizer, form, prompt, body.suffix or "", adds_bos=adds_bos)
    body.check_context(len(ids))
    ends = fill_ends(tokenizer, form)
    params.stop_token_ids = list(dict.fromkeys([*(params.stop_token_ids or ()), *ends]))
    return Prompt(None, ids, body.cache_salt)
