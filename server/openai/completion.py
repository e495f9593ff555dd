"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, WithJsonSchema

from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import SamplingParams
from pagoda.server.http.answer import respond
from pagoda.server.http.body import read_body
from pagoda.server.http.fields.base import Int64, unsupported
from pagoda.server.http.fields.logprobs import CompletionLogprobs, joined, prompt_logprobs
from pagoda.server.http.fields.sampling import SamplingFields
from pagoda.server.http.fields.usage import ResponseMeta, TextEvent, check_stream_options
from pagoda.server.http.request_context import answer_head, answer_id, best_of, model_of, server_of, work_of
from pagoda.server.http.state import ServerState
from pagoda.server.outputs import CompletionOutput, PromptLogprobs, RequestOutput
from pagoda.server.processing.prompt_embeds import from_base64
from pagoda.server.processing.tokenization import encode_kept

# The body of POST /v1/completions.

MAX_PROMPTS: Final = 4096
DEFAULT_MAX_TOKENS: Final = 16

_IDS = {"type": "array", "items": {"type": "integer"}}
_TEXTS = {"type": "array", "items": {"type": "string"}}
_PROMPT_SCHEMA: dict[str, Any] = {"anyOf": [{"type": "string"}, _TEXTS, _IDS, {"type": "array", "items": _IDS}]}


class CompletionRequest(SamplingFields):
    """A text completion: one prompt or many, as text or token ids."""

    searches_beams: ClassVar[bool] = True

    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)] = None
    echo: bool | None = False
    logprobs: Int64 | None = None
    max_tokens: Int64 | None = Field(DEFAULT_MAX_TOKENS, description="null: the default.")
    add_special_tokens: bool | None = True
    suffix: Any = unsupported(harmless=("",), why="no model served here fills in the middle of a text")
    prompt_embeds: str | list[str] | None = Field(
        None, description="Base64 of what torch.save writes of a tensor, with --enable-prompt-embeds; before `prompt`."
    )

    def check(self) -> None:
        """What no single field shows. Raises RequestError."""
        check_stream_options(self.stream, self.stream_options)
        if not self.embeds:
            return
        for name, asked in (("echo", self.echo), ("prompt_logprobs", self.prompt_logprobs is not None)):
            if asked:
                raise RequestError(name, f"{name} is about a prompt's tokens, and prompt_embeds have none; drop one")

    @property
    def embeds(self) -> list[str]:
        """The prompts that are embeddings, one entry each; their answers come first. Raises RequestError."""
        given = self.prompt_embeds
        embeds = [given] if isinstance(given, str) else given or []
        if len(embeds) > MAX_PROMPTS:
            raise RequestError(
                "prompt_embeds", f"prompt_embeds holds {len(embeds)} prompts; at most {MAX_PROMPTS} are allowed"
            )
        return embeds

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts of text or token ids, one entry each. Raises RequestError."""
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
        if _is_ids(prompt):
            return [prompt]
        if len(prompt) > MAX_PROMPTS:
            raise RequestError("prompt", f"prompt holds {len(prompt)} prompts; at most {MAX_PROMPTS} are allowed")
        if all(isinstance(each, str) for each in prompt) or all(_is_ids(each) for each in prompt):
            return prompt
        raise RequestError("prompt", "prompt must be a string, a list of strings, token ids, or lists of token ids")

    @property
    def shows_prompt_only(self) -> bool:
        """echo with max_tokens 0: nothing generated is shown."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def _max_tokens(self) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """SamplingParams. `defaults`: the model's own. Raises RequestError."""
        own: dict[str, Any] = {
            "logprobs": self.logprobs,
            "max_tokens": 1 if self.shows_prompt_only else self._max_tokens,
        }
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            own["prompt_logprobs"] = self.logprobs
        return self.sampling_params(defaults, **own)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


# Answers of POST /v1/completions.

PromptText = Callable[[RequestOutput], str]
"""The text of an output's prompt, decoded where the client gave token ids."""


