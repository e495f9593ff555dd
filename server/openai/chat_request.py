"""The body of POST /v1/chat/completions, and what the body for several conversations has in common with it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import SamplingParams
from pagoda.common.text.chat_template import template_kwargs_error
from pagoda.server.chat.conversation import (
    EFFORTS,
    FUNCTION_KEYS,
    TOOL_KEYS,
    Conversation,
    NamedTool,
    ToolChoice,
    is_function,
)
from pagoda.server.http.fields.base import MAX_OBJECTS, Ignored, Int64, RequestBody, hint, unsupported
from pagoda.server.http.fields.sampling import SamplingFields
from pagoda.server.http.fields.usage import check_stream_options


class NamedFunction(RequestBody):
    """The name of a tool."""

    name: str


class NamedToolChoice(RequestBody):
    """The one tool that must be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


class ChatFields(SamplingFields):
    """What requests for one conversation and for several have in common."""

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
    include_reasoning: bool | None = Field(True, description="Whether answers show the thinking.")
    tools: list[dict[str, Any]] | None = Field(None, description="Functions that the model may call.")
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = Field(
        "none", description="Left out, it is auto where there are tools."
    )
    parallel_tool_calls: bool | None = Field(True, description="False: an answer has one call at most.")
    reasoning_effort: Literal[EFFORTS] | None = Field(  # type: ignore[valid-type]
        None, description="A variable of the chat template; none switches thinking off."
    )
    return_prompt_text: bool | None = Field(None, description="Show the prompt as prompt_text.")

    media_io_kwargs: Any = hint(why="this version serves text only")
    mm_processor_kwargs: Any = hint(why="this version serves text only")

    def ignored(self, path: str = "") -> Iterator[Ignored]:
        """Yield the parts that have no effect, tools and fields of tools among them."""
        yield from super().ignored(path)
        yield from ignored_of_tools(self.tools or ())

    def check_fields(self) -> None:
        """What no single field shows. Raises RequestError."""
        check_stream_options(self.stream, self.stream_options)
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs", "top_logprobs needs logprobs true")
        if (
            self.continue_final_message
            and "add_generation_prompt" in self.model_fields_set
            and self.add_generation_prompt
        ):
            raise RequestError("continue_final_message", "it excludes add_generation_prompt; set only one of them")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise RequestError("max_tokens", "max_tokens and max_completion_tokens differ; set only one of them")
        fault = template_kwargs_error(self.chat_template_kwargs or {})
        if fault:
            raise RequestError("chat_template_kwargs", f"chat_template_kwargs {fault}")

    @property
    def opens_answer(self) -> bool:
        """Whether the template ends with the beginning of an answer."""
        return not self.continue_final_message and self.add_generation_prompt is not False

    @property
    def choice_of_tools(self) -> ToolChoice:
        """What tool_choice asks for; its default depends on the tools."""
        if self.tool_choice is None or "tool_choice" not in self.model_fields_set:
            return "auto" if offered_tools(self.tools or ()) else "none"
        if isinstance(self.tool_choice, NamedToolChoice):
            return NamedTool(self.tool_choice.function.name)
        return self.tool_choice

    def conversation_of(self, messages: Sequence[Mapping[str, Any]]) -> Conversation:
        """What is to be answered where these are the messages."""
        return Conversation(
            messages=messages,
            tools=offered_tools(self.tools or ()),
            tool_choice=self.choice_of_tools,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            reasoning_effort=self.reasoning_effort,
            add_generation_prompt=self.opens_answer,
            continue_final_message=bool(self.continue_final_message),
            add_special_tokens=bool(self.add_special_tokens),
            documents=self.documents,
            template=self.chat_template,
            keywords=self.chat_template_kwargs or {},
        )

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """SamplingParams. `defaults`: the model's own. Raises RequestError."""
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        most = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        try:
            return self.sampling_params(defaults, logprobs=logprobs, max_tokens=most)
        except RequestError as error:
            raise self.in_own_names(error) from None

    def own_name(self, field: str) -> str:
        """The name of a SamplingParams field in this request."""
        if field == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        if field == "structured_outputs" and not self.gives_structure:
            return "tools"
        return {"logprobs": "top_logprobs", "prompt": "messages"}.get(field, super().own_name(field))


