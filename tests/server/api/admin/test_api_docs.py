"""/docs and /redoc: a page without external resources that shows the schema; its behaviour in a browser."""

from __future__ import annotations

import re

import pytest
from support.servers.chromium import chromium
from support.servers.live_server import live_server

from pagoda.server.api.admin.api_docs import PAGE
from pagoda.server.api.admin.chat_page import policy

HTML = PAGE.read_text(encoding="utf-8")


def test_no_external_resources_and_no_html_injection() -> None:
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(|<(link rel=\"style|script src|img|iframe)", HTML)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", HTML)
    assert not re.search(r"\s(style|on[a-z]+)=", HTML), "the policy lets no such attribute run"


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_the_page_is_sent_with_a_policy(path: str) -> None:
    with live_server(api_key=("k",)) as server:
        answer = server.response("GET", path)
        assert (answer.status, answer.body.decode()) == (200, HTML)
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert answer.headers["content-security-policy"] == policy(HTML)
        assert server.get("/openapi.json")[0] == 401, "the page asks for the key"


@pytest.mark.program("chromium", "chromedriver")
def test_routes_are_shown_and_can_be_tried() -> None:
    with chromium() as page, live_server(api_key=("k",), root_path="/small") as server:
        page.open(server.url + "/small/docs")
        page.until(lambda: "API key" in page.text(".error"))
        page.type("#key", "k\ue004")  # U+E004: the Tab key
        page.until(lambda: "/v1/completions" in page.text("summary code"))
        page.log()  # the 401
        opened = (
            "const it = [...document.querySelectorAll('details')]"
            ".find((e) => e.querySelector('summary').innerText.startsWith('POST') && "
            "e.querySelector('code').textContent === '/v1/completions'); it.open = true; it.id = 'it';"
        )
        page.run(opened)
        page.until(lambda: "max_tokens" in page.text("#it td code"))
        assert "Field|Type|Description" in page.text("#it th")
        assert "mirostat" not in page.text("#it > table td code"), "fields without effect are folded"
        assert "fields without effect" in page.text("#it details summary")
        page.run("document.querySelector('#it details').open = true")
        page.until(lambda: "mirostat" in page.text("#it details td code"))
        page.run("document.querySelector('#it textarea').value = JSON.stringify({prompt: 'a', max_tokens: 2})")
        page.click("#it button")
        page.until(lambda: "200 OK" in page.text("#it pre"))
        assert '"text": "bc"' in page.text("#it pre")
        assert page.log() == []
