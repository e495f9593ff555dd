"""GET /metrics."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pagoda.common.observe.metrics import CONTENT_TYPE
from pagoda.server.routes.shared import server_of

router = APIRouter(tags=["metrics"])


@router.get("/metrics", response_model=None)
async def metrics(request: Request) -> Response:
    """All metrics in Prometheus' text format."""
    return Response(server_of(request).metrics.exposition(), headers={"content-type": CONTENT_TYPE})
