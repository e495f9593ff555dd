"""The bodies of POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, Field, Tag

from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from pagoda.server.api.anthropic.tools import AnthropicTool, CacheControl, ClientTool, CustomTool
from pagoda.server.api.chat_prompt import Conversation, NamedTool
from pagoda.server.api.chat_prompt import ToolChoice as Choice
from pagoda.server.http.body import Ignored, Int64, RequestBody, hint, unsupported
from pagoda.server.http.errors import HttpError
from pagoda.server.http.fields import LIST, OTHER, TEXT, Unsupported, by_type, check_template_kwargs, text_or_list


class _BlockFields(RequestBody):
    cache_control: CacheControl | None = None


class TextBlock(_BlockFields):
    """A text block."""

    type: Literal["text"]
    text: str
    citations: Any = hint(why="the model cites no sources")


class ThinkingBlock(_BlockFields):
    """Earlier thinking of the model. The signature is not verified."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(_BlockFields):
    """Encrypted thinking of another server; not shown to the model."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(_BlockFields):
    """A tool call of the model."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Any = hint(harmless=({"type": "direct"},), why="only the model calls tools")
    toolset_name: Any = hint()


class OtherBlock(RequestBody):
    """A block of another type, such as the call of a tool that a provider ran. It is dropped."""

    type: str

    def ignored(self, path: str = "") -> Iterator[Ignored]:
        """Yield this block, but not its fields."""
        yield Ignored(path, "item", f"{path}: type {self.type[:60]!r} is not supported by this version", self.type)


_Texts = Annotated[Annotated[TextBlock, Tag("<text>")] | Annotated[Unsupported, Tag(OTHER)], by_type("text")]
Texts = Annotated[Annotated[str, Tag(TEXT)] | Annotated[list[_Texts], Tag(LIST)], text_or_list()]


class TextSource(RequestBody):
    """A document as plain text."""

    type: Literal["text"]
    data: str
    media_type: str | None = None


class ContentSource(RequestBody):
    """A document as text blocks."""

    type: Literal["content"]
    content: Texts


class DocumentBlock(_BlockFields):
    """A document of text. Files, such as PDF, are refused."""

    type: Literal["document"]
    source: Annotated[
        Annotated[TextSource, Tag("<text>")]
        | Annotated[ContentSource, Tag("<content>")]
        | Annotated[Unsupported, Tag(OTHER)],
        by_type("text", "content"),
    ]
    title: str | None = None
    context: str | None = None
    citations: Any = hint(harmless=({"enabled": False},), why="the model cites no sources")

    @property
    def text(self) -> str:
        """The title, the context and the text, each on lines of its own."""
        match self.source:
            case TextSource(data=content):
                pass
            case ContentSource(content=blocks):
                content = text_of(blocks)
            case _:  # Other kinds are refused.
                content = ""
        return "\n".join(filter(None, (self.title, self.context, content)))


class SearchResultBlock(_BlockFields):
    """A search result."""

    type: Literal["search_result"]
    source: str
    title: str
    content: Texts
    citations: Any = hint(harmless=({"enabled": False},), why="the model cites no sources")

    @property
    def text(self) -> str:
        """The title, the source and the text, each on lines of its own."""
        return "\n".join(filter(None, (self.title, self.source, text_of(self.content))))


class CompactionBlock(_BlockFields):
    """A summary that replaces earlier messages."""

    type: Literal["compaction"]
    content: str | None = None

    @property
    def text(self) -> str:
        return self.content or ""


class ToolReferenceBlock(_BlockFields):
    """A tool that a search for tools found. All tools are shown to the model already."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        return self.tool_name


_MEDIA: Final = frozenset({"image", "audio", "video"})
"""Types of blocks that are refused; those of unknown types are dropped."""


def _block_of(*known_types: str) -> Discriminator:
    """Return a discriminator: `<type>` for the known types, MEDIA for those that are refused, else OTHER."""

    def tag(value: Any) -> str:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        if kind in known_types:
            return f"<{kind}>"
        return OTHER if isinstance(kind, str) and kind not in _MEDIA else MEDIA

    return Discriminator(tag)


MEDIA: Final = "<media>"
"""Tag of blocks that are refused."""

_RESULT_TYPES: Final = ("text", "document", "search_result", "tool_reference")

ResultBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[DocumentBlock, Tag("<document>")]
    | Annotated[SearchResultBlock, Tag("<search_result>")]
    | Annotated[ToolReferenceBlock, Tag("<tool_reference>")]
    | Annotated[Unsupported, Tag(MEDIA)]
    | Annotated[OtherBlock, Tag(OTHER)],
    _block_of(*_RESULT_TYPES),
]


_ResultContent = Annotated[Annotated[str, Tag(TEXT)] | Annotated[list[ResultBlock], Tag(LIST)], text_or_list()]


class ToolResultBlock(_BlockFields):
    """The result of a tool call. The text of a failed call is prefixed with "Error: "."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: _ResultContent | None = None
    is_error: bool | None = None
    toolset_name: Any = hint()


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[DocumentBlock, Tag("<document>")]
    | Annotated[SearchResultBlock, Tag("<search_result>")]
    | Annotated[ToolReferenceBlock, Tag("<tool_reference>")]
    | Annotated[CompactionBlock, Tag("<compaction>")]
    | Annotated[Unsupported, Tag(MEDIA)]
    | Annotated[OtherBlock, Tag(OTHER)],
    _block_of(*_RESULT_TYPES, "thinking", "redacted_thinking", "tool_use", "tool_result", "compaction"),
]


