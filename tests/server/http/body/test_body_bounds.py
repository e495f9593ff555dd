"""Out-of-bounds numbers in every request body: refused by name or answered, and the next request is served."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import interface
import pytest
from support.servers.api_bodies import LEAST, path_of
from support.servers.live_server import LiveServer, live_server
from support.suite.rows import each_row

from pagoda.common.errors import RequestError
from pagoda.common.request_bounds import (
    BOUNDS,
    MAX_GRAMMAR_CHARACTERS,
    MAX_TEXT_CHARACTERS,
    Bound,
    bound_of,
)
from pagoda.common.sampling_params import SamplingParams
from pagoda.server.api.app import BODIES, bodies_of
from pagoda.server.api.openai.completion import CompletionRequest
from pagoda.server.api.pooling.scoring import ScoreRequest
from pagoda.server.http.body import RequestBody, is_hint, is_unsupported, parse, parse_tolerant

NO_NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", "true", '""', '"one"', '{"a": {"a": 1}}', "[[[1]]]"]
FAR_OUT = [-1, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**40]

TEXT_OR_IDS = {"prompt", "input"}
"""Texts or token ids: what they may be is not said field by field."""

CANARY = {"prompt": "a", "max_tokens": 2}

BESIDE: dict[str, dict[str, Any]] = {
    "length_penalty": {"use_beam_search": True},
    "top_logprobs": {"logprobs": True},
    "logprob_token_ids": {"logprobs": 1},
    "best_of": {"temperature": 1},
}
"""Fields without which another is refused for a different reason."""


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


@each_row(("body", "name", "listed"), fields)
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


def values_outside(bound: Bound) -> list[Any]:
    """Numbers outside the bounds: the nearest ones, and those far out that no row allows."""
    assert bound.low is not None
    assert bound.high is not None
    below = bound.low if bound.above else bound.low - 1
    return [below, *(each for each in (bound.high + 1, *FAR_OUT) if not bound.low <= each <= bound.high)]


@each_row(("body", "name", "listed"), fields)
def test_numbers_out_of_bounds_are_refused_by_name(
    server: LiveServer, body: type[RequestBody], name: str, listed: bool
) -> None:
    """Every number just outside of its row, and far outside, is a 400 that names the field; the next is served."""
    bound = bound_of(body.__name__, name)
    assert bound is not None, "each numeric field has a row in request_bounds"
    path, more = path_of(body.__name__), BESIDE.get(name, {})
    for value in values_outside(bound):
        fields = LEAST[body.__name__] | more | {name: [value] if listed else value}
        status, answer = server.post(path, fields)
        assert status == 400, (value, answer)
        named = answer["error"].get("param") or answer["error"]["message"].partition(":")[0].partition(" ")[0]
        assert named.partition("[")[0].partition(".")[0] == name, (value, answer)
    assert server.post("/v1/completions", CANARY)[1]["choices"][0]["text"] == "bc"
    assert not server.llm.num_unfinished


@each_row(("body", "name", "listed"), fields)
def test_numbers_within_their_row_are_valid(body: type[RequestBody], name: str, listed: bool) -> None:
    """No body has narrower bounds than the table says."""
    bound = bound_of(body.__name__, name)
    assert bound is not None
    for value in (bound.low, bound.high):
        if value is not None and not (bound.above and value == bound.low):
            fields = LEAST[body.__name__] | {name: [value] if listed else value}
            parse_tolerant(body, json.dumps(fields).encode())


# Texts and lists.


def every_object() -> list[type[RequestBody]]:
    """Bodies, and the objects in them."""
    classes: dict[type[RequestBody], None] = {}

    def add(annotation: Any) -> None:
        if isinstance(annotation, type) and issubclass(annotation, RequestBody) and annotation not in classes:
            classes[annotation] = None
            for field in annotation.model_fields.values():
                add(field.annotation)
        for each in get_args(annotation):
            add(each)

    for body in every_body():
        add(body)
    return list(classes)


def types_of(annotation: Any) -> set[Any]:
    """The types in an annotation, without those of the entries of lists and objects, and without request objects."""
    if get_origin(annotation) is Annotated:
        return types_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return set().union(*map(types_of, get_args(annotation)))
    return {get_origin(annotation) or annotation}


def bounded_fields() -> list[tuple[type[RequestBody], str]]:
    return [
        (each, name)
        for each in every_object()
        for name, field in each.model_fields.items()
        if types_of(field.annotation) & {int, float, str, list} and not is_unsupported(field) and not is_hint(field)
    ]


def test_every_number_text_and_list_has_a_row_and_every_row_a_field() -> None:
    missing = [f"{each.__name__}.{name}" for each, name in bounded_fields() if bound_of(each.__name__, name) is None]
    assert missing == []
    known = {name for each in every_object() for name in (*each.model_fields, *_aliases(each))}
    known |= {f"{each.__name__}.{name}" for each in every_object() for name in each.model_fields}
    known |= {f"SamplingParams.{each.name}" for each in dataclasses.fields(SamplingParams)}
    assert sorted(BOUNDS.keys() - known) == []
    for each, name in bounded_fields():
        bound, types = bound_of(each.__name__, name), types_of(each.model_fields[name].annotation)
        assert bound is not None
        assert str not in types or bound.characters, (each, name)
        assert list not in types or bound.entries, (each, name)
        assert not types & {int, float} or None not in (bound.low, bound.high), (each, name)


def _aliases(each: type[RequestBody]) -> list[str]:
    return [field.alias for field in each.model_fields.values() if field.alias]


LONGEST_TRIED = 70_000


@each_row(("body", "name"), lambda: [each for each in bounded_fields() if each[0].__name__ in LEAST])
def test_texts_and_lists_beyond_their_row_are_refused_by_name(body: type[RequestBody], name: str) -> None:
    bound, types = bound_of(body.__name__, name), types_of(body.model_fields[name].annotation)
    assert bound is not None
    if bound.sampled:  # see test_sampling_params
        return
    key = body.model_fields[name].alias or name
    values: list[Any] = []
    if str in types and bound.characters and bound.characters <= LONGEST_TRIED:
        values.append("a" * (bound.characters + 1))
    if list in types and bound.entries and bound.entries <= LONGEST_TRIED:
        item = LEAST[body.__name__].get(key)
        values.append((item if isinstance(item, list) and item else ["a"])[:1] * (bound.entries + 1))
    for value in values:
        with pytest.raises(RequestError) as error:
            parse(body, json.dumps(LEAST[body.__name__] | {key: value}).encode())
        assert error.value.field.partition("[")[0] == key


def test_the_schema_of_a_text_has_the_characters_of_its_row() -> None:
    """Longer texts than a test can send."""
    prompt = ScoreRequest.model_json_schema()["properties"]["instruction"]
    assert {each.get("maxLength") for each in prompt["anyOf"]} >= {MAX_TEXT_CHARACTERS}
    grammar = CompletionRequest.model_json_schema()["properties"]["guided_regex"]
    assert {each.get("maxLength") for each in grammar["anyOf"]} >= {MAX_GRAMMAR_CHARACTERS}
