"""Render a conversation: its prompt, sampling parameters with the grammar of tool calls, and the reader of the output.

A conversation has the format of chat completions' messages and tools, to which the other APIs' are converted.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Final, Literal

from pagoda.common.engine.structured_output.grammar import json_schema
from pagoda.common.engine.structured_output.guidance import whole_pattern
from pagoda.common.errors import PromptTooLongError, RequestError
from pagoda.common.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from pagoda.common.text.chat_template import Messages, RenderedChat, render_chat, render_literal, template_of
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.http.body import Ignored, split_path
from pagoda.server.http.state import ServerState
from pagoda.server.parsers.answer_formats import NOT_SHOWN
from pagoda.server.parsers.output_parser import OutputParser
from pagoda.server.parsers.parser import (
    AdaptsConversation,
    Bracket,
    Brackets,
    Content,
    Event,
    LeavesMarkup,
    OutputReader,
    Parser,
    ReasoningFormat,
    Tool,
    ToolFormat,
)
from pagoda.server.parsers.tool.forced import Named, Required, schema_of_named, schema_of_required
from pagoda.server.processing.inputs import Prompt, encode_kept, max_prompt_tokens
from pagoda.server.processing.workers.worker import Lane
from pagoda.server.vllm.parser_interface import ChatCompletionToolsParam, ParserRequest, named_choice
from pagoda.server.vllm.parser_plugins import VllmReasoningFormat, VllmToolFormat

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

_DEFAULT_PARAMS: Final = SamplingParams()


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The one tool that must be called."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation to render and continue."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()  # Each is {"type": "function", "function": {...}}.
    tool_choice: ToolChoice = "none"
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    reasoning_budget: int | None = None  # Maximum number of reasoning tokens; a hint without a reasoning parser.
    add_generation_prompt: bool | None = None  # None: unless the last message is continued.
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: Sequence[Mapping[str, Any]] | None = None
    template: str | None = None  # Overrides the model's, with --trust-request-chat-template.
    keywords: Mapping[str, Any] = field(default_factory=dict)  # Variables of the template.
    cache_salt: str | None = None

    @property
    def opens_answer(self) -> bool:
        """Whether the chat template opens the assistant's message."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt(Prompt):
    """A rendered conversation, ready for the engine."""

    params: SamplingParams
    reader: Callable[[], OutputReader]  # Makes the reader of one sequence's output.
    last_message: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[Ignored, ...] = ()  # Fields of chat completions without effect on this model.


async def prepare(state: ServerState, conversation: Conversation, params: SamplingParams) -> ChatPrompt:
    """Render and tokenise, and adapt `params` to the tools. Raise RequestError naming chat completions' field."""
    state.llm().check_generates()
    tools = _callable_tools(state, conversation)
    if tools:
        params = _add_grammar(state, params, conversation, tools)
    variables = await _variables_of(state, conversation)
    _check_shown(state, conversation, variables)
    ignored = (
        *_ignored_effort(state, conversation, variables),
        *_ignored_documents(state, conversation, variables),
    )
    if conversation.reasoning_budget is not None:
        if state.formats.reasoning is None:
            ignored += (_ignored_budget(),)
        else:
            params = _with_values(params, thinking_token_budget=conversation.reasoning_budget)
    if ignored and state.config.strict_requests:
        raise RequestError(ignored[0].path, ignored[0].reason)
    if any(field.path == "documents" for field in ignored):
        conversation = replace(conversation, documents=None)
    rendered, token_ids = await _render_text(state, conversation, params)
    text = rendered.text
    formats = _OutputFormats(state.formats.reasoning, _format_of_calls(state, conversation) if tools else None)
    formats, params = _for_plugins(formats, state, conversation, params)
    parsers = _parsers(formats, conversation, tools, text)
    reader: Callable[[], OutputReader] = PlainReader
    if parsers:
        reader = _reader(state, parsers, params, parallel=conversation.parallel_tool_calls)
        if not formats.are_plugins:
            params = _with_values(params, skip_special_tokens=False)  # The parsers need them.
    return ChatPrompt(
        text,
        token_ids,
        conversation.cache_salt,
        literal=rendered.literal,
        stable_tokens=_stable_tokens(state, rendered, token_ids),
        params=params,
        reader=reader,
        last_message=conversation.messages[-1] if conversation.messages else {},
        ignored=ignored,
    )


