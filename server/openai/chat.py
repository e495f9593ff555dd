"""POST /v1/chat/completions, and its batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pagoda.common.errors import RequestError
from pagoda.server.chat.conversation import Conversation, NamedTool
from pagoda.server.chat.prompt import prepare
from pagoda.server.http.answer import respond
from pagoda.server.http.body import read_body
from pagoda.server.http.fields.logprobs import chat_logprobs, prompt_logprobs
from pagoda.server.http.fields.usage import ResponseMeta, TextEvent
from pagoda.server.http.ignored import note_ignored
from pagoda.server.http.request_context import answer_head, answer_id, best_of, model_of, server_of, work_of
from pagoda.server.http.state import ServerState
from pagoda.server.openai.chat_request import BatchChatCompletionRequest, ChatCompletionRequest, ChatFields
from pagoda.server.outputs import CompletionOutput, RequestOutput
from pagoda.server.parsers.output_parser import OutputParser
from pagoda.server.parsers.parser import Arguments, Content, Event, Reasoning, ToolCall, merge_events

# A chat message as it goes over the wire: whole, or as the pieces of a stream.


def message_of(role: str, events: Iterable[Event]) -> dict[str, Any]:
    """What was said. Content is null where there is none beside calls or thinking."""
    content, reasoning = "", ""
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        match event:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case ToolCall(number, name, id):
                calls[number] = {"id": id, "type": "function", "function": {"name": name, "arguments": ""}}
            case Arguments(number, text):
                calls[number]["function"]["arguments"] += text
    message: dict[str, Any] = {"role": role, "content": content, "refusal": None}
    if not content and (calls or reasoning):
        message["content"] = None
    if reasoning:
        message |= _reasoning(reasoning)
    if calls:
        message["tool_calls"] = list(calls.values())
    return message


def delta_of(event: Event) -> dict[str, Any]:
    """A piece of a message in a stream. A call's name comes before its arguments."""
    match event:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return _reasoning(text)
        case ToolCall(number, name, id):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": number, "id": id, "type": "function", "function": function}]}
        case Arguments(number, text):
            return {"tool_calls": [{"index": number, "function": {"arguments": text}}]}


def _reasoning(text: str) -> dict[str, str]:
    """Thinking under both names that clients know: today's, and the one it had before."""
    return {"reasoning": text, "reasoning_content": text}


# Answers of POST /v1/chat/completions and its batch.


@dataclass(frozen=True, slots=True)
class Beginning:
    """What is known of the answers to one conversation before they come. `echo`: text that they begin with."""

    role: str
    echo: str
    reader: Callable[[], OutputParser]


def beginning(
    request: ChatFields,
    messages: Sequence[Mapping[str, Any]],
    response_role: str,
    reader: Callable[[], OutputParser],
) -> Beginning:
    """How the answers to `messages` begin. `response_role`: who speaks in a new message."""
    last = messages[-1]
    role = response_role if request.opens_answer else str(last["role"])
    content = last.get("content")
    echo = content if request.echo and last["role"] == role and isinstance(content, str) else ""
    return Beginning(role, echo, reader)


