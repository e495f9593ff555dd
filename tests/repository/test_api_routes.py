"""vLLM's routes, row by row: each is answered or refused by name. And who may knock without a key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import interface
import pytest
from support.servers.live_server import LiveServer, live_server
from support.suite.rows import each_row

from pagoda.server.http.response import OPEN_PATHS

EVERYTHING = {
    "server_dev_mode": True,
    "enable_tokenizer_info_endpoint": True,
}
ROUTES = [(row["method"], row["path"]) for row in interface.rows("api_routes")]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(**EVERYTHING) as server:
        yield server


@pytest.fixture(scope="module")
def closed() -> Iterator[LiveServer]:
    with live_server(api_key=("key",), **EVERYTHING) as server:
        yield server


def routes_of(server: LiveServer) -> set[tuple[str, str]]:
    """Method and path of everything that the server answers."""
    return set(_walked(server.app.routes))


def _walked(routes: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Routers may stand among the routes, as they were included."""
    for route in routes:
        inner = getattr(route, "original_router", None)
        if inner is not None:
            yield from _walked(inner.routes)
        else:
            yield from ((method, route.path) for method in route.methods)


@each_row(("method", "path"), ROUTES)
def test_a_route_is_answered_or_refused_by_name(server: LiveServer, method: str, path: str) -> None:
    assert (method, path) in routes_of(server)
    status, answer = server.request(method, path, None if method == "GET" else {})
    assert status in ((200, 400, 501, 404) if "{" in path else (200, 400, 501)), answer
    if status == 501:
        assert path in answer["error"]["message"]


METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")


def spellings(path: str) -> list[str]:
    """Ways to write a path that a careless comparison would take for another."""
    return [
        path,
        path + "/",
        "/" + path,
        path + "?x=/health",
        path + "#/health",
        path + ";/health",
        "/health/.." + path,
        "/health/../" + path.lstrip("/"),
        "/health%2f.." + path,
        path.upper(),
        path.replace("/", "//"),
        path + "%00",
        path + "/health",
    ]


def test_everything_but_the_short_list_needs_a_key(closed: LiveServer) -> None:
    """Whatever is routed, however it is spelt, by whatever method, whatever host the client says it talks to."""
    for _, path in sorted(routes_of(closed)):
        for spelling in spellings(path.replace("{name:path}", "x").replace("{", "").replace("}", "")):
            bare = spelling.partition("?")[0].partition("#")[0]
            if bare in OPEN_PATHS or (bare[-2:-1] != "/" and bare.removesuffix("/") in OPEN_PATHS):
                continue
            for method in METHODS if spelling == path else ("GET", "POST"):
                status, _ = closed.request(method, spelling, None if method in ("GET", "HEAD") else {})
                assert status == 401, f"{method} {spelling}"


@each_row(
    "headers",
    [
        {"host": "localhost/health"},
        {"host": "/health"},
        {"host": "x/health?"},
        {"host": "x#/health"},
        {"x-forwarded-prefix": "/health"},
        {"x-original-url": "/health"},
        {"x-rewrite-url": "/health"},
        {"x-forwarded-host": "/health"},
        {"x-http-method-override": "OPTIONS"},
        {"authorization": "Bearer"},
        {"authorization": "Bearer key2"},
        {"authorization": "bearer\tkey"},
        {"x-api-key": "wrong"},
    ],
)
def test_headers_do_not_open_a_path(closed: LiveServer, headers: dict[str, str]) -> None:
    for method, path in (("GET", "/v1/models"), ("POST", "/invocations"), ("POST", "/v1/completions")):
        body: Any = None if method == "GET" else {"prompt": "a", "max_tokens": 1}
        assert closed.request(method, path, body, headers)[0] == 401


def test_the_short_list_is_short(closed: LiveServer) -> None:
    opened = {path for method, path in routes_of(closed) if closed.request(method, path, None)[0] != 401}
    assert opened == OPEN_PATHS
    assert {"/", "/docs", "/redoc", "/health", "/ready", "/ping", "/version", "/metrics", "/load"} == OPEN_PATHS
