"""The bodies of POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from pagoda.server.chat_prompt import Conversation, NamedTool
from pagoda.server.chat_prompt import ToolChoice as Choice
from pagoda.server.http.body import Ignored, Int64, RequestBody, hint, unsupported
from pagoda.server.http.errors import HttpError
from pagoda.server.http.fields import (
    LIST,
    OTHER,
    TEXT,
    Null,
    OtherTool,
    Unsupported,
    by_type,
    check_template_kwargs,
    refused,
    text_or_list,
)


class CacheControl(RequestBody):
    """Cache hint. No effect: prompt prefixes are cached automatically."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(RequestBody):
    """A text block."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[Any, refused([])] = None


class ThinkingBlock(RequestBody):
    """Earlier thinking of the model. The signature is not verified."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(RequestBody):
    """Encrypted thinking of another server; not shown to the model."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(RequestBody):
    """A tool call of the model."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: Annotated[Any, refused({"type": "direct"})] = None
    toolset_name: Null = None


_Texts = Annotated[Annotated[TextBlock, Tag("<text>")] | Annotated[Unsupported, Tag(OTHER)], by_type("text")]
Texts = Annotated[Annotated[str, Tag(TEXT)] | Annotated[list[_Texts], Tag(LIST)], text_or_list()]


class ToolResultBlock(RequestBody):
    """The result of a tool call. The text of a failed call is prefixed with "Error: "."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: Null = None


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[Unsupported, Tag(OTHER)],
    by_type("text", "thinking", "redacted_thinking", "tool_use", "tool_result"),
]


class AnthropicMessage(RequestBody):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[Annotated[str, Tag(TEXT)] | Annotated[list[Block], Tag(LIST)], text_or_list()]


Messages = Annotated[list[AnthropicMessage], Field(min_length=1)]


def messages_of(system: str | list[Any] | None, messages: Sequence[AnthropicMessage]) -> list[dict[str, Any]]:
    """Convert messages to the format of chat completions. Raise RequestError."""
    converted: list[dict[str, Any]] = []
    if system is not None:
        converted.append({"role": "system", "content": text_of(system)})
    tool_names: dict[str, str] = {}  # by id of the tool_use block
    for number, message in enumerate(messages):
        where = f"messages[{number}].content"
        if isinstance(message.content, str):
            converted.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            converted.append(_assistant_message(where, message.content, tool_names))
        else:
            converted += _user_messages(where, message.role, message.content, tool_names)
    return converted


def continues(messages: Sequence[AnthropicMessage]) -> bool:
    """Return whether the output continues the last message: one of the assistant without tool calls."""
    last = messages[-1]
    calls = not isinstance(last.content, str) and any(isinstance(block, ToolUseBlock) for block in last.content)
    return last.role == "assistant" and not calls


def text_of(content: str | list[Any] | None) -> str:
    """Return the joined text of text blocks."""
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content or ())


def _assistant_message(where: str, blocks: Sequence[Any], tool_names: dict[str, str]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    texts: list[str] = []
    thinking: list[str] = []
    calls: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thinking.append(block.thinking)
            case ToolUseBlock():
                tool_names[block.id] = block.name
                function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                calls.append({"id": block.id, "type": "function", "function": function})
            case ToolResultBlock():
                raise RequestError(
                    f"{where}[{number}]", f"{where}[{number}]: tool_result is allowed in user messages only"
                )
    message["content"] = "\n".join(texts)
    if thinking:
        message["reasoning_content"] = "\n".join(thinking)
    if calls:
        message["tool_calls"] = calls
    return message


def _user_messages(where: str, role: str, blocks: Sequence[Any], tool_names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Convert a user message: a tool message for each tool_result, then the text."""
    messages: list[dict[str, Any]] = []
    texts: list[str] = []
    for number, block in enumerate(blocks):
        field = f"{where}[{number}]"
        match block:
            case TextBlock():
                texts.append(block.text)
            case ToolResultBlock():
                id = block.tool_use_id
                if id not in tool_names:
                    raise RequestError(field, f"{field}.tool_use_id {id[:80]!r} matches no earlier tool_use block")
                text = ("Error: " if block.is_error else "") + text_of(block.content)
                messages.append({"role": "tool", "tool_call_id": id, "name": tool_names[id], "content": text})
            case _:
                raise RequestError(field, f"{field}: {block.type} is allowed in assistant messages only")
    if texts or not messages:
        messages.append({"role": role, "content": "\n".join(texts)})
    return messages