async def render(state: ServerState, conversation: Conversation, params: SamplingParams = _DEFAULT_PARAMS) -> Prompt:
    """Render and tokenise a conversation; with truncation, at least the kept tokens. Raise RequestError."""
    rendered, token_ids = await _render_text(state, conversation, params)
    return Prompt(rendered.text, token_ids, conversation.cache_salt, literal=rendered.literal)


async def prepare_fitting(state: ServerState, conversation: Conversation, params: SamplingParams) -> ChatPrompt:
    """Prepare the conversation, dropping its oldest messages if it exceeds the context. Raises as prepare does.

    Leading system messages are kept, and the kept messages start with a user's. Reserves max_tokens, at most half of
    the context, for the output. The last turn is never dropped: it may still be refused as too long.
    """
    context = max_prompt_tokens(state.llm().info)
    limit = context - min(params.max_tokens or 1, context // 2)
    messages = list(conversation.messages)
    head = next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))
    starts = [n for n, message in enumerate(messages) if n > head and message["role"] == "user"]
    if not starts:
        return await prepare(state, conversation, params)

    async def fitting(kept: list[Mapping[str, Any]]) -> ChatPrompt | None:
        try:
            prompt = await prepare(state, replace(conversation, messages=kept), params)
        except PromptTooLongError:
            return None
        return prompt if len(prompt.token_ids) <= limit else None

    longest = await fitting(messages)
    if longest is not None:
        return longest
    last = messages[:head] + messages[starts.pop() :]
    longest = await fitting(last)
    if longest is None:
        return await prepare(state, replace(conversation, messages=last), params)
    while starts:  # Binary search: the remaining `starts` keep more messages than `longest`.
        middle = len(starts) // 2
        candidate = await fitting(messages[:head] + messages[starts[middle] :])
        if candidate is not None:
            longest = candidate
            starts = starts[:middle]
        else:
            starts = starts[middle + 1 :]
    return longest


def in_conversation(error: RequestError, index: int) -> RequestError:
    """Return an error about the messages of one of several conversations with the conversation's index."""
    name, path = split_path(error.field)
    if name not in ("messages", "prompt"):
        return error
    field = f"messages[{index}]{path}"
    message = str(error)
    return error.renamed(field, field + message.removeprefix(error.field) if path else message)


# Rendering.

LONG_CONVERSATION: Final = 16_384
"""Length in characters, tools and documents included, from which a conversation is rendered among long ones and
tokenised in a thread, so that other requests keep streaming."""

MOST_MERGED: Final = 2
"""Tokens before a generation prompt that may have merged with it, where it is not tokenised as by itself."""

_REASONING_KEYS: Final = ("reasoning", "reasoning_content", "thinking")
"""Keys of a message's reasoning in clients and templates."""

_SWITCHES: Final = ("enable_thinking", "thinking")
"""Template variables that enable and disable thinking."""


async def _render_text(
    state: ServerState, conversation: Conversation, params: SamplingParams
) -> tuple[RenderedChat, list[int]]:
    tokenizer = state.tokenizer()
    if tokenizer is None:
        raise RequestError(
            "messages", "chat needs a tokenizer, which is disabled (--skip-tokenizer-init); use /v1/completions"
        )
    _check_template(state, conversation)
    variables = await _variables_of(state, conversation)
    lane = _lane(conversation)
    rendering = partial(_render_now, tokenizer, conversation, state, variables, lane)
    rendered = await asyncio.wrap_future(state.engine.templates.submit(lane, rendering))
    text = rendered.text
    encode = partial(
        encode_kept,
        tokenizer,
        text,
        params,
        max_prompt_tokens(state.engine.info),
        conversation.add_special_tokens,
        rendered.literal,
    )
    if len(text) < LONG_CONVERSATION:
        return rendered, encode()
    return rendered, await state.engine.text_threads.run(len(text), encode)


