"""GET /health, /ready, /ping and /version.

/health: the engine is loaded, alive and makes progress. /ready: besides, the server takes new requests.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

import pagoda
from pagoda.common.errors import EngineDeadError
from pagoda.common.observe.metrics import CONTENT_TYPE
from pagoda.server.http.fields.errors import HttpError
from pagoda.server.http.state import server_of

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


# GET /metrics.

metrics_router = APIRouter(tags=["metrics"])


@metrics_router.get("/metrics", response_model=None)
async def metrics(request: Request) -> Response:
    """All metrics in Prometheus' text format."""
    return Response(server_of(request).metrics.exposition(), headers={"content-type": CONTENT_TYPE})


# GET /load, with --enable-server-load-tracking.

load_router = APIRouter(tags=["load"])


@load_router.get("/load")
async def load(request: Request) -> dict[str, int]:
    """How many generation requests are being answered, for balancing over several servers."""
    return {"server_load": server_of(request).running}