class CustomTool(RequestBody):
    """A tool executed by the client."""

    name: str
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = Field(
        None, description="No effect: arguments are always streamed as they are generated."
    )
    input_examples: Any = hint(why="chat templates do not use them")
    defer_loading: Any = hint(why="all tools are always shown to the model")
    allowed_callers: Annotated[Any, refused(["direct"])] = None

    def as_chat(self) -> dict[str, Any]:
        """Return the tool in the format of chat completions."""
        function: dict[str, Any] = {"name": self.name, "parameters": self.input_schema}
        if self.description is not None:
            function["description"] = self.description
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}


Tool = Annotated[
    Annotated[CustomTool, Tag("<custom>")] | Annotated[OtherTool, Tag(OTHER)],
    by_type("custom", default="custom"),
]


class AnthropicToolChoice(RequestBody):
    """Tool choice."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class AnthropicOutputFormat(RequestBody):
    """Output format."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class AnthropicOutputConfig(RequestBody):
    """Output options."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: AnthropicOutputFormat | None = None


class AnthropicThinking(RequestBody):
    """Thinking options. Thinking is returned in full or omitted, never summarized."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Any = hint(harmless=("omitted",), why="thinking is returned in full or omitted")


class AnthropicMetadata(RequestBody):
    """Metadata of the request."""

    user_id: str | None = Field(None, description="End user, for the request log; does not affect the response.")


