"""The bodies of POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from pagoda.common.text.chat_template import fault_of_keywords
from pagoda.server.chat.conversation import Conversation, NamedTool
from pagoda.server.chat.conversation import ToolChoice as Choice
from pagoda.server.http.body import Ignored, Int64, RequestBody, hint, unsupported
from pagoda.server.http.fields.errors import HttpError
from pagoda.server.http.fields.tagged import (
    LIST,
    OTHER,
    TEXT,
    Null,
    OtherTool,
    Unsupported,
    by_type,
    refused,
    text_or_list,
)

# Messages of the Messages API, and how they become those of chat completions.


class CacheControl(RequestBody):
    """What a client would like cached. Equal beginnings of prompts share their cache without being told."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(RequestBody):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[Any, refused([])] = None


class ThinkingBlock(RequestBody):
    """What the model thought before. The signature is a client's to keep and proves nothing here."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(RequestBody):
    """Thinking that nobody but its maker can read; the model is not shown it."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(RequestBody):
    """A call that the model made."""

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
    """What a call gave. That it failed is said in front of what it gave."""

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
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[Annotated[str, Tag(TEXT)] | Annotated[list[Block], Tag(LIST)], text_or_list()]


Messages = Annotated[list[AnthropicMessage], Field(min_length=1)]


def messages_of(system: str | list[Any] | None, messages: Sequence[AnthropicMessage]) -> list[dict[str, Any]]:
    """The messages in the shape of chat completions. Raises RequestError."""
    found: list[dict[str, Any]] = []
    if system is not None:
        found.append({"role": "system", "content": text_of(system)})
    names: dict[str, str] = {}
    for number, message in enumerate(messages):
        where = f"messages[{number}].content"
        if isinstance(message.content, str):
            found.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            found.append(_said(where, message.content, names))
        else:
            found += _heard(where, message.role, message.content, names)
    return found


def continues(messages: Sequence[AnthropicMessage]) -> bool:
    """Whether the answer goes on with the last message, because it is the model's own and calls nothing."""
    last = messages[-1]
    calls = not isinstance(last.content, str) and any(isinstance(block, ToolUseBlock) for block in last.content)
    return last.role == "assistant" and not calls


def text_of(content: str | list[Any] | None) -> str:
    """The text of blocks that are all text."""
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content or ())


def _said(where: str, blocks: Sequence[Any], names: dict[str, str]) -> dict[str, Any]:
    """What the model said, as one message."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                names[block.id] = block.name
                function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                calls.append({"id": block.id, "type": "function", "function": function})
            case ToolResultBlock():
                raise RequestError(f"{where}[{number}]", f"{where}[{number}]: a tool_result belongs to the user")
    message["content"] = "\n".join(texts)
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _heard(where: str, role: str, blocks: Sequence[Any], names: dict[str, str]) -> list[dict[str, Any]]:
    """What the user said, and what tools gave, each of which is a message."""
    found: list[dict[str, Any]] = []
    texts: list[str] = []
    for number, block in enumerate(blocks):
        place = f"{where}[{number}]"
        match block:
            case TextBlock():
                texts.append(block.text)
            case ToolResultBlock():
                if block.tool_use_id not in names:
                    shown = block.tool_use_id[:80]
                    raise RequestError(place, f"{place}.tool_use_id {shown!r} is of no tool_use block before it")
                text = ("Error: " if block.is_error else "") + text_of(block.content)
                told = {"tool_call_id": block.tool_use_id, "name": names[block.tool_use_id], "content": text}
                found.append({"role": "tool", **told})
            case _:
                raise RequestError(place, f"{place}: a {block.type} block belongs to the assistant")
    if texts or not found:
        found.append({"role": role, "content": "\n".join(texts)})
    return found


class CustomTool(RequestBody):
    """A tool that the client runs."""

    name: str
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = Field(None, description="Arguments are always streamed as they come.")
    input_examples: Any = hint(why="templates do not show them")
    defer_loading: Any = hint(why="all tools are shown to the model at once")
    allowed_callers: Annotated[Any, refused(["direct"])] = None

    def as_chat(self) -> dict[str, Any]:
        """The tool in the shape of chat completions."""
        function: dict[str, Any] = {"name": self.name, "parameters": self.input_schema}
        told = {"description": self.description, "strict": self.strict}
        return {"type": "function", "function": function | {key: told[key] for key in told if told[key] is not None}}


Tool = Annotated[
    Annotated[CustomTool, Tag("<custom>")] | Annotated[OtherTool, Tag(OTHER)],
    by_type("custom", default="custom"),
]


class AnthropicToolChoice(RequestBody):
    """How tools are chosen."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class AnthropicOutputFormat(RequestBody):
    """The form of the text."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class AnthropicOutputConfig(RequestBody):
    """What the answer is like."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: AnthropicOutputFormat | None = None


