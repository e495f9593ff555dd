"""/v1/batches: create, list, describe and cancel batches."""

from __future__ import annotations

import re
import time
import uuid
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from pagoda.common.errors import RequestError
from pagoda.server.api.openai.batch.files import SECONDS, owner_id, page
from pagoda.server.api.openai.batch.lines import ENDPOINTS
from pagoda.server.api.openai.batch.runner import Batch, BatchRunner
from pagoda.server.http.body import RequestBody, read_body
from pagoda.server.http.response import json_response
from pagoda.server.http.state import server_of

_WINDOW: Final = re.compile(r"([1-9]\d{0,5})([smhd])", re.ASCII)
_UNITS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}

router = APIRouter(tags=["batches"])


class ExpiresAfter(RequestBody):
    """When a file is deleted."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=SECONDS[0], le=SECONDS[1])


class BatchCreateRequest(RequestBody):
    """A file of requests to answer."""

    input_file_id: str
    endpoint: str = Field(description="The path that all requests of the file are for.")
    completion_window: str = Field(description="When to give up, such as 24h; units are s, m, h and d.")
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = Field(
        None, max_length=16, description="Returned with the batch."
    )
    output_expires_after: ExpiresAfter | None = Field(None, description="When the output files are deleted.")

    def window(self) -> int:
        """Return the completion window in seconds. Raise RequestError."""
        match = _WINDOW.fullmatch(self.completion_window)
        if match is None:
            raise RequestError("completion_window", "completion_window must be a duration such as 24h")
        return int(match[1]) * _UNITS[match[2]]


@router.post("/v1/batches", response_model=None)
async def create_batch(request: Request) -> Response:
    """Create a batch of the requests in an uploaded file, and start it when the batches before it have ended."""
    state = server_of(request)
    body = await read_body(request, BatchCreateRequest, state.config)
    state.llm()
    if body.endpoint not in ENDPOINTS:
        raise RequestError("endpoint", f"endpoint must be one of {', '.join(ENDPOINTS)}")
    window = body.window()
    file = state.files.get(body.input_file_id, owner_id(request))
    if file.purpose != "batch":
        raise RequestError("input_file_id", f"input_file_id: its purpose is {file.purpose}; upload it as batch")
    batch = Batch(
        id=f"batch_{uuid.uuid4().hex}",
        owner=owner_id(request),
        endpoint=body.endpoint,
        input_file_id=file.id,
        completion_window=body.completion_window,
        window=window,
        created_at=int(time.time()),
        metadata=body.metadata,
        output_seconds=None if body.output_expires_after is None else body.output_expires_after.seconds,
    )
    _runner(request).start(batch, file)
    return json_response(batch.as_dict())


@router.get("/v1/batches", response_model=None)
async def list_batches(request: Request) -> Response:
    """List the batches, newest first; query parameters: after, limit."""
    batches = _runner(request).batches(owner_id(request))
    return json_response(page(request.query_params, batches, limit=100, default=20))


@router.get("/v1/batches/{batch_id}", response_model=None)
async def describe_batch(request: Request, batch_id: str) -> Response:
    """Describe a batch."""
    return json_response(_runner(request).get(batch_id, owner_id(request)).as_dict())


@router.post("/v1/batches/{batch_id}/cancel", response_model=None)
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """Cancel a batch. What it has answered is stored. A batch that has ended is returned unchanged."""
    runner = _runner(request)
    batch = runner.get(batch_id, owner_id(request))
    runner.cancel(batch)
    return json_response(batch.as_dict())


def _runner(request: Request) -> BatchRunner:
    runner: Any = request.app.state.batches
    assert isinstance(runner, BatchRunner)
    return runner
