"""Bodies with many invalid values: few errors are collected, and lists of objects have a maximum length."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError
from support.servers.api_bodies import LEAST

from pagoda.common.errors import RequestError
from pagoda.server.api.anthropic.request import AnthropicMessagesRequest
from pagoda.server.api.app import BODIES, bodies_of
from pagoda.server.api.openai.chat import ChatCompletionRequest
from pagoda.server.api.openai.responses.request import ResponsesRequest
from pagoda.server.http.body import MAX_LIST_OBJECTS, RequestBody, parse

MANY = 300
FEW = 32
WRONG: list[Any] = ["", 0, None, {}, [], {"type": "x"}, {"role": "user", "content": [0] * MANY}]

BODY_TYPES = list(dict.fromkeys(body for path in BODIES for body in bodies_of(path)))


def errors_of(body: type[RequestBody], raw: str) -> int:
    """Number of invalid values reported, without unknown fields, which MAX_KEYS bounds."""
    try:
        body.model_validate_json(raw)
    except ValidationError as error:
        return sum(each["type"] != "extra_forbidden" for each in error.errors(include_input=False))
    return 0


@pytest.mark.parametrize("body", BODY_TYPES, ids=lambda body: body.__name__)
def test_validation_stops_at_the_first_invalid_item(body: type[RequestBody]) -> None:
    least = LEAST[body.__name__]
    for wrong in map(json.dumps, WRONG):
        many = ",".join([wrong] * MANY)
        keyed = ",".join(f'"{key}":{wrong}' for key in range(MANY))
        for value in (f"[{many}]", f"[[{many}]]", f"{{{keyed}}}"):
            for name in body.model_fields:
                before = json.dumps({key: given for key, given in least.items() if key != name})[:-1]
                raw = f'{before}{", " if len(before) > 1 else ""}"{name}": {value}}}'
                assert errors_of(body, raw) < FEW, (name, wrong)


def test_the_first_invalid_item_is_named() -> None:
    with pytest.raises(RequestError) as error:
        parse(
            ChatCompletionRequest,
            b'{"messages": [{"role": "user", "content": "a"}], "stop_token_ids": [1, 2, "", 3, ""]}',
        )
    assert error.value.field == "stop_token_ids[2]"
    with pytest.raises(RequestError) as error:
        parse(
            ChatCompletionRequest, b'{"messages": [{"role": "user", "content": "a"}], "logit_bias": {"1": 1, "2": ""}}'
        )
    assert error.value.field == "logit_bias.2"


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (ChatCompletionRequest, "messages"),
        (ChatCompletionRequest, "tools"),
        (ChatCompletionRequest, "documents"),
        (ResponsesRequest, "input"),
        (ResponsesRequest, "tools"),
        (AnthropicMessagesRequest, "messages"),
        (AnthropicMessagesRequest, "tools"),
    ],
)
def test_lists_of_objects_have_a_maximum_length(body: type[RequestBody], name: str) -> None:
    item: dict[str, Any] = {"role": "user", "content": "a"}
    if name == "tools":
        item = {"type": "function", "name": "f"} if body is ResponsesRequest else {"name": "f", "input_schema": {}}
    given = LEAST[body.__name__] | {name: [item] * (MAX_LIST_OBJECTS + 1)}
    with pytest.raises(RequestError, match=f"at most {MAX_LIST_OBJECTS} items") as error:
        parse(body, json.dumps(given).encode())
    assert error.value.field == name


def test_parts_of_a_message_have_a_maximum_number() -> None:
    parts = [{"type": "text", "text": "a"}] * (MAX_LIST_OBJECTS + 1)
    given = {"messages": [{"role": "user", "content": parts}]}
    with pytest.raises(RequestError, match=f"at most {MAX_LIST_OBJECTS}") as error:
        parse(ChatCompletionRequest, json.dumps(given).encode()).check()
    assert error.value.field == "messages[0].content"