def _render_now(
    tokenizer: Tokenizer, conversation: Conversation, state: ServerState, variables: frozenset[str], lane: Lane
) -> RenderedChat:
    render_text = partial(_render_messages, tokenizer, conversation, state, variables, lane)
    if state.engine.config.model.special_tokens_in_messages == "parse":
        rendered = RenderedChat(render_text(conversation.messages, conversation.documents))
    else:
        rendered = render_literal(tokenizer, conversation.messages, conversation.documents, render_text)
    if not (state.engine.info.keeps_states and conversation.opens_answer):
        return rendered
    without = replace(conversation, add_generation_prompt=False)
    try:
        stable = _render_messages(
            tokenizer, without, state, variables, lane, conversation.messages, conversation.documents
        )
    except RequestError:  # The template needs a generation prompt; where the stable part ends is only a hint.
        return rendered
    return replace(rendered, generation_prompt=_end_after(stable, rendered.text))


def _end_after(beginning: str, text: str) -> str:
    """Return `text` without what it has in common with `beginning`."""
    common = len(beginning) if text.startswith(beginning) else len(os.path.commonprefix((beginning, text)))
    return text[common:]


def _stable_tokens(state: ServerState, rendered: RenderedChat, token_ids: Sequence[int]) -> int | None:
    """Return how many of the prompt's tokens precede its generation prompt; None if it was not determined."""
    tokenizer = state.tokenizer()
    if not rendered.generation_prompt or tokenizer is None:
        return None
    added = tokenizer.encode(rendered.generation_prompt, add_special_tokens=False)
    merged = 0 if list(token_ids[-len(added) :]) == added else MOST_MERGED
    return max(len(token_ids) - len(added) - merged, 0)


def _render_messages(
    tokenizer: Tokenizer,
    conversation: Conversation,
    state: ServerState,
    variables: frozenset[str],
    lane: Lane,
    messages: Messages,
    documents: Messages | None,
) -> str:
    """Return the text of a conversation with these messages and documents instead of its own."""
    tools = _shown_tools(state, conversation)
    messages = [_with_reasoning(message) for message in messages]
    reasoning = state.formats.reasoning
    if reasoning is not None and isinstance(reasoning, AdaptsConversation):
        messages, tools = reasoning.adapted(messages, tools)
    keywords = {
        **state.config.default_chat_template_kwargs,
        **_effort_variables(conversation.reasoning_effort, variables),
        **conversation.keywords,
    }
    return render_chat(
        tokenizer,
        messages,
        template=_template_of(tokenizer, conversation, state),
        renderer=partial(state.engine.templates.render, lane=lane),
        add_generation_prompt=conversation.opens_answer,
        continue_final_message=conversation.continue_final_message,
        tools=tools,
        documents=documents,
        content_format=state.config.chat_template_content_format,
        **keywords,
    )


def _check_template(state: ServerState, conversation: Conversation) -> None:
    if conversation.template is not None and not state.config.trust_request_chat_template:
        raise RequestError(
            "chat_template", "chat_template is only accepted with --trust-request-chat-template; leave it out"
        )


def _lane(conversation: Conversation) -> Lane:
    """Return which conversations this one is rendered among."""
    if conversation.template is not None:
        return "client"
    parts = (*conversation.messages, *conversation.tools, *(conversation.documents or ()), conversation.keywords)
    return "short" if sum(len(str(part)) for part in parts) < LONG_CONVERSATION else "long"


def _template_of(tokenizer: Tokenizer, conversation: Conversation, state: ServerState) -> str | None:
    tools = bool(_shown_tools(state, conversation))
    source = conversation.template or (state.formats.tools_template if tools else None) or state.given_template
    return template_of(tokenizer, source, with_tools=tools)


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message without empty keys, and with its reasoning under every key that a template may read."""
    message = {key: value for key, value in message.items() if value is not None and (key, value) != ("tool_calls", [])}
    reasoning = next((message[key] for key in _REASONING_KEYS if isinstance(message.get(key), str)), None)
    return message if reasoning is None else {**dict.fromkeys(_REASONING_KEYS, reasoning), **message}


def _shown_tools(state: ServerState, conversation: Conversation) -> list[Any]:
    """Return the tools to pass to the template."""
    hides = state.config.exclude_tools_when_tool_choice_none and conversation.tool_choice == "none"
    return [] if hides else [_in_usual_order(tool) for tool in conversation.tools]


_USUAL_ORDER: Final = ("name", "description", "parameters")


def _in_usual_order(tool: Any) -> Any:
    """Return a tool with the keys of its function in the order that models are trained with, whatever a client sent."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        return tool
    first = {key: function[key] for key in _USUAL_ORDER if key in function}
    return {**tool, "function": {**first, **function}}


