"""Answers of POST /v1/completions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pagoda.server.outputs import CompletionOutput, PromptLogprobs, RequestOutput
from pagoda.server.protocol.completion import CompletionRequest
from pagoda.server.protocol.head import AnswerHead, TextEvent
from pagoda.server.protocol.logprobs import CompletionLogprobs, joined, prompt_logprobs

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
class _Choice:
    """What one choice has said so far."""

    logprobs: CompletionLogprobs
    event: TextEvent
    pieces: list[_Piece] = field(default_factory=list)


class CompletionAnswer:
    """One text completion: prompts times n choices. Implements server.answer.Answer."""

    def __init__(self, head: AnswerHead, request: CompletionRequest, prompt_text: PromptText) -> None:
        self._head = head
        self._request = request
        self._prompt_text = prompt_text
        self._choices: dict[int, _Choice] = {}
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
            choice = self._choices[index] = _Choice(logprobs_of, event)
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

    def _echoed_logprobs(self, prompt_index: int, choice: _Choice) -> dict[str, Any] | None:
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
