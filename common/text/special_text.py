"""The text of special tokens in chat messages stays text: the parts of a prompt that must not be parsed.

A chat template puts messages and its own special tokens into one text, which is then tokenised. Where a message that
the application did not write contains the text of a special token, the conversation is rendered again with a marker in
its place: the special tokens in this rendering are the template's, and its markers are those of the messages. Both
renderings have the same sequence of them, which tells the one from the other in the prompt's text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pagoda.common.errors import RequestError
from pagoda.common.text.chat_template import TEXT_PARTS
from pagoda.common.text.literal_stretches import Span
from pagoda.common.text.tokenizer import Tokenizer

TRUSTED_ROLES: Final = frozenset({"system", "developer", "assistant"})
"""Roles whose messages the application or the model wrote: special tokens in them are parsed."""

_NONCE_CHARS: Final = 4
_PRIVATE: Final = (0xF0000, 0xFFFE)  # first code point and number of a plane for private use
_KINDS: Final = (0x100000, 0xFFFE)  # first code point and number of another plane: which special token a marker is

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A prompt's text and where special tokens in it are text of messages, in order."""

    text: str
    literal: tuple[Span, ...] = ()


def render_literal(
    tokenizer: Tokenizer,
    messages: Messages,
    documents: Messages | None,
    render: Callable[[Messages, Messages | None], str],
) -> RenderedChat:
    """Return what `render` makes of messages and documents, and which special tokens in it stay text.

    These are the ones in documents and in messages of all roles but TRUSTED_ROLES. Raises RequestError as `render`
    does, and if a template changes a message such that its special tokens cannot be told from the template's.
    """
    text = render(messages, documents)
    pattern = tokenizer.special_pattern
    try:
        if pattern is None or not any(pattern.search(text) for text in _untrusted_texts(messages, documents)):
            return RenderedChat(text)
        return RenderedChat(text, _literal_spans(pattern, text, messages, documents, render))
    except RecursionError:
        raise RequestError("messages", "the messages are nested too deeply") from None


def _literal_spans(
    pattern: re.Pattern[str],
    text: str,
    messages: Messages,
    documents: Messages | None,
    render: Callable[[Messages, Messages | None], str],
) -> tuple[Span, ...]:
    """Return where special tokens in the rendered `text` are text of messages. Raises RequestError."""
    markers = _Markers(pattern, text)
    read: list[list[_Found]] = []
    for joins in (True, False):
        shown = [markers.in_message(message, joins) for message in messages]
        found = markers.found(render(shown, markers.in_value(documents)))
        if found not in read:
            read.append(found)
    plain = [_Found(match[0], False) for match in pattern.finditer(text)]
    # These are the template's own: in this rendering no message has any.
    template_tokens = [token for token in read[0] if not token.is_literal]
    for found in (*read, plain):
        same = [token.text for token in found] == [token.text for token in plain]
        if same and [token for token in found if not token.is_literal] == template_tokens:
            spans = (match.span() for match in pattern.finditer(text))
            return tuple(span for span, token in zip(spans, found) if token.is_literal)
    raise RequestError(
        "messages",
        f"the chat template changes a message that contains the special token {markers.example!r}, so that it cannot "
        "be told from the template's; remove it from the message",
    )


@dataclass(frozen=True, slots=True)
class _Found:
    """A special token in a rendering."""

    text: str
    is_literal: bool


