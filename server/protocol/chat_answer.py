"""Answers of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pagoda.server.outputs import CompletionOutput, RequestOutput
from pagoda.server.protocol.chat import ChatCompletionRequest
from pagoda.server.protocol.head import AnswerHead
from pagoda.server.protocol.logprobs import chat_logprobs, prompt_logprobs


@dataclass(slots=True)
class _Choice:
    """What one choice has said so far."""

    text: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChatAnswer:
    """One chat completion. Implements server.answer.Answer."""

    def __init__(self, head: AnswerHead, request: ChatCompletionRequest, response_role: str) -> None:
        self._head = head
        self._request = request
        last = request.messages[-1]
        self._role = response_role if request.opens_answer else str(last["role"])
        content = last.get("content")
        self._echo = content if request.echo and last["role"] == self._role and isinstance(content, str) else ""
        self._choices: dict[int, _Choice] = {}
        self._prompt_token_ids: list[int] | None = None
        self._prompt_logprobs: list[dict[str, Any] | None] | None = None

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """What an output adds, as the chunks of a stream."""
        self._head.usage.count(prompt_index, output)
        for completion in output.outputs:
            if completion.index not in self._choices:
                self._choices[completion.index] = _Choice()
                yield self._opening(completion.index, output)
            chunk = self._chunk(completion)
            if chunk is not None:
                yield chunk

    def usage_chunk(self) -> dict[str, Any] | None:
        """The last chunk of a stream that reports its usage."""
        return self._head.usage_chunk("chat.completion.chunk")

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Take an output in, for `whole`."""
        self._head.usage.count(prompt_index, output)
        self._prompt_token_ids = output.prompt_token_ids
        if output.prompt_logprobs is not None and self._request.prompt_logprobs is not None:
            self._prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        for completion in output.outputs:
            choice = self._choices.get(completion.index)
            if choice is None:
                choice = self._choices[completion.index] = _Choice(text=[self._echo])
            choice.text.append(completion.text)
            choice.logprobs += self._logprobs(completion)
            choice.token_ids += completion.token_ids
            choice.finish_reason, choice.stop_reason = completion.finish_reason, completion.stop_reason

    def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        choices = [self._whole_choice(index, self._choices[index]) for index in sorted(self._choices)]
        answer = self._head.frame("chat.completion", choices) | {"usage": self._head.usage.as_dict()}
        if self._request.prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._prompt_logprobs
        if self._request.return_token_ids:
            answer["prompt_token_ids"] = self._prompt_token_ids
        return answer

    def _whole_choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "index": index,
            "message": {"role": self._role, "content": "".join(choice.text), "refusal": None},
            "logprobs": {"content": choice.logprobs, "refusal": None} if self._request.logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._request.return_token_ids:
            shown["token_ids"] = choice.token_ids
        return shown

    def _opening(self, index: int, output: RequestOutput) -> dict[str, Any]:
        delta = {"role": self._role, "content": self._echo}
        chunk = self._frame({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
        if self._request.return_token_ids:
            chunk["prompt_token_ids"] = output.prompt_token_ids
        return chunk

    def _chunk(self, completion: CompletionOutput) -> dict[str, Any] | None:
        """A chunk, or None where nothing would be in it."""
        ids = completion.token_ids if self._request.return_token_ids else []
        entries = self._logprobs(completion)
        if not (completion.text or entries or ids or completion.finish_reason):
            return None
        choice: dict[str, Any] = {
            "index": completion.index,
            "delta": {"content": completion.text} if completion.text else {},
            "logprobs": {"content": entries, "refusal": None} if entries else None,
            "finish_reason": completion.finish_reason,
        }
        if completion.finish_reason is not None:
            choice["stop_reason"] = completion.stop_reason
        if self._request.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return self._frame(choice)

    def _frame(self, choice: dict[str, Any]) -> dict[str, Any]:
        return self._head.frame("chat.completion.chunk", [choice]) | self._head.running_usage()

    def _logprobs(self, completion: CompletionOutput) -> list[dict[str, Any]]:
        if not self._request.logprobs or not completion.logprobs:
            return []
        return chat_logprobs(completion.logprobs, self._request.top_logprobs or 0, self._head.names)
