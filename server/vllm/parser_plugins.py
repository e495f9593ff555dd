"""Run tool and reasoning parsers of vLLM's interface as formats: a parser object per output, whole or streamed.

As in vLLM, a streamed output goes through `extract_..._streaming` piece by piece, with its token ids, and a whole one
through the other method. An exception of a parser fails its request with PluginError.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

from pagoda.common.errors import ConfigError, PluginError
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.parsers.parser import Arguments, Content, Event, Parser, Reasoning, Tool, ToolCall
from pagoda.server.vllm.parser_interface import (
    DeltaMessage,
    ExtractedToolCallInformation,
    ParserRequest,
    ReasoningParser,
    ReasoningParserManager,
    ToolParser,
    ToolParserManager,
)
from pagoda.server.vllm.tokenizer_view import HfTokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")


class PluginTokenizer(HfTokenizer):
    """The tokenizer that parsers are constructed with. Its vocabulary is read once, as parsers are many."""

    def get_vocab(self) -> dict[str, int]:
        return self._vocabulary

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        return super().get_vocab()


@dataclass(frozen=True, slots=True)
class VllmToolFormat:
    """A registered tool parser. Implements ToolFormat; `for_request` must come before `parser`."""

    name: str
    make: type[ToolParser]
    tokenizer: PluginTokenizer | None = None
    request: ParserRequest | None = None

    def bound(self, tokenizer: Tokenizer) -> VllmToolFormat:
        """Return the format for a model's tokenizer."""
        return replace(self, tokenizer=PluginTokenizer(tokenizer))

    def adjusted(self, request: ParserRequest) -> ParserRequest:
        """Return a request as the parser's `adjust_request` leaves it. Raise PluginError."""
        return _adjusted(self._plugin, self._construct(request), request)

    def for_request(self, request: ParserRequest) -> VllmToolFormat:
        """Return the format whose parsers read `request`."""
        return replace(self, request=request)

    def parser(self, tools: Sequence[Tool]) -> Parser:
        """Return a parser for one output. Raise PluginError if its constructor fails."""
        request = self.request or ParserRequest()
        parser = self._construct(request)
        if not request.stream:
            return _WholeCalls(self._plugin, parser, request)
        return _StreamedCalls(self._plugin, parser, request, _encode(self.tokenizer))

    def _construct(self, request: ParserRequest) -> ToolParser:
        tools = request.tools or []
        takes_tools = _num_positional(self.make) > 1  # Older parsers take the tokenizer alone.
        tokenizer = _required(self.tokenizer)
        arguments = (tokenizer, tools) if takes_tools else (tokenizer,)
        return _call(self._plugin, partial(self.make, *arguments))

    @property
    def _plugin(self) -> str:
        return f"tool parser {self.name!r}"


@dataclass(frozen=True, slots=True)
class VllmReasoningFormat:
    """A registered reasoning parser. Implements ReasoningFormat; `starts` and `ends` are known once it is bound."""

    name: str
    make: type[ReasoningParser]
    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    tokenizer: PluginTokenizer | None = None
    request: ParserRequest | None = None

    def bound(self, tokenizer: Tokenizer) -> VllmReasoningFormat:
        """Return the format for a model's tokenizer. Raise ConfigError if the parser cannot be constructed."""
        format = replace(self, tokenizer=PluginTokenizer(tokenizer))
        try:
            parser = format._construct(ParserRequest())
            start = parser.reasoning_start_str
            end = parser.reasoning_end_str
        except PluginError as error:
            raise ConfigError("--reasoning-parser", str(error)) from error
        return replace(format, starts=(start,) if start else (), ends=(end,) if end else ())

    def adjusted(self, request: ParserRequest) -> ParserRequest:
        """Return a request as the parser's `adjust_request` leaves it. Raise PluginError."""
        return _adjusted(self._plugin, self._construct(request), request)

    def for_request(self, request: ParserRequest) -> VllmReasoningFormat:
        """Return the format whose parsers read `request`."""
        return replace(self, request=request)

    def thinks(self, prompt: str) -> bool:
        """Return whether output for this prompt may start with reasoning: the prompt has not ended it."""
        parser = self._construct(self.request or ParserRequest())
        return not _call(self._plugin, partial(parser.is_reasoning_end, _encode(self.tokenizer)(prompt)))

    def parser(self, prompt: str) -> Parser:
        """Return a parser for one output. Raise PluginError if its constructor fails."""
        request = self.request or ParserRequest()
        parser = self._construct(request)
        if not request.stream:
            return _WholeReasoning(self._plugin, parser, request)
        encode = _encode(self.tokenizer)
        prompt_ids = encode(prompt)
        ended = _call(self._plugin, partial(parser.is_reasoning_end, prompt_ids))
        if not ended:
            _call(self._plugin, partial(parser.adjust_initial_state_from_prompt, prompt_ids))
        return _StreamedReasoning(self._plugin, parser, encode, ended=ended)

    def _construct(self, request: ParserRequest) -> ReasoningParser:
        kinds = {parameter.kind for parameter in inspect.signature(self.make).parameters.values()}
        takes_keywords = inspect.Parameter.VAR_KEYWORD in kinds
        keywords = {"chat_template_kwargs": request.chat_template_kwargs} if takes_keywords else {}
        make: Callable[..., ReasoningParser] = self.make
        return _call(self._plugin, partial(make, _required(self.tokenizer), **keywords))

    @property
    def _plugin(self) -> str:
        return f"reasoning parser {self.name!r}"


