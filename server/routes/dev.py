"""POST /reset_prefix_cache: for development only, with --server-dev-mode."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pagoda.server.routes.shared import server_of

router = APIRouter(tags=["development"])


@router.post("/reset_prefix_cache", response_model=None)
async def reset_prefix_cache(request: Request) -> Response:
    """Forget all cached prefixes; running requests keep their blocks."""
    await server_of(request).llm().reset_prefix_cache()
    return Response(status_code=200)