class AnthropicThinking(RequestBody):
    """Whether the model thinks, and for how long. Thinking is shown as it is, or omitted; there are no summaries."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Any = hint(harmless=("omitted",), why="thinking is shown as it is, or omitted")


class AnthropicMetadata(RequestBody):
    """About the request."""

    user_id: str | None = Field(None, description="The end user, for the request log; changes no answer.")


class AnthropicCountTokensRequest(RequestBody):
    """A conversation whose prompt is to be measured."""

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
        why="nothing is taken out of a conversation",
    )
    mcp_servers: Any = hint(why="the server calls no tools itself")
    speed: Any = hint(harmless=("standard",), why="there is one speed")
    thread: Any = hint(why="no conversations are kept; one that was begun is not gone on with")
    user_profile_id: Any = hint(why="no profiles are kept")
    workspace_id: Any = hint(why="there are no workspaces")

    def check(self) -> None:
        """Check what no single field shows. Raises RequestError, or HttpError for a thread to continue."""
        if isinstance(self.thread, dict) and self.thread.get("type") == "continue":
            # by this code clients know that they have to send the whole conversation
            message = "thread: this server keeps no conversations; send all messages"
            raise HttpError(404, message, "thread", code="thread_not_found")
        thinking = self.thinking
        if thinking is not None and (thinking.type == "enabled") != (thinking.budget_tokens is not None):
            raise RequestError("thinking", 'thinking.budget_tokens goes with type "enabled", and with no other')
        if self.tool_choice is not None and (self.tool_choice.type == "tool") != (self.tool_choice.name is not None):
            raise RequestError("tool_choice", 'tool_choice.name goes with type "tool", and with no other')
        fault = fault_of_keywords(self.chat_template_kwargs or {})
        if fault:
            raise RequestError("chat_template_kwargs", f"chat_template_kwargs {fault}")

    def conversation(self) -> Conversation:
        """What is to be answered. Raises RequestError."""
        goes_on = continues(self.messages)
        choice, parallel = self._choice()
        return Conversation(
            messages=messages_of(self.system, self.messages),
            tools=[tool.as_chat() for tool in self.tools or () if isinstance(tool, CustomTool)],
            tool_choice=choice,
            parallel_tool_calls=parallel,
            reasoning_effort=self._effort(),
            add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
            keywords=self._keywords(),
        )

    def own_name(self, field: str) -> str:
        """The name of a SamplingParams field, or of one of chat completions, in this request."""
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
        """The choice, and whether it may be several calls."""
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
        """Variables for the template; the two names by which those that can be told to think know it."""
        enabled = self.thinking is not None and self.thinking.type == "enabled"
        return ({"enable_thinking": True, "thinking": True} if enabled else {}) | (self.chat_template_kwargs or {})


class AnthropicMessagesRequest(AnthropicCountTokensRequest):
    """A conversation to continue. Fields left out: the model's default, else the engine's."""

    max_tokens: Int64
    metadata: AnthropicMetadata | None = None
    stop_sequences: Annotated[list[str], Field(max_length=4)] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_k: Int64 | None = None
    top_p: float | None = None
    service_tier: Literal["auto", "standard_only"] | None = Field(None, description="There is one tier, the standard.")
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    vllm_xargs: dict[str, Any] | None = Field(None, description="For logits processors; refused without any.")

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
        """Thinking blocks with their text, without it, or no such blocks."""
        thinking = self.thinking
        if thinking is None:
            return "full"
        return "none" if thinking.type == "disabled" else "omitted" if thinking.display == "omitted" else "full"

    def budget_without_effect(self) -> tuple[Ignored, ...]:
        """Return thinking.budget_tokens as an ignored hint: for a model that does not think."""
        if self.thinking is None or self.thinking.budget_tokens is None:
            return ()
        path = "thinking.budget_tokens"
        return (Ignored(path, "hint", f"{path} needs a server with --reasoning-parser; leave it out"),)

    def params(self, defaults: Mapping[str, Any], *, thinks: bool) -> SamplingParams:
        """Return SamplingParams. `defaults`: the model's own. `thinks`: whether it has a thinking budget to keep to.

        Raises RequestError.
        """
        values: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "extra_args": self.vllm_xargs,
        }
        known = {name: value for name, value in defaults.items() if values.get(name) is None}
        form = self.output_config.format if self.output_config is not None else None
        try:
            return SamplingParams.from_optional(
                **values | known,
                stop=self.stop_sequences,
                structured_outputs=None if form is None else StructuredOutputsParams(json=form.schema_),
                thinking_token_budget=self.thinking.budget_tokens if thinks and self.thinking is not None else None,
                output_kind=RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY,
            )
        except RequestError as error:
            raise self.in_own_names(error) from None