class AnthropicCountTokensRequest(RequestBody):
    """A conversation whose prompt tokens to count."""

    model: str
    messages: Messages
    system: Texts | None = None
    tools: list[Tool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: AnthropicThinking | None = None
    output_config: AnthropicOutputConfig | None = None
    cache_control: CacheControl | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    context_management: Any = hint(
        harmless=({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),  # agents send these
        why="conversations are never edited",
    )
    mcp_servers: Any = hint(why="the server calls no tools itself")
    speed: Any = hint(harmless=("standard",), why="there is only one speed")
    thread: Any = hint(why="the server keeps no conversations")
    user_profile_id: Any = hint(why="the server has no profiles")
    workspace_id: Any = hint(why="the server has no workspaces")

    def check(self) -> None:
        """Check combinations of fields. Raise RequestError, or HttpError for a thread to continue."""
        if isinstance(self.thread, dict) and self.thread.get("type") == "continue":
            # clients react to this code by sending the whole conversation
            message = "thread: this server keeps no conversations; send all messages"
            raise HttpError(404, message, "thread", code="thread_not_found")
        thinking = self.thinking
        if thinking is not None and (thinking.type == "enabled") != (thinking.budget_tokens is not None):
            raise RequestError(
                "thinking", 'thinking.budget_tokens is required for type "enabled" and not allowed for others'
            )
        if self.tool_choice is not None and (self.tool_choice.type == "tool") != (self.tool_choice.name is not None):
            raise RequestError("tool_choice", 'tool_choice.name is required for type "tool" and not allowed for others')
        check_template_kwargs(self.chat_template_kwargs)

    def conversation(self) -> Conversation:
        """Return the conversation in common form. Raise RequestError."""
        continues_last = continues(self.messages)
        choice, parallel = self._choice()
        return Conversation(
            messages=messages_of(self.system, self.messages),
            tools=[tool.as_chat() for tool in self.tools or () if isinstance(tool, CustomTool)],
            tool_choice=choice,
            parallel_tool_calls=parallel,
            reasoning_effort=self._effort(),
            add_generation_prompt=not continues_last,
            continue_final_message=continues_last,
            keywords=self._keywords(),
        )

    def own_name(self, field: str) -> str:
        """Return this request's name for a field of SamplingParams or chat completions."""
        disabled = self.thinking is not None and self.thinking.type == "disabled"
        names = {
            "extra_args": "vllm_xargs",
            "prompt": "messages",
            "stop": "stop_sequences",
            "structured_outputs": "tools" if self.output_config is None else "output_config",
            "thinking_token_budget": "thinking",
            "reasoning_effort": "thinking" if disabled else "output_config.effort",
        }
        if field.startswith("tools["):
            return field.replace(".function", "").replace(".parameters", ".input_schema")
        return names.get(field, field)

    def _choice(self) -> tuple[Choice, bool]:
        """Return the tool choice and whether parallel calls are allowed."""
        choice = self.tool_choice
        if choice is None:
            return "auto" if self.tools else "none", True
        parallel = not choice.disable_parallel_tool_use
        if choice.type == "tool" and choice.name is not None:
            return NamedTool(choice.name), parallel
        named: dict[str, Choice] = {"any": "required", "none": "none"}
        return named.get(choice.type, "auto" if self.tools else "none"), parallel

    def _effort(self) -> str | None:
        if self.thinking is not None and self.thinking.type == "disabled":
            return "none"
        return self.output_config.effort if self.output_config is not None else None

    def _keywords(self) -> dict[str, Any]:
        """Return template variables, including the two that templates use to enable thinking."""
        enabled = self.thinking is not None and self.thinking.type == "enabled"
        return ({"enable_thinking": True, "thinking": True} if enabled else {}) | (self.chat_template_kwargs or {})


class AnthropicMessagesRequest(AnthropicCountTokensRequest):
    """A conversation to continue. Omitted sampling fields take the model's default, else the engine's."""

    max_tokens: Int64
    metadata: AnthropicMetadata | None = None
    stop_sequences: Annotated[list[str], Field(max_length=4)] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_k: Int64 | None = None
    top_p: float | None = None
    service_tier: Literal["auto", "standard_only"] | None = Field(
        None, description="No effect; responses report standard."
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    vllm_xargs: dict[str, Any] | None = Field(
        None, description="Arguments of logits processors; refused if none is loaded."
    )

    container: Any = hint(why="the server runs no code")
    diagnostics: Any = hint()
    inference_geo: Any = unsupported()
    mm_payload: Any = unsupported("tensors", harmless=("none",))
    return_mm_kwargs: Any = unsupported()
    watermarking: Any = unsupported()
    kv_transfer_params: Any = unsupported()
    ec_transfer_params: Any = unsupported()

    @property
    def shows_thinking(self) -> Literal["full", "omitted", "none"]:
        """Thinking blocks with text, without text ("omitted"), or none."""
        thinking = self.thinking
        if thinking is None:
            return "full"
        return "none" if thinking.type == "disabled" else "omitted" if thinking.display == "omitted" else "full"

    def budget_without_effect(self) -> tuple[Ignored, ...]:
        """Return thinking.budget_tokens as an ignored hint, for servers without a reasoning parser."""
        if self.thinking is None or self.thinking.budget_tokens is None:
            return ()
        path = "thinking.budget_tokens"
        return (Ignored(path, "hint", f"{path} needs a server with --reasoning-parser; leave it out"),)

    def params(self, defaults: Mapping[str, Any], *, thinks: bool) -> SamplingParams:
        """Return SamplingParams. Raise RequestError.

        `defaults`: from the model's generation config. `thinks`: the server can enforce a thinking budget.
        """
        values: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "extra_args": self.vllm_xargs,
        }
        known = {name: value for name, value in defaults.items() if values.get(name) is None}
        format = self.output_config.format if self.output_config is not None else None
        try:
            return SamplingParams.from_optional(
                **values | known,
                stop=self.stop_sequences,
                structured_outputs=None if format is None else StructuredOutputsParams(json=format.schema_),
                thinking_token_budget=self.thinking.budget_tokens if thinks and self.thinking is not None else None,
                output_kind=RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY,
            )
        except RequestError as error:
            raise self.in_own_names(error) from None
