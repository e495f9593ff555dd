"""GET /health, /ready, /ping, /version, /metrics and /load.

/health: the engine is loaded, alive and makes progress, or is being restarted: nobody is to end the server meanwhile.
/ready: the server accepts new requests.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

import pagoda
from pagoda.common.errors import EngineDeadError, EngineRestartingError
from pagoda.server.http.errors import HttpError
from pagoda.server.http.state import server_of

router = APIRouter(tags=["health"])


@router.get("/health", response_model=None)
@router.get("/ping", response_model=None)
@router.post("/ping", response_model=None, include_in_schema=False)
async def health(request: Request) -> Response:
    """200 while the engine is alive and makes progress, or is being restarted, else 503 with the cause."""
    try:
        await server_of(request).check_health()
    except EngineRestartingError:
        pass
    except EngineDeadError as error:
        raise HttpError(503, str(error)) from None
    return Response(status_code=200)


@router.get("/ready", response_model=None)
async def ready(request: Request) -> Response:
    """200 while the server accepts new requests, else 503 with the cause."""
    try:
        await server_of(request).check_ready()
    except EngineDeadError as error:
        raise HttpError(503, str(error)) from None
    return Response(status_code=200)


@router.get("/version")
async def version() -> dict[str, str]:
    """Return the server version."""
    return {"version": pagoda.__version__}


metrics_router = APIRouter(tags=["metrics"])


@metrics_router.get("/metrics", response_model=None)
async def metrics(request: Request) -> Response:
    """Return all metrics in Prometheus' text format, or in OpenMetrics if the Accept header lists it."""
    text, content_type = await server_of(request).exposition(request.headers.get("accept", ""))
    return Response(text, headers={"content-type": content_type, "vary": "accept"})


@router.get("/load")
async def load(request: Request) -> dict[str, int]:
    """Number of requests in the engine, of all API processes, for load balancers."""
    return {"server_load": await server_of(request).num_running()}
