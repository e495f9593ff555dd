"""Tools of type mcp: a real server of the Model Context Protocol on loopback, called by responses."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import uvicorn
from support.servers.live_server import LiveServer, live_server
from support.servers.responses_api import events_of
from support.suite.rows import each_row
from support.suite.watching import eventually

from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.errors import ConfigError, RequestError
from pagoda.server.api.openai.responses import tool_servers
from pagoda.server.api.openai.responses.tool_servers import ToolServer, allowed_servers, resolve_url
from pagoda.server.api.openai.responses.tools import ListedTool, McpTool

pytestmark = pytest.mark.program("mcp")

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }};{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TOOLS = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "chat_template": TEMPLATE}


def tool_server_app() -> Any:
    """A server with tools that answer, fail, hang, and answer too much."""
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("tests")

    @server.tool()
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        return f"sum {a + b}"

    @server.tool()
    def fail() -> str:
        """Fail."""
        raise ValueError("no luck today")

    @server.tool()
    def much() -> str:
        """Return 10 MB."""
        return "x" * 10_000_000

    @server.tool()
    def long() -> str:
        """Return more than the model's context."""
        return "x" * 5000

    @server.tool()
    async def hang() -> str:
        """Never answer."""
        await asyncio.Event().wait()
        return ""

    return server.streamable_http_app()


