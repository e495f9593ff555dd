"""Points of docs/guides/security.md that no other test holds: code from data, owners, JSON depth, salts, logs."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.servers.live_server import LiveServer, live_server
from support.suite.rows import each_row

from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.errors import RequestError
from pagoda.common.observe.logs import LineFormatter
from pagoda.server.cli.serving.serve import is_open
from pagoda.server.http.body import Ignored
from pagoda.server.http.response import MAX_HEADER_BYTES, header_value

ROOT = Path(__file__).resolve().parents[3]
GUIDE = ROOT / "docs" / "guides" / "security.md"
TEXT = {"prompt": "a", "max_tokens": 1}

# Code from data.

READS_PICKLES = {
    "common/weights/torch_bin.py",  # a restricted unpickler, which knows tensors only
    "backends/jax_tpu/execution/programs.py",  # XLA executables in the user's own cache folder
}
"""Files that may import pickle, each with the reason."""


def calls_of(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        match node:
            case ast.Call(ast.Name(name)):
                yield name
            case ast.Call(ast.Attribute(ast.Name(owner), name)):
                yield f"{owner}.{name}"
            case _:
                pass


def sources() -> list[Path]:
    return [
        path for folder in ("common", "server", "backends", "kernels_pallas") for path in (ROOT / folder).rglob("*.py")
    ]


WRITES_CODE = {"backends/torch_cuda/kernels/frame/bound.py"}
"""Where code is written from the parameters' names of our own kernels, and from nothing else."""


def test_no_code_is_made_from_data() -> None:
    found = []
    modules = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
    calls = {"eval", "exec", "torch.load", "yaml.load", "os.system", "compile"}
    any_of_them = re.compile(rf"\b(?:{'|'.join(map(re.escape, modules | calls))})\b")
    for path in sources():
        text = path.read_text()
        if any_of_them.search(text) is None:
            continue
        nodes, name = list(ast.walk(ast.parse(text))), path.relative_to(ROOT).as_posix()
        imports = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        imports |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        wrong = imports & modules
        if name in READS_PICKLES:
            wrong -= {"pickle"}
        made = calls & set(calls_of(nodes))
        if name in WRITES_CODE:
            made -= {"exec"}
        found += [f"{name}: {each}" for each in (*wrong, *made)]
    assert found == []


# Who may reach the server.


@each_row(
    ("config", "expected"),
    [
        ({}, False),
        ({"host": "127.0.0.1"}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": "::"}, True),
        ({"host": "0.0.0.0", "api_key": ("k",)}, False),
        ({"uds": "/tmp/x"}, False),
    ],
)
def test_an_open_server_is_warned_about(config: dict[str, Any], expected: bool) -> None:
    assert is_open(ServerConfig(**config)) is expected


# What is stored belongs to the key that stored it.

ALICE, BOB = {"authorization": "Bearer alice"}, {"authorization": "Bearer bob"}
ITEM = {"type": "message", "role": "user", "content": "a"}
SENT = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": TEXT}


@pytest.fixture(scope="module")
def shared() -> Iterator[LiveServer]:
    with live_server("fake:slow", api_key=("alice", "bob")) as server:
        yield server


def upload(server: LiveServer, headers: dict[str, str]) -> str:
    body = (
        b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
        b'content-disposition: form-data; name="file"; filename="f"\r\n\r\n'
        b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 1}}'
        b"\r\n--b--\r\n"
    )
    status, answer = server.request(
        "POST", "/v1/files", body, headers | {"content-type": "multipart/form-data; boundary=b"}
    )
    assert status == 200, answer
    return str(answer["id"])


def stored(server: LiveServer) -> dict[str, str]:
    """Parameter of a route -> the id of something of Alice's."""
    file = upload(server, ALICE)
    batch = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    conversation = server.post("/v1/conversations", {"items": [ITEM]}, **ALICE)[1]["id"]
    items = server.get(f"/v1/conversations/{conversation}/items", **ALICE)[1]["data"]
    background = {"input": "a", "max_output_tokens": 50, "background": True}
    return {
        "response_id": server.post("/v1/responses", background, **ALICE)[1]["id"],
        "conversation_id": conversation,
        "item_id": items[0]["id"],
        "file_id": file,
        "batch_id": server.post("/v1/batches", batch, **ALICE)[1]["id"],
    }


BODIES = {
    "/v1/conversations/{conversation_id}": {"metadata": {}},
    "/v1/conversations/{conversation_id}/items": {"items": [ITEM]},
}