def tool_plugin(name: str) -> VllmToolFormat | None:
    """Return the tool parser that a plugin registered under a name, if any. Raises what its import raises."""
    parsers = ToolParserManager.parsers
    return VllmToolFormat(name, parsers.get(name)) if name in parsers else None


def reasoning_plugin(name: str) -> VllmReasoningFormat | None:
    """Return the reasoning parser that a plugin registered under a name, if any. Raises what its import raises."""
    parsers = ReasoningParserManager.parsers
    return VllmReasoningFormat(name, parsers.get(name)) if name in parsers else None


# Parsers of one output.


class _WholeText:
    """Collects the text until the output ends, for a parser that reads all of it at once."""

    def __init__(self, plugin: str, request: ParserRequest) -> None:
        self._plugin = plugin
        self._request = request
        self._parts: list[str] = []

    def feed(self, text: str) -> list[Event]:
        self._parts.append(text)
        return []

    @property
    def text(self) -> str:
        return "".join(self._parts)


class _WholeCalls(_WholeText):
    def __init__(self, plugin: str, parser: ToolParser, request: ParserRequest) -> None:
        super().__init__(plugin, request)
        self._parser = parser

    def finish(self) -> list[Event]:
        parsed = _call(self._plugin, partial(self._parser.extract_tool_calls, self.text, self._request))
        if not isinstance(parsed, ExtractedToolCallInformation):
            raise _wrong_result(self._plugin, "extract_tool_calls", "ExtractedToolCallInformation", parsed)
        if not parsed.tools_called:
            return [Content(parsed.content or self.text)]
        has_text = bool(parsed.content and parsed.content.strip())
        events: list[Event] = [Content(parsed.content or "")] if has_text else []
        for index, call in enumerate(parsed.tool_calls):
            events.append(ToolCall(index, call.function.name, call.id))
            events.append(Arguments(index, call.function.arguments))
        return events


class _WholeReasoning(_WholeText):
    def __init__(self, plugin: str, parser: ReasoningParser, request: ParserRequest) -> None:
        super().__init__(plugin, request)
        self._parser = parser

    def finish(self) -> list[Event]:
        parsed = _call(self._plugin, partial(self._parser.extract_reasoning, self.text, self._request))
        match parsed:
            case (str() | None as reasoning, str() | None as content):
                return [Reasoning(reasoning or ""), Content(content or "")]
        raise _wrong_result(self._plugin, "extract_reasoning", "a pair of texts", parsed)


class _TokenHistory:
    """The text and token ids so far, in the arguments of a streaming method."""

    def __init__(self) -> None:
        self.text = ""
        self.ids: list[int] = []

    def extended(self, text: str, ids: list[int]) -> tuple[str, str, str, list[int], list[int], list[int]]:
        """Append a piece and return previous, current and new text, and the ids of each."""
        before = self.text
        ids_before = self.ids
        self.text = before + text
        self.ids = ids_before + ids
        return before, self.text, text, ids_before, self.ids, ids