class AnthropicMessage(RequestBody):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[Annotated[str, Tag(TEXT)] | Annotated[list[Block], Tag(LIST)], text_or_list()]


Messages = Annotated[list[AnthropicMessage], Field(min_length=1)]

_BILLING: Final = "x-anthropic-billing-header"
"""Start of a system block of Claude Code that differs from request to request: dropped, so that prefixes are cached."""


def messages_of(system: str | list[Any] | None, messages: Sequence[AnthropicMessage]) -> list[dict[str, Any]]:
    """Convert messages to the format of chat completions. Raise RequestError."""
    converted: list[dict[str, Any]] = []
    if isinstance(system, list):
        system = "\n".join(block.text for block in system if not block.text.startswith(_BILLING))
    if system:
        converted.append({"role": "system", "content": system})
    tool_names: dict[str, str] = {}  # Id of the tool_use block -> name.
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
    """Return the joined text of blocks, without those that are dropped."""
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content or () if not isinstance(block, OtherBlock))


def _assistant_message(where: str, blocks: Sequence[Any], tool_names: dict[str, str]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    texts: list[str] = []
    thinking: list[str] = []
    calls: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        match block:
            case TextBlock() | CompactionBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thinking.append(block.thinking)
            case ToolUseBlock():
                tool_names[block.id] = block.name
                function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                calls.append({"id": block.id, "type": "function", "function": function})
            case ToolResultBlock() | DocumentBlock() | SearchResultBlock():
                field = f"{where}[{number}].type"
                raise RequestError(field, f"{field}: {block.type} is allowed in user messages only")
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
            case TextBlock() | DocumentBlock() | SearchResultBlock() | ToolReferenceBlock() | CompactionBlock():
                texts.append(block.text)
            case ToolResultBlock():
                id = block.tool_use_id
                if id not in tool_names:
                    name = f"{field}.tool_use_id"
                    raise RequestError(name, f"{name} {id[:80]!r} matches no earlier tool_use block")
                text = ("Error: " if block.is_error else "") + text_of(block.content)
                messages.append({"role": "tool", "tool_call_id": id, "name": tool_names[id], "content": text})
            case OtherBlock():
                pass
            case _:
                raise RequestError(f"{field}.type", f"{field}.type: {block.type} is allowed in assistant messages only")
    if texts or not messages:
        messages.append({"role": role, "content": "\n".join(texts)})
    return messages


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

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    format: AnthropicOutputFormat | None = None


class AnthropicThinking(RequestBody):
    """Thinking options. Thinking is returned in full or omitted, never summarized."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Any = hint(harmless=("omitted",), why="thinking is returned in full or omitted")


class AnthropicMetadata(RequestBody):
    """Metadata of the request."""

    user_id: str | None = Field(
        None, description="End user, for the request log, and a cache hint; does not affect the response."
    )


class AnthropicCountTokensRequest(RequestBody):
    """A conversation whose prompt tokens to count."""

    model: str
    messages: Messages
    system: Texts | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: AnthropicThinking | None = None
    output_config: AnthropicOutputConfig | None = None
    output_format: AnthropicOutputFormat | None = Field(None, description="Same as output_config.format.")
    cache_control: CacheControl | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    context_management: Any = hint(
        harmless=({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),  # Agents send these.
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
            # Clients react to this code by sending the whole conversation.
            message = "thread: this server keeps no conversations; send all messages"
            raise HttpError(404, message, "thread", messages_code="thread_not_found")
        if self.output_format is not None and self.output_config is not None and self.output_config.format is not None:
            raise RequestError("output_format", "output_format and output_config.format exclude each other; set one")
        if self.tool_choice is not None and (self.tool_choice.type == "tool") != (self.tool_choice.name is not None):
            name = "tool_choice.name"
            raise RequestError(name, f'{name} is required for type "tool" and not allowed for others')
        check_template_kwargs(self.chat_template_kwargs)

    def conversation(self) -> Conversation:
        """Return the conversation in common form. Raise RequestError."""
        continues_last = continues(self.messages)
        choice, parallel = self._choice()
        return Conversation(
            messages=messages_of(self.system, self.messages),
            tools=[tool.as_chat() for _, tool in self._offered()],
            tool_choice=choice,
            parallel_tool_calls=parallel,
            reasoning_effort=self._effort(),
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
            "structured_outputs": "tools" if self._format is None else self._format_field,
            "thinking_token_budget": "thinking.budget_tokens",
            "reasoning_effort": "thinking" if disabled else "output_config.effort",
            "tool_choice.function.name": "tool_choice.name",
        }
        return names.get(field, self._tool_path(field))

    def _tool_path(self, field: str) -> str:
        """Return the path of an offered tool, `tools[2].function.parameters`, in this request."""
        index, bracket, rest = field.removeprefix("tools[").partition("]")
        offered = self._offered()
        if not (field.startswith("tools[") and bracket and index.isdecimal() and int(index) < len(offered)):
            return field
        return offered[int(index)][0] + rest.replace(".function", "").replace(".parameters", ".input_schema")

    @property
    def _marks_prefix(self) -> bool:
        """Whether `cache_control` marks the end of a prefix anywhere."""
        system = self.system if isinstance(self.system, list) else []
        blocks = (block for message in self.messages if isinstance(message.content, list) for block in message.content)
        parts = itertools.chain((self,), self.tools or (), system, blocks)
        return any(getattr(part, "cache_control", None) is not None for part in parts)

    @property
    def _format(self) -> AnthropicOutputFormat | None:
        return self.output_format if self.output_config is None else self.output_config.format or self.output_format

    @property
    def _format_field(self) -> str:
        return "output_config" if self.output_format is None else "output_format"

    def _choice(self) -> tuple[Choice, bool]:
        """Return the tool choice and whether parallel calls are allowed."""
        choice = self.tool_choice
        if choice is None:
            return "auto" if self._offered() else "none", True
        parallel = not choice.disable_parallel_tool_use
        if choice.type == "tool" and choice.name is not None:
            return NamedTool(choice.name), parallel
        choices: dict[str, Choice] = {"any": "required", "none": "none"}
        return choices.get(choice.type, "auto" if self._offered() else "none"), parallel

    def _offered(self) -> list[tuple[str, CustomTool | ClientTool]]:
        """Return the tools that the model may call, each with its path."""
        return [
            (f"tools[{index}]", tool)
            for index, tool in enumerate(self.tools or ())
            if isinstance(tool, CustomTool | ClientTool)
        ]

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
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_k: Int64 | None = None
    top_p: float | None = None
    service_tier: str | None = Field(None, description="No effect; responses report standard.")
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    vllm_xargs: dict[str, Any] | None = Field(
        None, description="Arguments of logits processors; refused if none is loaded."
    )

    container: Any = hint(why="the server runs no code")
    diagnostics: Any = hint()
    inference_geo: Any = hint(why="the server runs in one place")
    mm_payload: Any = unsupported("tensors", harmless=("none",))
    return_mm_kwargs: Any = unsupported()
    watermarking: Any = unsupported()
    kv_transfer_params: Any = unsupported(why="KV blocks are not transferred between servers", idle=True)
    ec_transfer_params: Any = unsupported()

    @property
    def shows_thinking(self) -> Literal["full", "omitted", "none"]:
        """Thinking blocks with text, without text ("omitted"), or none."""
        thinking = self.thinking
        if thinking is None:
            return "full"
        return "none" if thinking.type == "disabled" else "omitted" if thinking.display == "omitted" else "full"

    def budget_without_effect(self, *, thinks: bool) -> tuple[Ignored, ...]:
        """Return thinking.budget_tokens as an ignored hint if thinking is not enabled, or not parsed (`thinks`)."""
        if self.thinking is None or self.thinking.budget_tokens is None or self._budget(thinks) is not None:
            return ()
        path = "thinking.budget_tokens"
        why = "needs a server with --reasoning-parser" if not thinks else 'needs thinking.type "enabled"'
        return (Ignored(path, "hint", f"{path} {why}; leave it out"),)

    def _budget(self, thinks: bool) -> int | None:
        """Return the maximum number of thinking tokens that can be enforced."""
        enabled = thinks and self.thinking is not None and self.thinking.type == "enabled"
        return self.thinking.budget_tokens if enabled and self.thinking is not None else None

    @property
    def cache_hint(self) -> str | None:
        """What names the conversation: the user, or for a request with `cache_control` its beginning."""
        user = None if self.metadata is None else self.metadata.user_id
        if user or not self._marks_prefix:
            return user
        beginning: str = messages_of(self.system, self.messages[:1])[0]["content"]
        return beginning

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
        applicable = {name: value for name, value in defaults.items() if values.get(name) is None}
        format = self._format
        try:
            return SamplingParams.from_optional(
                **values | applicable,
                stop=self.stop_sequences,
                structured_outputs=None if format is None else StructuredOutputsParams(json=format.schema_),
                thinking_token_budget=self._budget(thinks),
                output_kind=RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY,
            )
        except RequestError as error:
            raise self.in_own_names(error) from None
