"""Harmony, the format of gpt-oss: messages on channels, of which those to a function are its calls.

<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>, <|channel|>final<|message|>text<|end|>.
What is on the analysis channel is reasoning, where a reasoning format has not taken it already.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from pagoda.server.parsers.parser import Parser, Tool
from pagoda.server.parsers.tool import json_text
from pagoda.server.parsers.tool.machine import Machine, ParserOutput
from pagoda.server.parsers.tool.scanner import LONGEST, Ended, Malformed, Reading, Scanner, markers

_START: Final = "<|start|>"
_CHANNEL: Final = "<|channel|>"
_MESSAGE: Final = "<|message|>"
_CLOSING: Final = ("<|end|>", "<|call|>", "<|return|>")
_ENDS: Final = markers(*_CLOSING, _START, _CHANNEL)
_TO: Final = re.compile(r"to=([^\s<]+)")
_ON: Final = re.compile(re.escape(_CHANNEL) + r"\s*(\w+)")


@dataclass(frozen=True, slots=True)
class Harmony:
    """A text of messages, each with a header; what stands outside of messages is content.

    Headers are short, and no content: where an answer ends within one, it is left out.
    """

    def parser(self, tools: Sequence[Tool]) -> Parser:
        """A reader of one answer."""
        return Machine(partial(_messages, names=frozenset(tool.name for tool in tools)))


def _messages(scanner: Scanner, output: ParserOutput, names: frozenset[str]) -> Reading[None]:
    outside = markers(_START, _CHANNEL, _MESSAGE, *_CLOSING)
    speaks = False  # the last message was for the user: the next one for the user begins on a new line
    while found := (yield from scanner.until(outside, output.content)):
        if found in _CLOSING:
            yield from scanner.take(len(found))
            continue
        pieces: list[str] = []
        end = yield from scanner.until(markers(_MESSAGE, *_CLOSING), pieces.append)
        header = "".join(pieces)
        if len(header) > LONGEST:
            output.content(header)
        elif end == _MESSAGE:
            yield from scanner.take(len(end))
            speaks = yield from _message(scanner, output, header, names, again=speaks)
        elif not end:
            raise Ended
    output.content(scanner.rest())


def _message(
    scanner: Scanner, output: ParserOutput, header: str, names: frozenset[str], *, again: bool
) -> Reading[bool]:
    """Read one message. `again`: the one before was for the user. Whether this one is."""
    to, channel = _TO.search(header), _ON.search(header)
    name = to[1] if to else ""
    called = name.startswith("functions.") or name in names
    speaks = not called and (channel is None or channel[1] != "analysis")
    said = output.content if speaks or called else output.reasoning
    if called:
        output.call(name.removeprefix("functions."))
        yield from _arguments(scanner, output)
    elif again and speaks:
        output.content("\n")
    if (yield from scanner.until(_ENDS, said)):
        yield from scanner.accept(*_CLOSING)
    elif called:
        raise Ended
    else:
        said(scanner.rest())
    return speaks


def _arguments(scanner: Scanner, output: ParserOutput) -> Reading[None]:
    yield from scanner.space()
    if (yield from scanner.peek()) == "{":
        try:
            yield from json_text.value(scanner, output.arguments)
        except Ended:
            raise
        except Malformed:
            return
        yield from scanner.space()
        return
    found = False

    def put(text: str) -> None:
        nonlocal found
        found = True
        output.arguments(text)

    yield from scanner.until(_ENDS, put)
    yield from scanner.need(*_ENDS.texts)
    if not found:
        output.arguments("{}")


HARMONY: Final = Harmony()
