"""Chat completions on the wire, to the byte and with the official client."""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.servers.chat_messages import message as empty_message
from support.servers.live_server import LiveServer, live_server
from support.suite.rows import each_row

CHAT = "/v1/chat/completions"
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ü"}}\n</tool_call>'
ANSWER = f"<think>hm</think>Ok {CALL}"


def asking(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": f"[[{text}]]"}], "max_tokens": 300, **more}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    tools = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    with live_server("fake:say", engine={"reasoning_parser": "qwen3"}, **tools) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def events_of(server: LiveServer, body: dict[str, Any]) -> list[Any]:
    """Return the parsed events of a stream; fail unless it is server-sent events that end with [DONE]."""
    status, raw = server.post(CHAT, body | {"stream": True})
    assert status == 200, raw
    assert re.fullmatch(rb"(data: \{[^\n]*\}\n\n)+data: \[DONE\]\n\n", raw)
    return [json.loads(line.removeprefix(b"data: ")) for line in raw.split(b"\n\n")[:-2]]


def normalized(answer: Any) -> Any:
    """Return the response with ids and times checked and replaced by constants."""
    text = json.dumps(answer, ensure_ascii=False)
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", answer["id"])
    assert isinstance(answer["created"], int)
    text = text.replace(answer["id"], "ID").replace(f'"created": {answer["created"]}', '"created": 1')
    return json.loads(re.sub(r'"id": "[A-Za-z0-9]{9}"', '"id": "CALL"', text))


def chunk(choice: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    choices = (
        [] if choice is None else [{"index": 0, "logprobs": None, "finish_reason": None, "token_ids": None} | choice]
    )
    return {"id": "ID", "object": "chat.completion.chunk", "created": 1, "model": "fake", "choices": choices, **more}


def test_bytes_of_a_whole_response(server: LiveServer) -> None:
    status, answer = server.post(CHAT, asking(ANSWER, tools=[WEATHER]))
    assert status == 200
    assert normalized(answer) == {
        "id": "ID",
        "object": "chat.completion",
        "created": 1,
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Ok ",
                    "refusal": None,
                    "annotations": None,
                    "audio": None,
                    "function_call": None,
                    "reasoning": "hm",
                    "reasoning_content": "hm",
                    "tool_calls": [
                        {
                            "id": "CALL",
                            "type": "function",
                            "function": {"name": "weather", "arguments": '{"city": "Ü"}'},
                        }
                    ],
                },
                "logprobs": None,
                "finish_reason": "tool_calls",
                "stop_reason": None,
                "token_ids": None,
                "routed_experts": None,
            }
        ],
        "service_tier": None,
        "system_fingerprint": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
        "prompt_text": None,
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "usage": {
            "prompt_tokens_details": None,
            "prompt_tokens": len(f"weather;user: [[{ANSWER}]];assistant:".encode()),
            "total_tokens": len(f"weather;user: [[{ANSWER}]];assistant:{ANSWER}".encode()) + 1,
            "completion_tokens": len(ANSWER.encode()) + 1,
            "completion_tokens_details": {"reasoning_tokens": 2},
        },
    }


def test_fields_not_requested_are_null(server: LiveServer) -> None:
    chat = server.post(CHAT, asking("hi"))[1]
    text = server.post("/v1/completions", {"prompt": "[[hi]]assistant:", "max_tokens": 4})[1]
    for answer in (chat, text):
        assert [answer[key] for key in ("service_tier", "system_fingerprint", "kv_transfer_params")] == [None] * 3
        assert answer["choices"][0]["token_ids"] is None
        assert answer["usage"]["prompt_tokens_details"] is None
    assert (chat["prompt_logprobs"], chat["prompt_token_ids"]) == (None, None)
    assert (text["choices"][0]["prompt_logprobs"], text["choices"][0]["prompt_token_ids"]) == (None, None)


def test_keys_of_a_plain_message(server: LiveServer) -> None:
    _, answer = server.post(CHAT, asking("hi"))
    (choice,) = answer["choices"]
    assert choice["message"] == empty_message("hi")
    assert choice["finish_reason"] == "stop"