def routes_with_ids(server: LiveServer) -> list[tuple[str, str]]:
    paths = server.app.openapi()["paths"]
    return sorted(
        (method.upper(), path)
        for path, methods in paths.items()
        for method in methods
        if re.search(r"\{\w+_id\}", path) and method != "head"
    )


def test_every_route_of_something_stored_is_404_for_another_key(shared: LiveServer) -> None:
    """The same answer as for something that does not exist; the owner still has it afterwards."""
    routes = [each for each in routes_with_ids(shared) if each[1].startswith("/v1/")]
    assert len(routes) >= 16
    ids = stored(shared)
    for method, path in routes:
        if set(re.findall(r"\{(\w+)\}", path)) - ids.keys():
            continue
        body = BODIES.get(path, {}) if method == "POST" else None
        status, answer = shared.request(method, path.format(**ids), body, BOB)
        assert status in (404, 501), (method, path, answer)
    for name, path in (
        ("response_id", "/v1/responses"),
        ("conversation_id", "/v1/conversations"),
        ("file_id", "/v1/files"),
        ("batch_id", "/v1/batches"),
    ):
        assert shared.get(f"{path}/{ids[name]}", **ALICE)[0] == 200, name
    for path in ("/v1/responses", "/v1/files", "/v1/batches"):
        assert shared.get(path, **BOB)[1]["data"] == []
        assert shared.get(path, **ALICE)[1]["data"] != []


@each_row(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "a", "max_output_tokens": 1, "previous_response_id": "{response_id}"}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 1, "conversation": "{conversation_id}"}),
        ("/v1/responses", {"max_output_tokens": 1, "input": [{"type": "item_reference", "id": "{input_item_id}"}]}),
        (
            "/v1/batches",
            {"input_file_id": "{file_id}", "endpoint": "/v1/completions", "completion_window": "24h"},
        ),
    ],
)
def test_requests_cannot_use_what_another_key_stored(shared: LiveServer, path: str, body: dict[str, Any]) -> None:
    ids = stored(shared)

    ended = shared.post("/v1/responses", {"input": [ITEM], "max_output_tokens": 1}, **ALICE)[1]["id"]
    input_items = shared.get(f"/v1/responses/{ended}/input_items", **ALICE)[1]["data"]
    ids |= {"response_id": ended, "input_item_id": input_items[0]["id"]}

    def filled(value: Any) -> Any:
        if isinstance(value, int):
            return value
        if isinstance(value, str):
            return value.format(**ids)
        return [{key: filled(each) for key, each in item.items()} for item in value]

    given = {key: filled(value) for key, value in body.items()}
    status, answer = shared.post(path, given, **BOB)
    assert status in (400, 404), answer
    status, answer = shared.post(path, given, **ALICE)
    assert status == 200, answer


# Bodies.


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as server:
        yield server


