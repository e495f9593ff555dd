"""How many values JSON text has, counted before anything is made of them.

A parser makes an object of each value, with the interpreter's lock held: a body of millions of empty lists would stop
all streams for seconds. Counting needs no object and, within numpy, no lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from pagoda.server.protocol.errors import HttpError

MAX_VALUES: Final = 1 << 21
"""Most items of lists and objects of a body: token ids of two contexts of a million."""

MAX_OBJECTS: Final = 1 << 17
"""Most lists and objects of a body."""

MAX_KEYS: Final = 1 << 17
"""Most keys of all objects of a body."""

SMALL: Final = MAX_OBJECTS
"""Bytes of a body that cannot have more of anything than is allowed."""

_CHUNK: Final = 1 << 20
_ITEM, _KEY, _OPEN, _QUOTE = 1, 2, 3, 4
_KINDS: Final = np.zeros(256, np.uint8)
for _characters, _kind in ((b",", _ITEM), (b":", _KEY), (b"[{", _OPEN), (b'"', _QUOTE)):
    for _character in _characters:
        _KINDS[_character] = _kind


def check_size(raw: bytes) -> None:
    """Raise HttpError (413) for JSON text of too many values. What is no JSON may pass, or be refused."""
    items = keys = opened = 0
    inside = False  # of a string
    for chunk in _chunks(raw):
        kinds = _KINDS[np.frombuffer(chunk, np.uint8)]
        quotes = np.cumsum(kinds == _QUOTE, dtype=np.int32) + inside
        counts = np.bincount(kinds[(quotes & 1) == 0], minlength=_QUOTE)
        inside = bool(quotes[-1] & 1)
        items += int(counts[_ITEM])
        keys += int(counts[_KEY])
        opened += int(counts[_OPEN])
        for count, most, what in (
            (items + opened, MAX_VALUES, "values"),
            (opened, MAX_OBJECTS, "lists and objects"),
            (keys, MAX_KEYS, "keys"),
        ):
            if count > most:
                raise HttpError(413, f"the body has more than {most} {what}; send less in one request")


def _chunks(raw: bytes) -> Iterator[bytes]:
    """The text in pieces, without escaped characters, among which are quotes that end no string."""
    start = 0
    while start < len(raw):
        end = min(start + _CHUNK, len(raw))
        chunk = raw[start:end]
        backslashes = len(chunk) - len(chunk.rstrip(b"\\"))
        if backslashes % 2 and end < len(raw):  # the character that it escapes is in the next one
            end += 1
            chunk = raw[start:end]
        start = end
        if b"\\" in chunk:
            chunk = chunk.replace(b"\\\\", b"").replace(b'\\"', b"")
        if chunk:
            yield chunk
