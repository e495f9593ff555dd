"""What answers a conversation: its prompt, its params, and the reader of its answers.

Knows templates and parsers. Does not know the shape of a request or of an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from pagoda.common.errors import PromptTooLongError, RequestError
from pagoda.common.sampling_params import SamplingParams, StructuredOutputsParams
from pagoda.common.text.chat_template import render_chat, template_of, variables_of
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.chat.conversation import Conversation, NamedTool, checked_tools, effort_variables, is_effort_ignored
from pagoda.server.chat.tool_grammar import form_or_calls, strict_calls
from pagoda.server.http.fields.base import Ignored
from pagoda.server.http.state import ServerState
from pagoda.server.parsers.output_parser import OutputParser
from pagoda.server.parsers.parser import LeavesMarkup, Parser, Tool, ToolFormat
from pagoda.server.parsers.tool.forced import Named, Required, schema_of_named, schema_of_required
from pagoda.server.processing.tokenization import encode_kept

LONG_CONVERSATION: Final = 16_384
"""Characters of a conversation, tools and documents included, from which rendering and tokenising run in a thread, so
that other requests keep streaming."""

_PLAIN: Final = SamplingParams()

_THINKING: Final = ("reasoning", "reasoning_content", "thinking")
"""Names of a message's thinking, in clients and in templates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation ready to run.

    `prompt`: for the engine. `reader`: makes the reader of one of the n answers. `ignored`: fields, by chat
    completions' names, that have no effect with this model.
    """

    prompt: dict[str, Any]
    params: SamplingParams
    reader: Callable[[], OutputParser]
    ignored: tuple[Ignored, ...] = ()


async def prepare(state: ServerState, conversation: Conversation, params: SamplingParams) -> ChatPrompt:
    """Render, tokenise, and adjust `params` to the tools. Raises RequestError naming chat completions' fields."""
    state.llm().check_generates()
    tools = _callable_tools(state, conversation)
    if tools:
        params = _with_form(state, params, conversation, tools)
    ignored = _ignored_effort(state, conversation)
    if ignored and state.config.strict_requests:
        raise RequestError(ignored[0].path, ignored[0].reason)
    prompt = await rendered(state, conversation, params)
    parsers = _parsers(state, conversation, tools, prompt["prompt"])
    if not parsers:
        return ChatPrompt(prompt=prompt, params=params, reader=OutputParser, ignored=ignored)
    hidden = state.special_marks if params.skip_special_tokens else None
    count = None if state.reasoning_format is None else partial(_count_tokens, state)

    def reader() -> OutputParser:
        stages = [make() for make in parsers]
        return OutputParser(stages, hidden=hidden, parallel_calls=conversation.parallel_tool_calls, count=count)

    params = replace(params, skip_special_tokens=False)
    return ChatPrompt(prompt=prompt, params=params, reader=reader, ignored=ignored)


def _ignored_effort(state: ServerState, conversation: Conversation) -> tuple[Ignored, ...]:
    """Return the reasoning effort as an ignored hint where the chat template has no switch for it."""
    effort, tokenizer = conversation.reasoning_effort, state.tokenizer()
    if effort is None or tokenizer is None:
        return ()
    template = _template_of(tokenizer, conversation, state)
    if not is_effort_ignored(effort, variables_of(template or ""), thinks=state.reasoning_format is not None):
        return ()
    reason = (
        f"the model's chat template does not know reasoning_effort, so {effort!r} would change nothing; "
        "leave it out, or use chat_template_kwargs"
    )
    return (Ignored("reasoning_effort", "hint", reason),)


def _count_tokens(state: ServerState, text: str) -> int:
    tokenizer = state.tokenizer()
    return 0 if tokenizer is None or not text else len(tokenizer.encode(text, add_special_tokens=False))


def _callable_tools(state: ServerState, conversation: Conversation) -> list[Tool]:
    """The tools that this answer may call. Raises RequestError."""
    tools, choice = checked_tools(conversation.tools), conversation.tool_choice
    if choice == "none":
        return []
    if choice == "auto":
        if tools and (state.tool_format is None or not state.config.enable_auto_tool_choice):
            raise RequestError(
                "tool_choice",
                'tool_choice "auto" needs a server with --enable-auto-tool-choice and --tool-call-parser; '
                "without them calls can be required, or one tool named",
            )
        return tools
    if not tools:
        raise RequestError("tool_choice", "tool_choice needs tools to choose from; give tools")
    if choice == "required":
        return tools
    named = [tool for tool in tools if tool.name == choice.name]
    if not named:
        raise RequestError("tool_choice", f"there is no tool {choice.name[:128]!r} among the tools")
    return named


def _with_form(
    state: ServerState, params: SamplingParams, conversation: Conversation, tools: Sequence[Tool]
) -> SamplingParams:
    """The params, with the form of an answer that is calls or may be. Raises RequestError where it cannot be both."""
    asked, choice, many = params.structured_outputs, conversation.tool_choice, conversation.parallel_tool_calls
    if asked is None:
        if choice == "auto":
            strict = None if state.tool_format is None else strict_calls(state.tool_format, tools, parallel=many)
            return params if strict is None else replace(params, structured_outputs=strict)
        schema = schema_of_named(tools[0]) if choice != "required" else schema_of_required(tools, parallel=many)
        return replace(params, structured_outputs=StructuredOutputsParams(json=schema))
    both = None
    if choice == "auto" and state.tool_format is not None:
        both = form_or_calls(asked, state.tool_format, tools, state.special_texts, parallel=many)
    if both is None:
        raise RequestError(
            "structured_outputs",
            "structured_outputs would keep the model from calling tools; leave one of them out, "
            'or set tool_choice "none"',
        )
    return replace(params, structured_outputs=both)


