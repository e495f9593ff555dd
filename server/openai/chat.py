"""POST /v1/chat/completions and its batch: request bodies, response builder, routes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import SamplingParams
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.chat_prompt import (
    EFFORTS,
    FUNCTION_KEYS,
    TOOL_KEYS,
    ChatPrompt,
    Conversation,
    NamedTool,
    ToolChoice,
    is_function,
    prepare,
)
from pagoda.server.http.body import (
    MAX_LIST_OBJECTS,
    Ignored,
    Int64,
    RequestBody,
    hint,
    note_ignored,
    read_body,
    unsupported,
)
from pagoda.server.http.fields import (
    SamplingFields,
    chat_logprobs,
    check_stream_options,
    check_template_kwargs,
    prompt_logprobs,
)
from pagoda.server.http.response import respond
from pagoda.server.http.state import ServerState, model_of, request_id_of, server_of
from pagoda.server.openai.response import CompletionBuilder, TextEvent, best_of, output_source
from pagoda.server.outputs import CompletionOutput, RequestOutput
from pagoda.server.parsers.output_parser import OutputParser
from pagoda.server.parsers.parser import Arguments, Content, Event, Reasoning, ToolCall, merge_events

# Request bodies.


class NamedFunction(RequestBody):
    """The name of a tool."""

    name: str


class NamedToolChoice(RequestBody):
    """The one tool that must be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


class ChatFields(SamplingFields):
    """Fields of requests with one conversation and with several."""

    searches_beams: ClassVar[bool] = True

    logprobs: bool | None = False
    top_logprobs: Int64 | None = 0
    max_tokens: Int64 | None = None
    max_completion_tokens: Int64 | None = None
    echo: bool | None = False
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    add_special_tokens: bool | None = False
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = Field(True, description="Whether to return the reasoning.")
    tools: list[dict[str, Any]] | None = Field(None, description="Functions that the model may call.")
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = Field(
        "none", description="Default: auto if there are tools."
    )
    parallel_tool_calls: bool | None = Field(True, description="False: at most one tool call.")
    reasoning_effort: Literal[EFFORTS] | None = Field(  # type: ignore[valid-type]
        None, description="Passed to the chat template; none disables thinking."
    )
    return_prompt_text: bool | None = Field(None, description="Return the prompt as prompt_text.")

    media_io_kwargs: Any = hint(why="this version serves text only")
    mm_processor_kwargs: Any = hint(why="this version serves text only")

    def ignored(self, path: str = "") -> Iterator[Ignored]:
        """Yield the ignored parts, unsupported tools and unknown fields of tools among them."""
        yield from super().ignored(path)
        if self.tools:
            yield from ignored_of_tools(self.tools)

    def check_fields(self) -> None:
        """Raise RequestError for an invalid combination of fields."""
        check_stream_options(self.stream, self.stream_options)
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs", "top_logprobs needs logprobs true")
        if (
            self.continue_final_message
            and "add_generation_prompt" in self.model_fields_set
            and self.add_generation_prompt
        ):
            raise RequestError(
                "continue_final_message", "continue_final_message excludes add_generation_prompt; set only one of them"
            )
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise RequestError("max_tokens", "max_tokens and max_completion_tokens differ; set only one of them")
        check_template_kwargs(self.chat_template_kwargs)

    @property
    def starts_message(self) -> bool:
        """Whether the response is a new message, not the continuation of the last one."""
        return not self.continue_final_message and self.add_generation_prompt is not False

    @property
    def resolved_tool_choice(self) -> ToolChoice:
        """`tool_choice`, whose default depends on the tools."""
        if self.tool_choice is None or "tool_choice" not in self.model_fields_set:
            return "auto" if offered_tools(self.tools or ()) else "none"
        if isinstance(self.tool_choice, NamedToolChoice):
            return NamedTool(self.tool_choice.function.name)
        return self.tool_choice

    def conversation_of(self, messages: Sequence[Mapping[str, Any]]) -> Conversation:
        return Conversation(
            messages=messages,
            tools=offered_tools(self.tools or ()),
            tool_choice=self.resolved_tool_choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            reasoning_effort=self.reasoning_effort,
            add_generation_prompt=self.starts_message,
            continue_final_message=bool(self.continue_final_message),
            add_special_tokens=bool(self.add_special_tokens),
            documents=self.documents,
            template=self.chat_template,
            keywords=self.chat_template_kwargs or {},
            cache_salt=self.cache_salt,
        )

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return the SamplingParams. `defaults`: the model's generation config. Raise RequestError."""
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        try:
            return self.sampling_params(defaults, logprobs=logprobs, max_tokens=limit)
        except RequestError as error:
            raise self.in_own_names(error) from None

    def own_name(self, field: str) -> str:
        """Return the name of a SamplingParams field in this API."""
        if field == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        if field == "structured_outputs" and not self.gives_structure:
            return "tools"
        return {"logprobs": "top_logprobs", "prompt": "messages"}.get(field, super().own_name(field))


