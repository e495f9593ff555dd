"""Out-of-bounds numbers in every request body: refused by name or answered, and the next request is served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import interface
import pytest
from support.api_bodies import LEAST, path_of
from support.live_server import LiveServer, live_server

from pagoda.common.errors import RequestError
from pagoda.server.app import BODIES, bodies_of
from pagoda.server.http.body import RequestBody, is_unsupported, parse

NO_NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", "true", '""', '"one"', '{"a": {"a": 1}}', "[[[1]]]"]
FAR_OUT = [-1, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**40]

TEXT_OR_IDS = {"prompt", "input"}
"""Texts or token ids: what they may be is not said field by field."""

CANARY = {"prompt": "a", "max_tokens": 2}


def every_body() -> list[type[RequestBody]]:
    return list(dict.fromkeys(body for path in BODIES for body in bodies_of(path)))


def kinds_of(schema: dict[str, Any]) -> set[str]:
    """JSON types that a field may have; an array of numbers is "numbers"."""
    if "anyOf" in schema:
        return set().union(*map(kinds_of, schema["anyOf"]))
    kind = schema.get("type", "any")
    if kind == "array" and kinds_of(schema.get("items", {})) & {"integer", "number"}:
        return {"numbers"}
    return {kind} if isinstance(kind, str) else set(kind)


def numeric(body: type[RequestBody]) -> Iterator[tuple[str, bool]]:
    """Names of fields that are numbers, and whether they are lists of them."""
    properties = body.model_json_schema()["properties"]
    for name, field in body.model_fields.items():
        kinds = kinds_of(properties[name])
        if name in TEXT_OR_IDS or is_unsupported(field):
            continue
        if kinds & {"integer", "number", "numbers"} and not kinds & {"any", "object"}:
            yield name, "numbers" in kinds and not kinds & {"integer", "number"}


def fields() -> list[Any]:
    return [
        pytest.param(body, name, listed, id=f"{body.__name__}.{name}")
        for body in every_body()
        for name, listed in numeric(body)
    ]


def test_number_fields_are_collected() -> None:
    names = {f"{param.values[0].__name__}.{param.values[1]}" for param in fields()}
    rows = {
        f"{row['schema']}.{row['field']}"
        for row in interface.rows("api_fields")
        if row["type"].removesuffix(" | null") in ("integer", "number")
        and interface.body_of(row["schema"]) in every_body()
        and row["schema"] not in interface.SAME_BODY
        and not is_unsupported(interface.bodies()[row["schema"]].model_fields[row["field"]])
    }
    assert sorted(rows - names) == []


@pytest.mark.parametrize(("body", "name", "listed"), fields())
def test_other_types_are_refused_by_name(body: type[RequestBody], name: str, listed: bool) -> None:
    least = json.dumps({key: value for key, value in LEAST[body.__name__].items() if key != name})[1:-1]
    for text in NO_NUMBERS:
        if text.startswith('"') and "string" in kinds_of(body.model_json_schema()["properties"][name]):
            continue
        raw = f'{{"{name}": {f"[{text}]" if listed else text}{", " + least if least else ""}}}'
        with pytest.raises(RequestError) as error:
            parse(body, raw.encode())
        assert error.value.field.partition("[")[0].partition(".")[0] == name, text


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(engine={"scheduling_policy": "priority"}) as server:
        yield server


@pytest.mark.parametrize(("body", "name", "listed"), fields())
def test_numbers_out_of_bounds_are_no_server_error(
    server: LiveServer, body: type[RequestBody], name: str, listed: bool
) -> None:
    path = path_of(body.__name__)
    if path.startswith("/abort"):
        return
    for value in FAR_OUT:
        fields = LEAST[body.__name__] | {name: [value] if listed else value}
        status, answer = server.post(path, fields)
        assert status in (200, 400, 403), (value, answer)  # 403: adapters are loaded at start only
        if status == 400:
            assert answer["error"]["message"], value
    assert server.post("/v1/completions", CANARY)[1]["choices"][0]["text"] == "bc"
    assert not server.llm.num_unfinished
