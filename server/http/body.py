"""Request bodies: JSON only, not compressed, and no more of it than the server allows."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from pagoda.common.config.server import ServerConfig
from pagoda.server.http.ignored import note_ignored
from pagoda.server.http.json_size import SMALL, check_size
from pagoda.server.http.stream import ClientLeftError
from pagoda.server.protocol.base import Body, parse, parse_tolerant
from pagoda.server.protocol.errors import HttpError

BodyT = TypeVar("BodyT", bound=Body)


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
