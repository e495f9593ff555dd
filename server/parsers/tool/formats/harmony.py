"""Harmony, the format of gpt-oss: messages on channels; a message to a function is a tool call.

<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>, <|channel|>final<|message|>text<|end|>.
The analysis channel is reasoning, unless a reasoning format has already consumed it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from pagoda.server.parsers.parser import Parser, Tool
from pagoda.server.parsers.tool import json_text
from pagoda.server.parsers.tool.generator_parser import GeneratorParser, ParserOutput
from pagoda.server.parsers.tool.scanner import MAX_NAME_LENGTH, Ended, Malformed, Scan, Scanner, TrackingSink, markers

_START: Final = "<|start|>"
_CHANNEL: Final = "<|channel|>"
_MESSAGE: Final = "<|message|>"
_MESSAGE_CLOSE: Final = ("<|end|>", "<|call|>", "<|return|>")
_MESSAGE_ENDS: Final = markers(*_MESSAGE_CLOSE, _START, _CHANNEL)
_RECIPIENT: Final = re.compile(r"to=([^\s<]+)")
_CHANNEL_NAME: Final = re.compile(re.escape(_CHANNEL) + r"\s*(\w+)")


@dataclass(frozen=True, slots=True)
class Harmony:
    """Messages with headers; text outside of messages is content. A header truncated by the end of text is dropped."""

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return GeneratorParser(partial(_scan_messages, names=frozenset(tool.name for tool in tools)))


def _scan_messages(scanner: Scanner, output: ParserOutput, names: frozenset[str]) -> Scan[None]:
    outside = markers(_START, _CHANNEL, _MESSAGE, *_MESSAGE_CLOSE)
    after_text = False  # The last message was for the user: the next one starts on a new line.
    while marker := (yield from scanner.until(outside, output.content)):
        if marker in _MESSAGE_CLOSE:
            yield from scanner.take(len(marker))
            continue
        pieces: list[str] = []
        end = yield from scanner.until(markers(_MESSAGE, *_MESSAGE_CLOSE), pieces.append)
        header = "".join(pieces)
        if len(header) > MAX_NAME_LENGTH:
            output.content(header)
        elif end == _MESSAGE:
            yield from scanner.take(len(end))
            after_text = yield from _scan_message(scanner, output, header, names, after_text=after_text)
        elif not end:
            raise Ended
    output.content(scanner.rest())


def _scan_message(
    scanner: Scanner, output: ParserOutput, header: str, names: frozenset[str], *, after_text: bool
) -> Scan[bool]:
    """Scan one message and return whether it is for the user. `after_text`: the previous one was."""
    recipient = _RECIPIENT.search(header)
    channel = _CHANNEL_NAME.search(header)
    name = recipient[1] if recipient else ""
    is_call = name.startswith("functions.") or name in names
    is_text = not is_call and (channel is None or channel[1] != "analysis")
    sink = output.content if is_text or is_call else output.reasoning
    if is_call:
        output.call(name.removeprefix("functions."))
        yield from _scan_arguments(scanner, output)
    elif after_text and is_text:
        output.content("\n")
    if (yield from scanner.until(_MESSAGE_ENDS, sink)):
        yield from scanner.accept(*_MESSAGE_CLOSE)
    elif is_call:
        raise Ended
    else:
        sink(scanner.rest())
    return is_text


def _scan_arguments(scanner: Scanner, output: ParserOutput) -> Scan[None]:
    yield from scanner.space()
    if (yield from scanner.peek()) == "{":
        try:
            yield from json_text.copy_value(scanner, output.arguments)
        except Ended:
            raise
        except Malformed:
            return
        yield from scanner.space()
        return
    tracking = TrackingSink(output.arguments)
    yield from scanner.until(_MESSAGE_ENDS, tracking)
    yield from scanner.need(*_MESSAGE_ENDS.texts)
    if not tracking.used:
        output.arguments("{}")


HARMONY: Final = Harmony()