async def _variables_of(state: ServerState, conversation: Conversation) -> frozenset[str]:
    """Return the names that the chat template reads, if tools, documents or the reasoning effort depend on it; else
    none.
    """
    by_tools = bool(conversation.tools) and conversation.tool_choice == "auto"
    if not (by_tools or conversation.documents) and conversation.reasoning_effort is None:
        return frozenset()
    tokenizer = state.tokenizer()
    template = None if tokenizer is None else _template_of(tokenizer, conversation, state)
    if template is None:
        return frozenset()
    _check_template(state, conversation)
    lane: Lane = "short" if conversation.template is None else "client"
    return await asyncio.wrap_future(state.engine.templates.variables_of(template, lane=lane))


def _check_shown(state: ServerState, conversation: Conversation, variables: frozenset[str]) -> None:
    """Raise RequestError if the chat template does not show the model the tools that it may call."""
    tools: Sequence[Any] = conversation.tools if conversation.tool_choice == "auto" else ()
    if not tools or state.tokenizer() is None:
        return
    reasoning = state.formats.reasoning
    if reasoning is not None and isinstance(reasoning, AdaptsConversation):
        _, tools = reasoning.adapted((), tools)
    shown = state.formats.shows_tools if conversation.template is None else "tools" in variables
    if tools and not shown:
        raise RequestError("tools", NOT_SHOWN)


def _ignored_documents(
    state: ServerState, conversation: Conversation, variables: frozenset[str]
) -> tuple[Ignored, ...]:
    """Return the documents as an ignored hint if the chat template does not show them."""
    if not conversation.documents or state.tokenizer() is None or "documents" in variables:
        return ()
    reason = "documents are not shown to the model by its chat template; put their text into a message"
    return (Ignored("documents", "hint", reason),)


def _effort_variables(effort: str | None, known_variables: frozenset[str]) -> dict[str, Any]:
    """Return the variables that set the effort, of those that the template reads."""
    if effort is None:
        return {}
    variables: dict[str, Any] = {"reasoning_effort": effort} if "reasoning_effort" in known_variables else {}
    return variables | {name: effort != "none" for name in _SWITCHES if name in known_variables}


def _ignored_effort(state: ServerState, conversation: Conversation, variables: frozenset[str]) -> tuple[Ignored, ...]:
    """Return the reasoning effort as an ignored hint if the chat template does not read it."""
    effort = conversation.reasoning_effort
    if effort is None or state.tokenizer() is None:
        return ()
    needs_no_effect = effort == "none" and state.formats.reasoning is None  # The model does not reason.
    if needs_no_effect or _effort_variables(effort, variables):
        return ()
    reason = (
        f"reasoning_effort {effort!r} has no effect: the model's chat template does not read it; "
        "leave it out, or use chat_template_kwargs"
    )
    return (Ignored("reasoning_effort", "hint", reason),)


def _ignored_budget() -> Ignored:
    name = "reasoning_budget"
    return Ignored(name, "hint", f"{name} has no effect: it needs a server with --reasoning-parser; leave it out")


# The reader of the output.


class PlainReader:
    """Reads an output without formats: all of its text is content."""

    __slots__ = ()

    is_plain: ClassVar[bool] = True
    calls: ClassVar[int] = 0
    reasoning_tokens: ClassVar[int | None] = None

    def feed(self, text: str, token_ids: Sequence[int] | None = None) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


