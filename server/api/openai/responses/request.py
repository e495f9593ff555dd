"""The body of POST /v1/responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from pagoda.server.api.chat_prompt import Conversation
from pagoda.server.api.chat_prompt import ToolChoice as Choice
from pagoda.server.api.openai.responses.input import Input, Item, items_of, messages_of, tools_in
from pagoda.server.api.openai.responses.tools import (
    AllowedChoice,
    OfferedTool,
    ResponsesTool,
    ToolChoice,
    check_tool_names,
    chosen_tools,
    offered_tools,
    shown_tools,
)
from pagoda.server.http.body import Ignored, Int64, RequestBody, hint, split_path, unsupported
from pagoda.server.http.fields import StopStrings, StructuredOutputs, check_template_kwargs


class ResponsesTextFormat(RequestBody):
    """Output format. Always enforced, whatever `strict` says."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponsesText(RequestBody):
    """Options of the output text."""

    format: ResponsesTextFormat | None = None
    verbosity: Any = hint(harmless=("medium",), why="models have no verbosity levels")

    def structured(self) -> StructuredOutputsParams | None:
        """Return the output constraints. Raise RequestError."""
        format = self.format
        if format is None or format.type == "text":
            return None
        if format.type == "json_object":
            return StructuredOutputsParams(json_object=True)
        if format.schema_ is None or not format.name:
            field = "text.format.name" if not format.name else "text.format.schema"
            raise RequestError(field, f"{field} is missing: text.format needs a name and a schema")
        return StructuredOutputsParams(json=format.schema_)

    def shown(self) -> Mapping[str, Any]:
        """Return the fields that the response repeats."""
        format = self.format.model_dump(by_alias=True, exclude_unset=True) if self.format else {"type": "text"}
        return {"format": format, "verbosity": "medium"}


MAX_TOP_LOGPROBS: Final = 20

_SAMPLING_FIELDS: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
)
"""Fields of the same name in SamplingParams, which checks their bounds."""

Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
_INCLUDABLE: Final = frozenset({"message.output_text.logprobs", "reasoning.encrypted_content"})
Label = Annotated[str, Field(max_length=64)]
Metadata = Annotated[dict[Label, Annotated[str, Field(max_length=512)]], Field(max_length=16)]