@each_row("depth", [129, 1000, 60_000])
@each_row(("left", "right"), [(b"[", b"]"), (b'{"a":', b"}")])
@each_row(
    ("path", "head"),
    [
        ("/v1/completions", b'{"prompt": "a", "guided_json": {"a": '),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "metadata": {"a": '),
        ("/v1/responses", b'{"input": "a", "unknown": {"a": '),
        ("/tokenize", b'{"prompt": "a", "unknown": {"a": '),
        ("/invocations", b'{"prompt": "a", "unknown": {"a": '),
    ],
)
def test_deep_json_is_refused_or_ignored(
    server: LiveServer, path: str, head: bytes, left: bytes, right: bytes, depth: int
) -> None:
    status, answer = server.post(path, head + left * depth + b"1" + right * depth + b"}}")
    assert status in ((200, 400) if depth < 200 else (400, 413)), answer
    assert server.post("/v1/completions", TEXT)[0] == 200


def test_the_header_of_ignored_parts_is_bounded() -> None:
    many = [Ignored(f"{index}" + "é" * 90, "unknown") for index in range(64)]
    value = header_value(many)
    assert len(value) <= MAX_HEADER_BYTES + 20
    shown, _, more = value.rpartition(", +")
    assert len(shown.split(", ")) + int(more.removesuffix(" more")) == 64
    assert header_value([Ignored("a", "unknown"), Ignored("b", "hint")]) == "a, b"


# Caches of several tenants.


def test_a_salt_hides_what_is_cached() -> None:
    """A tenant with another salt cannot learn whether a prompt was sent: nothing is cached for it, however often."""
    prompt = TEXT | {"prompt": "tenants of one cache, each"}

    def cached(salt: str | None) -> int:
        params = {} if salt is None else {"cache_salt": salt}
        with_details = server.post("/v1/completions", prompt | params)[1]["usage"]
        return int((with_details.get("prompt_tokens_details") or {}).get("cached_tokens", 0))

    with live_server(enable_prompt_tokens_details=True) as server:
        assert [cached("alice"), cached("bob"), cached(None)] == [0, 0, 0]
        assert cached("alice") == cached("bob") == cached(None) > 0
        for salt in ("", "a" * 1025):
            status, answer = server.post("/v1/completions", prompt | {"cache_salt": salt})
            assert (status, answer["error"]["param"]) == (400, "cache_salt")


async def test_salts_of_the_python_api_are_bounded(server: LiveServer) -> None:
    processor = server.llm._ready().inputs.processor
    with pytest.raises(RequestError, match="cache_salt must have at most 1024 characters"):
        processor.parse({"prompt": "a", "cache_salt": "a" * 1025})


# What errors, logs and metrics show.

HOSTILE = "x\n2026-01-01 ERROR forged \r\n\x1b[31m"


def test_hostile_names_forge_no_log_lines_and_no_metrics(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "pagoda")
    with live_server(engine={"enable_log_requests": True}) as server:
        logging.getLogger("pagoda").addHandler(caplog.handler)
        try:
            before = series(server)
            for body in (
                TEXT | {"user": HOSTILE, "request_id": HOSTILE, "prompt": HOSTILE},
                TEXT | {"model": HOSTILE},
                TEXT | {HOSTILE: 1},
            ):
                server.post("/v1/completions", body)
            server.post("/v1/completions", TEXT, **{"x-request-id": "a b"})
            server.get("/v1/responses/x%0aERROR%20forged")
        finally:
            logging.getLogger("pagoda").removeHandler(caplog.handler)
        assert series(server) == before
    lines = list(map(LineFormatter().format, caplog.records))
    assert any("forged" in each for each in lines)
    assert not [each for each in lines if "\n" in each or "\r" in each or "\x1b" in each]


def series(server: LiveServer) -> set[str]:
    """The labelled series of /metrics: they are the same whatever clients send."""
    text = server.get("/metrics")[1].decode()
    return {
        line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#") and "_created" not in line
    }


def test_prompts_are_not_logged_by_default(caplog: pytest.LogCaptureFixture, server: LiveServer) -> None:
    caplog.set_level("DEBUG", "pagoda")
    logging.getLogger("pagoda").addHandler(caplog.handler)
    try:
        server.post("/v1/completions", TEXT | {"prompt": "a private text"})
        server.post("/v1/completions", TEXT | {"prompt": "a private text" * 99})
    finally:
        logging.getLogger("pagoda").removeHandler(caplog.handler)
    assert "private" not in caplog.text


PRIVATE = re.compile(r"0x[0-9a-f]{6,}|/(home|tmp|usr|work|root)/|Traceback|\.py\b|File \"|line \d+, in")
WRONG: list[tuple[str, Any]] = [
    ("/v1/completions", {"prompt": {"a": 1}}),
    ("/v1/completions", TEXT | {"logit_bias": {"x": 1}}),
    ("/v1/completions", TEXT | {"structured_outputs": {"regex": "(a"}}),
    ("/v1/completions", TEXT | {"structured_outputs": {"json": {"type": "x"}}}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ("/v1/chat/completions", {"messages": [{"role": 5}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "chat_template": "{{ 1/0 }}"}),
    ("/v1/responses", {"input": [{"type": "x"}]}),
    ("/v1/messages", {"model": "fake", "max_tokens": 1, "messages": [{"role": "user", "content": 5}]}),
    ("/v1/embeddings", {"input": "a"}),
    ("/tokenize", {"prompt": 5}),
    ("/v1/batches", {"input_file_id": "../../etc/passwd", "endpoint": "/v1/completions", "completion_window": "24h"}),
    ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "relative"}),
]


@each_row(("path", "body"), WRONG)
def test_errors_show_nothing_of_the_server(server: LiveServer, path: str, body: Any) -> None:
    answer = server.response("POST", path, body)
    assert 400 <= answer.status < 500, answer.body
    assert not PRIVATE.search(answer.body.decode()), answer.body


# The guide.


def test_every_test_that_the_guide_names_exists() -> None:
    names = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", GUIDE.read_text())
    assert len(names) >= 18
    for path, function in names:
        text = (ROOT / path).read_text()
        assert not function or f"def {function}" in text, (path, function)
