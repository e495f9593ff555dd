"""--root-path: the same responses with and without the prefix, with the same keys, for any path."""

import re
from typing import Any

import pytest
from support.servers.live_server import LiveServer, live_server

from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.errors import ConfigError

PREFIX = "/api/v1x"
TEXT = {"prompt": "a", "max_tokens": 2}

NO_ROUTE = (
    PREFIX + PREFIX + "/v1/models",
    PREFIX + PREFIX + "/health",
    PREFIX + "x/v1/models",
    PREFIX + "//v1/models",
    PREFIX + "//health",
    PREFIX + "/../v1/models",
    PREFIX + "/health/../v1/models",
    PREFIX + "/health//",
    "/" + PREFIX + "/v1/models",
    "/" + PREFIX + "/health",
    "/v1" + PREFIX + "/models",
    "/health" + PREFIX,
    "/api/v1/models",
    PREFIX.upper() + "/health",
    PREFIX + "v1/models",
)


def both(server: LiveServer, path: str, **headers: str) -> tuple[int, Any]:
    """The answer to a path, which is the same below the prefix."""
    plain, prefixed = server.get(path, **headers), server.get(PREFIX + path, **headers)
    assert plain[0] == prefixed[0], path
    if path not in ("/metrics", "/v1/models"):  # these two tell the time
        assert plain[1] == prefixed[1], path
    return prefixed


@pytest.mark.setting("--root-path")
@pytest.mark.parametrize("root_path", [PREFIX, PREFIX + "/"])
def test_requests_with_and_without_the_prefix(root_path: str) -> None:
    with live_server(root_path=root_path) as server:
        assert both(server, "/v1/models")[1]["data"][0]["id"] == "fake"
        for path in ("/health", "/ready", "/metrics", "/version", "/", "/docs", "/redoc", "/openapi.json"):
            assert both(server, path)[0] == 200, path
        for prefix in ("", PREFIX):
            status, answer = server.post(prefix + "/v1/completions", TEXT)
            assert (status, answer["choices"][0]["text"]) == (200, "bc")
        for path in NO_ROUTE:
            assert server.get(path)[0] == 404, path
        assert server.get("/%61pi/v1x/v1/models")[0] == 200
        assert server.post(PREFIX + "/v1/messages", {})[1]["type"] == "error", "as this API writes its errors"


def test_docs_and_schema_contain_the_prefix() -> None:
    with live_server(root_path=PREFIX + "/") as server:
        for path in ("/openapi.json", PREFIX + "/openapi.json"):
            assert server.get(path)[1]["servers"] == [{"url": PREFIX}]
        for path in ("/docs", "/redoc", PREFIX + "/docs", PREFIX + "/redoc"):
            page = server.get(path)[1].decode()
            assert set(re.findall(r"[\"'](/[^\"']*openapi.json)", page)) == {PREFIX + "/openapi.json"}
        page = server.get("/")
        assert page[0] == 200
        assert server.get(PREFIX) == server.get(PREFIX + "/") == page, "with a slash at its end or not"


def test_keys_are_required_with_and_without_the_prefix() -> None:
    with live_server(root_path=PREFIX, api_key=("secret",)) as server:
        for path in ("/health", "/health/", "/ready", "/ping", "/version", "/metrics", "/", "/docs"):
            assert both(server, path)[0] == 200, path
        for path in ("/v1/models", "/v1/models/", "/openapi.json", "/nothing", "/health//"):
            assert both(server, path)[0] == 401, path
        for path in NO_ROUTE:
            assert server.get(path)[0] == 401, path
        for prefix in ("", PREFIX):
            assert server.post(prefix + "/v1/completions", TEXT)[0] == 401
            assert server.get(prefix + "/v1/models", authorization="Bearer secret")[0] == 200
            assert server.get(prefix + "/v1/models", authorization="Bearer wrong")[0] == 401
            for path in ("/health/../v1/models", "/%2e%2e/v1/models", "/health%2f..%2fv1/models", "//v1/models"):
                assert server.get(prefix + path)[0] == 401, prefix + path


@pytest.mark.parametrize("root_path", ["/v1", "/health", "/"])
def test_a_prefix_shared_with_routes_hides_none(root_path: str) -> None:
    prefix = root_path.rstrip("/")
    with live_server(root_path=root_path, api_key=("secret",)) as server:
        for path in ("/v1/models", f"{prefix}/v1/models"):
            assert server.get(path)[0] == 401
            assert server.get(path, authorization="Bearer secret")[0] == 200
        for path in ("/health", f"{prefix}/health"):
            assert server.get(path)[0] == 200


def test_middleware_sees_one_path(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []

    class Seeing:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            seen.append((scope["root_path"], scope["path"]))
            await self.app(scope, receive, send)

    monkeypatch.setitem(globals(), "Seeing", Seeing)
    with live_server(root_path=PREFIX, middleware=(f"{__name__}.Seeing",)) as server:
        both(server, "/health")
    assert seen == [(PREFIX, PREFIX + "/health")] * 2


@pytest.mark.parametrize("bad", ["x", "//host", "/a//b", "/a?b", "/a#b", "/a b", "http://host/a", "/\u00e4", "/a%20b"])
def test_invalid_prefixes_are_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match=r"--root-path: .* is not a URL path"):
        ServerConfig(root_path=bad)