class _StreamedCalls:
    """Implements TokenParser."""

    def __init__(
        self, plugin: str, parser: ToolParser, request: ParserRequest, encode: Callable[[str], list[int]]
    ) -> None:
        self._plugin = plugin
        self._parser = parser
        self._request = request
        self._encode = encode
        self._history = _TokenHistory()
        self._ids: dict[int, str] = {}  # Ids of calls whose name has not come yet.
        self._named: set[int] = set()
        self._last_call: int | None = None  # The last call of the last delta.

    def feed(self, text: str) -> list[Event]:
        return self.feed_tokens(text, None)

    def feed_tokens(self, text: str, token_ids: Sequence[int] | None) -> list[Event]:
        ids = self._encode(text) if token_ids is None else list(token_ids)
        extract = partial(self._parser.extract_tool_calls_streaming, *self._history.extended(text, ids))
        delta = _call(self._plugin, partial(extract, self._request))
        events = _text_events(self._plugin, "extract_tool_calls_streaming", delta)
        if delta is None:
            return events
        self._last_call = delta.tool_calls[-1].index if delta.tool_calls else None
        for call in delta.tool_calls:
            name, arguments = (call.function.name, call.function.arguments) if call.function else (None, None)
            if call.id:
                self._ids.setdefault(call.index, call.id)
            if name and call.index not in self._named:
                self._named.add(call.index)
                events.append(ToolCall(call.index, name, self._ids.get(call.index)))
            if arguments:
                self._check_named(call.index)
                events.append(Arguments(call.index, arguments))
        return events

    def finish(self) -> list[Event]:
        if self._last_call is None or self._last_call not in self._named:
            return []
        rest = _call(self._plugin, self._parser.get_remaining_unstreamed_args)
        return [Arguments(self._last_call, rest)] if rest else []

    def _check_named(self, index: int) -> None:
        if index not in self._named:
            raise PluginError(f"{self._plugin} failed: it streams arguments of call {index} before its name")


class _StreamedReasoning:
    """Implements TokenParser."""

    def __init__(
        self, plugin: str, parser: ReasoningParser, encode: Callable[[str], list[int]], *, ended: bool
    ) -> None:
        self._plugin = plugin
        self._parser = parser
        self._encode = encode
        self._ended = ended
        self._history = _TokenHistory()

    def feed(self, text: str) -> list[Event]:
        return self.feed_tokens(text, None)

    def feed_tokens(self, text: str, token_ids: Sequence[int] | None) -> list[Event]:
        if self._ended:
            return [Content(text)]  # Even without text the next stage reads the token ids.
        ids = self._encode(text) if token_ids is None else list(token_ids)
        delta = _call(
            self._plugin, partial(self._parser.extract_reasoning_streaming, *self._history.extended(text, ids))
        )
        ended = partial(self._parser.is_reasoning_end_streaming, self._history.ids, ids)
        self._ended = bool(_call(self._plugin, ended))
        return _text_events(self._plugin, "extract_reasoning_streaming", delta)

    def finish(self) -> list[Event]:
        return []


def _text_events(plugin: str, method: str, delta: Any) -> list[Event]:
    """Return the reasoning and content of a delta. Raise PluginError if it is none."""
    if delta is None:
        return []
    if not isinstance(delta, DeltaMessage):
        raise _wrong_result(plugin, method, "DeltaMessage or None", delta)
    reasoning = delta.reasoning or delta.reasoning_content
    events: list[Event] = [Reasoning(reasoning)] if reasoning else []
    return [*events, Content(delta.content)] if delta.content else events


def _adjusted(plugin: str, parser: ToolParser | ReasoningParser, request: ParserRequest) -> ParserRequest:
    changed = _call(plugin, partial(parser.adjust_request, copy(request)))
    if not isinstance(changed, ParserRequest):
        raise _wrong_result(plugin, "adjust_request", "the request", changed)
    return changed


def _required(tokenizer: PluginTokenizer | None) -> PluginTokenizer:
    if tokenizer is None:
        raise PluginError("parser plugins need a tokenizer, which is disabled (--skip-tokenizer-init)")
    return tokenizer


def _encode(tokenizer: PluginTokenizer | None) -> Callable[[str], list[int]]:
    return partial(_required(tokenizer).encode, add_special_tokens=False)


def _num_positional(make: Callable[..., Any]) -> int:
    """Return the number of positional arguments that a callable takes, at most 2 of any number."""
    kinds = [parameter.kind for parameter in inspect.signature(make).parameters.values()]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return 2 if inspect.Parameter.VAR_POSITIONAL in kinds else sum(kind in positional for kind in kinds)


def _call(plugin: str, method: Callable[[], T]) -> T:
    """Call a plugin. Raise PluginError for any exception of it, whose traceback is logged."""
    try:
        return method()
    except PluginError:
        raise
    except Exception as error:
        logger.exception("%s failed", plugin)
        cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise PluginError(f"{plugin} failed: {cause}") from error


def _wrong_result(plugin: str, method: str, expected: str, result: Any) -> PluginError:
    return PluginError(f"{plugin} failed: {method} returned {type(result).__name__} instead of {expected}")