class ChatCompletionRequest(ChatFields):
    """A conversation to continue."""

    messages: list[dict[str, Any]] = Field(min_length=1)

    metadata: dict[str, str] | None = Field(None, description="Does not affect the output.")
    safety_identifier: str | None = Field(None, description="As user.")
    prompt_cache_key: str | None = Field(None, description="Not needed: shared prompt prefixes are cached anyway.")

    audio: Any = unsupported(why="the output is text")
    function_call: Any = unsupported(why="superseded by tool_choice")
    functions: Any = unsupported(why="superseded by tools")
    modalities: Any = unsupported(harmless=(["text"],), why="the output is text")
    moderation: Any = unsupported()

    prediction: Any = hint(why="predicted outputs are not used")
    prompt_cache_options: Any = hint(why="prefix caching has no per-request options")
    prompt_cache_retention: Any = hint(
        harmless=("in_memory", "in-memory"), why="prefixes are cached in memory until evicted"
    )
    service_tier: Any = hint(harmless=("auto", "default"), why="there is one tier")
    store: Any = hint(why="chat completions are not stored; the Responses API stores its responses")
    verbosity: Any = hint(harmless=("medium",), why="no model served here supports it")
    web_search_options: Any = hint(why="there is no web search")

    def check(self) -> None:
        """Raise RequestError for an invalid combination of fields or an invalid message."""
        self.check_fields()
        check_messages("messages", self.messages)

    def conversation(self) -> Conversation:
        return self.conversation_of(self.messages)


MAX_CONVERSATIONS: Final = 1_024


class BatchChatCompletionRequest(ChatFields):
    """Several conversations with the same settings. Choices are numbered consecutively, n per conversation."""

    messages: list[Annotated[list[dict[str, Any]], Field(min_length=1)]] = Field(
        min_length=1, max_length=MAX_CONVERSATIONS
    )
    return_token_ids: bool | None = False
    stream: Any = unsupported(False, why="batches are not streamed")
    stream_options: Any = unsupported(why="batches are not streamed")
    stream_interval: Any = unsupported(why="batches are not streamed")
    return_token_offsets: Any = unsupported(False, why="it is for the render endpoints only")

    def check(self) -> None:
        """Raise RequestError for an invalid combination of fields or an invalid message."""
        self.check_fields()
        for index, messages in enumerate(self.messages):
            check_messages(f"messages[{index}]", messages)

    def conversations(self) -> Iterator[Conversation]:
        return map(self.conversation_of, self.messages)


def ignored_of_tools(tools: Sequence[Mapping[str, Any]]) -> Iterator[Ignored]:
    """Yield the tools that are not functions, and the unknown fields of functions."""
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if not is_function(tool):
            kind = str(tool["type"])
            yield Ignored(where, "tool", f'{where}.type must be "function", not {kind[:60]!r}', kind)
            continue
        function = tool.get("function")
        yield from _unknown_keys(where, tool, TOOL_KEYS)
        if isinstance(function, Mapping):
            yield from _unknown_keys(f"{where}.function", function, FUNCTION_KEYS)


def _unknown_keys(where: str, value: Mapping[str, Any], known: Collection[str]) -> Iterator[Ignored]:
    for key in value:
        if key not in known:
            yield Ignored(f"{where}.{key[:80]}", "unknown", f"{where} has no field {key[:80]!r}")


def offered_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the function tools with their known fields."""
    return [_known_fields(tool) for tool in tools if is_function(tool)]


def _known_fields(tool: Mapping[str, Any]) -> dict[str, Any]:
    known = {key: value for key, value in tool.items() if key in TOOL_KEYS}
    function = tool.get("function")
    if isinstance(function, Mapping):
        known["function"] = {key: value for key, value in function.items() if key in FUNCTION_KEYS}
    return known


def check_messages(where: str, messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise RequestError naming the first invalid message."""
    for index, message in enumerate(messages):
        _check_message(f"{where}[{index}]", message)


