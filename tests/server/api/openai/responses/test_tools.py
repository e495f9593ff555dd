"""Tools of the Responses API: what the model is offered, what its calls become, and how they come back as input."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engines.scripted import pieces
from support.servers.live_server import LiveServer, live_server
from support.servers.response_grammar import check_grammar
from support.servers.responses_api import ROUTES, client_of, events_of, posted
from support.suite.rows import each_row
from support.suite.spying import Spy, spy_on

from pagoda.common.errors import RequestError
from pagoda.server.api.chat_prompt import NamedTool
from pagoda.server.api.openai.responses.input import (
    AdditionalToolsItem,
    McpApprovalRequestItem,
    McpApprovalResponseItem,
    approved_calls,
)
from pagoda.server.api.openai.responses.request import ResponsesRequest
from pagoda.server.api.openai.responses.tools import (
    AllowedChoice,
    CustomInputDecoder,
    McpTool,
    OfferedTool,
    chosen_tools,
    custom_arguments,
)
from pagoda.server.http.body import parse, parse_tolerant
from pagoda.server.parsers.parser import Arguments, Event, ToolCall

PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = {"type": "function", "name": "f", "description": "d", "parameters": PARAMETERS, "strict": False}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}
SEARCH = {"type": "tool_search", "execution": "client", "description": "d", "parameters": PARAMETERS}
TOOLS: list[Any] = [
    {"type": "web_search"},
    FUNCTION,
    {"type": "namespace", "name": "agents", "description": "", "tools": [FUNCTION, PATCH | {"name": "exec"}]},
    PATCH,
    {"type": "local_shell"},
    SEARCH,
]
NAMES = ["f", "agents__f", "agents__exec", "apply_patch", "local_shell", "tool_search"]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(enable_auto_tool_choice=True, tool_call_parser="hermes") as server:
        yield server


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return spy_on(monkeypatch, ROUTES)


def called(name: str, arguments: str) -> list[Event]:
    return [ToolCall(0, name, "c0"), *(Arguments(0, each) for each in arguments)]


@pytest.mark.field("ResponsesRequest.tools")
def test_tools_are_offered_as_functions(server: LiveServer, spy: Spy) -> None:
    posted(server, tools=TOOLS)
    functions = [tool["function"] for tool in spy.conversation.tools]
    assert [function["name"] for function in functions] == NAMES
    assert functions[1] == {"name": "agents__f", "description": "d", "parameters": PARAMETERS, "strict": False}
    patch = functions[3]
    assert patch["parameters"]["required"] == ["input"]
    assert patch["parameters"]["properties"]["input"]["type"] == "string"
    assert patch["description"].startswith("Edits files.\n\n")
    assert 'start: "x"' in patch["description"]
    assert functions[4]["parameters"]["properties"]["command"]["items"] == {"type": "string"}
    assert functions[5] == {"name": "tool_search", "description": "d", "parameters": PARAMETERS}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "custom", "name": "apply_patch"}, NamedTool("apply_patch")),
        ({"type": "function", "name": "agents__f"}, NamedTool("agents__f")),
        ({"type": "custom", "name": "exec"}, NamedTool("agents__exec")),
        ({"type": "function", "name": "f", "namespace": "agents"}, NamedTool("agents__f")),
        ({"type": "function", "name": "f"}, NamedTool("f")),
        ({"type": "local_shell"}, NamedTool("local_shell")),
    ],
)
@pytest.mark.field("ResponsesRequest.tool_choice")
def test_named_tools(server: LiveServer, spy: Spy, choice: Any, expected: NamedTool) -> None:
    answer = posted(server, tools=TOOLS, tool_choice=choice)
    assert spy.conversation.tool_choice == expected
    assert answer["tool_choice"] == choice


def test_allowed_tools_of_other_types_are_dropped(server: LiveServer, spy: Spy) -> None:
    allowed = [{"type": "custom", "name": "apply_patch"}, {"type": "web_search"}, {"type": "mcp", "server_label": "x"}]
    posted(server, tools=TOOLS, tool_choice={"type": "allowed_tools", "mode": "auto", "tools": allowed})
    assert [tool["function"]["name"] for tool in spy.conversation.tools] == ["apply_patch"]


@pytest.mark.parametrize("more", [{"connector_id": "c"}, {"server_label": "my server"}, {}])
def test_tool_servers_are_ignored_where_the_server_calls_none(server: LiveServer, more: dict[str, str]) -> None:
    body = {"model": "fake", "input": "a", "tools": [{"type": "mcp", "headers": {"Host": "h"}, **more}]}
    answer = server.response("POST", "/v1/responses", body)
    assert (answer.status, answer.headers["x-pagoda-ignored"]) == (200, "tools[type=mcp]")


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"connector_id": "c"}, "tools[0].connector_id"),
        ({"server_label": "my server"}, "tools[0].server_label"),
        ({"headers": {"hOst": "inner"}}, "tools[0].headers"),
        ({"headers": {"Accept-Encoding": "gzip"}}, "tools[0].headers"),
        ({"headers": {"Mcp-Session-Id": "1"}}, "tools[0].headers"),
    ],
)
def test_what_no_tool_server_is_asked(more: dict[str, Any], field: str) -> None:
    def check() -> None:
        tool = McpTool(**{"type": "mcp", "server_label": "calc", **more})
        tool.check("tools[0]")
        tool.http_headers("tools[0]")

    with pytest.raises(RequestError) as raised:
        check()
    assert raised.value.field == field


def test_secrets_of_tool_servers_are_neither_stored_nor_shown() -> None:
    tool = McpTool(type="mcp", server_label="calc", authorization="secret", headers={"x-key": "secret"})
    item = AdditionalToolsItem(type="additional_tools", tools=[tool])
    assert "secret" not in item.model_dump_json() + json.dumps(tool.shown())
    assert tool.http_headers("tools[0]")["Authorization"] == "Bearer secret"


def test_allowed_tools_of_tool_servers_stay_allowed_after_calls() -> None:
    names = ("add", "remove")
    of_calc = [OfferedTool(path="tools[0]", name=name, server_label="calc", definition={}) for name in names]
    tools = [*of_calc, OfferedTool(path="tools[1]", name="other", definition={})]

    def allowed(**entry: str) -> AllowedChoice:
        return AllowedChoice(type="allowed_tools", mode="required", tools=[{"type": "mcp", **entry}])

    assert chosen_tools(tools, allowed(server_label="calc")) == (of_calc, "required")
    assert chosen_tools(tools, allowed(server_label="calc", name="add")) == (of_calc[:1], "required")
    choice = allowed(server_label="calc", name="add")
    later = ResponsesRequest(model="m", input="a", tool_choice=choice).after_calls().tool_choice
    assert chosen_tools(tools, later) == (of_calc[:1], "auto")


def test_an_approval_is_given_once() -> None:
    asked = McpApprovalRequestItem(type="mcp_approval_request", id="a", server_label="calc", name="add", arguments="{}")
    answers = [
        McpApprovalResponseItem(type="mcp_approval_response", approval_request_id="a", approve=approve)
        for approve in (False, True)
    ]
    assert approved_calls([asked, answers[1]], 0) == [asked]
    with pytest.raises(RequestError, match="answered twice"):
        approved_calls([asked, *answers], 0)


@pytest.mark.parametrize(
    ("tool", "field"),
    [
        (FUNCTION, "tools[6].name"),
        ({"type": "namespace", "name": "a b", "tools": [FUNCTION]}, "tools[6].tools[0].name"),
    ],
)
def test_invalid_tools_are_named_by_their_path(server: LiveServer, tool: Any, field: str) -> None:
    status, answer = server.post("/v1/responses", {"input": "a", "tools": [*TOOLS, tool]})
    assert status == 400
    assert answer["error"]["param"] == field


def test_a_grammar_is_reported_and_refused_when_strict() -> None:
    raw = json.dumps({"input": "a", "tools": [PATCH]}).encode()
    assert [each.name for each in parse_tolerant(ResponsesRequest, raw)[1]] == ["tools[].format"]
    with pytest.raises(RequestError, match=r"tools\[0\].format"):
        parse(ResponsesRequest, raw)


CALLS: list[tuple[str, str, dict[str, Any]]] = [
    ("f", '{"a":1}', {"type": "function_call", "name": "f", "namespace": None, "arguments": '{"a":1}'}),
    ("agents__f", "{}", {"type": "function_call", "name": "f", "namespace": "agents", "arguments": "{}"}),
    (
        "apply_patch",
        custom_arguments('a "b"\n\té𝄞\\'),
        {"type": "custom_tool_call", "name": "apply_patch", "namespace": None, "input": 'a "b"\n\té𝄞\\'},
    ),
    (
        "agents__exec",
        "t(1)",
        {"type": "custom_tool_call", "name": "exec", "namespace": "agents", "input": "t(1)"},
    ),
    (
        "local_shell",
        '{"command": ["ls", "-l"], "timeout_ms": 5}',
        {
            "type": "local_shell_call",
            "action": {
                "type": "exec",
                "command": ["ls", "-l"],
                "timeout_ms": 5,
                "working_directory": None,
                "env": {},
                "user": None,
            },
        },
    ),
    ("tool_search", '{"query": "x"}', {"type": "tool_search_call", "execution": "client", "arguments": {"query": "x"}}),
]


@pytest.mark.parametrize(("name", "arguments", "expected"), CALLS)
def test_calls_become_items_and_come_back_as_input(
    server: LiveServer, spy: Spy, name: str, arguments: str, expected: dict[str, Any]
) -> None:
    spy.script = called(name, arguments)
    body = {"tools": TOOLS, "max_output_tokens": len(spy.script)}
    whole = posted(server, **body)["output"][0]
    raw = server.response("POST", "/v1/responses", {"input": "a", "stream": True, **body}).body
    streamed = check_grammar(events_of(raw))["output"][0]
    for item in (whole, streamed):
        shown = {key: value for key, value in item.items() if key not in ("id", "status", "caller")}
        assert shown == expected | {"call_id": "c0"}
    output = {"function_call": "function_call_output", "custom_tool_call": "custom_tool_call_output"}
    kind = output.get(whole["type"], whole["type"] + "_output")
    result = {"type": kind, "call_id": "c0", "output": "done"}
    if kind == "tool_search_call_output":
        result = {"type": "tool_search_output", "call_id": "c0", "tools": [FUNCTION | {"name": "g"}]}
    spy.script = None
    posted(server, input=[{"role": "user", "content": "a"}, whole, result], tools=TOOLS)
    _, call, answer = spy.conversation.messages
    function = call["tool_calls"][0]["function"]
    assert function["name"] == name
    given = arguments if name != "agents__exec" else custom_arguments(arguments)
    assert json.loads(function["arguments"]).items() >= json.loads(given).items()
    assert (answer["role"], answer["name"]) == ("tool", name)
    if kind == "tool_search_call_output":
        assert json.loads(answer["content"]) == {"tools": ["g"]}
    else:
        assert answer["content"] == "done"


def test_tools_in_items_are_offered_too(server: LiveServer, spy: Spy) -> None:
    found = FUNCTION | {"name": "g", "defer_loading": True}
    items = [
        {
            "type": "additional_tools",
            "role": "developer",
            "tools": [{"type": "namespace", "name": "n", "tools": [PATCH]}],
        },
        {"role": "user", "content": "a"},
        {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"query": "x"}},
        {"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": [found, FUNCTION]},
    ]
    first = posted(server, input=items, tools=[FUNCTION, SEARCH])
    names = ["f", "tool_search", "n__apply_patch", "g"]
    assert [tool["function"]["name"] for tool in spy.conversation.tools] == names
    posted(server, input="b", tools=[FUNCTION], previous_response_id=first["id"])
    assert [tool["function"]["name"] for tool in spy.conversation.tools] == ["f", "n__apply_patch", "g"]


def test_the_output_of_a_shell_call_may_name_its_item(server: LiveServer, spy: Spy) -> None:
    call = {"type": "local_shell_call", "id": "lsh_1", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}}
    posted(server, input=[call, {"type": "local_shell_call_output", "id": "lsh_1", "output": "x"}])
    call, answer = spy.conversation.messages
    assert call["tool_calls"][0]["id"] == answer["tool_call_id"] == "c"


def test_official_client(server: LiveServer, spy: Spy) -> None:
    spy.script = called("apply_patch", custom_arguments("x\ny"))
    tools: Any = TOOLS
    body: Any = {"model": "fake", "input": "a", "tools": tools, "max_output_tokens": len(spy.script)}
    events = list(client_of(server).responses.create(**body, stream=True))
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert events[-1].type == "response.incomplete"
    item = events[-1].response.output[0]
    assert item.type == "custom_tool_call"
    assert item.input == "".join(deltas) == "x\ny"


# Inputs of custom tools.


def decoded(arguments: str, cuts: list[int]) -> str:
    decoder, text = CustomInputDecoder(), ""
    for size in pieces(len(arguments), cuts):
        text += decoder.feed(arguments[:size])
        arguments = arguments[size:]
    text += decoder.finish()
    assert decoder.text == text
    return text


@given(st.text(), st.lists(st.integers(0, 99), max_size=6), st.booleans(), st.sampled_from(["", " \n"]))
def test_inputs_are_decoded_in_pieces(text: str, cuts: list[int], ascii: bool, space: str) -> None:
    arguments = space + json.dumps({"input": text}, ensure_ascii=ascii)
    assert decoded(arguments, cuts) == text


@given(st.text(), st.integers(0, 99))
def test_truncated_inputs_are_a_beginning(text: str, end: int) -> None:
    arguments = custom_arguments(text)
    start = len('{"input": "')
    assert text.startswith(decoded(arguments[: max(start, end % (len(arguments) + 1))], [3, start + 1]))


@each_row(
    ("arguments", "expected"),
    [
        ("plain", "plain"),
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"why": "y", "input": "x"}', "x"),
        ('{"input": 5}', '{"input": 5}'),
        ("[]", "[]"),
        (r'{"input": "\ud800 x"}', "\ud800 x"),
        (r'{"input": "\q"}', r"\q"),
    ],
)
def test_arguments_of_another_form(arguments: str, expected: str) -> None:
    assert decoded(arguments, [4, 11, 13]) == expected