class ReasoningOptions(RequestBody):
    """Reasoning options. The full reasoning is returned, never a summary."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Any = hint(harmless=("auto",), why="the full reasoning is returned")
    generate_summary: Any = hint(harmless=("auto",), why="the full reasoning is returned")
    context: Any = hint(harmless=("auto",))
    mode: Any = hint(harmless=("standard",))


class ResponseStreamOptions(RequestBody):
    """Options of the event stream."""

    include_obfuscation: Any = hint(why="streams are not padded")


class ConversationId(RequestBody):
    """A conversation of /v1/conversations."""

    id: str


class ResponsesRequest(RequestBody):
    """Input to respond to. A null sampling field takes the model's default, else the engine's."""

    input: Input | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    background: bool | None = False
    store: bool | None = True
    stream: bool | None = False
    stream_options: ResponseStreamOptions | None = None
    include: list[str] | None = Field(
        None,
        description="message.output_text.logprobs, reasoning.encrypted_content; other values are ignored.",
    )
    max_output_tokens: Int64 | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Maximum number of calls of tools of type mcp; further ones fail, which the model sees."
    )
    metadata: Metadata | None = None
    parallel_tool_calls: bool | None = True
    reasoning: ReasoningOptions | None = None
    include_reasoning: bool = True
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] = Field(
        "auto", description="No effect; responses report default."
    )
    text: ResponsesText | None = None
    tool_choice: ToolChoice = "auto"
    tools: list[ResponsesTool] | None = Field(default_factory=list)
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = 0
    truncation: Literal["auto", "disabled"] | None = "disabled"
    user: str | None = Field(
        None,
        description="End user, for the request log; a cache hint if there is no other. Does not affect the response.",
    )
    safety_identifier: Label | None = Field(None, description="Same as user.")
    prompt_cache_key: str | None = Field(
        None,
        max_length=1024,
        description="Cache hint: requests with the same key run where its prefixes are, which are kept longer.",
    )
    session_id: str | None = Field(None, description="As prompt_cache_key.")

    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: Int64 | None = None
    stop: StopStrings | None = Field(default_factory=list)
    stop_token_ids: list[Int64] | None = Field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputs | None = None
    priority: Int64 = 0
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,256}$")] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    vllm_xargs: dict[str, Any] | None = Field(
        None, description="Arguments of logits processors; refused if none is loaded."
    )
    chat_template_kwargs: dict[str, Any] | None = None

    conversation: str | ConversationId | None = Field(
        None,
        description="A conversation of /v1/conversations, by id: its items precede the input, and it gets the "
        "items of the input and the output.",
    )

    prompt: Any = unsupported()
    moderation: Any = unsupported()
    watermarking: Any = unsupported()
    mm_payload: Any = unsupported("tensors", harmless=("none",))
    return_mm_kwargs: Any = unsupported()
    enable_response_messages: Any = unsupported(False)
    previous_input_messages: Any = unsupported()
    kv_transfer_params: Any = unsupported(why="KV blocks are not transferred between servers", idle=True)
    ec_transfer_params: Any = unsupported()

    client_metadata: Any = hint(why="metadata of the client")
    context_management: Any = hint(why="conversations are not compacted")
    media_io_kwargs: Any = hint(why="this version serves text only")
    mm_processor_kwargs: Any = hint(why="this version serves text only")
    prompt_cache_options: Any = hint(why="prefixes are cached without options")
    prompt_cache_retention: Any = hint(harmless=("in_memory",), why="prefixes are cached in memory until evicted")

    def ignored(self, path: str = "") -> Iterator[Ignored]:
        """Yield the parts that have no effect, values of `include` among them."""
        yield from super().ignored(path)
        for index, value in enumerate(self.include or ()):
            if value not in _INCLUDABLE:
                where = f"include[{index}]"
                yield Ignored(where, "hint", f"{where}: {value[:100]!r} is not supported; leave it out")

    def check(self) -> None:
        """Check combinations of fields. Raise RequestError."""
        if self.background and self.store is False:
            raise RequestError("background", "background needs store true: the response is fetched from the store")
        continued = self.previous_response_id is not None or self.conversation_id is not None
        if not self.input and self.instructions is None and not continued:
            raise RequestError("input", "input: field required, a text or a list of items")
        if self.conversation is not None and self.previous_response_id is not None:
            raise RequestError(
                "conversation", "conversation and previous_response_id exclude each other; leave one of them out"
            )
        check_template_kwargs(self.chat_template_kwargs)

    @property
    def cache_hint(self) -> str | None:
        """What the client names its conversation or its user by."""
        return self.prompt_cache_key or self.session_id or self.safety_identifier or self.user

    @property
    def shows_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ()) or bool(self.top_logprobs)

    @property
    def includes_encrypted_reasoning(self) -> bool:
        """Whether to return `encrypted_content` with reasoning items."""
        return "reasoning.encrypted_content" in (self.include or ())

    @property
    def conversation_id(self) -> str | None:
        conversation = self.conversation
        return conversation.id if isinstance(conversation, ConversationId) else conversation

    def offered(self, items: Sequence[Item], num_earlier: int) -> tuple[list[OfferedTool], Choice]:
        """Return the tools as the model sees them, those in `items` included, and the tool choice.

        Of tools in items with the same name, the first is offered. Raise RequestError.
        """
        tools = offered_tools(self.tools or ())
        check_tool_names(tools)
        names = {tool.function_name for tool in tools}
        for tool in tools_in(items, num_earlier):
            if tool.function_name not in names:
                tools.append(tool)
                names.add(tool.function_name)
        return chosen_tools(tools, self.tool_choice)

    def after_calls(self) -> ResponsesRequest:
        """Return the request with which a response goes on after calls: a choice that demands one has had it."""
        choice = self.tool_choice
        if choice in ("auto", "none"):
            return self
        later = choice.model_copy(update={"mode": "auto"}) if isinstance(choice, AllowedChoice) else "auto"
        return self.model_copy(update={"tool_choice": later})

    def conversation_of(self, items: Sequence[Item], num_earlier: int) -> Conversation:
        """Return the conversation of `items`, the first `num_earlier` of earlier requests. Raise RequestError."""
        tools, choice = self.offered(items, num_earlier)
        return Conversation(
            messages=messages_of(self.instructions, items, num_earlier),
            tools=[tool.as_chat() for tool in tools],
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            reasoning_effort=self.reasoning.effort if self.reasoning is not None else None,
            keywords=self.chat_template_kwargs or {},
            cache_salt=self.cache_salt,
        )

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return SamplingParams. `defaults`: from the model's generation config. Raise RequestError."""
        values = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        values |= {"max_tokens": self.max_output_tokens, "extra_args": self.vllm_xargs}
        values = {name: defaults.get(name) if value is None else value for name, value in values.items()}
        kind = RequestOutputKind.DELTA if self.stream or self.background else RequestOutputKind.FINAL_ONLY
        try:
            return SamplingParams.from_optional(
                **values,
                logprobs=(self.top_logprobs or 0) if self.shows_logprobs else None,
                structured_outputs=self._structured(),
                output_kind=kind,
            )
        except RequestError as error:
            raise self.in_own_names(error) from None

    def _structured(self) -> StructuredOutputsParams | None:
        by_format = self.text.structured() if self.text is not None else None
        if self.structured_outputs is None:
            return by_format
        if by_format is not None:
            raise RequestError("structured_outputs", "structured_outputs and text.format exclude each other; set one")
        return self.structured_outputs.params()

    def own_name(self, field: str) -> str:
        """Return this request's name for a field of SamplingParams or chat completions."""
        by_format = self.text is not None and self.structured_outputs is None
        names = {
            "structured_outputs": "text.format" if by_format else "tools" if self.structured_outputs is None else field,
            "extra_args": "vllm_xargs",
            "max_tokens": "max_output_tokens",
            "logprobs": "top_logprobs",
            "prompt": "input",
            "reasoning_effort": "reasoning.effort",
            "tool_choice.function.name": "tool_choice.name",
        }
        if split_path(field)[0] == "messages":  # A message's index is not that of an item of the input.
            return "input"
        return names.get(field, self._tool_path(field))

    def _tool_path(self, field: str) -> str:
        """Return the path of an offered tool, `tools[2].function.name`, in this request."""
        index, bracket, rest = field.removeprefix("tools[").partition("]")
        offered, _ = self.offered(items_of(self.input), 0)
        if not (field.startswith("tools[") and bracket and index.isdecimal() and int(index) < len(offered)):
            return field
        return offered[int(index)].path + rest.replace(".function", "")

    def shown(self, params: SamplingParams) -> dict[str, Any]:
        """Return the request fields that the response repeats."""
        reasoning = {"effort": self.reasoning.effort if self.reasoning is not None else None, "summary": None}
        choice = self.tool_choice
        shown_choice = choice if isinstance(choice, str) else choice.model_dump(exclude_unset=True)
        return {
            "background": bool(self.background),
            "instructions": self.instructions,
            "conversation": None if self.conversation_id is None else {"id": self.conversation_id},
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "prompt": None,
            "input_messages": None,
            "output_messages": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": reasoning,
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "temperature": params.temperature,
            "text": (self.text or ResponsesText()).shown(),
            "tool_choice": shown_choice,
            "tools": shown_tools(self.tools or ()),
            "top_logprobs": self.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": self.truncation or "disabled",
            "user": self.user,
        }
