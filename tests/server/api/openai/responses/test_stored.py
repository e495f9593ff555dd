"""Stored responses and conversations: lists, input items, references, input tokens, render."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.servers.live_server import LiveServer, live_server
from support.servers.responses_api import ROUTES, client_of, fault, posted
from support.suite.rows import each_row
from support.suite.spying import Spy, spy_on


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(api_key=()) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return client_of(server)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return spy_on(monkeypatch, ROUTES)


def contents(spy: Spy) -> list[Any]:
    return [message["content"] for message in spy.conversation.messages]


# --- lists ---


def test_responses_are_listed_in_pages() -> None:
    with live_server() as server:
        ids = [posted(server)["id"] for _ in range(5)]
        posted(server, store=False)
        status, page = server.request("GET", "/v1/responses?limit=2")
        assert status == 200
        assert [each["id"] for each in page["data"]] == [ids[4], ids[3]]
        assert (page["object"], page["first_id"], page["last_id"], page["has_more"]) == ("list", ids[4], ids[3], True)
        assert page["data"][0]["object"] == "response"
        _, page = server.request("GET", f"/v1/responses?limit=2&after={ids[2]}")
        assert ([each["id"] for each in page["data"]], page["has_more"]) == ([ids[1], ids[0]], False)
        _, page = server.request("GET", "/v1/responses?order=asc")
        assert [each["id"] for each in page["data"]] == ids
        _, page = server.request("GET", f"/v1/responses?before={ids[1]}&limit=2")
        assert ([each["id"] for each in page["data"]], page["has_more"]) == ([ids[3], ids[2]], True)


@each_row(
    ("query", "field"),
    [("limit=0", "limit"), ("limit=101", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=x", "after")],
)
def test_invalid_pages_name_the_parameter(server: LiveServer, query: str, field: str) -> None:
    status, answer = server.request("GET", f"/v1/responses?{query}")
    assert (status, answer["error"]["param"]) == (400, field)


def test_responses_of_other_keys_are_not_listed() -> None:
    with live_server(api_key=("a", "b")) as server:
        for key in ("a", "b"):
            one = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
            one.responses.create(model="fake", input=key)
            listed: Any = one.get("/responses", cast_to=object)
            assert len(listed["data"]) == 1


def test_input_items(client: openai.OpenAI) -> None:
    given: Any = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
    ]
    first = client.responses.create(model="fake", input=given, max_output_tokens=3)
    second = client.responses.create(model="fake", input="c", previous_response_id=first.id, max_output_tokens=3)
    items = client.responses.input_items.list(first.id, order="asc").data
    assert [(item.type, item.role, item.status) for item in items] == [
        ("message", "user", "completed"),
        ("message", "assistant", "completed"),
    ]
    assert items[0].content[0].to_dict() == {"type": "input_text", "text": "a"}
    later = list(client.responses.input_items.list(second.id, limit=1))  # the client fetches all pages
    assert [item.content[0].text for item in later] == ["c", first.output_text, "b", "a"]
    assert [item.id for item in later[1:]] == [first.output[0].id, items[1].id, items[0].id]
    assert len({item.id for item in later}) == 4


def test_input_items_of_unknown_and_running_responses(server: LiveServer) -> None:
    assert server.request("GET", "/v1/responses/resp_x/input_items")[0] == 404
    with live_server("fake:slow") as slow:
        running = posted(slow, background=True, max_output_tokens=None)
        status, answer = slow.request("GET", f"/v1/responses/{running['id']}/input_items")
        assert (status, answer["error"]["param"]) == (400, "response_id")
        slow.post(f"/v1/responses/{running['id']}/cancel", {})


# --- references ---


def test_references_stand_for_stored_items(server: LiveServer, spy: Spy) -> None:
    first = posted(server, input=[{"role": "user", "content": "a", "id": "msg_a"}])
    text = first["output"][0]["content"][0]["text"]
    references = [{"type": "item_reference", "id": "msg_a"}, {"id": first["output"][0]["id"]}]
    posted(server, input=[*references, {"role": "user", "content": "b"}])
    assert contents(spy) == ["a", text, "b"]


def test_unknown_references_are_named(server: LiveServer) -> None:
    gone = posted(server, input=[{"role": "user", "content": "a", "id": "msg_gone"}])
    reference = [{"role": "user", "content": "b"}, {"type": "item_reference", "id": "msg_gone"}]
    posted(server, input=reference)
    for stored in server.request("GET", "/v1/responses")[1]["data"]:
        server.request("DELETE", f"/v1/responses/{stored['id']}")
    field, message = fault(server, input=reference)
    assert field == "input[1]"
    assert "msg_gone" in message
    assert gone["id"]


# --- input tokens, render ---


def test_input_tokens_and_render_agree(server: LiveServer, client: openai.OpenAI) -> None:
    body: Any = {"input": "count me", "instructions": "x"}
    counted = client.responses.input_tokens.count(model="fake", **body)
    assert counted.object == "response.input_tokens"
    status, rendered = server.post("/v1/responses/render", {"model": "fake", "temperature": 0.5, **body})
    assert status == 200
    assert len(rendered["token_ids"]) == counted.input_tokens
    assert rendered["sampling_params"]["temperature"] == 0.5
    assert counted.input_tokens == client.responses.create(model="fake", **body, max_output_tokens=1).usage.input_tokens  # type: ignore[union-attr]


# --- conversations ---


@pytest.mark.field("ResponsesRequest.conversation")
def test_responses_continue_a_conversation(server: LiveServer, client: openai.OpenAI, spy: Spy) -> None:
    conversation = client.conversations.create(
        items=[{"type": "message", "role": "user", "content": "a"}], metadata={"k": "v"}
    )
    assert conversation.id.startswith("conv_")
    assert conversation.metadata == {"k": "v"}
    first = client.responses.create(model="fake", input="b", conversation=conversation.id, max_output_tokens=3)
    assert first.conversation is not None
    assert first.conversation.id == conversation.id
    assert contents(spy) == ["a", "b"]
    client.responses.create(
        model="fake", input="c", conversation={"id": conversation.id}, max_output_tokens=3, store=False
    )
    assert contents(spy) == ["a", "b", first.output_text, "c"]
    with client.responses.stream(model="fake", input="d", conversation=conversation.id) as stream:
        list(stream)
    client.responses.input_tokens.count(model="fake", input="e", conversation=conversation.id)
    items = list(client.conversations.items.list(conversation.id, order="asc", limit=2))
    assert [item.role for item in items] == ["user", "user", "assistant", "user", "assistant", "user", "assistant"]  # type: ignore[union-attr]
    assert items[2].id == first.output[0].id
    field, _ = fault(server, conversation=conversation.id, previous_response_id=first.id)
    assert field == "conversation"


@pytest.mark.field("CreateConversationRequest.items|metadata")
@pytest.mark.field("UpdateConversationRequest.metadata")
@pytest.mark.field("CreateItemsRequest.items")
def test_items_of_conversations(client: openai.OpenAI) -> None:
    conversation = client.conversations.create()
    added = client.conversations.items.create(
        conversation.id,
        items=[
            {"type": "message", "role": "user", "content": "a"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        ],
    )
    assert [item.type for item in added.data] == ["message", "function_call"]
    message = client.conversations.items.retrieve(str(added.data[0].id), conversation_id=conversation.id)
    assert message.content[0].text == "a"  # type: ignore[union-attr]
    updated = client.conversations.update(conversation.id, metadata={"x": "y"})
    assert client.conversations.retrieve(conversation.id).metadata == updated.metadata == {"x": "y"}
    client.conversations.items.delete(str(added.data[0].id), conversation_id=conversation.id)
    assert [item.type for item in client.conversations.items.list(conversation.id)] == ["function_call"]
    assert client.conversations.delete(conversation.id).deleted
    for fetch in (
        lambda: client.conversations.retrieve(conversation.id),
        lambda: client.responses.create(model="fake", input="a", conversation=conversation.id),
        lambda: client.conversations.items.list(conversation.id),
    ):
        with pytest.raises(openai.NotFoundError):
            fetch()


def test_bad_conversation_requests(server: LiveServer) -> None:
    made = server.post("/v1/conversations", {})[1]["id"]
    item = {"type": "message", "role": "user", "content": "a", "id": "msg_1"}
    assert server.post(f"/v1/conversations/{made}/items", {"items": [item]})[0] == 200
    for body, param in (
        ({"items": [item]}, "items"),
        ({"items": [item | {"id": None}] * 21}, "items"),
        ({"items": [{"type": "item_reference", "id": "x"}]}, "items[0]"),
        ({}, "items"),
    ):
        status, answer = server.post(f"/v1/conversations/{made}/items", body)
        assert (status, answer["error"]["param"]) == (400, param)
    assert server.request("GET", f"/v1/conversations/{made}/items/msg_2")[0] == 404


@pytest.mark.setting("--max-stored-responses")
def test_conversations_are_bounded_in_number() -> None:
    with live_server(max_stored_responses=2) as server:
        made = [server.post("/v1/conversations", {})[1]["id"] for _ in range(2)]
        server.post(f"/v1/conversations/{made[0]}", {"metadata": {"a": "b"}})  # the latest change counts
        server.post("/v1/conversations", {})
        assert server.request("GET", f"/v1/conversations/{made[0]}")[0] == 200
        assert server.request("GET", f"/v1/conversations/{made[1]}")[0] == 404
    with live_server(max_stored_responses=0) as server:
        assert server.post("/v1/conversations", {})[0] == 400


@pytest.mark.setting("--max-stored-response-bytes")
def test_conversations_are_bounded_in_size() -> None:
    item = {"type": "message", "role": "user", "content": "a" * 3000}
    with live_server(max_stored_response_bytes=10_000) as server:
        made = server.post("/v1/conversations", {"items": [item]})[1]["id"]
        assert server.post(f"/v1/conversations/{made}/items", {"items": [item]})[0] == 200
        assert server.post(f"/v1/conversations/{made}/items", {"items": [item]})[0] == 413
        assert len(server.request("GET", f"/v1/conversations/{made}/items")[1]["data"]) == 2
        assert server.post("/v1/conversations", {"items": [item] * 4})[0] == 413
        server.post("/v1/conversations", {"items": [item]})  # evicts the first
        assert server.request("GET", f"/v1/conversations/{made}")[0] == 404


def test_conversations_of_other_keys_do_not_exist() -> None:
    with live_server(api_key=("a", "b")) as server:
        a, b = (openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) for key in ("a", "b"))
        conversation = a.conversations.create()
        with pytest.raises(openai.NotFoundError):
            b.conversations.retrieve(conversation.id)
        assert a.conversations.retrieve(conversation.id).id == conversation.id