def _reader(
    state: ServerState, parsers: list[Callable[[], Parser]], params: SamplingParams, *, parallel: bool
) -> Callable[[], OutputParser]:
    hidden = state.special_delimiters if params.skip_special_tokens else None
    count = None if state.formats.reasoning is None else partial(_count_tokens, state)
    return lambda: OutputParser([parser() for parser in parsers], hidden=hidden, parallel_calls=parallel, count=count)


def _count_tokens(state: ServerState, text: str) -> int:
    tokenizer = state.tokenizer()
    return 0 if tokenizer is None or not text else len(tokenizer.encode(text, add_special_tokens=False))


@dataclass(frozen=True, slots=True)
class _OutputFormats:
    """The formats of one request's output."""

    reasoning: ReasoningFormat | None
    calls: ToolFormat | None

    @property
    def are_plugins(self) -> bool:
        """Whether all formats are plugins of vLLM's interface, which decide about special tokens themselves."""
        formats = [format for format in (self.reasoning, self.calls) if format is not None]
        return all(isinstance(format, VllmReasoningFormat | VllmToolFormat) for format in formats)


def _for_plugins(
    formats: _OutputFormats, state: ServerState, conversation: Conversation, params: SamplingParams
) -> tuple[_OutputFormats, SamplingParams]:
    """Return formats and params after plugins of vLLM's interface read and adjusted the request. Raise PluginError."""
    reasoning = formats.reasoning
    calls = formats.calls
    if not isinstance(reasoning, VllmReasoningFormat) and not isinstance(calls, VllmToolFormat):
        return formats, params
    request = _parser_request(state, conversation, params)
    if isinstance(reasoning, VllmReasoningFormat):
        request = reasoning.adjusted(request)
    if isinstance(calls, VllmToolFormat):
        request = calls.adjusted(request)
    params = _with_values(
        params, skip_special_tokens=request.skip_special_tokens, structured_outputs=request.structured_outputs
    )
    if isinstance(reasoning, VllmReasoningFormat):
        reasoning = reasoning.for_request(request)
    if isinstance(calls, VllmToolFormat):
        calls = calls.for_request(request)
    return _OutputFormats(reasoning, calls), params


def _parser_request(state: ServerState, conversation: Conversation, params: SamplingParams) -> ParserRequest:
    choice = conversation.tool_choice
    return ParserRequest(
        messages=list(conversation.messages),
        tools=[ChatCompletionToolsParam.model_validate(tool) for tool in conversation.tools] or None,
        tool_choice=named_choice(choice.name) if isinstance(choice, NamedTool) else choice,
        parallel_tool_calls=conversation.parallel_tool_calls,
        reasoning_effort=conversation.reasoning_effort,
        chat_template_kwargs={**state.config.default_chat_template_kwargs, **conversation.keywords},
        documents=None if conversation.documents is None else list(conversation.documents),
        structured_outputs=params.structured_outputs,
        skip_special_tokens=params.skip_special_tokens,
        stream=params.output_kind is RequestOutputKind.DELTA,
    )


def _parsers(
    formats: _OutputFormats, conversation: Conversation, tools: Sequence[Tool], prompt: str
) -> list[Callable[[], Parser]]:
    """Return factories of the reader's stages: reasoning first, then tool calls."""
    stages: list[Callable[[], Parser]] = []
    reasoning = formats.reasoning
    by_format = bool(tools) and conversation.tool_choice == "auto"
    if reasoning is not None:
        stages.append(partial(reasoning.parser, prompt))
        if isinstance(reasoning, LeavesMarkup) and not by_format:
            stages.append(reasoning.plain)
    if formats.calls is not None:
        stages.append(partial(formats.calls.parser, tools))
    return stages


def _format_of_calls(state: ServerState, conversation: Conversation) -> ToolFormat | None:
    match conversation.tool_choice:
        case NamedTool(name):
            return Named(name)
        case "required":
            return Required()
        case _:
            return state.formats.tools


# Tools.

MAX_TOOLS: Final = 1_024
MAX_TOOLS_CHARS: Final = 1 << 20
"""Maximum length of all tools together, in characters."""

_NAME: Final = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
TOOL_KEYS: Final = frozenset({"type", "function"})
FUNCTION_KEYS: Final[Mapping[str, tuple[type, ...]]] = {
    "name": (str,),
    "description": (str, type(None)),
    "parameters": (dict, type(None)),
    "strict": (bool, type(None)),
}