def test_bytes_of_a_stream(server: LiveServer) -> None:
    events = events_of(server, asking(ANSWER, tools=[WEATHER], stream_options={"include_usage": True}))
    assert len({event["id"] for event in events}) == len({event["created"] for event in events}) == 1
    events = [normalized(event) for event in events]
    usage = events[-1].pop("usage")
    assert events[-1] == chunk(None)
    assert usage["completion_tokens"] == len(ANSWER.encode()) + 1
    assert all(event.pop("usage") is None for event in events[:-1])
    first, *between, last, _ = events
    assert first == chunk({"delta": {"role": "assistant", "content": ""}}, prompt_token_ids=None, prompt_text=None)
    delta = last["choices"][0]["delta"]  # on a busy machine the last tokens come together with the end
    assert last == chunk({"delta": delta, "finish_reason": "tool_calls", "stop_reason": None})
    deltas = [event["choices"][0]["delta"] for event in between]
    assert between == [chunk({"delta": delta}) for delta in deltas], "nothing else is in between"
    deltas += [delta] if delta else []
    thought = [delta for delta in deltas if "reasoning" in delta]
    assert all(delta == dict.fromkeys(("reasoning", "reasoning_content"), delta["reasoning"]) for delta in thought)
    assert "".join(delta["reasoning"] for delta in thought) == "hm"
    contents = [delta for delta in deltas if "content" in delta]
    assert "".join(delta["content"] for delta in contents) == "Ok "
    name, *pieces = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert name == [{"index": 0, "id": "CALL", "type": "function", "function": {"name": "weather", "arguments": ""}}]
    assert [set(piece[0]) for piece in pieces] == [{"index", "function"}] * len(pieces)
    assert [set(piece[0]["function"]) for piece in pieces] == [{"arguments"}] * len(pieces)
    assert "".join(piece[0]["function"]["arguments"] for piece in pieces) == '{"city": "Ü"}'
    order = [next(iter(delta)) for delta in deltas]
    assert order == sorted(order, key=["reasoning", "content", "tool_calls"].index)


def test_logprobs_have_openai_format(server: LiveServer) -> None:
    body = asking("<think>h</think>é", logprobs=True, top_logprobs=1)
    _, answer = server.post(CHAT, body)
    entries = answer["choices"][0]["logprobs"]
    assert set(entries) == {"content", "refusal"}
    last = entries["content"][-2]
    assert (last["bytes"], last["token"], set(last)) == ([0xA9], "é", {"token", "logprob", "bytes", "top_logprobs"})
    assert [set(top) for top in last["top_logprobs"]] == [{"token", "logprob", "bytes"}]
    parts = [event["choices"][0]["logprobs"] for event in events_of(server, body)]
    assert [entry for part in parts if part for entry in part["content"]] == entries["content"]
    assert all(part is None or part["content"] for part in parts)


@each_row("stream", [False, True])
@each_row(
    ("more", "param"),
    [
        ({"temperature": 3e9}, "temperature"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f", "parameters": 1}]}, "functions[0].parameters"),
    ],
)
def test_bytes_of_errors(server: LiveServer, more: dict[str, Any], param: str, stream: bool) -> None:
    status, answer = server.post(CHAT, asking("x", stream=stream, **more))
    assert status == 400
    assert set(answer) == {"error"}
    message = answer["error"].pop("message")
    assert param.partition("[")[0] in message
    assert answer["error"] == {"type": "invalid_request_error", "param": param, "code": None}


# --- the official client ---


def test_the_official_client_reads_whole_responses(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**asking(ANSWER, tools=[WEATHER]))
    message = answer.choices[0].message
    assert (message.content, answer.choices[0].finish_reason) == ("Ok ", "tool_calls")
    assert message.model_dump()["reasoning"] == "hm"
    assert message.tool_calls is not None
    assert message.tool_calls[0].type == "function"
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Ü"}
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 2
    assert answer.choices[0].model_dump(warnings="error")


def test_the_official_client_reads_streams(client: openai.OpenAI) -> None:
    reasons, thought = [], ""
    with client.chat.completions.stream(**asking(ANSWER, tools=[WEATHER])) as stream:
        for event in stream:
            if event.type == "chunk":
                reasons.append(event.chunk.choices[0].finish_reason)
                thought += event.chunk.choices[0].delta.model_dump().get("reasoning", "")
        final = stream.get_final_completion()
    assert thought == "hm"
    assert reasons[-1] == "tool_calls"
    assert set(reasons[:-1]) == {None}
    message = final.choices[0].message
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.name == "weather"
    assert message.tool_calls[0].function.arguments == '{"city": "Ü"}'
    assert message.content == "Ok "


async def test_the_official_asynchronous_client(server: LiveServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

        async def one(text: str) -> str:
            stream = await client.chat.completions.create(**asking(text, stream=True))
            return "".join([piece.choices[0].delta.content or "" async for piece in stream])

        texts = [f"Grüße {number} " * number for number in range(1, 6)]
        assert await asyncio.gather(*map(one, texts)) == texts
        whole = await client.chat.completions.create(**asking(ANSWER, tools=[WEATHER], n=2))
    assert [choice.finish_reason for choice in whole.choices] == ["tool_calls"] * 2


def test_the_official_client_raises_typed_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(**asking("x", tool_choice="required"))
    assert (bad.value.param, bad.value.code) == ("tool_choice", None)
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(**asking("x") | {"model": "gpt-9"})
    assert missing.value.param == "model"