@dataclass(slots=True)
class _Piece:
    """What an output adds to one choice."""

    text: str
    token_ids: list[int]
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(slots=True)
class _CompletionChoice:
    """What one choice has said so far."""

    logprobs: CompletionLogprobs
    event: TextEvent
    pieces: list[_Piece] = field(default_factory=list)


class CompletionAnswer:
    """One text completion: prompts times n choices. Implements server.answer.Answer."""

    def __init__(self, head: ResponseMeta, request: CompletionRequest, prompt_text: PromptText) -> None:
        self._head = head
        self._request = request
        self._prompt_text = prompt_text
        self._choices: dict[int, _CompletionChoice] = {}
        self._prompts: dict[int, RequestOutput] = {}
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}
        says_more = request.logprobs is not None or request.return_token_ids or request.shows_prompt_only
        self._says_text_only = not (says_more or head.has_running_usage)  # until a choice ends

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[dict[str, Any] | bytes]:
        """What an output adds, as the chunks of a stream."""
        self._note(prompt_index, output)
        for completion in output.outputs:
            index = self._index(prompt_index, completion)
            choice = self._choices.get(index)
            if choice is not None and self._says_text_only and completion.finish_reason is None:
                if completion.text:
                    yield choice.event(completion.text)
                continue
            opens = choice is None
            piece = self._piece(prompt_index, completion)
            ids = self._request.return_token_ids and (opens or piece.token_ids)
            if not (piece.text or piece.logprobs or piece.finish_reason or ids):
                continue
            shown = _shown(index, piece)
            if piece.finish_reason is not None:
                shown["stop_reason"] = piece.stop_reason
            if self._request.return_token_ids:
                shown["token_ids"] = piece.token_ids
                shown["prompt_token_ids"] = output.prompt_token_ids if opens else None
            yield self._chunk(shown)

    def usage_chunk(self) -> dict[str, Any] | None:
        """The last chunk of a stream that reports its usage."""
        return self._head.usage_chunk("text_completion")

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Take an output in, for `whole`."""
        self._note(prompt_index, output)
        for completion in output.outputs:
            piece = self._piece(prompt_index, completion)
            self._choices[self._index(prompt_index, completion)].pieces.append(piece)

    def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        choices = [self._whole_choice(index, self._choices[index].pieces) for index in sorted(self._choices)]
        return self._head.whole("text_completion", choices)

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return self._head.frame("text_completion", [choice]) | self._head.running_usage()

    def _whole_choice(self, index: int, pieces: list[_Piece]) -> dict[str, Any]:
        parts = [piece.logprobs for piece in pieces if piece.logprobs is not None]
        prompt_index = index // (self._request.n or 1)
        positions = self._prompt_logprobs.get(prompt_index) if self._request.prompt_logprobs is not None else None
        shows_ids = bool(self._request.return_token_ids)
        return {
            "index": index,
            "text": "".join(piece.text for piece in pieces),
            "logprobs": joined(parts) if self._request.logprobs is not None else None,
            "finish_reason": pieces[-1].finish_reason,
            "stop_reason": pieces[-1].stop_reason,
            "prompt_logprobs": prompt_logprobs(positions) if positions is not None else None,
            "token_ids": [token for piece in pieces for token in piece.token_ids] if shows_ids else None,
            "prompt_token_ids": self._prompts[prompt_index].prompt_token_ids if shows_ids else None,
        }

    def _note(self, prompt_index: int, output: RequestOutput) -> None:
        self._head.usage.count(prompt_index, output)
        if self._request.shows_prompt_only:
            self._head.usage.forget_generated()
        self._prompts[prompt_index] = output
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[prompt_index] = output.prompt_logprobs

    def _index(self, prompt_index: int, completion: CompletionOutput) -> int:
        return prompt_index * (self._request.n or 1) + completion.index

    def _piece(self, prompt_index: int, completion: CompletionOutput) -> _Piece:
        """What a completion adds; the first piece of a choice begins with the prompt when `echo` asks for it."""
        index = self._index(prompt_index, completion)
        text, ids, positions = completion.text, completion.token_ids, completion.logprobs or []
        if self._request.shows_prompt_only:
            text, ids, positions = "", [], []
        choice = self._choices.get(index)
        prompt: dict[str, Any] | None = None
        if choice is None:
            logprobs_of = CompletionLogprobs(self._shown_logprobs, self._head.names)
            event = TextEvent(lambda text: self._chunk(_shown(index, _Piece(text, [], None, None, None))))
            choice = self._choices[index] = _CompletionChoice(logprobs_of, event)
            if self._request.echo:
                text = self._prompt_text(self._prompts[prompt_index]) + text
                prompt = self._echoed_logprobs(prompt_index, choice)
        logprobs = choice.logprobs.take(ids, positions) if self._request.logprobs is not None and positions else None
        parts = [part for part in (prompt, logprobs) if part is not None]
        return _Piece(text, ids, joined(parts) if parts else None, completion.finish_reason, completion.stop_reason)

    @property
    def _shown_logprobs(self) -> int:
        """How many candidates of a position; all that there are when the request names them."""
        return -1 if self._request.logprob_token_ids else self._request.logprobs or 0

    def _echoed_logprobs(self, prompt_index: int, choice: _CompletionChoice) -> dict[str, Any] | None:
        if self._request.logprobs is None:
            return None
        ids = self._prompts[prompt_index].prompt_token_ids or []
        return choice.logprobs.take(ids, self._prompt_logprobs.get(prompt_index) or [None] * len(ids))


def _shown(index: int, piece: _Piece) -> dict[str, Any]:
    """What every chunk says of a choice."""
    return {
        "index": index,
        "text": piece.text,
        "logprobs": piece.logprobs,
        "finish_reason": piece.finish_reason,
    }


router = APIRouter(tags=["completions"])


@router.post("/v1/completions", response_model=None)
async def completions(request: Request) -> Response:
    """Continue prompts, streamed or whole."""
    state = server_of(request)
    body = await read_body(request, CompletionRequest, state.config)
    model = model_of(state, body)
    try:
        params = body.params(state.llm().info.sampling_defaults)
        prompts = [await embeds_of(state, body, text) for text in body.embeds]
        prompts += [await prompt_of(state, body, prompt, params) for prompt in body.prompts]
        request_id = answer_id(request, body, "cmpl")
        work = work_of(state, body, request_id, prompts, params)
        head = answer_head(state, body, request_id, model)
        answer = best_of(CompletionAnswer(head, body, _prompt_text(state, body)), body, head)
        return await respond(request, state, work, answer, stream=bool(body.stream))
    except RequestError as error:
        raise body.in_own_names(error) from None


async def embeds_of(state: ServerState, body: CompletionRequest, text: str) -> dict[str, Any]:
    """One prompt of embeddings, for the engine. Raises RequestError."""
    embeds = await asyncio.to_thread(from_base64, text, state.llm().info, body.truncate_prompt_tokens)
    return {"prompt_embeds": embeds, "cache_salt": body.cache_salt}


async def prompt_of(
    state: ServerState, body: CompletionRequest, prompt: str | list[int], params: SamplingParams
) -> dict[str, Any]:
    """One prompt, for the engine. Raises RequestError."""
    salted = {"cache_salt": body.cache_salt}
    if not isinstance(prompt, str):
        return {"prompt_token_ids": prompt} | salted
    if body.add_special_tokens is not False:
        return {"prompt": prompt} | salted
    tokenizer = state.tokenizer()
    if tokenizer is None:
        raise RequestError("prompt", "the tokenizer is switched off; give token ids")
    ids = await asyncio.to_thread(encode_kept, tokenizer, prompt, params, state.llm().max_model_len, False)
    return {"prompt": prompt, "prompt_token_ids": ids} | salted


def _prompt_text(state: ServerState, body: CompletionRequest) -> Any:
    tokenizer = state.tokenizer()

    def text(output: RequestOutput) -> str:
        if output.prompt is not None and body.truncate_prompt_tokens is None:
            return output.prompt
        return "" if tokenizer is None else tokenizer.decode(output.prompt_token_ids or [], skip_special_tokens=False)

    return text