class ChatCompletionRequest(ChatFields):
    """A conversation to continue."""

    messages: list[dict[str, Any]] = Field(min_length=1)

    metadata: dict[str, str] | None = Field(None, description="About the request; changes no answer.")
    safety_identifier: str | None = Field(None, description="As user.")
    prompt_cache_key: str | None = Field(None, description="Equal beginnings of prompts share their cache untold.")

    audio: Any = unsupported(why="answers are text")
    function_call: Any = unsupported(why="it was superseded; use tool_choice")
    functions: Any = unsupported(why="they were superseded; use tools")
    modalities: Any = unsupported(harmless=(["text"],), why="answers are text")
    moderation: Any = unsupported()

    prediction: Any = hint(why="answers are not predicted")
    prompt_cache_options: Any = hint(why="prefixes are cached without options")
    prompt_cache_retention: Any = hint(
        harmless=("in_memory", "in-memory"), why="prefixes are kept in memory, for as long as there is room"
    )
    service_tier: Any = hint(harmless=("auto", "default"), why="there is one tier")
    store: Any = hint(why="chat completions are not kept; the Responses API keeps its answers")
    verbosity: Any = hint(harmless=("medium",), why="no model served here has levels of it")
    web_search_options: Any = hint(why="there is no web search")

    def check(self) -> None:
        """What no single field shows. Raises RequestError."""
        self.check_fields()
        check_messages("messages", self.messages)

    def conversation(self) -> Conversation:
        """What is to be answered."""
        return self.conversation_of(self.messages)


def ignored_of_tools(tools: Sequence[Mapping[str, Any]]) -> Iterator[Ignored]:
    """Yield the tools that are no functions, and the unknown fields of those that are."""
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
    """Return the tools that are functions, with the fields that a template may show."""
    return [_known_fields(tool) for tool in tools if is_function(tool)]


def _known_fields(tool: Mapping[str, Any]) -> dict[str, Any]:
    known = {key: value for key, value in tool.items() if key in TOOL_KEYS}
    function = tool.get("function")
    if isinstance(function, Mapping):
        known["function"] = {key: value for key, value in function.items() if key in FUNCTION_KEYS}
    return known


def check_messages(where: str, messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise RequestError naming the first message that is none."""
    for index, message in enumerate(messages):
        _check_message(f"{where}[{index}]", message)


def _check_message(where: str, message: Mapping[str, Any]) -> None:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role", f"{where}.role must be a string such as 'user'")
    if content is None:
        if role != "assistant":  # which may have called or thought only, or said nothing
            raise RequestError(f"{where}.content", f"{where}.content is missing")
    elif not isinstance(content, str | list):
        raise RequestError(f"{where}.content", f"{where}.content must be a string or a list of parts")
    elif isinstance(content, list) and len(content) > MAX_OBJECTS:
        raise RequestError(
            f"{where}.content", f"{where}.content has {len(content)} parts; at most {MAX_OBJECTS} are allowed"
        )


# The body of POST /v1/chat/completions/batch: several conversations, answered in one.

MAX_CONVERSATIONS: Final = 1_024


class BatchChatCompletionRequest(ChatFields):
    """Conversations to continue, each with the same settings. Choices are numbered over all of them, n for each."""

    messages: list[Annotated[list[dict[str, Any]], Field(min_length=1)]] = Field(
        min_length=1, max_length=MAX_CONVERSATIONS
    )
    return_token_ids: bool | None = False
    stream: Any = unsupported(False, why="the answers come together")
    stream_options: Any = unsupported(why="the answers come together")
    stream_interval: Any = unsupported(why="the answers come together")
    return_token_offsets: Any = unsupported(False, why="offsets are shown by the render endpoints only")

    def check(self) -> None:
        """What no single field shows. Raises RequestError."""
        self.check_fields()
        for index, messages in enumerate(self.messages):
            check_messages(f"messages[{index}]", messages)

    def conversations(self) -> Iterator[Conversation]:
        """What is to be answered, one after the other."""
        return map(self.conversation_of, self.messages)
