"""/v1/files: upload, list, describe, download and delete files."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, Response
from starlette.datastructures import QueryParams

from pagoda.common.errors import RequestError
from pagoda.server.api.openai.batch.upload import Upload
from pagoda.server.http.body import MAX_IGNORED, Ignored, note_ignored
from pagoda.server.http.errors import HttpError
from pagoda.server.http.response import json_response, owner_of
from pagoda.server.http.state import ServerState, server_of

PURPOSES: Final = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")
"""Purposes of uploads. Only `batch` files have a use in this server; the others are stored."""

SECONDS: Final = (3_600, 2_592_000)
"""Limits of expires_after: one hour and 30 days."""

_FIELDS: Final = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")

router = APIRouter(tags=["files"])


@router.post(
    "/v1/files",
    response_model=None,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "multipart/form-data": {
                    "schema": {
                        "type": "object",
                        "required": ["file", "purpose"],
                        "properties": {
                            "file": {"type": "string", "format": "binary"},
                            "purpose": {"enum": list(PURPOSES)},
                            "expires_after[anchor]": {"const": "created_at"},
                            "expires_after[seconds]": {"type": "integer", "minimum": SECONDS[0], "maximum": SECONDS[1]},
                        },
                    }
                }
            },
        },
    },
)
async def upload_file(request: Request) -> Response:
    """Upload a file as multipart/form-data."""
    state = server_of(request)
    owner = owner_id(request)
    upload = _upload(request, state, owner)
    try:
        await upload.read(request)
        _note_unknown(request, state, upload.fields)
        if upload.file is None:
            raise RequestError("file", "file is missing; send it as a file of the form")
        purpose = upload.fields.get("purpose")
        if purpose not in PURPOSES:
            raise RequestError("purpose", f"purpose must be one of {', '.join(PURPOSES)}")
        seconds = _expiry(upload.fields)
        stored = upload.file.finish((upload.filename or "file")[:200], purpose, seconds)
    except BaseException:
        upload.abandon()
        raise
    return json_response(stored.as_dict())


@router.get("/v1/files", response_model=None)
async def list_files(request: Request) -> Response:
    """List the files, newest first; query parameters: purpose, order, after, limit."""
    query = request.query_params
    files = server_of(request).files.files(owner_id(request))
    if "purpose" in query:
        files = [file for file in files if file.purpose == query["purpose"]]
    if query.get("order", "desc") not in ("asc", "desc"):
        raise RequestError("order", "order must be asc or desc")
    if query.get("order") != "asc":
        files.reverse()
    return json_response(page(query, files, limit=10_000))


@router.get("/v1/files/{file_id}", response_model=None)
async def describe_file(request: Request, file_id: str) -> Response:
    """Describe a file."""
    return json_response(server_of(request).files.get(file_id, owner_id(request)).as_dict())


@router.get("/v1/files/{file_id}/content", response_model=None)
async def download_file(request: Request, file_id: str) -> Response:
    """Return the content of a file."""
    files = server_of(request).files
    file = files.get(file_id, owner_id(request))
    return FileResponse(files.path(file), media_type="application/octet-stream", filename=file.filename)


@router.delete("/v1/files/{file_id}", response_model=None)
async def delete_file(request: Request, file_id: str) -> Response:
    """Delete a file."""
    server_of(request).files.delete(file_id, owner_id(request))
    return json_response({"id": file_id, "object": "file", "deleted": True})


def owner_id(request: Request) -> str:
    """Return the digest of the request's API key; empty if the server has no keys."""
    return owner_of(request.scope).hex()


def _upload(request: Request, state: ServerState, owner: str) -> Upload:
    """Return the reader of a request's form. Raise HttpError (400, 415, 501)."""
    content_type = request.headers.get("content-type", "")
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise HttpError(415, f"content-type {kind[:80]!r} is not supported; send multipart/form-data")
    try:
        return Upload(content_type, lambda: state.files.write(owner))
    except ImportError:
        raise HttpError(501, "this server cannot read uploads; pip install python-multipart and restart it") from None


def _note_unknown(request: Request, state: ServerState, fields: Mapping[str, str]) -> None:
    """Note fields without effect. Raise RequestError if the server is strict."""
    unknown = [
        Ignored(name[:200], "unknown", f"unknown field {name[:200]!r}") for name in fields if name not in _FIELDS
    ]
    if unknown and state.config.strict_requests:
        raise RequestError(unknown[0].path, unknown[0].reason)
    note_ignored(request, unknown[:MAX_IGNORED])


def _expiry(form: Mapping[str, str]) -> int | None:
    """Return the seconds of expires_after; None without it. Raise RequestError."""
    text = form.get("expires_after[seconds]")
    anchor = form.get("expires_after[anchor]")
    if text is None and anchor is None:
        return None
    if anchor != "created_at":
        raise RequestError("expires_after[anchor]", "expires_after[anchor] must be created_at")
    seconds = -1
    with contextlib.suppress(ValueError, TypeError):
        seconds = int(str(text)[:20])
    if not SECONDS[0] <= seconds <= SECONDS[1]:
        raise RequestError(
            "expires_after[seconds]", f"expires_after[seconds] must be a number from {SECONDS[0]} to {SECONDS[1]}"
        )
    return seconds


class Listed(Protocol):
    """An object of a list."""

    @property
    def id(self) -> str:
        """Its id."""
        ...

    def as_dict(self) -> dict[str, Any]:
        """Return OpenAI's object."""
        ...


ListedT = TypeVar("ListedT", bound=Listed)


def page(query: QueryParams, items: Sequence[ListedT], *, limit: int, default: int | None = None) -> dict[str, Any]:
    """Return the items after the one with id `after`, at most the query's `limit`. Raise RequestError."""
    text = query.get("limit", str(default or limit))
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= limit):
        raise RequestError("limit", f"limit must be a number from 1 to {limit}")
    start = 0
    if "after" in query:
        start = next((index for index, item in enumerate(items, 1) if item.id == query["after"]), -1)
        if start < 0:
            raise RequestError("after", f"after: there is no object {query['after'][:200]!r}")
    shown = items[start : start + int(text)]
    return {
        "object": "list",
        "data": [item.as_dict() for item in shown],
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
        "has_more": start + len(shown) < len(items),
    }
