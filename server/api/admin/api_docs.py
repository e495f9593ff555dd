"""GET /docs and /redoc: a page that shows the OpenAPI schema and sends requests, without external resources."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pagoda.server.api.admin.chat_page import page_response

PAGE: Final = Path(__file__).with_name("api_docs.html")

router = APIRouter(include_in_schema=False)  # Included without --disable-fastapi-docs.


@router.get("/docs", response_model=None)
@router.get("/redoc", response_model=None)
async def api_docs(request: Request) -> Response:
    """Return the page that lists the routes and fields of this server, and sends requests."""
    prefix = request.scope.get("root_path", "")
    return page_response(PAGE.read_text(encoding="utf-8").replace("/openapi.json", f"{prefix}/openapi.json"))