class _Markers:
    """Puts markers for special tokens into messages and finds them in renderings."""

    def __init__(self, pattern: re.Pattern[str], text: str) -> None:
        """`text`: the rendered conversation, which has no marker in it."""
        self._pattern = pattern
        self._kinds: dict[str, str] = {}  # text of a special token -> marker
        first, count = _PRIVATE
        while (nonce := "".join(chr(first + secrets.randbelow(count)) for _ in range(_NONCE_CHARS))) in text:
            pass
        self._nonce = nonce
        self._marker = re.compile(f"{nonce}[{chr(_KINDS[0])}-{chr(_KINDS[0] + _KINDS[1] - 1)}]")

    @property
    def example(self) -> str:
        """The first special token that a marker stands for."""
        return next(iter(self._kinds), "")

    def in_message(self, message: Mapping[str, Any], joins: bool) -> Mapping[str, Any]:
        """Return a message with markers. `joins`: also for what is split over its parts, as templates may join them."""
        if not _is_untrusted(message):
            return message
        marked = {key: self.in_value(value) for key, value in message.items()}
        content = message.get("content")
        if joins and isinstance(content, list | tuple) and _texts(content):
            marked["content"] = self._in_parts(content)
        return marked

    def in_value(self, value: Any) -> Any:
        """Return a JSON value with markers in its texts."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: self._marker_of(match[0]), value)
        if isinstance(value, Mapping):
            return {self.in_value(key): self.in_value(each) for key, each in value.items()}
        return [self.in_value(each) for each in value] if isinstance(value, list | tuple) else value

    def found(self, rendered: str) -> list[_Found]:
        """Return the special tokens of a rendering and its markers, in order."""
        names = {marker: text for text, marker in self._kinds.items()}
        found = []
        start = 0
        for marker in self._marker.finditer(rendered):
            between = rendered[start : marker.start()]
            found += [_Found(match[0], False) for match in self._pattern.finditer(between)]
            found.append(_Found(names.get(marker[0], ""), True))
            start = marker.end()
        return found + [_Found(match[0], False) for match in self._pattern.finditer(rendered[start:])]

    def _in_parts(self, parts: Sequence[Any]) -> list[Any]:
        """Return parts with markers, where a special token that is split over parts is one in the first of them."""
        texts = _texts(parts)
        joined = "".join(text for _, text in texts)
        spans = [match.span() for match in self._pattern.finditer(joined)]
        marked = list(parts)
        at = 0
        next_span = 0
        for index, text in texts:
            end = at + len(text)
            pieces = []
            start = at
            while next_span < len(spans) and spans[next_span][0] < end:
                first, last = spans[next_span]
                pieces.append(joined[start : max(start, first)])
                if first >= at:
                    pieces.append(self._marker_of(joined[first:last]))
                start = min(last, end)
                if last > end:
                    break  # The text goes on in the next part.
                next_span += 1
            marked[index] = _with_text(self.in_value(parts[index]), "".join(pieces) + joined[start:end])
            at = end
        return marked

    def _marker_of(self, text: str) -> str:
        first, count = _KINDS
        if text not in self._kinds:
            self._kinds[text] = self._nonce + chr(first + len(self._kinds) % count)
        return self._kinds[text]


def _untrusted_texts(messages: Messages, documents: Messages | None) -> Iterable[str]:
    for message in messages:
        if _is_untrusted(message):
            yield from _all_texts(message)
            content = message.get("content")
            if isinstance(content, list | tuple) and len(content) > 1:
                yield "".join(text for _, text in _texts(content))
    yield from _all_texts(documents)


def _all_texts(value: Any) -> Iterable[str]:
    """Return all texts in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _all_texts(key)
            yield from _all_texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _all_texts(each)


def _is_untrusted(message: Mapping[str, Any]) -> bool:
    return isinstance(message, Mapping) and message.get("role") not in TRUSTED_ROLES


def _texts(parts: Sequence[Any]) -> list[tuple[int, str]]:
    """Return index and text of the parts that are texts."""
    texts = [(index, _text_of(part)) for index, part in enumerate(parts)]
    return [(index, text) for index, text in texts if text is not None]


def _text_of(part: Any) -> str | None:
    if isinstance(part, Mapping):
        kind = part.get("type")
        part = part.get(TEXT_PARTS[kind]) if isinstance(kind, str) and kind in TEXT_PARTS else None
    return part if isinstance(part, str) else None


def _with_text(part: Any, text: str) -> Any:
    return {**part, TEXT_PARTS[part["type"]]: text} if isinstance(part, Mapping) else text