def _check_message(where: str, message: Mapping[str, Any]) -> None:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role", f"{where}.role must be a string such as 'user'")
    if content is None:
        if role != "assistant":  # an assistant's message may consist of tool calls or reasoning
            raise RequestError(f"{where}.content", f"{where}.content is missing")
    elif not isinstance(content, str | list):
        raise RequestError(f"{where}.content", f"{where}.content must be a string or a list of parts")
    elif isinstance(content, list) and len(content) > MAX_LIST_OBJECTS:
        raise RequestError(
            f"{where}.content", f"{where}.content has {len(content)} parts; at most {MAX_LIST_OBJECTS} are allowed"
        )


# Messages of a response, whole or as stream deltas.


def message_of(role: str, events: Iterable[Event]) -> dict[str, Any]:
    """Return the message. Its content is null if it consists of calls or reasoning only."""
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
    """Return a stream delta. A call's name precedes its arguments."""
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
    """Return reasoning under its current and its former field name; clients know either."""
    return {"reasoning": text, "reasoning_content": text}


# Response builder.


@dataclass(slots=True)
class _ChatChoice:
    """One choice: its parser and, for a whole response, what was parsed so far."""

    role: str
    echo: str  # content of the request's last message that the output continues
    reader: OutputParser
    text_event: TextEvent | None = None  # of a stream
    events: list[Event] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChatCompletionBuilder(CompletionBuilder):
    """Builds one chat completion. `prompts`: one unless a batch."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        request: ChatFields,
        response_id: str,
        model: str,
        config: ServerConfig,
        tokenizer: Tokenizer | None,
        prompts: Sequence[ChatPrompt],
    ) -> None:
        super().__init__(request, response_id, model, config, tokenizer)
        self._request = request
        self._new_role = config.response_role
        self._prompts = prompts
        self._is_named_call = isinstance(request.tool_choice, NamedToolChoice)
        self._choices: dict[int, _ChatChoice] = {}
        self._prompt_fields: dict[str, Any] = {}
        needs_frames = request.logprobs or request.return_token_ids or self._reports_running_usage
        self._content_only = not needs_frames  # chunks but a choice's last consist of content only

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[dict[str, Any] | bytes]:
        self.usage.count(prompt_index, output)
        for completion in output.outputs:
            index = self._index(prompt_index, completion)
            choice = self._choices.get(index)
            if choice is None:
                choice = self._begin(index, prompt_index)
                choice.text_event = self._text_event(index)
                delta = {"role": choice.role, "content": choice.echo}
                yield self._chunk(_chunk_choice(index, delta)) | self._prompt_of(output)
            if self._content_only and choice.reader.is_plain and completion.finish_reason is None and choice.text_event:
                if completion.text:
                    yield choice.text_event(completion.text)
            else:
                yield from self._chunks(index, choice, completion)

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        self.usage.count(prompt_index, output)
        if not prompt_index:
            self._prompt_fields = self._about_prompt(output)
        for completion in output.outputs:
            index = self._index(prompt_index, completion)
            choice = self._choices.get(index)
            if choice is None:
                choice = self._begin(index, prompt_index)
                choice.events.append(Content(choice.echo))
            choice.events += self._events(choice, completion)
            choice.logprobs += self._logprobs(completion)
            choice.token_ids += completion.token_ids
            choice.stop_reason = completion.stop_reason

    def whole(self) -> dict[str, Any]:
        choices = [self._whole_choice(index, self._choices[index]) for index in sorted(self._choices)]
        return self._whole(choices) | {"prompt_logprobs": None, "prompt_token_ids": None} | self._prompt_fields

    def _text_event(self, index: int) -> TextEvent:
        return TextEvent(lambda text: self._chunk(_chunk_choice(index, delta_of(Content(text)))))

    def _begin(self, index: int, prompt_index: int) -> _ChatChoice:
        prompt = self._prompts[prompt_index]
        last = prompt.last_message
        role = self._new_role if self._request.starts_message else str(last["role"])
        content = last.get("content")
        echo = content if self._request.echo and last["role"] == role and isinstance(content, str) else ""
        choice = self._choices[index] = _ChatChoice(role, echo, prompt.reader())
        return choice

    def _events(self, choice: _ChatChoice, completion: CompletionOutput) -> list[Event]:
        """Parse the new text of a completion; with the last, set the finish reason."""
        events = choice.reader.feed(completion.text)
        if completion.finish_reason is not None:
            events += choice.reader.finish()
            choice.finish_reason = self._finish_reason(completion.finish_reason, choice.reader)
            self.usage.count_reasoning(choice.reader.reasoning_tokens)
        if self._request.include_reasoning is False:
            events = [event for event in events if not isinstance(event, Reasoning)]
        return merge_events(events) if len(events) > 1 else events

    def _finish_reason(self, reason: str, reader: OutputParser) -> str:
        """Return "tool_calls" if the model chose to call; as at OpenAI, a named tool's call ends with "stop"."""
        return "tool_calls" if reason == "stop" and reader.calls and not self._is_named_call else reason

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
        """Return the requested fields about the prompt; of a batch, about the first."""
        fields: dict[str, Any] = {}
        if self._request.prompt_logprobs is not None:
            positions = output.prompt_logprobs
            fields["prompt_logprobs"] = None if positions is None else prompt_logprobs(positions)
        return fields | self._prompt_of(output)

    def _prompt_of(self, output: RequestOutput) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self._request.return_token_ids:
            fields["prompt_token_ids"] = output.prompt_token_ids
        if self._request.return_prompt_text:
            fields["prompt_text"] = output.prompt
        return fields

    def _chunks(
        self, index: int, choice: _ChatChoice, completion: CompletionOutput
    ) -> Iterator[dict[str, Any] | bytes]:
        """Yield one chunk per event: the first has the tokens, the last the finish reason."""
        events = self._events(choice, completion)
        if self._content_only and completion.finish_reason is None and len(events) == 1:
            event = events[0]
            if isinstance(event, Content) and choice.text_event is not None:
                yield choice.text_event(event.text)
                return
        deltas = [delta_of(event) for event in events]
        entries = self._logprobs(completion)
        ids = completion.token_ids if self._request.return_token_ids else []
        if not deltas and (entries or ids or completion.finish_reason):
            deltas = [{}]
        for number, delta in enumerate(deltas):
            chunk = _chunk_choice(index, delta)
            if entries:
                chunk["logprobs"] = {"content": entries, "refusal": None}
            if completion.finish_reason is not None and number == len(deltas) - 1:
                chunk["finish_reason"] = choice.finish_reason
                chunk["stop_reason"] = completion.stop_reason
            if self._request.return_token_ids:
                chunk["token_ids"] = ids
            yield self._chunk(chunk)
            entries, ids = [], []

    def _logprobs(self, completion: CompletionOutput) -> list[dict[str, Any]]:
        if not self._request.logprobs or not completion.logprobs:
            return []
        count = -1 if self._request.logprob_token_ids else self._request.top_logprobs or 0
        return chat_logprobs(completion.logprobs, count, self._names)


