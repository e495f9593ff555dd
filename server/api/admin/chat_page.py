"""GET /: a chat page. A single static file without external resources; it uses the public API only."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pagoda.server.http.state import server_of

PAGE: Final = Path(__file__).with_name("chat_page.html")

_REFERENCE: Final = re.compile(r' *<p class="facts" id="reference">.*?</p>\n', re.DOTALL)
"""What links to /docs."""

router = APIRouter(include_in_schema=False)


def policy(page: str) -> str:
    """Return a Content-Security-Policy that allows only the page's own script and style."""

    def hashes(tag: str) -> str:
        texts = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


@router.get("/", response_model=None)
async def chat_page(request: Request) -> Response:
    """Return the chat page, with a link to /docs unless --disable-fastapi-docs."""
    page = PAGE.read_text(encoding="utf-8")
    return page_response(_REFERENCE.sub("", page) if server_of(request).config.disable_fastapi_docs else page)


def page_response(page: str) -> Response:
    """Return a page with a policy that lets only its own script and style run."""
    headers = {
        "content-security-policy": policy(page),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return Response(page, media_type="text/html; charset=utf-8", headers=headers)