@dataclass(slots=True)
class _ChatChoice:
    """What one choice has said so far, as far as `whole` needs it."""

    role: str
    reader: OutputParser
    content: TextEvent
    events: list[Event] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChatAnswer:
    """One chat completion. Implements server.answer.Answer. `beginnings`: of each conversation, one unless a batch."""

    def __init__(self, head: ResponseMeta, request: ChatFields, *beginnings: Beginning) -> None:
        self._head = head
        self._request = request
        self._beginnings = beginnings
        self._named = isinstance(request.choice_of_tools, NamedTool)
        self._choices: dict[int, _ChatChoice] = {}
        self._prompt_shown: dict[str, Any] = {}
        says_more = request.logprobs or request.return_token_ids or head.has_running_usage
        self._says_content_only = not says_more  # until a choice ends, where nothing but content comes

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[dict[str, Any] | bytes]:
        """What an output adds, as the chunks of a stream."""
        self._head.usage.count(prompt_index, output)
        for completion in output.outputs:
            index = self._index(prompt_index, completion)
            choice = self._choices.get(index)
            if choice is None:
                choice = self._begin(index, prompt_index)
                yield self._opening(index, choice, self._beginnings[prompt_index].echo, output)
            if self._says_content_only and choice.reader.is_plain and completion.finish_reason is None:
                if completion.text:
                    yield choice.content(completion.text)
            else:
                yield from self._chunks(index, choice, completion)

    def usage_chunk(self) -> dict[str, Any] | None:
        """The last chunk of a stream that reports its usage."""
        return self._head.usage_chunk("chat.completion.chunk")

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Take an output in, for `whole`."""
        self._head.usage.count(prompt_index, output)
        if not prompt_index:
            self._prompt_shown = self._about_prompt(output)
        for completion in output.outputs:
            index = self._index(prompt_index, completion)
            choice = self._choices.get(index)
            if choice is None:
                choice = self._begin(index, prompt_index)
                choice.events.append(Content(self._beginnings[prompt_index].echo))
            choice.events += self._events(choice, completion)
            choice.logprobs += self._logprobs(completion)
            choice.token_ids += completion.token_ids
            choice.stop_reason = completion.stop_reason

    def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        choices = [self._whole_choice(index, self._choices[index]) for index in sorted(self._choices)]
        not_asked = {"prompt_logprobs": None, "prompt_token_ids": None}
        return self._head.whole("chat.completion", choices) | not_asked | self._prompt_shown

    def _index(self, prompt_index: int, completion: CompletionOutput) -> int:
        return prompt_index * (self._request.n or 1) + completion.index

    def _begin(self, index: int, prompt_index: int) -> _ChatChoice:
        start = self._beginnings[prompt_index]
        content = TextEvent(lambda text: self._frame(_shown(index, delta_of(Content(text)))))
        choice = self._choices[index] = _ChatChoice(start.role, start.reader(), content)
        return choice

    def _events(self, choice: _ChatChoice, completion: CompletionOutput) -> list[Event]:
        """What a completion adds; sets the finish reason with the last."""
        events = choice.reader.feed(completion.text)
        if completion.finish_reason is not None:
            events += choice.reader.finish()
            choice.finish_reason = self._finish_reason(completion.finish_reason, choice.reader)
            self._head.usage.count_reasoning(choice.reader.reasoning_tokens)
        if self._request.include_reasoning is False:
            events = [event for event in events if not isinstance(event, Reasoning)]
        return merge_events(events) if len(events) > 1 else events

    def _finish_reason(self, reason: str, reader: OutputParser) -> str:
        """As OpenAI has it: "tool_calls" where the model chose to call, "stop" where it was told which tool."""
        return "tool_calls" if reason == "stop" and reader.calls and not self._named else reason

    def _whole_choice(self, index: int, choice: _ChatChoice) -> dict[str, Any]:
        return {
            "index": index,
            "message": message_of(choice.role, choice.events),
            "logprobs": {"content": choice.logprobs, "refusal": None} if self._request.logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids if self._request.return_token_ids else None,
        }

    def _about_prompt(self, output: RequestOutput) -> dict[str, Any]:
        """What was asked for about the prompt; in a batch, about the first."""
        shown: dict[str, Any] = {}
        if self._request.prompt_logprobs is not None:
            positions = output.prompt_logprobs
            shown["prompt_logprobs"] = None if positions is None else prompt_logprobs(positions)
        return shown | self._prompt_of(output)

    def _prompt_of(self, output: RequestOutput) -> dict[str, Any]:
        shown: dict[str, Any] = {}
        if self._request.return_token_ids:
            shown["prompt_token_ids"] = output.prompt_token_ids
        if self._request.return_prompt_text:
            shown["prompt_text"] = output.prompt
        return shown

    def _opening(self, index: int, choice: _ChatChoice, echo: str, output: RequestOutput) -> dict[str, Any]:
        delta = {"role": choice.role, "content": echo}
        chunk = self._frame(_shown(index, delta))
        return chunk | self._prompt_of(output)

    def _chunks(
        self, index: int, choice: _ChatChoice, completion: CompletionOutput
    ) -> Iterator[dict[str, Any] | bytes]:
        """One chunk per event: tokens go with the first of them, the end with the last. None where there is no news."""
        events = self._events(choice, completion)
        if self._says_content_only and completion.finish_reason is None and len(events) == 1:
            event = events[0]
            if isinstance(event, Content):
                yield choice.content(event.text)
                return
        deltas = [delta_of(event) for event in events]
        entries = self._logprobs(completion)
        ids = completion.token_ids if self._request.return_token_ids else []
        if not deltas and (entries or ids or completion.finish_reason):
            deltas = [{}]
        for number, delta in enumerate(deltas):
            ends = completion.finish_reason is not None and number == len(deltas) - 1
            shown = _shown(index, delta)
            if entries:
                shown["logprobs"] = {"content": entries, "refusal": None}
            if ends:
                shown["finish_reason"] = choice.finish_reason
                shown["stop_reason"] = completion.stop_reason
            if self._request.return_token_ids:
                shown["token_ids"] = ids
            yield self._frame(shown)
            entries, ids = [], []

    def _frame(self, choice: dict[str, Any]) -> dict[str, Any]:
        return self._head.frame("chat.completion.chunk", [choice]) | self._head.running_usage()

    def _logprobs(self, completion: CompletionOutput) -> list[dict[str, Any]]:
        if not self._request.logprobs or not completion.logprobs:
            return []
        shown = -1 if self._request.logprob_token_ids else self._request.top_logprobs or 0
        return chat_logprobs(completion.logprobs, shown, self._head.names)


def _shown(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    """What every chunk says of a choice."""
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


router = APIRouter(tags=["chat"])


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(request: Request) -> Response:
    """Answer a conversation, streamed or whole."""
    state = server_of(request)
    body = await read_body(request, ChatCompletionRequest, state.config)
    model = model_of(state, body)
    return await _answer(request, state, body, model, [body.conversation()])


@router.post("/v1/chat/completions/batch", response_model=None)
async def chat_completions_batch(request: Request) -> Response:
    """Answer several conversations."""
    state = server_of(request)
    body = await read_body(request, BatchChatCompletionRequest, state.config)
    model = model_of(state, body)
    return await _answer(request, state, body, model, list(body.conversations()))


async def _answer(
    request: Request, state: ServerState, body: ChatFields, model: str, conversations: Sequence[Conversation]
) -> Response:
    params = body.params(state.llm().info.sampling_defaults)
    try:
        turns = [await prepare(state, conversation, params) for conversation in conversations]
        note_ignored(request, turns[0].ignored, body.own_name)
        prompts = [turn.prompt | {"cache_salt": body.cache_salt} for turn in turns]
        request_id = answer_id(request, body, "chatcmpl")
        work = work_of(state, body, request_id, prompts, turns[0].params)
        beginnings = [
            beginning(body, conversation.messages, state.config.response_role, turn.reader)
            for conversation, turn in zip(conversations, turns)
        ]
        head = answer_head(state, body, request_id, model)
        answer = best_of(ChatAnswer(head, body, *beginnings), body, head)
        return await respond(request, state, work, answer, stream=bool(body.stream))
    except RequestError as error:
        raise body.in_own_names(error) from None
