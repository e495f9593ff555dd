"""Fields as other clients give them: former functions, allowed tools, reasoning, numbers as text, empty values."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.checkpoints.byte_text import byte_tokenizer
from support.servers.live_server import LiveServer, live_server
from support.suite.rows import each_row

from pagoda.common.text.fill_in_middle import FillFormat
from pagoda.server.api.openai import completion

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "parameters": CITY}
CLOCK = {"name": "clock", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TEMPLATE = (
    "{{ reasoning_effort }},{{ enable_thinking }};{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
    "{% for m in messages %}{% for k in m if k != 'content' %}{{ k }}={{ m[k] | tojson }},{% endfor %}"
    "{{ m.role }}: {{ m.content }};{% endfor %}assistant:"
)


def tool(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": function}


def asking(text: str, **more: Any) -> dict[str, Any]:
    """A request that is answered with `text`."""
    return {"messages": [{"role": "user", "content": f"[[{text}]]"}], "max_tokens": 400, **more}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    flags = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "chat_template": TEMPLATE}
    with live_server("fake:say", engine={"reasoning_parser": "qwen3"}, **flags) as server:
        yield server


@pytest.fixture(scope="module")
def plain() -> Iterator[LiveServer]:
    """A server without a reasoning parser, whose template has no switches."""
    with live_server("fake:say") as server:
        yield server


@pytest.fixture(scope="module")
def bare() -> Iterator[LiveServer]:
    """A server that continues any prompt."""
    with live_server() as server:
        yield server


def answer_of(server: LiveServer, body: dict[str, Any], path: str = CHAT) -> Any:
    status, answer = server.post(path, body)
    assert status == 200, answer
    return answer


def refused(server: LiveServer, body: dict[str, Any], path: str = CHAT) -> str:
    status, answer = server.post(path, body)
    assert status == 400, answer
    assert answer["error"]["param"] in answer["error"]["message"]
    return str(answer["error"]["param"])


def chunks_of(server: LiveServer, body: dict[str, Any], path: str = CHAT) -> list[Any]:
    status, raw = server.post(path, body | {"stream": True})
    assert status == 200, raw
    return [json.loads(line.removeprefix(b"data: ")) for line in raw.split(b"\n\n")[:-2]]


# Former functions.


@pytest.mark.field("ChatCompletionRequest.functions|function_call")
def test_functions_are_answered_with_function_call(server: LiveServer) -> None:
    body = asking(CALL, functions=[WEATHER, CLOCK])
    (choice,) = answer_of(server, body)["choices"]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert "tool_calls" not in choice["message"]
    chunks = [chunk["choices"][0] for chunk in chunks_of(server, body)]
    calls = [chunk["delta"]["function_call"] for chunk in chunks if "function_call" in chunk["delta"]]
    assert calls[0] == {"name": "weather", "arguments": ""}
    assert "".join(call["arguments"] for call in calls) == '{"city": "Rome"}'
    assert chunks[-1]["finish_reason"] == "function_call"
    named = asking('{"city": "Oslo"}', functions=[WEATHER, CLOCK], function_call={"name": "weather"})
    assert answer_of(server, named)["choices"][0]["message"]["function_call"]["arguments"] == '{"city": "Oslo"}'
    none = answer_of(server, asking(CALL, functions=[WEATHER], function_call="none"))["choices"][0]
    assert (none["message"]["content"], none["message"]["function_call"]) == (CALL, None)


def test_errors_of_functions_name_their_fields(server: LiveServer) -> None:
    assert refused(server, asking("x", functions=[{"name": "a b"}])) == "functions[0].name"
    assert refused(server, asking("x", functions=[WEATHER], function_call={"name": "f"})) == "function_call.name"
    assert refused(server, asking("x", functions=[WEATHER], tools=[tool(WEATHER)])) == "functions"


def test_function_messages_reach_the_template_as_tool_calls(server: LiveServer) -> None:
    history = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": '{"city": "Rome"}'}},
        {"role": "function", "name": "weather", "content": "sunny"},
        {"role": "user", "content": "[[ok]]"},
    ]
    prompt = answer_of(server, {"messages": history, "return_prompt_text": True})["prompt_text"]
    assert 'tool_calls=[{"id": "call_1", "type": "function"' in prompt
    assert 'role="tool",name="weather",tool_call_id="call_1",tool: sunny;' in prompt
    assert "function_call" not in prompt


# Tool choices.


def test_allowed_tools_restrict_the_calls(server: LiveServer) -> None:
    def choice(mode: str, *names: str) -> dict[str, Any]:
        allowed = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}

    tools = [tool(WEATHER), tool(CLOCK)]
    answer = answer_of(
        server, asking(CALL, tools=tools, tool_choice=choice("auto", "weather"), return_prompt_text=True)
    )
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert "weather;" in answer["prompt_text"]
    assert "clock;" not in answer["prompt_text"]
    required = asking('[{"name": "clock", "parameters": {}}]', tools=tools, tool_choice=choice("required", "clock"))
    assert answer_of(server, required)["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "clock"
    assert (
        refused(server, asking("x", tools=tools, tool_choice=choice("auto", "f")))
        == "tool_choice.allowed_tools.tools[0]"
    )


def test_any_is_required(server: LiveServer) -> None:
    body = asking('[{"name": "clock", "parameters": {}}]', tools=[tool(CLOCK)], tool_choice="any")
    assert answer_of(server, body)["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "clock"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_response_format_beside_a_required_call(server: LiveServer, choice: Any) -> None:
    """instructor sends both; the call leaves no text that the format would apply to."""
    text = '[{"name": "weather", "parameters": {"city": "Rome"}}]' if choice == "required" else '{"city": "Rome"}'
    form = {"type": "json_schema", "json_schema": {"name": "other", "schema": {"type": "object"}}}
    body = asking(text, tools=[tool(WEATHER)], tool_choice=choice, response_format=form, parallel_tool_calls=False)
    (call,) = answer_of(server, body)["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}


# Reasoning.


@pytest.mark.field("ChatCompletionRequest.reasoning|thinking|enable_thinking|think")
@each_row(
    ("more", "shown"),
    [
        ({"reasoning_effort": "low"}, "low,True;"),
        ({"reasoning": {"effort": "high"}}, "high,True;"),
        ({"reasoning": {"enabled": False}}, "none,False;"),
        ({"reasoning": {"enabled": True}}, "medium,True;"),
        ({"thinking": {"type": "disabled"}}, "none,False;"),
        ({"thinking": {"type": "enabled"}}, "medium,True;"),
        ({"enable_thinking": False}, "none,False;"),
        ({"think": True}, "medium,True;"),
        ({"think": "low"}, "low,True;"),
        ({"reasoning_effort": "high", "enable_thinking": False}, "high,True;"),
    ],
)
def test_reasoning_in_other_forms(server: LiveServer, more: dict[str, Any], shown: str) -> None:
    answer = server.response("POST", CHAT, asking("x", return_prompt_text=True, **more))
    assert json.loads(answer.body)["prompt_text"].startswith(shown)
    assert "x-pagoda-ignored" not in answer.headers


@each_row(
    ("more", "name"),
    [
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"thinking": {"type": "enabled"}}, "thinking.type"),
        ({"enable_thinking": True}, "enable_thinking"),
        ({"think": True}, "think"),
        ({"thinking_budget": 100}, "thinking_budget"),
        ({"reasoning": {"max_tokens": 100}}, "reasoning.max_tokens"),
        ({"thinking": {"type": "disabled", "budget_tokens": 100}}, "thinking.budget_tokens"),
    ],
)
def test_reasoning_is_a_hint_for_models_without_it(plain: LiveServer, more: dict[str, Any], name: str) -> None:
    answer = plain.response("POST", CHAT, asking("x", **more))
    assert (answer.status, answer.headers["x-pagoda-ignored"]) == (200, name)


@pytest.mark.field("ChatCompletionRequest.thinking_budget")
@pytest.mark.parametrize(
    "more",
    [
        {"thinking_budget": 5},
        {"reasoning": {"max_tokens": 5}},
        {"thinking": {"type": "enabled", "budget_tokens": 5}},
    ],
)
def test_a_reasoning_budget_is_passed_to_the_engine(server: LiveServer, more: dict[str, Any]) -> None:
    answer = answer_of(server, asking("x", **more), f"{CHAT}/render")
    assert answer["sampling_params"]["thinking_token_budget"] == 5


def test_reasoning_exclude_hides_the_reasoning(server: LiveServer) -> None:
    body = asking("<think>hm</think>ok")
    assert answer_of(server, body)["choices"][0]["message"]["reasoning"] == "hm"
    message = answer_of(server, body | {"reasoning": {"exclude": True}})["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("ok", None)


# Numbers, stops, limits.


def test_numbers_as_floats_and_text(server: LiveServer) -> None:
    body = asking("abcdef", max_tokens="2", n=1.0, seed="1", temperature="0", stream="false", top_k=1.0)
    assert answer_of(server, body)["choices"][0]["message"]["content"] == "ab"
    for name, value in (("max_tokens", "two"), ("max_tokens", 2.5), ("temperature", "nan"), ("stream", "maybe")):
        assert refused(server, asking("x", **{name: value})) == name


@each_row("stop", ["", [], [""], None, ["", "c"]])
def test_empty_stops(server: LiveServer, stop: Any) -> None:
    text = answer_of(server, asking("abcd", stop=stop))["choices"][0]["message"]["content"]
    assert text == ("ab" if stop == ["", "c"] else "abcd")


@pytest.mark.field("ChatCompletionRequest|CompletionRequest.stop")
@pytest.mark.setting("--max-stop-strings")
@pytest.mark.variable("PAGODA_MAX_STOP_STRINGS")
def test_number_of_stops(server: LiveServer) -> None:
    many = [f"{number}x" for number in range(15)] + ["c"]
    assert answer_of(server, asking("abcd", stop=many))["choices"][0]["message"]["content"] == "ab"
    assert refused(server, asking("abcd", stop=[*many, "d"])) == "stop"
    with live_server("fake:say", max_stop_strings=1) as one:
        assert refused(one, asking("abcd", stop=["c", "d"])) == "stop"


def test_unlimited_tokens(server: LiveServer) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        body = {"messages": [{"role": "user", "content": "[[" + "a" * 50 + "]]"}], name: -1}
        assert answer_of(server, body)["choices"][0]["message"]["content"] == "a" * 50
    prompt = "[[" + "a" * 50 + "]]assistant:"
    assert answer_of(server, {"prompt": prompt, "max_tokens": -1}, TEXT)["choices"][0]["text"] == "a" * 50


def test_max_completion_tokens_has_precedence(server: LiveServer) -> None:
    answer = server.response("POST", CHAT, asking("abcdef", max_completion_tokens=3))
    assert json.loads(answer.body)["choices"][0]["message"]["content"] == "abc"
    assert answer.headers["x-pagoda-ignored"] == "max_tokens"


@each_row(("value", "status"), [(0, 200), (2, 200), (2.1, 400), (-0.1, 400)])
def test_temperature_has_the_bounds_of_openai(server: LiveServer, value: float, status: int) -> None:
    for path, body in ((CHAT, asking("x")), (TEXT, {"prompt": "[[x]]assistant:", "max_tokens": 1})):
        code, answer = server.post(path, body | {"temperature": value})
        assert code == status
        assert status == 200 or answer["error"]["param"] == "temperature"


def test_stream_options_without_a_stream(server: LiveServer) -> None:
    for path, body in ((CHAT, asking("x")), (TEXT, {"prompt": "[[x]]assistant:", "max_tokens": 1})):
        answer = server.response("POST", path, body | {"stream_options": {"include_usage": True}})
        assert (answer.status, answer.headers["x-pagoda-ignored"]) == (200, "stream_options")


def test_running_usage_counts_no_token_for_the_role(server: LiveServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chunks_of(server, asking("abc", stream_options=options))
    first = chunks[0]["usage"]
    assert (first["completion_tokens"], first["total_tokens"]) == (0, first["prompt_tokens"])
    assert first["prompt_tokens"] == chunks[-1]["usage"]["prompt_tokens"]
    assert chunks[-1]["usage"]["completion_tokens"] == 4


def test_the_header_wins_over_the_request_id_of_the_body(server: LiveServer) -> None:
    status, answer = server.post(CHAT, asking("x", request_id="body"), **{"x-request-id": "header"})
    assert (status, answer["id"]) == (200, "chatcmpl-header")


# Messages.


@pytest.mark.parametrize("empty", [{"tool_calls": []}, {"tool_calls": None}, {"function_call": None, "audio": None}])
def test_empty_keys_do_not_reach_the_template(server: LiveServer, empty: dict[str, Any]) -> None:
    history = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", **empty},
        {"role": "user", "content": "[[c]]"},
    ]
    prompt = answer_of(server, {"messages": history, "return_prompt_text": True})["prompt_text"]
    assert ';role="assistant",assistant: b;' in prompt


def test_null_content_of_a_tool(server: LiveServer) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    history = [
        {"role": "user", "content": "[[ok]]"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": None},
    ]
    assert answer_of(server, {"messages": history})["choices"][0]["finish_reason"] == "stop"


# Constraints and limits of other servers.


@pytest.mark.field("ChatCompletionRequest|CompletionRequest.grammar|json_schema")
def test_constraints_in_other_forms(server: LiveServer) -> None:
    def constraint(**fields: Any) -> Any:
        answer = answer_of(server, asking("x", **fields), f"{CHAT}/render")
        structured = answer["sampling_params"].get("structured_outputs")
        return structured and {key: value for key, value in structured.items() if value}

    gbnf = 'root ::= "yes" | "no"'
    assert constraint(grammar=gbnf) == {"grammar": gbnf}
    assert constraint(json_schema=CITY) == {"json": CITY}
    assert constraint(response_format={"type": "json_object", "schema": CITY}) == {"json": CITY}
    assert constraint(grammar="", json_schema={}) is None
    text = {"prompt": "[[yes]]assistant:", "grammar": gbnf}
    assert answer_of(server, text, f"{TEXT}/render")[0]["sampling_params"]["structured_outputs"]["grammar"] == gbnf
    assert refused(server, asking("x", grammar=gbnf, response_format={"type": "json_object"})) == "grammar"


@pytest.mark.field("ChatCompletionRequest|CompletionRequest.num_ctx|options")
def test_a_context_shorter_than_the_prompt_is_refused(server: LiveServer) -> None:
    for path, body in ((CHAT, asking("x")), (TEXT, {"prompt": "[[abcd]]assistant:", "max_tokens": 1})):
        assert refused(server, body | {"num_ctx": 4}, path) == "num_ctx"
        assert refused(server, body | {"options": {"num_ctx": 4}}, path) == "options.num_ctx"
        assert server.post(path, body | {"num_ctx": 4096})[0] == 200
        answer = server.response("POST", path, body | {"options": {"num_ctx": 4096, "num_predict": 3}})
        assert (answer.status, answer.headers["x-pagoda-ignored"]) == (200, "options")


def test_best_of_that_selects_nothing_is_streamed(server: LiveServer) -> None:
    assert chunks_of(server, {"prompt": "[[a]]assistant:", "best_of": 1, "max_tokens": 2}, TEXT)[-1]["choices"]


@pytest.mark.field("CompletionRequest.suffix")
def test_suffix(bare: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(bare, {"prompt": "a", "suffix": "b"}, TEXT) == "suffix"
    assert bare.post(TEXT, {"prompt": "a", "suffix": ""})[0] == 200
    names = byte_tokenizer()
    form = FillFormat(names.token_name(1), names.token_name(2), names.token_name(3), (names.token_name(4),))
    monkeypatch.setattr(completion, "fill_format", lambda tokenizer: form)
    body = {"prompt": "ab", "suffix": "cd", "return_token_ids": True}
    (choice,) = answer_of(bare, body, TEXT)["choices"]
    assert choice["prompt_token_ids"] == [1, *b"ab", 2, *b"cd", 3]
    (preview,) = answer_of(bare, body, f"{TEXT}/render")
    assert preview["sampling_params"]["stop_token_ids"] == [1, 2, 3, 4]
    for more in ({"echo": True}, {"truncate_prompt_tokens": 3}):
        assert refused(bare, body | more, TEXT) == next(iter(more))


def test_the_official_client_reads_former_functions(server: LiveServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    body: Any = asking(CALL, functions=[WEATHER], function_call="auto")
    call = client.chat.completions.create(model="fake", **body).choices[0].message.function_call
    assert call is not None
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Rome"})
