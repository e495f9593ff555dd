"""Ignored parts of requests: accepted, named in x-pagoda-ignored, logged, counted; refused when strict."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from support.servers.live_server import LiveServer, live_server

from pagoda.server.api.openai.chat import ChatCompletionRequest
from pagoda.server.api.openai.responses.request import ResponsesRequest
from pagoda.server.http.body import MAX_IGNORED, Ignored, parse, parse_tolerant
from pagoda.server.http.response import MAX_HEADER_BYTES, MAX_HEADER_NAMES, header_value

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "a"}
SCHEMA = {"type": "object", "properties": {}}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
RESPONSES_FUNCTION = {"type": "function", "name": "f", "parameters": SCHEMA, "strict": False}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER], "max_tokens": 3},
    RESPONSES: {"input": "a", "max_output_tokens": 3},
    MESSAGES: {"model": "fake", "messages": [USER], "max_tokens": 3},
    "/v1/completions": {"prompt": "a", "max_tokens": 3},
    "/tokenize": {"prompt": "a"},
}
ITEM = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}], "phase": "commentary"}

CASES: list[tuple[str, dict[str, Any], str]] = [
    # Codex CLI
    (RESPONSES, {"client_metadata": {"session_id": "x"}}, "client_metadata"),
    (
        RESPONSES,
        {
            "tools": [
                RESPONSES_FUNCTION,
                {"type": "namespace", "name": "agents", "tools": [RESPONSES_FUNCTION, {"type": "x"}]},
                {"type": "web_search", "external_web_access": False},
                {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "definition": "x"}},
                {"type": "local_shell"},
            ]
        },
        "tools[].tools[type=x], tools[type=web_search], tools[].format",
    ),
    (RESPONSES, {"input": [ITEM, ITEM]}, "input[].phase"),
    (RESPONSES, {"reasoning": {"effort": "high", "summary": "detailed"}}, "reasoning.summary, reasoning.effort"),
    (RESPONSES, {"include": ["web_search_call.action.sources"]}, "include[]"),
    (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
    # Claude Code, Anthropic's tool runner
    (MESSAGES, {"output_config": {"effort": "high"}}, "output_config.effort"),
    (MESSAGES, {"thread": {"type": "new"}}, "thread"),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
    (
        MESSAGES,
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}], "mcp_servers": [{"type": "url"}]},
        "mcp_servers, tools[type=web_search_20250305]",
    ),
    (
        MESSAGES,
        {"system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "scope": "global"}}]},
        "system[].cache_control.scope",
    ),
    # Open WebUI, OpenRouter, Ollama
    (CHAT, {"chat_id": "x", "session_id": "y", "features": {"memory": True}}, "chat_id, features"),
    (CHAT, {"provider": {"order": ["x"]}, "usage": {"include": True}}, "provider, usage"),
    (
        CHAT,
        {"reasoning": {"effort": "low"}, "options": {"num_ctx": 99}, "keep_alive": "5m"},
        "keep_alive, options, reasoning.effort",
    ),
    # OpenAI
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
    (CHAT, {"store": True, "service_tier": "flex", "verbosity": "low"}, "service_tier, store, verbosity"),
    (CHAT, {"tools": [{"type": "web_search"}]}, "tools[type=web_search]"),
    (CHAT, {"tools": [{**FUNCTION, "cache_control": {}}], "tool_choice": "none"}, "tools[].cache_control"),
    (CHAT, {"stream_options": {"include_obfuscation": True}, "stream": True}, "stream_options.include_obfuscation"),
    ("/v1/completions", {"surprise": 1}, "surprise"),
    ("/tokenize", {"surprise": 1}, "surprise"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(enable_auto_tool_choice=True, tool_call_parser="hermes") as server:
        yield server


@pytest.fixture(scope="module")
def strict() -> Iterator[LiveServer]:
    with live_server(strict_requests=True, enable_auto_tool_choice=True, tool_call_parser="hermes") as server:
        yield server


def counts(server: LiveServer) -> dict[str, float]:
    """Ignored parts by kind."""
    text = server.get("/metrics")[1].decode()
    lines = [line for line in text.splitlines() if line.startswith("pagoda:ignored_request_parts_total{")]
    return {line.split('kind="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


@pytest.mark.parametrize(("path", "more", "names"), CASES)
def test_ignored_parts_are_named_in_the_header(server: LiveServer, path: str, more: dict[str, Any], names: str) -> None:
    answer = server.response("POST", path, BODIES[path] | more)
    assert answer.status == 200, answer.body
    assert sorted(answer.headers["x-pagoda-ignored"].split(", ")) == sorted(names.split(", "))


@pytest.mark.setting("--strict-requests")
@pytest.mark.parametrize(("path", "more", "names"), CASES)
def test_a_strict_server_refuses_ignored_parts(strict: LiveServer, path: str, more: dict[str, Any], names: str) -> None:
    answer = strict.response("POST", path, BODIES[path] | more)
    assert answer.status == 400
    message = json.loads(answer.body)["error"]["message"]
    assert any(name.split("[")[0].split("=")[-1] in message for name in names.split(", ")), message
    assert "x-pagoda-ignored" not in answer.headers


@pytest.mark.parametrize(("path", "body"), BODIES.items())
def test_no_header_without_ignored_parts(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    answer = server.response("POST", path, body)
    assert answer.status == 200
    assert "x-pagoda-ignored" not in answer.headers


def test_ignored_parts_are_logged_and_counted(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    before = counts(server)
    with caplog.at_level(logging.DEBUG, "pagoda.server.http.response"):
        server.post(CHAT, BODIES[CHAT] | {"a\nb": 1, "c": 2, "store": True, "tools": [{"type": "web_search"}]})
    assert [record.getMessage() for record in caplog.records] == [
        f"POST {CHAT}: ignored a%0Ab, c, store, tools[type=web_search]"
    ]
    after = counts(server)
    assert {kind: after[kind] - before[kind] for kind in after} == {"unknown": 2, "hint": 1, "tool": 1, "item": 0}


@pytest.mark.parametrize(
    ("path", "more", "field"),
    [
        (CHAT, {"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        (
            CHAT,
            {
                "tools": [{"type": "web_search"}],
                "tool_choice": {"type": "function", "function": {"name": "web_search"}},
            },
            "tool_choice",
        ),
        (CHAT, {"tools": [FUNCTION], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        (RESPONSES, {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        (RESPONSES, {"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        (
            MESSAGES,
            {"tools": [{"type": "computer_20250124", "name": "c"}], "tool_choice": {"type": "any"}},
            "tool_choice",
        ),
    ],
)
def test_a_required_unsupported_tool_is_refused(
    server: LiveServer, path: str, more: dict[str, Any], field: str
) -> None:
    status, answer = server.post(path, BODIES[path] | more)
    assert status == 400
    assert field in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "more", "field"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0]"),
        (CHAT, {"format": "json"}, "format"),
        (CHAT, {"options": {"num_ctx": 4}}, "options.num_ctx"),
        (CHAT, {"num_ctx": 4}, "num_ctx"),
        ("/v1/completions", {"prompt": "abcdefg", "num_ctx": 4}, "num_ctx"),
        ("/v1/completions", {"suffix": "x"}, "suffix"),
        (CHAT, {"modalities": ["audio"]}, "modalities"),
        (RESPONSES, {"prompt": {"id": "pmpt_1"}}, "prompt"),
    ],
)
def test_fields_that_would_change_the_output_are_refused(
    server: LiveServer, path: str, more: dict[str, Any], field: str
) -> None:
    status, answer = server.post(path, BODIES[path] | more)
    assert status == 400
    assert field in answer["error"]["message"]


def test_undeclared_fields_are_not_stored_or_returned(server: LiveServer) -> None:
    item = ITEM | {"surprise": 1}
    answer = server.post(RESPONSES, BODIES[RESPONSES] | {"input": [item], "tools": [RESPONSES_FUNCTION | {"x": 1}]})[1]
    assert answer["tools"] == [RESPONSES_FUNCTION | {"description": None}]
    later = server.post(RESPONSES, BODIES[RESPONSES] | {"previous_response_id": answer["id"]})
    assert later[0] == 200, later[1]


def test_ignored_tool_fields_do_not_reach_the_model(server: LiveServer) -> None:
    body = BODIES[CHAT] | {"return_prompt_text": True}
    plain = server.post(CHAT, body | {"tools": [FUNCTION]})[1]["prompt_text"]
    more = {**FUNCTION, "x": 1, "function": FUNCTION["function"] | {"y": 2}}  # type: ignore[operator]
    assert server.post(CHAT, body | {"tools": [more, {"type": "web_search"}]})[1]["prompt_text"] == plain


def test_unknown_query_parameters_of_a_retrieval(server: LiveServer, strict: LiveServer) -> None:
    for each, status, named in ((server, 200, "include[]"), (strict, 400, None)):
        stored = each.post(RESPONSES, BODIES[RESPONSES])[1]["id"]
        answer = each.response("GET", f"{RESPONSES}/{stored}?include[]=x&include_obfuscation=false")
        assert (answer.status, answer.headers.get("x-pagoda-ignored")) == (status, named)


def test_streams_have_the_header(server: LiveServer) -> None:
    answer = server.response("POST", CHAT, BODIES[CHAT] | {"stream": True, "chat_id": "x"}, {"origin": "http://x"})
    assert answer.headers["x-pagoda-ignored"] == "chat_id"
    assert answer.headers["access-control-expose-headers"] == "x-pagoda-ignored"


def test_the_tool_runner_resends_the_conversation_without_threads() -> None:
    """The runner sends only new messages of a thread, so a server that ignored `thread` would lose the conversation."""
    sent: list[bytes] = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"[[sunny in {city}]]"

    with live_server("fake:say", enable_auto_tool_choice=True, tool_call_parser="hermes") as server:
        client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
        client._client.event_hooks["request"].append(lambda request: sent.append(request.read()))
        call = '[[<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>]]'
        user: Any = {"role": "user", "content": call}
        runner = client.beta.messages.tool_runner(
            model="fake", max_tokens=400, messages=[user], tools=[weather], max_iterations=2
        )
        kinds = [[block.type for block in message.content] for message in runner]
        refused = server.response("POST", MESSAGES, BODIES[MESSAGES] | {"thread": {"type": "continue"}})
    assert [kind[0] for kind in kinds] == ["tool_use", "tool_use"], "the script of the fake model is the first text"
    assert [json.loads(body).get("thread", {}).get("type") for body in sent] == ["create", "continue", "create"]
    assert len(json.loads(sent[-1])["messages"]) == 3
    assert refused.status == 404
    assert json.loads(refused.body)["error"]["details"] == {"error_code": "thread_not_found"}


def test_the_header_is_bounded_ascii() -> None:
    names = [Ignored(f"é\r\n{i}" + "x" * 300, "unknown") for i in range(MAX_HEADER_NAMES + 3)]
    value = header_value(names)
    assert value.isascii()
    assert value.isprintable()
    shown, _, more = value.rpartition(", +")
    assert len(shown.split(", ")) + int(more.removesuffix(" more")) == MAX_HEADER_NAMES + 3
    assert len(shown) <= MAX_HEADER_BYTES
    assert header_value([Ignored(f"f{i}", "unknown") for i in range(MAX_HEADER_NAMES + 3)]).endswith(", +3 more")
    assert len(value) < 8_192


def test_many_ignored_parts_are_cheap() -> None:
    raw = json.dumps({"messages": [USER]} | {f"f{i}": i for i in range(100_000)}).encode()
    body, ignored = parse_tolerant(ChatCompletionRequest, raw)
    assert len(ignored) == MAX_IGNORED
    assert not body.model_extra


def test_a_strict_parser_suggests_the_nearest_field() -> None:
    with pytest.raises(Exception, match=r"unknown field 'temprature'; did you mean 'temperature'\?"):
        parse(ResponsesRequest, b'{"input": "a", "temprature": 1}')


def test_clients_with_unknown_fields(server: LiveServer) -> None:
    chat = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    whole = chat.chat.completions.create(model="fake", messages=[USER], max_tokens=3, extra_body={"chat_id": "x"})  # type: ignore[list-item]
    assert len(whole.choices[0].message.content or "") == 3
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    message = client.messages.create(model="fake", messages=[USER], max_tokens=3, extra_body={"thread": {}})  # type: ignore[list-item]
    assert len(str(message.content[0].to_dict()["text"])) == 3
