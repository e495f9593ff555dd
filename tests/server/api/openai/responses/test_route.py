"""The Responses API over a socket: official client, raw events, store, background, every field."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.engines.scripted import outputs
from support.servers.live_server import LiveServer, live_server
from support.servers.response_grammar import check_grammar, plain
from support.servers.responses_api import ASK, FULL, ROUTES, TOOL, client_of, events_of, fault, posted
from support.suite.rows import each_row
from support.suite.spying import Spy, spy_on
from support.suite.watching import eventually

from pagoda.server.parsers.parser import Content


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(trust_request_chat_template=True) as server:
        yield server


@pytest.fixture(scope="module")
def strict() -> Iterator[LiveServer]:
    """A server with --strict-requests."""
    with live_server(strict_requests=True) as server:
        yield server


@pytest.fixture(scope="module")
def slow() -> Iterator[LiveServer]:
    with live_server("fake:slow", sse_keep_alive_interval=0.001) as server:
        yield server


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return spy_on(monkeypatch, ROUTES)


@pytest.fixture
def client(server: LiveServer) -> openai.OpenAI:
    return client_of(server)


# --- the client ---


@pytest.mark.field("ResponsesRequest.input|model|max_output_tokens")
def test_whole(client: openai.OpenAI) -> None:
    response = client.responses.create(model="fake", input="a", max_output_tokens=5)
    assert (response.object, response.status, response.output_text) == ("response", "incomplete", ";<=>?")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.id.startswith("resp_")
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (18, 5, 23)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="other", input="a")


def test_completed(client: openai.OpenAI) -> None:
    response = client.responses.create(model="fake", input="a", extra_body={"stop": "="})
    assert (response.status, response.output_text, response.error) == ("completed", ";<", None)
    assert response.completed_at is not None


@pytest.mark.field("ResponsesRequest.stream")
def test_streamed(client: openai.OpenAI) -> None:
    with client.responses.stream(model="fake", input="a", extra_body={"stop": "="}) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == ";<"
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"


@each_row("background", [False, True])
def test_the_stream_of_a_prompt_that_is_too_long_fails(server: LiveServer, background: bool) -> None:
    """Coding agents shorten the conversation at this event, not at a 400."""
    long = {"input": "a" * 300, "background": background}
    status, raw = server.post("/v1/responses", ASK | long | {"stream": True})
    assert status == 200
    kinds = ["created", "queued", "in_progress", "failed"] if background else ["created", "in_progress", "failed"]
    events = events_of(raw)
    assert [event["type"] for event in events] == [f"response.{kind}" for kind in kinds]
    assert [event["sequence_number"] for event in events] == list(range(len(kinds)))
    response = events[-1]["response"]
    assert (response["error"]["code"], response["store"]) == ("context_length_exceeded", False)
    assert "maximum context length" in response["error"]["message"]
    assert server.get(f"/v1/responses/{response['id']}")[0] == 404
    status, answer = server.post("/v1/responses", ASK | long)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


async def test_asynchronous_client(server: LiveServer) -> None:
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    async with client.responses.stream(model="fake", input="a", extra_body={"stop": "="}) as stream:
        final = await stream.get_final_response()
    assert final.output_text == ";<"
    assert (await client.responses.retrieve(final.id)).output_text == ";<"
    await client.responses.delete(final.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(final.id)
    await client.close()


def test_thinking_and_calls(client: openai.OpenAI, spy: Spy) -> None:
    spy.script = FULL
    tools: Any = [TOOL]
    with client.responses.stream(model="fake", input="a", tools=tools, max_output_tokens=5) as stream:
        events = list(stream)
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == '{"a":1}'
    last = events[-1]
    assert last.type == "response.incomplete"
    reasoning, message, call = last.response.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert reasoning.content[0].text == "so"
    assert message.type == "message"
    assert call.type == "function_call"
    assert (call.name, call.call_id, call.arguments) == ("f", "c0", '{"a":1}')
    again: Any = [*last.response.output, {"type": "function_call_output", "call_id": "c0", "output": "out"}]
    client.responses.create(model="fake", input=again, tools=tools)
    assert list(spy.conversation.messages) == [
        {
            "role": "assistant",
            "reasoning_content": "so",
            "content": "hi",
            "tool_calls": [{"id": "c0", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}],
        },
        {"role": "tool", "tool_call_id": "c0", "name": "f", "content": "out"},
    ]


# --- raw events ---


def test_raw_events(server: LiveServer) -> None:
    status, raw = server.post("/v1/responses", ASK | {"stream": True})
    assert status == 200
    response = check_grammar(events_of(raw))
    assert plain(response) | {"id": 0, "created_at": 0, "usage": 0} == (
        plain(posted(server)) | {"id": 0, "created_at": 0, "usage": 0}
    )


def test_events_of_thinking_and_calls(server: LiveServer, spy: Spy) -> None:
    spy.script = FULL
    _, raw = server.post("/v1/responses", ASK | {"stream": True})
    items = check_grammar(events_of(raw))["output"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]


def test_a_broken_stream_ends_with_a_failure(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: Any) -> Any:
        yield 0, outputs([2, 0])[0]
        raise RuntimeError("secret")

    monkeypatch.setattr(f"{ROUTES}.Generation.outputs", broken)
    _, raw = server.post("/v1/responses", ASK | {"stream": True})
    response = check_grammar(events_of(raw))
    assert response["status"] == "failed"
    assert "secret" not in json.dumps(response)


def test_a_disconnect_frees_the_request(slow: LiveServer) -> None:
    with slow.raw("POST", "/v1/responses", {"input": "a", "stream": True}) as raw:
        assert raw.recv(100)
        assert slow.state.running == 1
    eventually(lambda: slow.state.running == 0 and slow.llm.num_unfinished == 0)


ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [{"type": "computer_call"}]}, "input[0]"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
    ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input[0].content[0]"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"type": "reasoning", "encrypted_content": "pagoda:?"}]}, "input[0].encrypted_content"),
    ({"input": [{"type": "reasoning", "encrypted_content": "gAAA"}]}, "input[0].encrypted_content"),
    ({"input": "a" * 100}, "input"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0]"),
    ({"tools": [TOOL]}, "tool_choice"),
    ({"tools": [TOOL | {"name": "f f"}]}, "tools[0].name"),
    ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": ALLOWED}, "tool_choice.tools[0]"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"json": {}}}, "structured_outputs"),
    ({"structured_outputs": {"nothing": 1}}, "structured_outputs.nothing"),
    ({"include": ["file_search_call.results"]}, "include[0]"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"metadata": {"a" * 65: "b"}}, None),
    ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_tool_calls": 0}, "max_tool_calls"),
    ({"temperature": -1}, "temperature"),
    ({"background": True, "store": False}, "background"),
    ({"background": True, "input": "a" * 100}, "input"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"request_id": "a/b"}, "request_id"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"surprise": 1}, "surprise"),
]


@each_row(("body", "param"), BAD)
def test_bad_requests_name_the_field(strict: LiveServer, body: dict[str, Any], param: str | None) -> None:
    named, message = fault(strict, **body)
    if param is not None:
        assert named == param, message
    assert strict.state.running == 0


def test_an_image_is_refused_because_the_model_is_served_text_only(strict: LiveServer) -> None:
    _, message = fault(strict, input=[{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}])
    assert "type 'input_image' is not supported: the model is served text-only" in message


# --- the store ---


@pytest.mark.field("ResponsesRequest.store")
def test_responses_are_stored_by_default(client: openai.OpenAI, server: LiveServer) -> None:
    kept = client.responses.create(**ASK)
    assert client.responses.retrieve(kept.id).model_dump() == kept.model_dump()
    lost = client.responses.create(**ASK, store=False)
    assert lost.model_dump()["store"] is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(lost.id)
    client.responses.delete(kept.id)
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            ask(kept.id)


def test_a_streamed_response_is_stored_too(server: LiveServer) -> None:
    _, raw = server.post("/v1/responses", ASK | {"stream": True})
    last = events_of(raw)[-1]["response"]
    assert server.get(f"/v1/responses/{last['id']}") == (200, last)


@pytest.mark.setting("--max-stored-responses")
def test_the_oldest_response_is_evicted() -> None:
    with live_server(max_stored_responses=2) as server:
        ids = [posted(server)["id"] for _ in range(3)]
        assert [server.get(f"/v1/responses/{each}")[0] for each in ids] == [404, 200, 200]


@pytest.mark.setting("--max-stored-response-bytes")
def test_memory_is_bounded() -> None:
    with live_server(max_stored_response_bytes=6_000) as server:
        ids = [posted(server)["id"] for _ in range(4)]
        statuses = [server.get(f"/v1/responses/{each}")[0] for each in ids]
        assert statuses[0] == 404
        assert statuses[-1] == 200


def test_a_server_without_a_store() -> None:
    with live_server(max_stored_responses=0) as server:
        answer = posted(server)
        assert answer["store"] is False
        assert server.get(f"/v1/responses/{answer['id']}")[0] == 404
        assert fault(server, store=True)[0] == "store"
        assert fault(server, background=True)[0] == "background"


@pytest.mark.field("ResponsesRequest.previous_response_id|instructions")
def test_conversations_continue(client: openai.OpenAI, spy: Spy) -> None:
    spy.script = FULL
    first = client.responses.create(**ASK, instructions="be brief")
    assert first.instructions == "be brief"
    assert [message["role"] for message in spy.conversation.messages] == ["system", "user"]
    output: Any = [{"type": "function_call_output", "call_id": "c0", "output": [{"type": "input_text", "text": "out"}]}]
    spy.script = [Content("done")]
    second = client.responses.create(
        model="fake", input=output, previous_response_id=first.id, max_output_tokens=1, instructions="be long"
    )
    assert second.previous_response_id == first.id
    third = client.responses.create(model="fake", input="b", previous_response_id=second.id, max_output_tokens=1)
    assert third.instructions is None
    messages = [(message["role"], message["content"]) for message in spy.conversation.messages]
    assert messages == [("user", "a"), ("assistant", "hi"), ("tool", "out"), ("assistant", "done"), ("user", "b")]
    thinking, calls = (spy.conversation.messages[1][key] for key in ("reasoning_content", "tool_calls"))
    assert (thinking, calls[0]["id"]) == ("so", "c0")


# --- several keys ---


ONE, TWO = ({"authorization": f"Bearer {key}"} for key in ("key-one", "key-two"))


@pytest.fixture(scope="module")
def keyed() -> Iterator[LiveServer]:
    with live_server("fake:slow", api_key=("key-one", "key-two"), max_stored_responses=16) as server:
        yield server


def created(server: LiveServer, headers: dict[str, str], **body: Any) -> Any:
    status, answer = server.request("POST", "/v1/responses", ASK | body, headers)
    assert status == 200, answer
    return answer


@each_row(
    ("method", "suffix"),
    [
        ("GET", ""),
        ("GET", "?stream=true"),
        ("GET", "?stream=true&starting_after=1"),
        ("POST", "/cancel"),
        ("DELETE", ""),
    ],
)
def test_other_keys_cannot_see_a_response(keyed: LiveServer, method: str, suffix: str) -> None:
    name = f"{method}{len(suffix)}"
    created(keyed, ONE, background=True, stream="stream" in suffix, max_output_tokens=40, request_id=name)
    body = {} if method == "POST" else None
    theirs = keyed.request(method, f"/v1/responses/{name}{suffix}", body, TWO)
    unknown = keyed.request(method, f"/v1/responses/{'x' * len(name)}{suffix}", body, TWO)
    assert theirs[0] == unknown[0] == 404
    assert theirs[1]["error"]["message"].replace(name, "x" * len(name)) == unknown[1]["error"]["message"]
    assert keyed.request("GET", f"/v1/responses/{name}", None, ONE)[1]["status"] != "cancelled"
    assert keyed.request(method, f"/v1/responses/{name}{suffix}", body, ONE)[0] == 200


def test_other_keys_cannot_continue_a_response(keyed: LiveServer) -> None:
    first = created(keyed, ONE)["id"]
    body = ASK | {"previous_response_id": first}
    status, answer = keyed.request("POST", "/v1/responses", body, TWO)
    assert (status, answer["error"]["param"]) == (404, "previous_response_id")
    unknown = keyed.request("POST", "/v1/responses", body | {"previous_response_id": "x"}, TWO)
    assert unknown[1]["error"]["message"].replace("'x'", repr(first)) == answer["error"]["message"]
    assert created(keyed, ONE, previous_response_id=first)["previous_response_id"] == first


def test_the_same_id_under_two_keys(keyed: LiveServer) -> None:
    for headers, text in ((ONE, "a"), (TWO, "b")):
        created(keyed, headers, request_id="same", input=text)
    assert keyed.request("POST", "/v1/responses", ASK | {"request_id": "same"}, TWO)[0] == 400
    outputs = [keyed.request("GET", "/v1/responses/same", None, headers)[1]["output"] for headers in (ONE, TWO)]
    assert outputs[0] != outputs[1]


def test_a_key_is_the_same_in_either_header(keyed: LiveServer) -> None:
    name = created(keyed, {"x-api-key": "key-one"})["id"]
    assert keyed.request("GET", f"/v1/responses/{name}", None, ONE)[0] == 200
    for headers, status in (
        ({"x-api-key": "key-one", "authorization": "Bearer wrong"}, 200),
        ({"x-api-key": "key-two", "authorization": "Bearer wrong"}, 404),
        ({"x-api-key": "key-one"} | TWO, 404),
        ({}, 401),
    ):
        assert keyed.request("GET", f"/v1/responses/{name}", None, headers)[0] == status


def test_a_running_response_cannot_be_continued(slow: LiveServer) -> None:
    running = posted(slow, background=True, max_output_tokens=40)
    assert "not ready" in fault(slow, previous_response_id=running["id"])[1]
    slow.post(f"/v1/responses/{running['id']}/cancel", {})
    assert "cancelled" in fault(slow, previous_response_id=running["id"])[1]


# --- the background ---


@pytest.mark.field("ResponsesRequest.background")
def test_in_the_background(slow: LiveServer) -> None:
    client = client_of(slow)
    response = client.responses.create(**ASK, background=True)
    assert (response.status, response.background, response.output) == ("queued", True, [])
    eventually(lambda: client.responses.retrieve(response.id).status == "incomplete")
    assert len(client.responses.retrieve(response.id).output_text) == 5
    assert client.responses.cancel(response.id).status == "incomplete"


def test_cancelled_in_the_background(slow: LiveServer) -> None:
    client = client_of(slow)
    response = client.responses.create(model="fake", input="a", background=True)
    eventually(lambda: bool(client.responses.retrieve(response.id).output_text))
    cancelled = client.responses.cancel(response.id)
    assert cancelled.status == "cancelled"
    assert cancelled.output_text
    assert client.responses.retrieve(response.id).model_dump() == cancelled.model_dump()
    eventually(lambda: slow.llm.num_unfinished == 0)


def test_deleting_cancels_a_running_response(slow: LiveServer) -> None:
    response = posted(slow, background=True, max_output_tokens=40)
    assert slow.request("DELETE", f"/v1/responses/{response['id']}") == (
        200,
        {"id": response["id"], "object": "response", "deleted": True},
    )
    eventually(lambda: slow.state.running == 0 and slow.llm.num_unfinished == 0)


def test_only_the_background_can_be_cancelled(server: LiveServer) -> None:
    status, answer = server.post(f"/v1/responses/{posted(server)['id']}/cancel", {})
    assert (status, answer["error"]["param"]) == (400, "response_id")


def test_a_background_stream_outlives_its_client_and_is_read_again(slow: LiveServer) -> None:
    client = client_of(slow)
    stream = client.responses.create(**ASK, background=True, stream=True)
    first = next(iter(stream))
    stream.close()
    assert first.type == "response.created"
    events = list(client.responses.retrieve(first.response.id, stream=True))
    check_grammar([event.to_dict(mode="json") for event in events])
    later = list(client.responses.retrieve(first.response.id, stream=True, starting_after=3))
    assert [event.sequence_number for event in later] == list(range(4, len(events)))
    assert client.responses.retrieve(first.response.id).status == "incomplete"


def test_only_background_streams_can_be_read_again(server: LiveServer) -> None:
    path = f"/v1/responses/{posted(server)['id']}"
    for query, param in (
        ("stream=true", "stream"),
        ("stream=maybe", "stream"),
        ("starting_after=1", "starting_after"),
        ("starting_after=x", "starting_after"),
    ):
        status, answer = server.get(f"{path}?{query}")
        assert (status, answer["error"]["param"]) == (400, param)


def test_the_background_ends_with_the_server() -> None:
    with live_server("fake:slow") as slow:
        posted(slow, background=True, max_output_tokens=40)
        stored = next(iter(slow.state.responses._responses.values()))

        async def stop() -> None:
            slow.state.stopping.set()
            assert stored.task is not None
            await stored.task

        slow.call(stop())
        assert stored.status == "failed"


def test_a_dead_engine_fails_the_background() -> None:
    with live_server("fake:crash") as server:
        response = posted(server, background=True)
        eventually(lambda: server.get(f"/v1/responses/{response['id']}")[1]["status"] == "failed")
        assert server.get(f"/v1/responses/{response['id']}")[1]["error"]["code"] == "server_error"


def test_concurrent_responses(server: LiveServer) -> None:
    async def all_of() -> list[str]:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        requests = [client.responses.create(**ASK) for _ in range(8)]
        texts = [response.output_text for response in await asyncio.gather(*requests)]
        await client.close()
        return texts

    assert asyncio.run(all_of()) == [";<=>?"] * 8
