"""GET /health, /ready, /ping and /version.

/health: the engine is loaded, alive and makes progress. /ready: besides, the server takes new requests.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

import pagoda
from pagoda.common.errors import EngineDeadError
from pagoda.server.protocol.errors import HttpError
from pagoda.server.routes.shared import server_of

router = APIRouter(tags=["health"])


@router.get("/health", response_model=None)
@router.get("/ping", response_model=None)
@router.post("/ping", response_model=None, include_in_schema=False)
async def health(request: Request) -> Response:
    """200 while the engine is alive and moves, else 503 with the cause."""
    try:
        await server_of(request).check_health()
    except EngineDeadError as error:
        raise HttpError(503, str(error)) from None
    return Response(status_code=200)


@router.get("/ready", response_model=None)
async def ready(request: Request) -> Response:
    """200 while new requests are welcome, else 503 with the cause."""
    try:
        await server_of(request).check_ready()
    except EngineDeadError as error:
        raise HttpError(503, str(error)) from None
    return Response(status_code=200)


@router.get("/version")
async def version() -> dict[str, str]:
    """The server's version."""
    return {"version": pagoda.__version__}