def _parsers(
    state: ServerState, conversation: Conversation, tools: Sequence[Tool], prompt: str
) -> list[Callable[[], Parser]]:
    """What makes the stages of a reader: thinking first, then calls."""
    stages: list[Callable[[], Parser]] = []
    thinking = state.reasoning_format
    by_format = bool(tools) and conversation.tool_choice == "auto"
    if thinking is not None:
        stages.append(partial(thinking.parser, prompt))
        if isinstance(thinking, LeavesMarkup) and not by_format:
            stages.append(thinking.plain)
    calls = _format_of_calls(state, conversation) if tools else None
    if calls is not None:
        stages.append(partial(calls.parser, tools))
    return stages


def _format_of_calls(state: ServerState, conversation: Conversation) -> ToolFormat | None:
    match conversation.tool_choice:
        case NamedTool(name):
            return Named(name)
        case "required":
            return Required()
        case _:
            return state.tool_format


async def rendered(state: ServerState, conversation: Conversation, params: SamplingParams = _PLAIN) -> dict[str, Any]:
    """{"prompt": text, "prompt_token_ids": ids}; of a long text the ids that truncation by `params` keeps.

    Raises RequestError.
    """
    tokenizer = state.tokenizer()
    if tokenizer is None:
        raise RequestError(
            "messages", "chat needs a tokenizer, which is switched off; use /v1/completions with token ids"
        )
    if conversation.template is not None and not state.config.trust_request_chat_template:
        raise RequestError(
            "chat_template", "this server takes no templates from requests (--trust-request-chat-template)"
        )
    shown = (*conversation.messages, *conversation.tools, *(conversation.documents or ()), conversation.keywords)
    size = sum(len(str(each)) for each in shown)
    if size < LONG_CONVERSATION:
        return _rendered(tokenizer, conversation, params, state)
    return await asyncio.to_thread(_rendered, tokenizer, conversation, params, state)


def _rendered(
    tokenizer: Tokenizer, conversation: Conversation, params: SamplingParams, state: ServerState
) -> dict[str, Any]:
    tools = _shown_tools(state, conversation)
    template = _template_of(tokenizer, conversation, state)
    effort = effort_variables(conversation.reasoning_effort, variables_of(template or ""))
    text = render_chat(
        tokenizer,
        [_with_thinking(message) for message in conversation.messages],
        template=template,
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message,
        tools=tools,
        must_show_tools=conversation.tool_choice == "auto",
        documents=conversation.documents,
        content_format=state.config.chat_template_content_format,
        **{**state.config.default_chat_template_kwargs, **effort, **conversation.keywords},
    )
    ids = encode_kept(tokenizer, text, params, state.engine.max_model_len, conversation.add_special_tokens)
    return {"prompt": text, "prompt_token_ids": ids}


def _template_of(tokenizer: Tokenizer, conversation: Conversation, state: ServerState) -> str | None:
    source = conversation.template or state.chat_template
    return template_of(tokenizer, source, with_tools=bool(_shown_tools(state, conversation)))


def _with_thinking(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with its thinking under every name by which a template may look for it."""
    thinking = next((message[name] for name in _THINKING if isinstance(message.get(name), str)), None)
    return message if thinking is None else {**dict.fromkeys(_THINKING, thinking), **message}


def _shown_tools(state: ServerState, conversation: Conversation) -> list[Any]:
    """The tools that the template shows to the model."""
    hides = state.config.exclude_tools_when_tool_choice_none and conversation.tool_choice == "none"
    return [] if hides else list(conversation.tools)


# Conversations that are too long: their oldest turns are left out until the rest fits.
#
# Knows messages and prompts. Does not know how a prompt is written.

Message = Mapping[str, Any]


async def prepare_fitting(state: ServerState, conversation: Conversation, params: SamplingParams) -> ChatPrompt:
    """As prepare, without the oldest messages where all of them are too many. Raises as prepare does.

    System messages at the beginning stay, and what is kept begins with a user's. Room is left for max_tokens, at most
    half of the context. The last turn alone is not cut: it may still be refused as too long.
    """
    context = state.llm().max_model_len
    most = context - min(params.max_tokens or 1, context // 2)
    messages = list(conversation.messages)
    head = next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))
    starts = [n for n, message in enumerate(messages) if n > head and message["role"] == "user"]
    if not starts:
        return await prepare(state, conversation, params)

    async def fitting(kept: list[Message]) -> ChatPrompt | None:
        try:
            turn = await prepare(state, replace(conversation, messages=kept), params)
        except PromptTooLongError:
            return None
        return turn if len(turn.prompt["prompt_token_ids"]) <= most else None

    turn = await fitting(messages)
    if turn is not None:
        return turn
    last = messages[:head] + messages[starts.pop() :]
    turn = await fitting(last)
    if turn is None:
        return await prepare(state, replace(conversation, messages=last), params)
    while starts:  # `turn` fits; what is left of `starts` keeps more than it does
        middle = len(starts) // 2
        longer = await fitting(messages[:head] + messages[starts[middle] :])
        if longer is not None:
            turn, starts = longer, starts[:middle]
        else:
            starts = starts[middle + 1 :]
    return turn
