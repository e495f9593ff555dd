"""GET /load, with --enable-server-load-tracking."""

from __future__ import annotations

from fastapi import APIRouter, Request

from pagoda.server.routes.shared import server_of

router = APIRouter(tags=["load"])


@router.get("/load")
async def load(request: Request) -> dict[str, int]:
    """How many generation requests are being answered, for balancing over several servers."""
    return {"server_load": server_of(request).running}
