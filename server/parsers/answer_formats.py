"""How the served model writes tool calls and reasoning: by flag, else as its chat template and its family tell."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from pagoda.common.config.defaults import ResolvedRow
from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.models.family import AnswerFormat
from pagoda.common.text.chat_template import built_in_template, template_of
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.parsers.detection import Probe, reasoning_of, tools_of
from pagoda.server.parsers.parser import ReasoningFormat, ToolFormat
from pagoda.server.parsers.registry import AUTO, NONE, reasoning_format, tool_format

logger = logging.getLogger(__name__)

RenderTemplate = Callable[..., str]
"""Renders a template: `render(template, messages, special_tokens=..., ...)`, see `common.text.chat_template.render`."""

_CHATML: Final = "<|im_start|>assistant"

NOT_SHOWN: Final = (
    "the model's chat template does not show it any tools; leave them out, or serve the model with a --chat-template "
    "that shows them (chatml_tools for ChatML models)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormats:
    """The formats of one served model, and the template of its conversations with tools."""

    tools: ToolFormat | None = None
    may_choose: bool = False  # whether tool_choice auto is accepted
    reasoning: ReasoningFormat | None = None
    tools_template: str | None = None  # of conversations with tools, in place of the model's
    shows_tools: bool = True  # whether the template of conversations with tools shows them
    rows: tuple[ResolvedRow, ...] = ()  # for --explain-config

    def log(self) -> None:
        """Log what was found from the chat template, and warn if another template shows the tools."""
        for row in self.rows:
            logger.info("--%s: %s, %s", row.name.replace("_", "-"), row.value, row.reason)
        if self.tools_template is not None:
            logger.warning(
                "the model's chat template shows no tools: conversations with tools use the built-in template "
                "chatml_tools (--chat-template names another)"
            )


def answer_formats(
    config: ServerConfig,
    engine: EngineConfig,
    given: str | None,
    hints: AnswerFormat,
    tokenizer: Tokenizer | None,
    render: RenderTemplate,
) -> AnswerFormats:
    """Return the formats of a model. Renders some conversations. Raises ConfigError.

    `given`: the template that stands in for the model's; `hints`: the formats of the model's family.
    """
    structured = engine.structured_outputs
    template = _ToolTemplate.of(given, tokenizer, partial(render, **config.default_chat_template_kwargs))
    tools, why_tools = _tools(config, hints, template)
    reasoning, why_reasoning = _reasoning(structured.reasoning_parser, hints, template)
    return AnswerFormats(
        tools=tool_format(tools, config.tool_parser_plugin, tokenizer) if tools else None,
        may_choose=config.enable_auto_tool_choice or (bool(tools) and config.tool_call_parser in (None, AUTO)),
        reasoning=reasoning_format(reasoning, structured.reasoning_parser_plugin, tokenizer) if reasoning else None,
        tools_template=template.built_in,
        shows_tools=template.shows_tools,
        rows=tuple(_rows(tools, why_tools, reasoning, why_reasoning)),
    )


def _rows(tools: str, why_tools: str, reasoning: str, why_reasoning: str) -> Iterator[ResolvedRow]:
    if why_tools:
        yield ResolvedRow("tool_call_parser", tools or NONE, "model", why_tools)
    if why_reasoning:
        yield ResolvedRow("reasoning_parser", reasoning or NONE, "model", why_reasoning)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ToolTemplate:
    """What is known of the model's chat template."""

    plain: Probe | None  # None: there is no template
    with_tools: Probe | None
    built_in: str | None = None  # the template that stands in for one that shows no tools

    @classmethod
    def of(cls, given: str | None, tokenizer: Tokenizer | None, render: RenderTemplate) -> _ToolTemplate:
        if tokenizer is None:
            return cls(plain=None, with_tools=None)

        def probe(source: str) -> Probe:
            special = tokenizer.special_tokens
            return Probe.of(source, partial(render, source, special_tokens=special))

        source = template_of(tokenizer, given, with_tools=False)
        for_tools = template_of(tokenizer, given, with_tools=True)
        if source is None or for_tools is None:
            return cls(plain=None, with_tools=None)
        plain = probe(source)
        shown = plain if for_tools == source else probe(for_tools)
        if shown.shows_tools or given is not None or _CHATML not in plain.plain:
            return cls(plain=plain, with_tools=shown)
        built_in = built_in_template("chatml_tools")
        return cls(plain=plain, with_tools=probe(built_in), built_in=built_in)

    @property
    def shows_tools(self) -> bool:
        return self.with_tools is None or self.with_tools.shows_tools


_BY_TEMPLATE: Final = "as the chat template shows"
_BY_FAMILY: Final = "the format of the model's answers"


def _tools(config: ServerConfig, hints: AnswerFormat, template: _ToolTemplate) -> tuple[str, str]:
    """Return the name of the format of tool calls, "" for none, and why unless a flag names it."""
    if config.tool_call_parser not in (None, AUTO):
        return ("" if config.tool_call_parser == NONE else config.tool_call_parser or ""), ""
    if hints.fixed:
        return hints.tools, _BY_FAMILY
    if template.with_tools is None:
        return "", ""
    name = tools_of(template.with_tools, hints.tools)
    if template.built_in is not None:
        return name, "as the built-in template chatml_tools shows, since the model's shows no tools"
    if not template.shows_tools:
        return "", "the chat template shows no tools"
    return name, _BY_TEMPLATE if name else "the chat template shows no calls in a known format"


def _reasoning(given: str, hints: AnswerFormat, template: _ToolTemplate) -> tuple[str, str]:
    """Return the name of the format of reasoning, "" for none, and why unless a flag names it."""
    if given not in ("", AUTO):
        return ("" if given == NONE else given), ""
    if hints.fixed:
        return hints.reasoning, _BY_FAMILY
    if template.plain is None:
        return "", ""
    name = reasoning_of(template.plain, hints.reasoning)
    return name, _BY_TEMPLATE if name else "the chat template shows no reasoning"