def is_function(tool: Mapping[str, Any]) -> bool:
    """Return whether a tool is a function, not a hosted tool of a provider."""
    return not isinstance(tool.get("type"), str) or tool["type"] == "function"


def checked_tools(tools: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """Return the tools. Raise RequestError naming the first invalid one."""
    if len(tools) > MAX_TOOLS:
        raise RequestError("tools", f"there are {len(tools)} tools; at most {MAX_TOOLS} are allowed")
    by_name: dict[str, Tool] = {}
    for index, offered in enumerate(tools):
        path = f"tools[{index}]"
        tool = _checked_tool(path, offered)
        if tool.name in by_name:
            raise RequestError(f"{path}.function.name", f"{path}.function.name: two tools have the name {tool.name!r}")
        by_name[tool.name] = tool
    if sum(len(str(tool)) for tool in tools) > MAX_TOOLS_CHARS:
        raise RequestError("tools", f"the tools have more than {MAX_TOOLS_CHARS} characters; shorten them")
    return list(by_name.values())


def _checked_tool(path: str, tool: object) -> Tool:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise RequestError(f"{path}.type", f'{path} must be an object of type "function"')
    _only_known(path, tool, TOOL_KEYS)
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{path}.function", f"{path}.function must be an object with a name")
    _only_known(f"{path}.function", function, FUNCTION_KEYS)
    for key, types in FUNCTION_KEYS.items():
        if not isinstance(function.get(key, None if key != "name" else 0), types):
            kind = {"parameters": "an object (a JSON schema)", "strict": "true or false"}.get(key, "a string")
            raise RequestError(f"{path}.function.{key}", f"{path}.function.{key} must be {kind}")
    if not _NAME.fullmatch(function["name"]):
        raise RequestError(
            f"{path}.function.name",
            f"{path}.function.name must have 1 to 128 letters, digits, underscores, dots or dashes",
        )
    return Tool(function["name"], function.get("parameters") or {}, bool(function.get("strict")))


def _only_known(path: str, value: Mapping[str, Any], known_keys: Mapping[str, Any] | frozenset[str]) -> None:
    unknown = next((key for key in value if key not in known_keys), None)
    if unknown is not None:
        raise RequestError(f"{path}.{str(unknown)[:80]}", f"{path} has no field {str(unknown)[:80]!r}")


def _callable_tools(state: ServerState, conversation: Conversation) -> list[Tool]:
    """Return the tools that may be called. Raise RequestError."""
    choice = conversation.tool_choice
    tools = checked_tools(conversation.tools) if conversation.tools else []
    if choice == "none":
        return []
    if choice == "auto":
        if tools and (state.formats.tools is None or not state.formats.may_choose):
            raise RequestError(
                "tool_choice",
                'tool_choice "auto" needs a format of tool calls, which the chat template does not show or a flag '
                'switched off; use "required", name one tool, or serve the model with --enable-auto-tool-choice and '
                "--tool-call-parser",
            )
        return tools
    if not tools:
        raise RequestError("tool_choice", "tool_choice needs tools")
    if choice == "required":
        return tools
    chosen = [tool for tool in tools if tool.name == choice.name]
    if not chosen:
        field = "tool_choice.function.name"
        raise RequestError(field, f"{field} is {choice.name[:128]!r}, which is not among the tools")
    return chosen


# Grammars, as structural tags, of output that may call tools in the model's own format.

_ANY_OBJECT = {"type": "object"}
_ANY_TEXT = {"type": "any_text"}
_LINE = {"type": "regex", "pattern": r"\n?"}


def _add_grammar(
    state: ServerState, params: SamplingParams, conversation: Conversation, tools: Sequence[Tool]
) -> SamplingParams:
    """Return the params with the grammar of tool calls. Raise RequestError if it excludes structured_outputs."""
    structured = params.structured_outputs
    choice = conversation.tool_choice
    parallel = conversation.parallel_tool_calls
    if structured is None and choice == "auto":
        strict = None if state.formats.tools is None else strict_calls(state.formats.tools, tools, parallel=parallel)
        return params if strict is None else _with_values(params, structured_outputs=strict)
    if structured is None or choice != "auto":  # A required call leaves no text to constrain.
        schema = schema_of_named(tools[0]) if choice != "required" else schema_of_required(tools, parallel=parallel)
        return _with_values(params, structured_outputs=StructuredOutputsParams(json=schema))
    grammar = None
    if state.formats.tools is not None:
        grammar = output_or_calls(structured, state.formats.tools, tools, state.special_texts, parallel=parallel)
    if grammar is None:
        raise RequestError(
            "structured_outputs",
            'structured_outputs would prevent tool calls; leave one of them out, or set tool_choice "none"',
        )
    return _with_values(params, structured_outputs=grammar)


def output_or_calls(
    structured: StructuredOutputsParams,
    format: ToolFormat,
    tools: Sequence[Tool],
    special: Collection[str],
    *,
    parallel: bool,
) -> StructuredOutputsParams | None:
    """Return a grammar of either the structured output or tool calls; None if no grammar can distinguish them.

    Calls conform to their tools' schemas where the format defines the content between its delimiters. `special`: the
    tokenizer's special tokens, which `any_text` between delimiters excludes. `parallel`: allow several calls. Raise
    RequestError for an invalid schema.
    """
    constraint = _constraint(structured)
    brackets = format.brackets(tools) if isinstance(format, Brackets) else ()
    if constraint is None or not brackets or any(_has_special(bracket, special) for bracket in brackets):
        return None
    calls = {
        "type": "tags_with_separator",
        "tags": [_tag(bracket) for bracket in brackets],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    tag = {"format": {"type": "or", "elements": [constraint, calls]}}
    return replace(structured, structural_tag=tag, json=None, regex=None, choice=None, grammar=None, json_object=None)


def strict_calls(format: ToolFormat, tools: Sequence[Tool], *, parallel: bool) -> StructuredOutputsParams | None:
    """Return a grammar of free text in which calls of strict tools conform to their schemas; None if not possible.

    Calls of other tools have arbitrary arguments. `parallel`: allow several calls. Raise RequestError for an invalid
    schema.
    """
    if not any(tool.strict for tool in tools) or not isinstance(format, Brackets):
        return None
    brackets = format.brackets([tool if tool.strict else replace(tool, parameters=_ANY_OBJECT) for tool in tools])
    if not brackets or any(bracket.call is None for bracket in brackets):
        return None
    calls = {
        "type": "triggered_tags",
        "triggers": [bracket.begin for bracket in brackets],
        "tags": [_tag(bracket) for bracket in brackets],
        "stop_after_first": not parallel,
    }
    return StructuredOutputsParams(structural_tag={"format": calls})


def _constraint(structured: StructuredOutputsParams) -> dict[str, Any] | None:
    """Return the constraint as a structural tag element; None for a structural tag, which may itself contain calls."""
    if structured.json is not None:
        return {"type": "json_schema", "json_schema": json_schema(structured.json)}
    if structured.json_object:
        return {"type": "json_schema", "json_schema": _ANY_OBJECT}
    if structured.choice:
        return {"type": "or", "elements": [{"type": "const_string", "value": choice} for choice in structured.choice]}
    if structured.regex is not None:
        return {"type": "regex", "pattern": whole_pattern(structured.regex)}
    return None


def _tag(bracket: Bracket) -> dict[str, Any]:
    """Return the structural tag of calls between the format's delimiters."""
    content: dict[str, Any] = _ANY_TEXT
    if bracket.call is not None:
        call = {"type": "json_schema", "json_schema": bracket.call}
        content = {"type": "sequence", "elements": [_LINE, call, _LINE]}
    return {"type": "tag", "begin": bracket.begin, "content": content, "end": bracket.end}


def _has_special(bracket: Bracket, special: Collection[str]) -> bool:
    return any(token in mark for mark in bracket.inner for token in special)


def _with_values(params: SamplingParams, **values: Any) -> SamplingParams:
    """Return a copy with these values, which need no verification."""
    params = copy(params)
    for name, value in values.items():
        setattr(params, name, value)
    return params
