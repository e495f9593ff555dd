"""Request bodies: JSON only, not compressed, and no more of it than the server allows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final, TypeVar

import numpy as np
from starlette.requests import ClientDisconnect, Request

from pagoda.common.config.groups.server import ServerConfig
from pagoda.server.http.fields.base import RequestBody, parse, parse_tolerant
from pagoda.server.http.fields.errors import HttpError
from pagoda.server.http.ignored import note_ignored
from pagoda.server.http.stream import ClientLeftError

# How many values JSON text has, counted before anything is made of them.
#
# A parser makes an object of each value, with the interpreter's lock held: a body of millions of empty lists would stop
# all streams for seconds. Counting needs no object and, within numpy, no lock.

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


BodyT = TypeVar("BodyT", bound=RequestBody)


async def read_body(request: Request, body_type: type[BodyT], config: ServerConfig) -> BodyT:
    """The parsed body. Raises HttpError (413, 415), RequestError naming the field, or ClientLeftError."""
    return parse_body(request, body_type, await read_json(request, config), config)


def parse_body(request: Request, body_type: type[BodyT], raw: bytes, config: ServerConfig) -> BodyT:
    """Return the parsed body, with its parts that have no effect noted for the response. Raises RequestError."""
    if config.strict_requests:
        return parse(body_type, raw)
    body, ignored = parse_tolerant(body_type, raw)
    note_ignored(request, ignored)
    return body


async def read_json(request: Request, config: ServerConfig) -> bytes:
    """The body as it came, said to be JSON. Raises HttpError (413, 415) or ClientLeftError."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HttpError(415, f"content-type {kind[:80]!r} is not supported; send application/json")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise HttpError(415, f"content-encoding {coding[:80]!r} is not supported; send the body as it is")
    raw = await _read(request, config.max_body_bytes)
    if len(raw) > SMALL:
        await asyncio.to_thread(check_size, raw)
    return raw


async def _read(request: Request, limit: int) -> bytes:
    stated = request.headers.get("content-length", "")
    if stated.isascii() and stated.isdigit() and int(stated[:20]) > limit:
        raise _too_large(limit)
    raw = bytearray()
    try:
        async for chunk in request.stream():
            raw += chunk
            if len(raw) > limit:
                raise _too_large(limit)
    except ClientDisconnect:
        raise ClientLeftError from None
    return bytes(raw)


def _too_large(limit: int) -> HttpError:
    return HttpError(413, f"the body is larger than {limit} bytes (--max-body-bytes)")