@pytest.fixture(scope="module")
def mcp_url() -> Iterator[str]:
    config = uvicorn.Config(tool_server_app(), log_level="error", lifespan="on", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
        thread.start()
        eventually(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
        server.should_exit = True
        thread.join(60)


@pytest.fixture(scope="module")
def server(mcp_url: str) -> Iterator[LiveServer]:
    limits = {"tool_server_timeout": 20.0, "max_tool_result_bytes": 100_000, "max_tool_rounds": 3}
    with live_server("fake:steps", tool_server=f"calc={mcp_url}", **TOOLS, **limits) as server:
        yield server


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def ask(*steps: str, **fields: Any) -> dict[str, Any]:
    """A request whose answer is the steps, one after each result of a tool."""
    tool = {"type": "mcp", "server_label": "calc", "require_approval": "never"}
    return {"input": f"[[{'||'.join(steps)}]]", "tools": [tool], "max_output_tokens": 300} | fields


def kinds(response: dict[str, Any]) -> list[str]:
    return [item["type"] for item in response["output"]]


@pytest.mark.setting("--tool-server")
def test_a_tool_is_called_and_its_result_answered(server: LiveServer) -> None:
    status, response = server.post("/v1/responses", ask(call("add", a=2, b=3), "It is five."))
    assert (status, response["status"]) == (200, "completed"), response
    assert kinds(response) == ["mcp_list_tools", "mcp_call", "message"]
    listed, made, message = response["output"]
    assert [tool["name"] for tool in listed["tools"]] == ["add", "fail", "much", "long", "hang"]
    assert listed["tools"][0]["input_schema"]["required"] == ["a", "b"]
    assert (made["server_label"], made["name"], json.loads(made["arguments"])) == ("calc", "add", {"a": 2, "b": 3})
    assert (made["output"], made["error"], made["status"]) == ("sum 5", None, "completed")
    assert message["content"][0]["text"] == "It is five."
    alone = server.post("/v1/responses", ask("fine"))[1]["usage"]["input_tokens"]
    assert response["usage"]["input_tokens"] > 2 * alone, "the prompts of both rounds"
    status, again = server.post("/v1/responses", {"input": "x", "previous_response_id": response["id"]})
    assert status == 200, again


def test_the_limit_of_output_tokens_counts_all_rounds(server: LiveServer) -> None:
    step = call("add", a=2, b=3)
    limit = len(step) + 1 + len("It is")  # bytes, and the end of the first answer
    response = server.post("/v1/responses", ask(step, "It is five.", max_output_tokens=limit))[1]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][-1]["content"][0]["text"] == "It is"
    assert (response["max_output_tokens"], response["usage"]["output_tokens"]) == (limit, limit)


def test_the_same_is_streamed(server: LiveServer) -> None:
    events = events_of(server.post("/v1/responses", ask(call("add", a=2, b=3), "five", stream=True))[1])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    names = [event["type"].removeprefix("response.") for event in events]
    assert names[:6] == [
        *("created", "in_progress", "output_item.added"),
        *("mcp_list_tools.in_progress", "mcp_list_tools.completed", "output_item.done"),
    ]
    assert [len(event["response"]["output"]) for event in events if "response" in event] == [0, 0, 3]
    calls = [name for name in names if name.startswith("mcp_call") and "delta" not in name]
    assert calls == ["mcp_call.in_progress", "mcp_call_arguments.done", "mcp_call.completed"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done[1]["output"] == "sum 5"
    assert names[-1] == "completed"
    assert kinds(events[-1]["response"]) == ["mcp_list_tools", "mcp_call", "message"]


def test_background_responses_call_tools(server: LiveServer) -> None:
    response = server.post("/v1/responses", ask(call("add", a=1, b=1), "two", background=True))[1]
    path = f"/v1/responses/{response['id']}"
    eventually(lambda: server.get(path)[1]["status"] not in ("queued", "in_progress"))
    response = server.get(path)[1]
    assert (response["status"], kinds(response)) == ("completed", ["mcp_list_tools", "mcp_call", "message"])


@each_row(
    ("step", "error"),
    [
        (call("fail"), "Error executing tool fail"),
        (call("much"), "its answer is larger than 100000 bytes (--max-tool-result-bytes)"),
        (call("add", a="x"), "a"),
        (call("nothing"), None),
    ],
)
@pytest.mark.setting("--max-tool-result-bytes")
def test_a_failed_call_is_a_result_and_the_response_goes_on(server: LiveServer, step: str, error: str | None) -> None:
    response = server.post("/v1/responses", ask(step, "sorry"))[1]
    assert response["status"] == "completed", response
    if error is None:
        assert kinds(response) == ["mcp_list_tools", "function_call"], "a function that was not offered is the client's"
        return
    _, made, message = response["output"]
    assert (made["status"], made["output"]) == ("failed", None)
    assert error in made["error"]
    assert message["content"][0]["text"] == "sorry"


@pytest.mark.setting("--tool-server-timeout")
def test_a_server_that_hangs_fails_its_call_alone(mcp_url: str) -> None:
    with live_server("fake:steps", tool_server=mcp_url, tool_server_timeout=2.0, **TOOLS) as server:
        tool = {"type": "mcp", "server_label": "x", "server_url": mcp_url, "require_approval": "never"}
        body = ask(call("hang") + call("add", a=1, b=2), "a", "after", tools=[tool])
        response = server.post("/v1/responses", body)[1]
    _, hung, added, message = response["output"]
    assert hung["error"] == "tool server 'x': no answer within 2 s (--tool-server-timeout)"
    assert added["output"] == "sum 3", "the next call has a session of its own"
    assert message["content"][0]["text"] == "after"


def test_a_stream_ends_properly_if_a_result_does_not_fit_the_context(server: LiveServer) -> None:
    body = ask(call("long"), "never", stream=True)
    events = events_of(server.post("/v1/responses", body)[1])
    assert events[-1]["type"] == "response.failed", events[-1]
    assert "maximum context length is 4096 tokens" in events[-1]["response"]["error"]["message"]
    assert kinds(events[-1]["response"]) == ["mcp_list_tools", "mcp_call"]
    status, whole = server.post("/v1/responses", body | {"stream": False})
    assert (status, whole["status"], kinds(whole)) == (200, "failed", ["mcp_list_tools", "mcp_call"])
    assert whole["error"] == events[-1]["response"]["error"]
    assert server.post("/v1/responses", ask("fine"))[1]["status"] == "completed"


def test_a_client_that_leaves_ends_the_sessions(mcp_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    close = tool_servers.ToolSession.close

    async def counted(session: tool_servers.ToolSession) -> None:
        await close(session)
        closed.append(session._label)

    monkeypatch.setattr(tool_servers.ToolSession, "close", counted)
    with live_server("fake:steps", tool_server=f"calc={mcp_url}", **TOOLS) as server:
        connection = server.raw("POST", "/v1/responses", ask(call("hang"), "never", stream=True))
        eventually(lambda: server.state.running == 0 and connection.recv(1))
        connection.close()
        eventually(lambda: closed == ["calc"])
        assert server.post("/v1/responses", ask("fine"))[1]["status"] == "completed"
        assert closed == ["calc", "calc"]


@pytest.mark.setting("--max-tool-rounds")
def test_a_model_that_never_stops_calling_is_stopped(server: LiveServer) -> None:
    response = server.post("/v1/responses", ask(call("add", a=1, b=1)))[1]
    assert kinds(response) == ["mcp_list_tools", *["mcp_call"] * 4]
    assert all(item["output"] == "sum 2" for item in response["output"][1:])
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_tool_rounds"})
    response = server.post("/v1/responses", ask(call("add", a=1, b=1), call("add", a=2, b=2), "x", max_tool_calls=1))[1]
    assert response["output"][2]["error"] == "the response may make no further calls (max_tool_calls)"
    assert (response["status"], kinds(response)[-1]) == ("completed", "message")


def test_calls_wait_for_approval(server: LiveServer) -> None:
    tools = [{"type": "mcp", "server_label": "calc", "require_approval": {"never": {"tool_names": ["fail"]}}}]
    response = server.post("/v1/responses", ask(call("add", a=2, b=2), "four", tools=tools))[1]
    assert kinds(response) == ["mcp_list_tools", "mcp_approval_request"]
    asked = response["output"][1]
    assert (asked["name"], json.loads(asked["arguments"])) == ("add", {"a": 2, "b": 2})

    def answer(approve: bool, **fields: Any) -> tuple[int, dict[str, Any]]:
        item = {"type": "mcp_approval_response", "approval_request_id": asked["id"], "approve": approve}
        body = {"previous_response_id": response["id"], "input": [item], "tools": tools, "max_output_tokens": 300}
        return server.post("/v1/responses", body | fields)

    approved = answer(True)[1]
    assert kinds(approved) == ["mcp_list_tools", "mcp_call", "message"], approved
    made = approved["output"][1]
    assert (made["approval_request_id"], made["output"]) == (asked["id"], "sum 4")
    assert approved["output"][2]["content"][0]["text"] == "four"
    refused = answer(False)[1]
    assert kinds(refused) == ["mcp_list_tools", "message"]
    status, error = answer(True, tools=[])
    assert (status, error["error"]["param"]) == (400, "tools")


FUNCTION = {"type": "function", "name": "add", "parameters": {"type": "object"}}


def test_bad_requests_are_named(server: LiveServer, mcp_url: str) -> None:
    calc = {"type": "mcp", "server_label": "calc"}
    same = {"type": "mcp", "server_label": "other", "server_url": mcp_url}
    for tools, param, text in (
        ([calc, same], "tools[1]", "there is a tool 'add' in tools[0], too"),
        ([FUNCTION, calc], "tools[1]", "there is a tool 'add' in tools[0], too"),
        ([calc, calc], "tools[1].server_label", "is used twice"),
        ([calc | {"server_label": "x"}], "tools[0].server_label", "has no server 'x' (calc)"),
        ([calc | {"server_url": "http://127.0.0.2:1/mcp"}], "tools[0].server_url", "127.0.0.2:1 is not among"),
        ([calc | {"server_url": "file:///etc/passwd"}], "tools[0].server_url", "not an http or https URL"),
        ([calc | {"allowed_tools": ["sub"]}], "tools[0].allowed_tools", "there is no tool 'sub'"),
        ([calc | {"headers": {"a b": "c"}}], "tools[0].headers", "'a b' is not a valid header"),
        ([calc | {"connector_id": "c"}], "tools[0].connector_id", "connectors are OpenAI's"),
    ):
        status, answer = server.post("/v1/responses", ask("x", tools=tools))
        assert (status, answer["error"]["param"]) == (400, param), answer
        assert text in answer["error"]["message"]
    both = [calc | {"allowed_tools": ["add"]}, same | {"allowed_tools": {"tool_names": ["fail"]}}]
    assert server.post("/v1/responses", ask("x", tools=both))[0] == 200


def test_a_server_that_cannot_be_reached_is_named() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with live_server("fake:steps", tool_server=f"calc={address}", **TOOLS) as server:
        status, answer = server.post("/v1/responses", ask("x", stream=True))
        assert status == 424, answer
        assert "tool server 'calc'" in answer["error"]["message"]
        assert server.post("/v1/responses", ask("fine", tools=[]))[0] == 200, "others go on"


def test_without_tool_servers_the_tools_are_reported() -> None:
    with live_server("fake:say") as server:
        body = ask("x")
        assert server.post("/v1/responses", body)[0] == 200
    with live_server("fake:say", strict_requests=True) as server:
        status, answer = server.post("/v1/responses", body)
        assert (status, answer["error"]["param"]) == (400, "tools[0]")
        assert "--tool-server" in answer["error"]["message"]


def test_the_allow_list() -> None:
    assert allowed_servers(None) == ()
    assert allowed_servers("a:1, code=https://h/mcp?x=1 ,http://b:2/path") == (
        ToolServer("", "http://a:1/mcp"),
        ToolServer("code", "https://h/mcp?x=1"),
        ToolServer("", "http://b:2/path"),
    )
    for wrong, reason in (("demo", "no built-in tools"), ("ftp://a", "give host:port, a URL"), ("x=", "not an http")):
        with pytest.raises(ConfigError, match=reason):
            allowed_servers(wrong)
    tool = McpTool(type="mcp", server_label="l", server_url="https://h:443/other")
    assert resolve_url(allowed_servers("code=https://h/mcp"), tool, "tools[0]") == "https://h:443/other"
    with pytest.raises(RequestError, match="h:443 is not among"):
        resolve_url(allowed_servers("http://h:443"), tool, "tools[0]")


def test_a_flag_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_servers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'pagoda\[mcp\]'"):
        allowed_servers("only-here:1")
    for field in ("tool_server_timeout", "max_tool_rounds", "max_tool_result_bytes"):
        with pytest.raises(ConfigError, match=field.replace("_", "-")):
            ServerConfig(**{field: 0})


def test_approval_and_filters() -> None:
    read = ListedTool("read", None, {}, read_only=True)
    write = ListedTool("write", None, {})
    tool = McpTool(type="mcp", server_label="l", allowed_tools={"read_only": True})
    assert [each["name"] for each in tool.take_listing([read, write], "tools[0]")] == ["read"]
    for rule, needed in (
        (None, [True, True]),
        ("always", [True, True]),
        ("never", [False, False]),
        ({"never": {"read_only": True}}, [False, True]),
        ({"always": {"tool_names": ["write"]}}, [True, True]),
        ({"never": {}, "always": {"tool_names": ["write"]}}, [False, True]),
    ):
        tool = McpTool(type="mcp", server_label="l", require_approval=rule)
        assert [tool.needs_approval(each) for each in (read, write)] == needed
