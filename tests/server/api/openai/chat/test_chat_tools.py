"""Chat with tools and reasoning over a real socket: requests, refusals, server flags."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.servers.chat_messages import message as empty_message
from support.servers.live_server import LiveServer, live_server
from support.suite.rows import each_row

from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.errors import ConfigError

CHAT = "/v1/chat/completions"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "?", "parameters": CITY}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
TWO = CALL + '\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nHm, <b>.\n</think>\n\n"


def asking(text: str, **more: Any) -> dict[str, Any]:
    """A request that is answered with `text`."""
    return {"messages": [{"role": "user", "content": f"[[{text}]]"}], "max_tokens": 400, **more}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    tools = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    with live_server("fake:say", engine={"reasoning_parser": "qwen3"}, **tools) as server:
        yield server


@pytest.fixture(scope="module")
def strict() -> Iterator[LiveServer]:
    """A server with --strict-requests."""
    with live_server(
        "fake:say", strict_requests=True, enable_auto_tool_choice=True, tool_call_parser="hermes"
    ) as server:
        yield server


@pytest.fixture(scope="module")
def bare() -> Iterator[LiveServer]:
    """A server without parsers."""
    with live_server("fake:say") as server:
        yield server


@pytest.fixture(scope="module")
def harmony() -> Iterator[LiveServer]:
    """A model whose family has a format of its own."""
    with live_server("fake:harmony") as server:
        yield server


def choice_of(server: LiveServer, text: str, **more: Any) -> dict[str, Any]:
    """Return the choice of a whole response, which must equal the streamed one."""
    status, answer = server.post(CHAT, asking(text, **more))
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert streamed(server, asking(text, **more)) == {
        "message": without_ids(choice["message"]),
        "finish_reason": choice["finish_reason"],
    }
    return choice


def streamed(server: LiveServer, body: dict[str, Any]) -> dict[str, Any]:
    """Return the response merged from a stream."""
    status, raw = server.post(CHAT, body | {"stream": True})
    assert status == 200, raw
    message = empty_message("", role=None)
    reason = None
    for line in raw.decode().split("\n\n")[:-2]:
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        assert reason is None, "nothing comes after the end"
        reason = choice["finish_reason"]
        for key, value in choice["delta"].items():
            if key == "tool_calls":
                (piece,) = value
                calls = message.setdefault("tool_calls", [])
                if "id" in piece:
                    assert piece["index"] == len(calls)
                    calls.append({"type": piece["type"], "function": dict(piece["function"])})
                else:
                    calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
            elif key == "role":
                message["role"] = value
            else:
                message[key] = (message.get(key) or "") + value
    if not message["content"] and ("tool_calls" in message or message["reasoning"]):
        message["content"] = None
    return {"message": message, "finish_reason": reason}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = [{key: value for key, value in call.items() if key != "id"} for call in message["tool_calls"]]
    return message | {"tool_calls": calls}


def refused(server: LiveServer, body: dict[str, Any]) -> tuple[str, str]:
    """Return field and message of a 400."""
    status, answer = server.post(CHAT, body)
    assert status == 400, answer
    return answer["error"]["param"], answer["error"]["message"]


def prompt_of(server: LiveServer, **more: Any) -> str:
    status, answer = server.post(CHAT, asking("x", return_prompt_text=True, **more))
    assert status == 200, answer
    return str(answer["prompt_text"])


# --- tools ---


@pytest.mark.field("ChatCompletionRequest.tools")
@pytest.mark.setting("--enable-auto-tool-choice", "--tool-call-parser")
def test_a_call_in_the_model_format(server: LiveServer) -> None:
    choice = choice_of(server, CALL, tools=[WEATHER, CLOCK])
    (call,) = choice["message"].pop("tool_calls")
    assert choice["message"] == empty_message(None)
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Zürich"}
    assert call["id"].isalnum()
    assert choice["finish_reason"] == "tool_calls"
    assert choice_of(server, "no call", tools=[WEATHER])["finish_reason"] == "stop"


@pytest.mark.field("ChatCompletionRequest.tool_choice")
def test_reasoning_content_and_two_calls(server: LiveServer) -> None:
    choice = choice_of(server, THOUGHT + "Let me look. " + TWO, tools=[WEATHER, CLOCK], tool_choice="auto")
    message = choice["message"]
    assert message["reasoning"] == message["reasoning_content"] == "Hm, <b>."
    assert message["content"].strip() == "Let me look."
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather", "clock"]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    plain = choice_of(server, TWO, tools=[WEATHER, CLOCK], tool_choice="none")["message"]
    assert (plain["content"], "tool_calls" in plain) == (TWO, False)


@pytest.mark.field("ChatCompletionRequest.parallel_tool_calls")
def test_parallel_tool_calls_false(server: LiveServer) -> None:
    message = choice_of(server, TWO, tools=[WEATHER, CLOCK], parallel_tool_calls=False)["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]


def test_a_truncated_call(server: LiveServer) -> None:
    choice = choice_of(server, CALL, tools=[WEATHER], max_tokens=60)
    assert choice["finish_reason"] == "length"
    assert json.dumps({"city": "Zürich"}, ensure_ascii=False).startswith(
        choice["message"]["tool_calls"][0]["function"]["arguments"]
    )


def test_each_choice_has_its_own_reader(server: LiveServer) -> None:
    status, answer = server.post(CHAT, asking(THOUGHT + CALL, tools=[WEATHER], n=3))
    assert status == 200
    assert [choice["message"]["reasoning"] for choice in answer["choices"]] == ["Hm, <b>."] * 3
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in answer["choices"]}) == 3


def test_a_named_format_needs_both_flags(bare: LiveServer) -> None:
    for more in ({}, {"tool_choice": "auto"}):
        field, message = refused(bare, asking("x", tools=[WEATHER], **more))
        assert field == "tool_choice"
        assert "--enable-auto-tool-choice" in message
        assert "--tool-call-parser" in message
    with live_server("fake:say", tool_call_parser="hermes") as half:
        assert refused(half, asking("x", tools=[WEATHER]))[0] == "tool_choice"
        assert half.post(CHAT, asking("x", tools=[WEATHER], tool_choice="none"))[0] == 200
    with pytest.raises(ConfigError, match=r"--enable-auto-tool-choice: needs a --tool-call-parser"):
        ServerConfig(enable_auto_tool_choice=True, tool_call_parser="none")


ANALYSIS = "<|channel|>analysis<|message|>Hm, <b>.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"


@pytest.mark.parametrize(
    "header", ["commentary to=functions.weather <|constrain|>json", "analysis to=functions.weather"]
)
def test_a_model_with_a_format_of_its_own_needs_no_flags(harmony: LiveServer, header: str) -> None:
    choice = choice_of(
        harmony, f'{ANALYSIS}<|channel|>{header}<|message|>{{"city": "Zürich"}}', tools=[WEATHER], tool_choice="auto"
    )
    message = choice["message"]
    assert (message["content"], message["reasoning"], message["reasoning_content"]) == (None, *["Hm, <b>."] * 2)
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Zürich"}'}
    assert choice["finish_reason"] == "tool_calls"
    for more in ({}, {"tools": [WEATHER]}):
        choice = choice_of(harmony, f"{ANALYSIS}{FINAL}5 < 6", **more)
        assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("5 < 6", "Hm, <b>.")


def test_the_template_of_harmony_gets_what_it_takes() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.thinking }}{{ m.tool_calls | length }};{% endfor %}"
        "{% for t in tools or [] %}{{ '//' + t.function.description }}{% endfor %}[[x]]" + TAIL
    )
    calls = [{"id": name, "type": "function", "function": {"name": "clock", "arguments": "{}"}} for name in "ab"]
    turn = {"role": "assistant", "content": "Wait.", "reasoning_content": "Hm.", "tool_calls": calls}
    with live_server("fake:harmony", chat_template=template) as server:
        body = {"messages": [{"role": "user", "content": "?"}, turn], "tools": [CLOCK], "return_prompt_text": True}
        status, answer = server.post(CHAT, {**body, "max_tokens": 4})
    assert status == 200, answer
    assert answer["prompt_text"].startswith("user:0;assistant:Hm.\nWait.1;assistant:1;//[[x]]")


def test_flags_override_the_format_of_the_model() -> None:
    with live_server("fake:harmony", engine={"reasoning_parser": "identity"}, tool_call_parser="hermes") as server:
        assert choice_of(server, f"{ANALYSIS}{FINAL}5")["message"]["content"] == f"{ANALYSIS}{FINAL}5"
        assert refused(server, asking("x", tools=[WEATHER]))[0] == "tool_choice"


BAD_TOOLS: list[tuple[Any, str]] = [
    ([{"type": "function"}], "tools[0].function"),
    ([WEATHER, {"type": "retrieval"}], "tools[1]"),
    ([{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name"),
    ([{"type": "function", "function": {"name": "x" * 129}}], "tools[0].function.name"),
    ([{"type": "function", "function": {"name": None}}], "tools[0].function.name"),
    ([{"type": "function", "function": {"parameters": {}}}], "tools[0].function.name"),
    ([{"type": "function", "function": {"name": "f", "parameters": []}}], "tools[0].function.parameters"),
    ([{"type": "function", "function": {"name": "f", "description": 1}}], "tools[0].function.description"),
    ([{"type": "function", "function": {"name": "f", "strict": "no"}}], "tools[0].function.strict"),
    ([{"type": "function", "function": {"name": "f", "args": {}}}], "tools[0].function.args"),
    ([{"type": "function", "function": {"name": "f"}, "x": 1}], "tools[0].x"),
    ([WEATHER, CLOCK, WEATHER], "tools[2].function.name"),
    ([{"type": "function", "function": {"name": f"f{i}"}} for i in range(1025)], "tools"),
    ([{"type": "function", "function": {"name": "f", "description": "x" * (1 << 20)}}], "tools"),
    ("weather", "tools"),
    ([1], "tools[0]"),
]


@each_row(("tools", "field"), BAD_TOOLS, ids=lambda value: value if isinstance(value, str) else "")
@each_row("choice", ["auto", "none", "required"])
def test_errors_name_the_bad_tool(strict: LiveServer, tools: Any, field: str, choice: str) -> None:
    assert refused(strict, asking("x", tools=tools, tool_choice=choice))[0] == field


@each_row(
    ("more", "field"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": [WEATHER]}, "tool_choice"),
        ({"tool_choice": "all", "tools": [WEATHER]}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [WEATHER]}, "tool_choice"),
        ({"tools": [WEATHER], "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ],
)
def test_errors_name_the_bad_tool_choice(server: LiveServer, more: dict[str, Any], field: str) -> None:
    assert refused(server, asking("x", **more))[0].startswith(field)


def test_an_invalid_schema_names_the_tool(server: LiveServer) -> None:
    bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "nope"}}}
    field, message = refused(server, asking("x", tools=[bad], tool_choice="required"))
    assert (field, "nope" in message) == ("tools", True)


def test_tools_that_the_template_does_not_show_are_refused() -> None:
    blind = "{% for m in messages %}{{ m.content }}{% endfor %}assistant:"
    flags = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "chat_template": blind}
    with live_server("fake:say", **flags) as other:
        field, message = refused(other, asking("x", tools=[WEATHER]))
        assert (field, "--chat-template" in message) == ("tools", True)
        for without in ({"tools": [WEATHER], "tool_choice": "none"}, {"tools": [WEATHER], "tool_choice": "required"}):
            assert other.response("POST", CHAT, asking("x", **without)).status == 200


@pytest.mark.setting("--exclude-tools-when-tool-choice-none")
def test_exclude_tools_when_tool_choice_none(bare: LiveServer) -> None:
    none = {"tools": [WEATHER, CLOCK], "tool_choice": "none"}
    assert prompt_of(bare, **none).startswith("weather;clock;user: ")
    with live_server("fake:say", exclude_tools_when_tool_choice_none=True) as hides:
        assert prompt_of(hides, **none).startswith("user: ")


# --- thinking ---


@pytest.mark.setting("--reasoning-parser")
def test_reasoning_is_separated_from_content(server: LiveServer, bare: LiveServer) -> None:
    message = choice_of(server, THOUGHT + "Yes — ✓.")["message"]
    assert (message["reasoning"], message["content"]) == ("Hm, <b>.", "Yes — ✓.")
    assert choice_of(bare, THOUGHT + "Yes.")["message"]["content"] == THOUGHT + "Yes."
    with pytest.raises(ConfigError, match="--reasoning-parser: unknown format 'x'"):
        configure({"--reasoning-parser": "x"})
    with pytest.raises(ConfigError, match="--tool-call-parser: unknown format 'x'"):
        configure({"--tool-call-parser": "x"})


def configure(flags: dict[str, str]) -> None:
    """Resolve the flags of `serve`."""
    from pagoda.server.cli.main import COMMANDS, parser_of
    from pagoda.server.cli.serving import serve

    parser = parser_of("serve", COMMANDS["serve"])
    serve.configurations(parser.parse_args(["model", *(word for pair in flags.items() for word in pair)]))


@pytest.mark.field("ChatCompletionRequest.include_reasoning")
def test_include_reasoning_false(server: LiveServer) -> None:
    message = choice_of(server, THOUGHT + "Yes.", include_reasoning=False)["message"]
    assert message == empty_message("Yes.")
    status, answer = server.post(CHAT, asking(THOUGHT + "Yes.", include_reasoning=False))
    assert status == 200
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("Hm, <b>.")}, "it is counted still"


def test_content_is_null_with_reasoning_only(server: LiveServer) -> None:
    choice = choice_of(server, THOUGHT, max_tokens=12)
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == (None, "Hm,")
    assert choice["finish_reason"] == "length"


@pytest.mark.field("ChatCompletionRequest.skip_special_tokens")
def test_special_tokens_decoded_for_parsers_are_hidden(server: LiveServer, bare: LiveServer) -> None:
    assert choice_of(server, "<think>a<eos></think>b<eos>c")["message"]["content"] == "bc"
    shown = choice_of(server, "<think>a<eos></think>b<eos>c", skip_special_tokens=False)["message"]
    assert (shown["reasoning"], shown["content"]) == ("a<eos>", "b<eos>c")
    assert choice_of(bare, "b<eos>c")["message"]["content"] == "b<eos>c", "text without parsers is the model's own"


THINKING = "{% if enable_thinking is false %}off;{% endif %}"
EFFORT = "{{ reasoning_effort or 'usual' }};"
TAIL = "{% for m in messages %}{{ m.content }}{{ m.reasoning_content or '' }};{% endfor %}assistant:"


@pytest.mark.field("ChatCompletionRequest.reasoning_effort")
def test_reasoning_effort_reaches_the_template(bare: LiveServer) -> None:
    with live_server("fake:say", chat_template=THINKING + TAIL) as switch:
        assert prompt_of(switch, reasoning_effort="none").startswith("off;")
        assert prompt_of(switch, reasoning_effort="high") == prompt_of(switch) == "[[x]];assistant:"
        kept = prompt_of(switch, reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
        assert kept == "[[x]];assistant:"
    with live_server("fake:say", chat_template=EFFORT + TAIL) as graded:
        assert prompt_of(graded, reasoning_effort="low").startswith("low;")
        assert prompt_of(graded).startswith("usual;")
    assert prompt_of(bare, reasoning_effort="low") == prompt_of(bare), "a template without a switch"
    with live_server("fake:say", strict_requests=True) as strict:
        assert refused(strict, asking("x", reasoning_effort="low"))[0] == "reasoning_effort"
    assert refused(bare, asking("x", reasoning_effort="huge"))[0] == "reasoning_effort"
    assert prompt_of(bare, reasoning_effort="none") == prompt_of(bare), "a model that does not think does not"


def test_earlier_reasoning_reaches_the_template() -> None:
    with live_server("fake:say", chat_template=TAIL) as server:
        for name in ("reasoning", "reasoning_content"):
            messages = [{"role": "user", "content": "[[x]]"}, {"role": "assistant", "content": "a", name: "hm"}]
            status, answer = server.post(CHAT, {"messages": messages, "return_prompt_text": True})
            assert (status, answer["prompt_text"]) == (200, "[[x]];ahm;assistant:")


def test_a_prompt_that_starts_reasoning() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}assistant:<think>\x1f"
    with live_server("fake:say", chat_template=template, engine={"reasoning_parser": "qwen3"}) as server:
        message = choice_of(server, "hm</think>ok")["message"]
    assert (message["reasoning"], message["content"]) == ("hm", "ok")


# --- what goes with it ---


@pytest.mark.field("ChatCompletionRequest.return_prompt_text")
def test_return_prompt_text(bare: LiveServer) -> None:
    assert prompt_of(bare) == "user: [[x]];assistant:"
    body = asking("x", return_prompt_text=True, stream=True)
    _, raw = bare.post(CHAT, body)
    first, *others = [json.loads(line[6:]) for line in raw.decode().split("\n\n")[:-2]]
    assert first["prompt_text"] == "user: [[x]];assistant:"
    assert all("prompt_text" not in chunk for chunk in others)


@pytest.mark.field("ChatCompletionRequest.logprobs|return_token_ids")
def test_token_ids_are_complete_while_text_is_held_back(server: LiveServer) -> None:
    text = THOUGHT + CALL
    body = asking(text, tools=[WEATHER], logprobs=True, return_token_ids=True)
    status, whole = server.post(CHAT, body)
    assert status == 200
    (choice,) = whole["choices"]
    tokens = [entry["bytes"][0] for entry in choice["logprobs"]["content"]]
    assert bytes(tokens[:-1]).decode() == bytes(choice["token_ids"][:-1]).decode() == text
    _, raw = server.post(CHAT, body | {"stream": True})
    chunks = [json.loads(line[6:])["choices"][0] for line in raw.decode().split("\n\n")[:-2]]
    entries = [entry for chunk in chunks for entry in (chunk["logprobs"] or {"content": []})["content"]]
    assert entries == choice["logprobs"]["content"]
    assert [token for chunk in chunks for token in chunk["token_ids"] or []] == choice["token_ids"]


def test_stop_strings_match_raw_text(server: LiveServer) -> None:
    choice = choice_of(server, THOUGHT + "one two three", stop=["two"])
    assert (choice["message"]["content"], choice["stop_reason"]) == ("one ", "two")
    assert choice_of(server, THOUGHT + "one", stop=["<b>"])["message"]["reasoning"] == "Hm,"


def test_a_conversation_continues_after_calls(server: LiveServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": f"[[{CALL}]]"}]
    tools: Any = [WEATHER]
    first = client.chat.completions.create(model="fake", messages=messages, tools=tools).choices[0].message
    messages.append(first.model_dump(exclude_none=True))
    assert first.tool_calls is not None
    messages.append({"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "sunny"})
    again = client.chat.completions.create(model="fake", messages=messages, tools=tools)
    assert again.choices[0].finish_reason == "tool_calls", "the same script, behind a longer prompt"
