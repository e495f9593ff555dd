"""POST /v1/chat/completions and its batch: request bodies, response builder, routes."""

from __future__ import annotations

import asyncio
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
from pagoda.server.api.chat_prompt import (
    EFFORTS,
    FUNCTION_KEYS,
    TOOL_KEYS,
    ChatPrompt,
    Conversation,
    NamedTool,
    ToolChoice,
    in_conversation,
    is_function,
    prepare,
)
from pagoda.server.api.openai.chat_variants import (
    AllowedToolsChoice,
    GivenToolChoice,
    NamedFunction,
    NamedToolChoice,
    RoutedReasoning,
    ThinkingOptions,
    delta_with_function_call,
    effort_of_switch,
    message_with_function_call,
    own_name_of_functions,
    with_tool_calls,
)
from pagoda.server.http.body import MAX_LIST_OBJECTS, Ignored, Int64, hint, note_ignored, unsupported
from pagoda.server.http.fields import SamplingFields, chat_logprobs, check_template_kwargs, prompt_logprobs
from pagoda.server.http.generation import output_source
from pagoda.server.http.response import CompletionBuilder, TextEvent, best_of, respond
from pagoda.server.http.state import ServerState, read_for_model, request_id_of
from pagoda.server.outputs import CompletionOutput, RequestOutput
from pagoda.server.parsers.parser import Arguments, Content, Event, OutputReader, Reasoning, ToolCall, merge_events

# Request bodies.


