"""Harmony, the format of gpt-oss: an output is a sequence of messages, each with a header that names its channel.

<|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>text for the user

The first header lacks <|start|>assistant, since the prompt ends with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Final, Literal

from pagoda.server.parsers.parser import Content, DelimiterSet, Event, Parser, Reasoning

_START: Final = "<|start|>assistant"
_MESSAGE: Final = "<|message|>"
_HEADER_STARTS: Final = ("<|start|>", "<|channel|>", " to=")  # The last one is a recipient right after the role.
_MESSAGE_ENDS: Final = DelimiterSet(("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>"))
_MAX_HEADER: Final = 512  # Number of characters; a longer header is treated as text.
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w*)")

Kind = Literal["reasoning", "other"]


class HarmonyReasoning:
    """The analysis channel is reasoning. The other channels, which may be tool calls, stay in the content as markup."""

    starts: tuple[str, ...] = ("<|channel|>analysis<|message|>",)
    ends: tuple[str, ...] = ("<|channel|>final<|message|>", "<|channel|>final <|constrain|>json<|message|>")

    def thinks(self, prompt: str) -> bool:
        """Return False only if the prompt already starts the final message."""
        turn = prompt.rpartition(_START)[2] if _START in prompt else ""
        return not any(end in turn for end in self.ends)

    def parser(self, prompt: str) -> Parser:
        return HarmonyParser(keep_markup=True, in_message=not self.thinks(prompt))

    def adapted(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]
    ) -> tuple[list[Mapping[str, Any]], list[Any]]:
        """Return messages and tools for the published template.

        It takes one call per message, before its result; one text beside a call; tools with descriptions.
        """
        shown: list[Mapping[str, Any]] = []
        position = 0
        while position < len(messages):
            message = messages[position]
            calls = messages[position].get("tool_calls")
            position += 1
            if not isinstance(calls, list) or not calls:
                shown.append(message)
                continue
            results = list(takewhile(lambda later: later.get("role") == "tool", messages[position:]))
            position += len(results)
            for index, call in enumerate(calls):
                before = _one_text(message) if index == 0 else {"role": message.get("role")}
                results_of_call = [result for result in results if _is_result(result, call)]
                shown += [{**before, "tool_calls": [call]}, *results_of_call]
                results = [result for result in results if result not in results_of_call]
            shown += results
        return shown, [_described(tool) for tool in tools]

    def plain(self) -> Parser:
        """Return a parser that emits the text of all channels without markup."""
        return HarmonyParser(keep_markup=False)


def _is_result(message: Mapping[str, Any], call: Any) -> bool:
    return isinstance(call, Mapping) and message.get("tool_call_id") == call.get("id")


def _one_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with its content appended to its reasoning, if it has both."""
    content = message.get("content")
    thinking = message.get("thinking")
    if not isinstance(content, str) or not isinstance(thinking, str) or not content or not thinking:
        return message
    return {**{key: value for key, value in message.items() if key != "content"}, "thinking": f"{thinking}\n{content}"}


def _described(tool: Any) -> Any:
    """Return a function with a description, by default an empty one."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or function.get("description") is not None:
        return tool
    return {**tool, "function": {**function, "description": ""}}


class HarmonyParser:
    """Parses headers and messages alternately.

    `keep_markup`: emit messages of other channels, and messages to a tool on the analysis channel, with their markup.
    """

    __slots__ = ("_in_header", "_keep_markup", "_kind", "_seen", "_unread")

    def __init__(self, *, keep_markup: bool, in_message: bool = False) -> None:
        self._keep_markup = keep_markup
        self._in_header = not in_message
        self._kind: Kind = "other"
        self._seen: set[Kind] = set()  # Kinds with a message so far: their next message starts on a new line.
        self._unread = ""

    def feed(self, text: str) -> list[Event]:
        self._unread += text
        return self._run(False)

    def finish(self) -> list[Event]:
        return self._run(True)

    def _run(self, final: bool) -> list[Event]:
        events: list[Event] = []
        while True:
            was_in_header = self._in_header
            events += self._header(final) if was_in_header else self._message(final)
            if self._in_header is was_in_header:
                return events

    def _header(self, final: bool) -> list[Event]:
        text = self._unread
        start = next((header for header in _HEADER_STARTS if text.startswith(header)), "")
        if not start:
            if text and (final or not any(header.startswith(text) for header in _HEADER_STARTS)):
                self._in_header = False
                self._kind = "other"
            return []
        position = text.find(_MESSAGE, 0, _MAX_HEADER)
        if position >= 0:
            end = position + len(_MESSAGE)
            return self._start_message(text[:end], text[end:])
        if len(text) >= _MAX_HEADER:
            self._in_header = False
            self._kind = "other"
            self._unread = text[len(start) :]
            return [Content(start)] if self._keep_markup else []
        if not final:
            return []
        self._unread = ""  # A header without a message is dropped.
        return [Content(text)] if self._keep_markup else []

    def _start_message(self, header: str, rest: str) -> list[Event]:
        channel = _CHANNEL.search(header)
        is_analysis = channel is not None and channel[1] == "analysis"
        is_reasoning = is_analysis and not (self._keep_markup and " to=" in header)
        self._kind = "reasoning" if is_reasoning else "other"
        self._in_header = False
        self._unread = rest
        if self._keep_markup and not is_reasoning:
            complete = header.startswith(("<|start|>", "<|channel|>"))
            return [Content(header if complete else _START + header)]
        is_first = self._kind not in self._seen
        self._seen.add(self._kind)
        return [] if is_first else [self._event("\n")]

    def _message(self, final: bool) -> list[Event]:
        text, end, rest = _MESSAGE_ENDS.split(self._unread, final=final)
        self._unread = rest
        if end:
            self._in_header = True
            if end in _HEADER_STARTS:
                self._unread = end + rest
            elif self._keep_markup and self._kind == "other":
                text += end
        return [self._event(text)] if text else []

    def _event(self, text: str) -> Event:
        return Reasoning(text) if self._kind == "reasoning" else Content(text)


HARMONY: Final = HarmonyReasoning()