def _chunk_choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


router = APIRouter(tags=["chat"])


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(request: Request) -> Response:
    """Continue a conversation, streamed or whole."""
    state = server_of(request)
    body = await read_body(request, ChatCompletionRequest, state.config)
    model = model_of(state, body)
    return await _answer(request, state, body, model, [body.conversation()])


@router.post("/v1/chat/completions/batch", response_model=None)
async def chat_completions_batch(request: Request) -> Response:
    """Continue several conversations."""
    state = server_of(request)
    body = await read_body(request, BatchChatCompletionRequest, state.config)
    model = model_of(state, body)
    return await _answer(request, state, body, model, list(body.conversations()))


async def _answer(
    request: Request, state: ServerState, body: ChatFields, model: str, conversations: Sequence[Conversation]
) -> Response:
    params = body.params(state.llm().info.sampling_defaults)
    try:
        prompts = [await prepare(state, conversation, params) for conversation in conversations]
        note_ignored(request, prompts[0].ignored, body.own_name)
        request_id = request_id_of(request, body, "chatcmpl")
        source = output_source(state, body, request_id, prompts, prompts[0].params)
        builder = ChatCompletionBuilder(body, request_id, model, state.config, state.tokenizer(), prompts)
        return await respond(request, state, source, best_of(builder, body), stream=bool(body.stream))
    except RequestError as error:
        raise body.in_own_names(error) from None