class ChatFields(SamplingFields):
    """Fields of requests with one conversation and with several."""

    searches_beams: ClassVar[bool] = True

    logprobs: bool | None = Field(False, description="Report log-probabilities of the output's tokens.")
    top_logprobs: Int64 | None = Field(0, description="Number of best tokens to report beside each; needs logprobs.")
    max_tokens: Int64 | None = Field(None, description="Former name of max_completion_tokens; -1: unlimited.")
    max_completion_tokens: Int64 | None = Field(
        None,
        description="Maximum length of an output, reasoning included; null: the model's default, else the context.",
    )
    echo: bool | None = Field(False, description="Put the last message before the output if its role is the same.")
    add_generation_prompt: bool | None = Field(True, description="The chat template begins the assistant's message.")
    continue_final_message: bool | None = Field(
        False, description="Continue the last message instead of replying to it; excludes add_generation_prompt."
    )
    add_special_tokens: bool | None = Field(
        False, description="Add the tokenizer's special tokens to those of the chat template."
    )
    documents: list[dict[str, Any]] | None = Field(None, description="Passed to the chat template.")
    chat_template: str | None = Field(
        None, description="Jinja template in place of the model's; needs --trust-request-chat-template."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the chat template.")
    include_reasoning: bool | None = Field(True, description="Whether to return the reasoning.")
    tools: list[dict[str, Any]] | None = Field(None, description="Functions that the model may call.")
    tool_choice: GivenToolChoice | None = Field("none", description="Default: auto if there are tools.")
    parallel_tool_calls: bool | None = Field(True, description="False: at most one tool call.")
    reasoning_effort: Literal[EFFORTS] | None = Field(  # type: ignore[valid-type]
        None, description="Passed to the chat template; none disables thinking."
    )
    reasoning: RoutedReasoning | None = Field(None, description="OpenRouter's options of reasoning.")
    thinking: ThinkingOptions | None = Field(None, description="Enables or disables thinking, as reasoning_effort.")
    enable_thinking: bool | None = Field(None, description="Enables or disables thinking, as reasoning_effort.")
    think: bool | Literal[EFFORTS] | None = Field(  # type: ignore[valid-type]
        None, description="Enables or disables thinking, or its effort, as reasoning_effort."
    )
    thinking_budget: Int64 | None = Field(
        None, description="As thinking_token_budget, but a hint for servers without a reasoning parser."
    )
    functions: list[dict[str, Any]] | None = Field(
        None, description="OpenAI's former tools; calls are returned as function_call."
    )
    function_call: Literal["none", "auto"] | NamedFunction | None = Field(
        None, description="OpenAI's former tool_choice."
    )
    return_prompt_text: bool | None = Field(None, description="Return the prompt as prompt_text.")

    media_io_kwargs: Any = hint(why="this version serves text only")
    mm_processor_kwargs: Any = hint(why="this version serves text only")

    def ignored(self, path: str = "") -> Iterator[Ignored]:
        """Yield the ignored parts, unsupported tools and unknown fields of tools among them."""
        yield from super().ignored(path)
        if self.tools:
            yield from ignored_of_tools(self.tools)
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            yield Ignored("max_tokens", "hint", "max_tokens differs from max_completion_tokens; set only one of them")

    def check_fields(self) -> None:
        """Raise RequestError for an invalid combination of fields."""
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
        if self.functions and self.tools:
            raise RequestError("functions", "functions and tools are the same; set only one of them")
        check_template_kwargs(self.chat_template_kwargs)

    @property
    def starts_message(self) -> bool:
        """Whether the response is a new message, not the continuation of the last one."""
        return not self.continue_final_message and self.add_generation_prompt is not False

    @property
    def resolved_tool_choice(self) -> ToolChoice:
        """`tool_choice`, whose default depends on the tools."""
        if self.functions:
            call = self.function_call
            return NamedTool(call.name) if isinstance(call, NamedFunction) else call or "auto"
        if self.tool_choice is None or "tool_choice" not in self.model_fields_set:
            return "auto" if offered_tools(self.tools or ()) else "none"
        if isinstance(self.tool_choice, NamedToolChoice):
            return NamedTool(self.tool_choice.function.name)
        if isinstance(self.tool_choice, AllowedToolsChoice):
            return self.tool_choice.allowed_tools.mode
        return self.tool_choice

    @property
    def resolved_tools(self) -> list[dict[str, Any]]:
        """The functions that may be called, as tools. Raise RequestError for an unknown allowed tool."""
        if self.functions:
            return [{"type": "function", "function": function} for function in self.functions]
        tools = offered_tools(self.tools or ())
        if isinstance(self.tool_choice, AllowedToolsChoice):
            return self.tool_choice.allowed_tools.of(tools)
        return tools

    @property
    def names_tool(self) -> bool:
        """Whether one tool must be called."""
        return isinstance(self.resolved_tool_choice, NamedTool)

    @property
    def resolved_effort(self) -> str | None:
        """The reasoning effort, however the client gives it."""
        return next((effort for _, effort in self._efforts() if effort is not None), None)

    def _efforts(self) -> Iterator[tuple[str, str | None]]:
        """Yield the fields that may set the reasoning effort, in order of precedence, with their efforts."""
        yield "reasoning_effort", self.reasoning_effort
        if self.reasoning is not None:
            yield "reasoning.effort", self.reasoning.effort
            yield "reasoning.enabled", effort_of_switch(self.reasoning.enabled)
        if self.thinking is not None:
            yield "thinking.type", effort_of_switch(self.thinking.type != "disabled")
        if self.think is not None:
            yield "think", effort_of_switch(self.think)
        if self.enable_thinking is not None:
            yield "enable_thinking", effort_of_switch(self.enable_thinking)

    def _budgets(self) -> Iterator[tuple[str, int | None]]:
        """Yield the fields that may set a reasoning budget that is a hint, with their tokens."""
        yield "reasoning.max_tokens", None if self.reasoning is None else self.reasoning.max_tokens
        yield "thinking.budget_tokens", None if self.thinking is None else self.thinking.budget_tokens
        yield "thinking_budget", self.thinking_budget

    @property
    def shows_reasoning(self) -> bool:
        """Whether the response contains the reasoning."""
        return self.include_reasoning is not False and not (self.reasoning is not None and self.reasoning.exclude)

    def conversation_of(self, messages: Sequence[Mapping[str, Any]]) -> Conversation:
        return Conversation(
            messages=with_tool_calls(messages) if any(map(_is_former, messages)) else messages,
            tools=self.resolved_tools,
            tool_choice=self.resolved_tool_choice,
            parallel_tool_calls=self.parallel_tool_calls is not False and not self.functions,
            reasoning_effort=self.resolved_effort,
            reasoning_budget=next((tokens for _, tokens in self._budgets() if tokens is not None), None),
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
        limit = self.token_limit
        limit = None if limit == -1 else limit  # The number of tokens is unlimited.
        try:
            return self.sampling_params(defaults, logprobs=logprobs, max_tokens=limit)
        except RequestError as error:
            raise self.in_own_names(error) from None

    def own_value(self, name: str) -> tuple[str, Any]:
        """Return the name under which this API has a field of OTHER_NAMES, and its value if it is given."""
        if name == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().own_value(name)

    def own_name(self, field: str) -> str:
        """Return the name of a SamplingParams field in this API."""
        if field == "structured_outputs" and not self.gives_structure:
            return "tools"
        if field == "reasoning_effort":
            return next((name for name, effort in self._efforts() if effort is not None), field)
        if field == "reasoning_budget":
            return next((name for name, tokens in self._budgets() if tokens is not None), field)
        if self.functions:
            field = own_name_of_functions(field)
        return {"logprobs": "top_logprobs", "prompt": "messages"}.get(field, super().own_name(field))


class ChatCompletionRequest(ChatFields):
    """A conversation to continue."""

    messages: list[dict[str, Any]] = Field(min_length=1, description="The conversation, the latest message last.")

    metadata: dict[str, Any] | None = Field(None, description="Does not affect the output.")
    safety_identifier: str | None = Field(None, description="As user.")

    audio: Any = unsupported(why="the output is text")
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


def _is_former(message: Mapping[str, Any]) -> bool:
    """Return whether a message has a call or a result of OpenAI's former functions."""
    return bool(message.get("function_call")) or message.get("role") == "function"


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


def _unknown_keys(where: str, value: Mapping[str, Any], known_keys: Collection[str]) -> Iterator[Ignored]:
    for key in value:
        if key not in known_keys:
            yield Ignored(f"{where}.{key[:80]}", "unknown", f"{where} has no field {key[:80]!r}")


def offered_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the function tools with their known fields."""
    return [_known_fields(tool) for tool in tools if is_function(tool)]


def _known_fields(tool: Mapping[str, Any]) -> dict[str, Any]:
    known_items = {key: value for key, value in tool.items() if key in TOOL_KEYS}
    function = tool.get("function")
    if isinstance(function, Mapping):
        known_items["function"] = {key: value for key, value in function.items() if key in FUNCTION_KEYS}
    return known_items


_MAY_BE_ABSENT: Final = ("assistant", "tool", "function")
"""Roles whose content may be absent: an assistant's message may consist of calls, a tool may return nothing. That of
others may be null, as in vLLM.
"""


def check_messages(where: str, messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise RequestError naming the first invalid message."""
    for index, message in enumerate(messages):
        _check_message(f"{where}[{index}]", message)


def _check_message(where: str, message: Mapping[str, Any]) -> None:
    role = message.get("role")
    content = message.get("content")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role", f"{where}.role must be a string such as 'user'")
    if content is None:
        if role not in _MAY_BE_ABSENT and "content" not in message:
            raise RequestError(f"{where}.content", f"{where}.content is missing")
    elif not isinstance(content, str | list):
        raise RequestError(f"{where}.content", f"{where}.content must be a string or a list of parts")
    elif isinstance(content, list) and len(content) > MAX_LIST_OBJECTS:
        raise RequestError(
            f"{where}.content", f"{where}.content has {len(content)} parts; at most {MAX_LIST_OBJECTS} are allowed"
        )


# Messages of a response, whole or as stream deltas.

_UNUSED: Final = {"refusal": None, "annotations": None, "audio": None, "function_call": None}
"""Keys that OpenAI's and vLLM's messages have and a message here leaves empty."""


def message_of(role: str, events: Iterable[Event]) -> dict[str, Any]:
    """Return the message. Its content is null if it consists of calls or reasoning only."""
    content = ""
    reasoning = ""
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
    message: dict[str, Any] = {"role": role, "content": content, **_UNUSED, "reasoning": None}
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
    echo: str  # Content of the request's last message that the output continues.
    reader: OutputReader
    text_event: TextEvent | None = None  # The text event of a stream.
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
        self._is_named_call = request.names_tool
        self._in_functions = bool(request.functions)
        self._choices: dict[int, _ChatChoice] = {}
        self._prompt_fields: dict[str, Any] = {}
        needs_frames = request.logprobs or request.return_token_ids or self._reports_running_usage
        self._content_only = not needs_frames  # Chunks but a choice's last consist of content only.

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[dict[str, Any] | bytes]:
        self.usage.count(prompt_index, output)
        for completion in output.outputs:
            index = self._index(prompt_index, completion)
            choice = self._choices.get(index)
            if choice is None:
                choice = self._begin(index, prompt_index)
                choice.text_event = self._text_event(index)
                delta = {"role": choice.role, "content": choice.echo}
                unset = {"prompt_token_ids": None, "prompt_text": None}
                chunk = self._chunk(_chunk_choice(index, delta)) | unset | self._prompt_of(output)
                yield chunk if chunk.get("usage") is None else chunk | {"usage": self.usage.of_prompt()}
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
        unset = {"prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None}
        return self._whole(choices) | unset | self._prompt_fields

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
        events = choice.reader.feed(completion.text, completion.token_ids)
        if completion.finish_reason is not None:
            events += choice.reader.finish()
            choice.finish_reason = self._finish_reason(completion.finish_reason, choice.reader)
            self.usage.count_reasoning(choice.reader.reasoning_tokens)
        if not self._request.shows_reasoning:
            events = [event for event in events if not isinstance(event, Reasoning)]
        return merge_events(events) if len(events) > 1 else events

    def _finish_reason(self, reason: str, reader: OutputReader) -> str:
        """Return "tool_calls" if the model chose to call; as at OpenAI, a named tool's call ends with "stop"."""
        if reason != "stop" or not reader.calls or self._is_named_call:
            return reason
        return "function_call" if self._in_functions else "tool_calls"

    def _whole_choice(self, index: int, choice: _ChatChoice) -> dict[str, Any]:
        return {
            "index": index,
            "message": self._message(choice),
            "logprobs": {"content": choice.logprobs, "refusal": None} if self._request.logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids if self._request.return_token_ids else None,
            "routed_experts": None,
        }

    def _message(self, choice: _ChatChoice) -> dict[str, Any]:
        message = message_of(choice.role, choice.events)
        return message_with_function_call(message) if self._in_functions else message

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
        if self._in_functions:
            deltas = [delta_with_function_call(delta) for delta in deltas]
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
            entries = []
            ids = []

    def _logprobs(self, completion: CompletionOutput) -> list[dict[str, Any]]:
        if not self._request.logprobs or not completion.logprobs:
            return []
        count = -1 if self._request.logprob_token_ids else self._request.top_logprobs or 0
        return chat_logprobs(completion.logprobs, count, self._names)


def _chunk_choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, "token_ids": None}


router = APIRouter(tags=["chat"])


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(request: Request) -> Response:
    """Continue a conversation, streamed or whole."""
    state, body, model = await read_for_model(request, ChatCompletionRequest)
    return await _answer(request, state, body, model, [body.conversation()])


@router.post("/v1/chat/completions/batch", response_model=None)
async def chat_completions_batch(request: Request) -> Response:
    """Continue several conversations."""
    state, body, model = await read_for_model(request, BatchChatCompletionRequest)
    return await _answer(request, state, body, model, list(body.conversations()))


async def _answer(
    request: Request, state: ServerState, body: ChatFields, model: str, conversations: Sequence[Conversation]
) -> Response:
    params = body.params(state.llm().info.sampling_defaults)
    try:
        prompts = []
        for index, conversation in enumerate(conversations):
            try:
                prompts.append(await prepare(state, conversation, params))
            except RequestError as error:
                raise in_conversation(error, index) if isinstance(body, BatchChatCompletionRequest) else error from None
            await asyncio.sleep(0)  # Other requests run between the conversations of a batch.
        for prompt in prompts:
            body.check_context(len(prompt.token_ids))
        note_ignored(request, prompts[0].ignored, body.own_name)
        request_id = request_id_of(request, body, "chatcmpl")
        source = output_source(state, body, request_id, prompts, prompts[0].params)
        builder = ChatCompletionBuilder(body, request_id, model, state.config, state.tokenizer(), prompts)
        return await respond(request, state, source, best_of(builder, body), stream=bool(body.stream))
    except RequestError as error:
        raise body.in_own_names(error) from None
