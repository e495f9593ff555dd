"""The effect of each setting of `serve`."""

import asyncio
import json
import logging
import os
import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.servers.live_server import LiveServer, live_server
from support.servers.served import served, wait_ready
from support.suite.rows import each_row
from support.suite.watching import eventually, logged

from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.errors import ConfigError
from pagoda.common.observe.metrics import Metrics
from pagoda.server.api.app import create_app
from pagoda.server.async_llm import AsyncLLM
from pagoda.server.cli.serving import serve
from pagoda.server.http.response import with_pauses
from pagoda.server.http.state import ServerState
from pagoda.server.settings.flags import EngineArgs

TEXT = {"prompt": "a", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
PARTS = "{% for m in messages %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endfor %}"


def state_of(**config: Any) -> ServerState:
    """Return the state of a server whose engine has a configuration only."""
    llm = SimpleNamespace(config=EngineArgs(model="m").create_engine_config(), check_overload=lambda: None)
    return ServerState(cast(AsyncLLM, llm), ServerConfig(**config), Metrics("m"))


def prompt_of(server: LiveServer, **more: Any) -> str:
    """Return the rendered text of a chat, as ids of the byte tokenizer."""
    status, answer = server.post("/v1/chat/completions", CHAT | {"return_token_ids": True} | more)
    assert status == 200, answer
    return bytes(answer["prompt_token_ids"]).decode()


# --- address and docs pages ---


@pytest.mark.setting("--host", "--port")
def test_host_and_port() -> None:
    with serve.bind(ServerConfig(host="127.0.0.2", port=0)) as free:
        assert free.getsockname()[0] == "127.0.0.2"
        port = free.getsockname()[1]
    with serve.bind(ServerConfig(port=port)) as listener:
        assert listener.getsockname() == ("127.0.0.1", port)


@pytest.mark.setting("--root-path")
def test_root_path_in_the_docs_page() -> None:
    with live_server(root_path="/behind") as server:
        assert b"/behind/openapi.json" in server.get("/docs")[1]
        assert server.get("/openapi.json")[1]["servers"] == [{"url": "/behind"}]
        assert server.get("/v1/models")[0] == 200


@pytest.mark.setting("--disable-fastapi-docs")
def test_disable_fastapi_docs() -> None:
    with live_server() as shown, live_server(disable_fastapi_docs=True) as hidden:
        for path in ("/docs", "/redoc", "/openapi.json"):
            assert (shown.get(path)[0], hidden.get(path)[0]) == (200, 404)


# --- cross-origin rules and middleware ---


@pytest.mark.setting("--allowed-origins", "--allowed-methods", "--allowed-headers", "--allow-credentials")
def test_cross_origin_rules() -> None:
    rules = {
        "allowed_origins": ("http://good",),
        "allowed_methods": ("GET",),
        "allowed_headers": ("X-Mine",),
        "allow_credentials": True,
    }
    with live_server(**rules) as server:

        def preflight(origin: str, method: str, header: str) -> int:
            asked = {
                "origin": origin,
                "access-control-request-method": method,
                "access-control-request-headers": header,
            }
            return server.request("OPTIONS", "/v1/models", None, asked)[0]

        assert preflight("http://good", "GET", "x-mine") == 200
        assert preflight("http://bad", "GET", "x-mine") == 400
        assert preflight("http://good", "PUT", "x-mine") == 400
        assert preflight("http://good", "GET", "x-other") == 400
        headers = headers_of(server, "/v1/models", origin="http://good")
        assert headers["access-control-allow-origin"] == "http://good"
        assert headers["access-control-allow-credentials"] == "true"
        assert "access-control-allow-origin" not in headers_of(server, "/v1/models", origin="http://bad")


def headers_of(server: LiveServer, path: str, body: Any = None, **headers: str) -> dict[str, str]:
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    raw = None if body is None else json.dumps(body)
    connection.request("GET" if raw is None else "POST", path, raw, {"content-type": "application/json"} | headers)
    response = connection.getresponse()
    response.read()
    connection.close()
    return {name.lower(): value for name, value in response.getheaders()}


class Stamp:
    """ASGI middleware, for --middleware."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def stamped(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-stamp", b"class")]
            await send(message)

        await self.app(scope, receive, stamped)


async def teapot(request: Any, call_next: Any) -> Any:
    from starlette.responses import Response

    return Response(status_code=418) if request.url.path == "/teapot" else await call_next(request)


@pytest.mark.setting("--middleware")
def test_middleware() -> None:
    with live_server(middleware=(f"{__name__}.Stamp", f"{__name__}:teapot")) as server:
        assert headers_of(server, "/health")["x-stamp"] == "class"
        assert server.get("/teapot")[0] == 418
        status, answer = server.post("/v1/completions", TEXT)
        assert (status, answer["choices"][0]["text"]) == (200, "bc")


@pytest.mark.setting("--middleware")
@pytest.mark.parametrize("name", ["no.such.thing", "json.dumps", "os.path"])
def test_invalid_middleware_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--middleware: {name}"):
        create_app(state_of(middleware=(name,)))


# --- information in responses ---


def test_load() -> None:
    with live_server("fake:slow", api_key=("k",)) as server:
        assert server.get("/load") == (200, {"server_load": 0})
        body = json.dumps(TEXT | {"max_tokens": 60, "stream": True, "ignore_eos": True}).encode()
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\ncontent-length: {len(body)}"
            client.sendall(head.encode() + b"\r\n\r\n" + body)
            eventually(lambda: server.get("/load")[1] == {"server_load": 1})
        eventually(lambda: server.get("/load")[1] == {"server_load": 0})


@pytest.mark.setting("--enable-tokenizer-info-endpoint")
def test_tokenizer_info() -> None:
    with live_server() as plain:
        assert plain.get("/tokenizer_info")[0] == 404
    with live_server(enable_tokenizer_info_endpoint=True, chat_template="{{ 1 }}") as server:
        status, about = server.get("/tokenizer_info")
    assert status == 200
    assert (about["eos_token"], about["vocab_size"], about["chat_template"]) == ("<eos>", 257, "{{ 1 }}")
    assert about["added_tokens_decoder"] == {"256": {"content": "<eos>", "special": True}}
    assert about["model_max_length"] == 64


@pytest.mark.setting("--enable-request-id-headers")
def test_request_id_headers() -> None:
    with live_server() as plain, live_server(enable_request_id_headers=True) as server:
        assert "x-request-id" not in headers_of(plain, "/v1/completions", TEXT)
        headers = headers_of(server, "/v1/completions", TEXT | {"request_id": "mine"})
        assert headers["x-request-id"] == "cmpl-mine"
        forged = headers_of(server, "/v1/completions", TEXT | {"request_id": "a\r\nset-cookie: b=c \u65e5%"})
        assert forged["x-request-id"] == "cmpl-a%0D%0Aset-cookie: b=c %E6%97%A5%25"
        for body in (TEXT, TEXT | {"stream": True}, TEXT | {"model": "other"}, {}):
            named = server.response("POST", "/v1/completions", body, {"x-request-id": "mine \u00e9"}).headers
            assert named["x-request-id"] == "mine %C3%A9"
        new = {server.response("GET", "/health").headers["x-request-id"] for _ in range(2)}
        assert len(new) == 2
        assert "set-cookie" not in forged


@pytest.mark.setting("--enable-prompt-tokens-details")
def test_prompt_tokens_details() -> None:
    with live_server() as plain, live_server(enable_prompt_tokens_details=True) as server:
        assert plain.post("/v1/completions", TEXT)[1]["usage"]["prompt_tokens_details"] is None
        usage = server.post("/v1/completions", TEXT)[1]["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


def events(raw: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in raw.split(b"\n\n") if line.startswith(b"data: {")]


@pytest.mark.setting("--enable-force-include-usage")
def test_usage_without_asking() -> None:
    with live_server() as plain, live_server(enable_force_include_usage=True) as server:
        body = TEXT | {"stream": True}
        assert not any("usage" in event for event in events(plain.post("/v1/completions", body)[1]))
        assert events(server.post("/v1/completions", body)[1])[-1]["usage"]["completion_tokens"] == 2


@pytest.mark.setting("--return-tokens-as-token-ids")
def test_tokens_as_token_ids() -> None:
    with live_server(return_tokens_as_token_ids=True) as server:
        body = TEXT | {"logprobs": 0}
        logprobs = server.post("/v1/completions", body)[1]["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["token_id:98", "token_id:99"]
        asked = server.post("/v1/completions", body | {"return_tokens_as_token_ids": False})[1]
        assert asked["choices"][0]["logprobs"]["tokens"] == ["b", "c"]


# --- the prompt of a chat ---


@pytest.mark.setting("--chat-template", "--response-role")
def test_template_and_role() -> None:
    with live_server(chat_template="<{{ messages[0].content }}>", response_role="bot") as server:
        assert prompt_of(server) == "<a>"
        assert server.post("/v1/chat/completions", CHAT)[1]["choices"][0]["message"]["role"] == "bot"


@pytest.mark.setting("--chat-template")
def test_template_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("[{{ messages[0].content }}]")
    with live_server(chat_template=str(tmp_path / "t.jinja")) as server:
        assert prompt_of(server) == "[a]"


@pytest.mark.setting("--trust-request-chat-template")
def test_templates_of_requests() -> None:
    with live_server() as plain, live_server(trust_request_chat_template=True) as server:
        body = CHAT | {"chat_template": "({{ messages[0].content }})"}
        assert plain.post("/v1/chat/completions", body)[1]["error"]["param"] == "chat_template"
        assert prompt_of(server, chat_template="({{ messages[0].content }})") == "(a)"


@pytest.mark.setting("--chat-template-content-format")
@pytest.mark.parametrize(("form", "prompt"), [("auto", "<x><y>"), ("openai", "<x><y>"), ("string", "<><><>")])
def test_content_as_the_template_wants_it(form: str, prompt: str) -> None:
    content = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    with live_server(chat_template=PARTS, chat_template_content_format=form) as server:
        assert prompt_of(server, messages=[{"role": "user", "content": content}]) == prompt


@pytest.mark.setting("--default-chat-template-kwargs")
def test_default_template_variables() -> None:
    template = "{{ mood }} {{ messages[0].content }}"
    with live_server(chat_template=template, default_chat_template_kwargs={"mood": "calm"}) as server:
        assert prompt_of(server) == "calm a"
        assert prompt_of(server, chat_template_kwargs={"mood": "wild"}) == "wild a"
    with pytest.raises(ConfigError, match=r"--default-chat-template-kwargs: .*'messages'"):
        state_of(default_chat_template_kwargs={"messages": []})


# --- logs ---


@pytest.mark.setting("--enable-log-requests", "--max-log-len")
def test_requests_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with logged(caplog, "pagoda"), live_server() as server:
        server.post("/v1/completions", TEXT)
    assert "prompt" not in caplog.text
    with logged(caplog, "pagoda"), live_server(engine={"enable_log_requests": True}, max_log_len=40) as server:
        server.post("/v1/completions", TEXT | {"prompt": "b" * 50})
        server.post("/v1/completions", {"prompt": list(range(97, 147)), "max_tokens": 1})
        server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 1})
    assert f"prompt '{'b' * 40}...', params" in caplog.text
    assert re.search(r"prompt '.*ab.*', prompt_token_ids \[[\d, ]+\], params", caplog.text)
    assert f"prompt_token_ids [{', '.join(map(str, range(97, 137)))}, ...], params" in caplog.text


@pytest.mark.setting("--enable-log-outputs", "--enable-log-deltas")
@pytest.mark.parametrize("deltas", [True, False])
def test_answers_in_the_log(caplog: pytest.LogCaptureFixture, deltas: bool) -> None:
    config = {"enable_log_outputs": True, "enable_log_deltas": deltas}
    with logged(caplog, "pagoda"), live_server("fake:slow", engine={"enable_log_requests": True}, **config) as server:
        server.post("/v1/completions", TEXT | {"max_tokens": 4})
        server.post("/v1/completions", TEXT | {"max_tokens": 4, "stream": True, "n": 2, "temperature": 1.0})
    assert caplog.text.count("output 'bcde', finish reason length") == 3
    assert (" delta " in caplog.text) is deltas


@pytest.mark.setting("--log-error-stack")
def test_traceback_of_a_failed_request(caplog: pytest.LogCaptureFixture) -> None:
    bad = TEXT | {"temperature": -1}
    with logged(caplog, "pagoda"), live_server() as server:
        server.post("/v1/completions", bad)
    assert "Traceback" not in caplog.text
    with logged(caplog, "pagoda"), live_server(log_error_stack=True) as server:
        assert server.post("/v1/completions", bad)[0] == 400
    assert "/v1/completions failed" in caplog.text
    assert "RequestError" in caplog.text


@pytest.mark.setting("--log-error-stack")
def test_no_traceback_of_a_failed_probe(caplog: pytest.LogCaptureFixture) -> None:
    with logged(caplog, "pagoda"), live_server("fake:crash", log_error_stack=True) as server:
        server.post("/v1/completions", TEXT | {"max_tokens": 20})
        failed = caplog.text.count("Traceback")
        for path in ("/health", "/ready", "/ping", "/health/"):
            assert server.get(path)[0] == 503
            assert server.response("HEAD", path).status == 503
        assert caplog.text.count("Traceback") == failed > 0


@pytest.mark.setting("--log-error-stack")
def test_traceback_of_a_failed_stream(caplog: pytest.LogCaptureFixture) -> None:
    with logged(caplog, "pagoda"), live_server("fake:crash", log_error_stack=True) as server:
        server.post("/v1/completions", TEXT | {"max_tokens": 20, "stream": True})
    assert "EngineDeadError" in caplog.text
    assert "Traceback" in caplog.text


@pytest.mark.setting("--disable-uvicorn-access-log", "--uvicorn-log-level", "--disable-access-log-for-endpoints")
@each_row(
    ("config", "seen"),
    [
        ({"uvicorn_log_level": "info"}, ["/health", "/v1/models"]),
        ({"uvicorn_log_level": "warning"}, []),
        ({"uvicorn_log_level": "info", "disable_uvicorn_access_log": True}, []),
        ({"uvicorn_log_level": "info", "disable_access_log_for_endpoints": ("/health", "/ping")}, ["/v1/models"]),
    ],
)
def test_access_log(caplog: pytest.LogCaptureFixture, config: dict[str, Any], seen: list[str]) -> None:
    access = logging.getLogger("uvicorn.access")
    access.addHandler(caplog.handler)
    try:
        with live_server(**config) as server:
            server.get("/health")
            server.get("/v1/models")
    finally:
        access.removeHandler(caplog.handler)
    paths = {str(record.args[2]) for record in caplog.records if record.name == access.name and record.args}
    assert sorted(paths) == seen


@pytest.mark.setting("--disable-log-stats", "--log-stats-interval")
@pytest.mark.parametrize("quiet", [False, True])
def test_statistics_in_the_log(caplog: pytest.LogCaptureFixture, quiet: bool) -> None:
    engine = {"disable_log_stats": quiet, "log_stats_interval": 0.01}
    with logged(caplog, "pagoda"), live_server("fake:slow", ready=False, engine=engine) as server:
        life = asyncio.run_coroutine_threadsafe(serve._watch_engine(server.state, lambda: None), server._loop)
        eventually(lambda: server.get("/ready")[0] == 200)

        def answer() -> None:
            server.post("/v1/completions", TEXT | {"max_tokens": 20})

        answer()
        if not quiet:  # A request that is answered before the first totals are taken is in no later difference.
            eventually(lambda: "Avg generation throughput" in caplog.text, then=answer)
        life.cancel()
    assert ("Avg generation throughput" in caplog.text) is not quiet


# --- limits and shutdown ---


@pytest.mark.setting("--api-key")
def test_several_api_keys() -> None:
    with live_server(api_key=("one", "two")) as server:
        got = [server.get("/v1/models", authorization=f"Bearer {key}")[0] for key in ("one", "two", "three")]
        assert got == [200, 200, 401]


@pytest.mark.setting("--max-body-bytes")
def test_bodies_are_bounded() -> None:
    with live_server(max_body_bytes=100) as server:
        assert server.post("/v1/completions", TEXT)[0] == 200
        assert server.post("/v1/completions", TEXT | {"user": "x" * 100})[0] == 413


@pytest.mark.setting("--max-logprobs")
def test_logprobs_are_bounded() -> None:
    with live_server(engine={"max_logprobs": 2}) as server:
        assert server.post("/v1/completions", TEXT | {"logprobs": 2})[0] == 200
        status, answer = server.post("/v1/completions", TEXT | {"logprobs": 3})
        assert (status, answer["error"]["param"]) == (400, "logprobs")


@pytest.mark.setting("--max-num-queued-reqs")
def test_full_queue_is_answered_429() -> None:
    with live_server("fake:slow", engine={"max_num_queued_reqs": 2, "max_num_seqs": 1}) as server:
        long = {"prompt": "a", "max_tokens": 60, "n": 2, "temperature": 1.0, "stream": True}
        connection = server.raw("POST", "/v1/completions", long)
        eventually(lambda: server.llm.num_unfinished == 1)
        for stream in (False, True):
            status, answer = server.post("/v1/completions", TEXT | {"stream": stream})
            assert (status, answer["error"]["type"]) == (429, "requests")
        assert headers_of(server, "/v1/completions", TEXT)["retry-after"] == "1"
        connection.close()
        eventually(lambda: not server.llm.num_unfinished)
        assert server.post("/v1/completions", TEXT)[0] == 200
        status, answer = server.post("/v1/completions", TEXT | {"n": 3, "temperature": 1.0})
        assert (status, answer["error"]["param"]) == (400, "n")


@pytest.mark.setting("--sse-keep-alive-interval")
def test_idle_stream_sends_keep_alives() -> None:
    body = TEXT | {"stream": True, "max_tokens": 3}
    with live_server("fake:slow", sse_keep_alive_interval=0.002) as server:
        raw = server.post("/v1/completions", body)[1]
        assert b": keep-alive\n\n" in raw
        assert "".join(event["choices"][0]["text"] for event in events(raw)) == "bcd"
        assert raw.endswith(b"data: [DONE]\n\n")
    with live_server("fake:slow") as server:
        assert b"keep-alive" not in server.post("/v1/completions", body)[1]


async def test_pauses_lose_nothing() -> None:
    closed = []
    paused = asyncio.Event()

    async def slowly() -> Any:
        try:
            for number in range(3):
                await paused.wait()
                paused.clear()
                yield number
        finally:
            closed.append(True)

    seen = []
    async for item in with_pauses(slowly(), 0.001):
        seen.append(item)
        if item is None:
            paused.set()
    assert [item for item in seen if item is not None] == [0, 1, 2]
    assert None in seen
    left = with_pauses(slowly(), 0.001)
    await anext(left)
    await left.aclose()
    assert closed == [True, True]


@pytest.mark.setting("--disable-frontend-multiprocessing")
@pytest.mark.parametrize("alone", [False, True])
def test_an_engine_without_a_process(alone: bool) -> None:
    flags = ["--disable-frontend-multiprocessing"] if alone else []
    with served("fake", *flags) as (process, _):
        wait_ready(process)
        listed = Path(f"/proc/{process.pid}/task").glob("*/children")
        children = [Path("/proc", child) for each in listed for child in each.read_text().split()]
        names = [(child / "cmdline").read_text() + (child / "comm").read_text() for child in children]
        engines = ["fake_engine" in name for name in names]  # one that is forked has its name in comm
        assert sum(engines) == (0 if alone else 1), "other children render chat templates"


@pytest.mark.setting("--uds")
def test_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with live_server(uds=path), socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        client.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200 OK" in client.recv(1000)
        assert os.stat(path)


@pytest.mark.setting("--shutdown-timeout")
@pytest.mark.parametrize(("seconds", "word"), [(0.0, b"shutting down"), (20.0, b'"finish_reason":"length"')])
def test_shutdown_timeout(seconds: float, word: bytes) -> None:
    with live_server("fake:slow", shutdown_timeout=seconds) as server:
        connection = server.raw("POST", "/v1/completions", {"prompt": "a", "max_tokens": 30, "stream": True})
        answer = connection.recv(65536)
        asyncio.run_coroutine_threadsafe(server.state.drain(), server._loop).result(60)
        while b"[DONE]" not in answer and (part := connection.recv(65536)):
            answer += part
        assert word in answer
        connection.close()
