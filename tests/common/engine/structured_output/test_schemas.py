"""JSON schemas as grammars: which answers they allow, what is left to a check, and what is refused."""

from __future__ import annotations

import enum
import itertools
import json
import pathlib
import uuid
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel, Field, Json, SecretBytes, SecretStr, TypeAdapter
from support.suite.rows import each_row

from pagoda.benchmarks.cpu import schema_suite
from pagoda.common.engine.structured_output.grammar import GrammarError, Matcher, ResolvedGrammar
from pagoda.common.engine.structured_output.guidance import guidance_text
from pagoda.common.engine.structured_output.schemas import Closing, answer_error
from pagoda.common.sampling_params import StructuredOutputsParams

SUITE = json.loads((Path(__file__).parents[3] / "data" / "json_schema_suite.json").read_text())


@pytest.fixture(scope="module")
def settings() -> schema_suite.Settings:
    return schema_suite.settings(walks=4, seed=5)


def resolved(settings: schema_suite.Settings, schema: Any, closing: Closing = "no", **params: Any) -> ResolvedGrammar:
    return settings.library.resolved(guidance_text(StructuredOutputsParams(json=schema, **params), {}, closing=closing))


def matcher(settings: schema_suite.Settings, schema: Any, closing: Closing = "no", **params: Any) -> Matcher:
    return settings.library.compile(resolved(settings, schema, closing, **params).text)


def test_schemas_of_the_suite_count(settings: schema_suite.Settings) -> None:
    """A random answer is valid, the suite's valid instances are accepted, its invalid ones are not."""
    outcomes = [schema_suite.judge(case["file"], case, settings) for case in SUITE["cases"]]
    assert [outcome for outcome in outcomes if outcome.fate not in ("enforced", "checked")] == []
    assert [outcome.file for outcome in outcomes if outcome.fate == "checked"] == ["uniqueItems"]


class Color(enum.Enum):
    RED = "red"
    GREEN = "green"


class Cat(BaseModel):
    name: str
    lives: Annotated[int, Field(ge=1, le=9)]


class Node(BaseModel):
    colors: set[Color] = set()
    parts: dict[Color, Node] = {}


@pytest.mark.parametrize("closing", ["no", "safe", "yes"])
def test_types_of_pydantic(settings: schema_suite.Settings, closing: Closing) -> None:
    types: list[Any] = [
        *(
            set[Color],
            set[bool],
            dict[Color, int],
            dict[Literal["x", "y"], int],
            dict[uuid.UUID, int],
            Node,
            Cat | Node,
        ),
        *(pathlib.Path, bytes, SecretStr, SecretBytes, Json[int], set[str], frozenset[int], list[set[float]]),
    ]
    by_check = []
    for number, type_ in enumerate(types):
        schema = TypeAdapter(type_).json_schema()
        grammar = resolved(settings, schema, closing)
        start = settings.library.compile(grammar.text)
        draw = schema_suite.random.Random(number)
        answers = [schema_suite.walk(settings, start, draw) for _ in range(3)]
        for answer in answers:
            assert answer is not None, type_
            if not grammar.unchecked or not answer_error(grammar, answer):
                jsonschema.Draft202012Validator(schema).validate(json.loads(answer))
        by_check += [type_] * bool(grammar.unchecked)
    assert by_check == [set[str], frozenset[int], list[set[float]]]


UNEVALUATED = {
    "type": "array",
    "not": {"contains": {"const": 1}, "minContains": 2},
    "unevaluatedItems": {"type": "integer", "minimum": 2},
}
"""What is negated evaluates no items."""
IMPOSSIBLE = {
    "anyOf": [
        {"type": "string", "pattern": "^a$", "maxLength": 0},
        {"const": 1},
        {"type": "number", "multipleOf": 2, "minimum": 3, "maximum": 3.5},
    ],
    "not": {"type": "array"},
}
"""A schema of which only 1 is left."""
SWITCHES = {"uniqueItems": True, "prefixItems": [{"type": "boolean"}] * 2, "items": False}
MANY = [index * 7 % 40 for index in range(40)]
KINDS = {"oneOf": [{"properties": {name: {"type": "integer"}}, "required": [name]} for name in ("foo", "bar", "baz")]}
NEEDED = {"if": {"required": ["a"]}, "then": {"required": ["b"]}, "type": "object"}
PATTERNED = {
    "patternProperties": {"^a": {"type": "null"}},
    "additionalProperties": {"type": "integer"},
    "maxProperties": 1,
    "not": {"type": "array"},
}
OLD_DRAFT = {"dependencies": {"a": ["b"]}, "items": [{"type": "null"}], "additionalItems": False}
LINKED = {
    "type": "object",
    "properties": {"next": {"$ref": "#"}, "tags": {"type": "array", "uniqueItems": True, "items": {"enum": ["a", 1]}}},
    "dependentRequired": {"next": ["tags"]},
}


@each_row(
    ("schema", "allowed", "refused"),
    [
        ({"uniqueItems": True, "items": {"enum": ["a", "b"]}}, ["[]", '["b","a"]'], ['["a","a"]']),
        ({"uniqueItems": True, "items": {"enum": [1, 11, ",1"]}, "minItems": 2}, ['[1,11,",1"]'], ["[1]", "[1,1]"]),
        ({"items": {"enum": [1, 2, 3]}, "uniqueItems": True, "maxItems": 2}, ["[3,1]"], ["[1,2,3]"]),
        ({"uniqueItems": True, "items": {"enum": list(MANY)}}, [json.dumps(MANY)], ["[1,1]", json.dumps([*MANY, 5])]),
        (SWITCHES, ["[true,false]", "[true]"], ["[true,true]", "[true,false,true]"]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["0.1", "0.5"], ["0", "0.0", "0.6"]),
        ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, ["-0.5", "-0.1"], ["0", "-0", "-1"]),
        (UNEVALUATED, ["[]", "[2]"], ["[1]", "[null]", "[1,1]"]),
        (IMPOSSIBLE, ["1"], ['"a"', '""', "3", "2"]),
        ({"contains": {"type": "null"}, "maxContains": 1, "minItems": 2}, ["[1,null]"], ["[null]", "[null,null]"]),
        ({"contains": {"const": 1}, "minContains": 2, "maxItems": 3}, ["[1,1]", "[1,0,1]"], ["[1]", "[1,1,1,1]"]),
        ({"type": "array", "not": {"items": {"type": "string"}}}, ['["a",1]'], ['["a"]', "[]"]),
        ({"not": {"minimum": 3}, "type": "number"}, ["2.5"], ["3", "4"]),
        ({"not": {"type": "integer"}, "minimum": 1, "type": "number"}, ["1.5"], ["2", "0.5", "1.0"]),
        ({"not": {"enum": ["foo", 'a"', 3]}}, ['"fo"', '"fooo"', '"b\\""', "4"], ['"foo"', '"a\\""', "3"]),
        ({"type": "string", "not": {"pattern": "^a|z$"}}, [], []),
        ({"type": "string", "not": {"pattern": "^ab"}, "maxLength": 3}, ['"ba"', '"a"'], ['"abc"', '"cccc"']),
        ({"type": "string", "pattern": '^[^"]*$'}, ['"a"'], ['"\\""', '"a\\"b"']),
        ({"not": {"const": [1, {"a": 2}]}}, ["[1]", '[1,{"a":3}]', "2"], ['[1,{"a":2}]']),
        (KINDS, ['{"foo":1}', '{"foo":1,"bar":"x"}'], ['{"foo":1,"bar":2}', "{}"]),
        (NEEDED, ["{}", '{"a":1,"b":2}'], ['{"a":1}']),
        ({"propertyNames": {"enum": ["a", "b"]}, "minProperties": 1, "type": "object"}, ['{"b":1}'], ["{}", '{"c":1}']),
        (PATTERNED, ['{"ab":null}', '{"b":1}'], ['{"ab":1}', '{"b":null}', '{"b":1,"c":2}', "[]"]),
        (LINKED, ['{"next":{},"tags":[1]}', '{"tags":["a",1]}'], ['{"next":{}}', '{"next":{"next":{}},"tags":[]}']),
        ({"type": "string", "format": "path"}, ['"x"'], ["1"]),
        (OLD_DRAFT, ["[null]", "{}"], ["[1]", "[null,null]", '{"a":1}']),
        ({"enum": [{"a": [1, "b"]}, 2.0, None], "not": {"type": "null"}}, ['{ "a": [1, "b"] }', "2"], ["null", "{}"]),
    ],
)  # fmt: skip
def test_what_a_schema_allows(settings, schema, allowed, refused):
    if not allowed:
        with pytest.raises(GrammarError, match="has anchors inside, and cannot be negated"):
            matcher(settings, schema)
        return
    start = matcher(settings, schema)
    assert [text for text in allowed if not schema_suite.accepts(start, text)] == []
    assert [text for text in refused if schema_suite.accepts(start, text)] == []


QUOTED = {"type": "object", "properties": {"q": {"type": "string", "pattern": '^"[^"]*"$'}}, "required": ["q"]}
ACCOUNT = {"type": "string", "pattern": r"^[^\\]+\\[^\\]+$"}
FREE = {"properties": {"a": {"type": "string", "pattern": '^[^"]*$'}}, "required": ["a"], "type": "object"}
WIDE = {**FREE, "properties": {**FREE["properties"], **{f"p{number}": {} for number in range(800)}}}
NAMED = {"patternProperties": {"^x_": {"type": "integer"}}, **FREE}


@each_row(
    ("schema", "allowed", "refused"),
    [
        ({"type": "string", "pattern": r'^[^\\/:*?"<>|]+$'}, ['"a.b"'], ['"a:b"', '"a|b"', '"a\\"b"']),
        ({"type": "string", "pattern": '^[^"$^|]*$'}, ['"ab"', '""'], ['"a$"', '"a|"', '"^"']),
        ({"type": "string", "format": "uri", "pattern": r'^https?://[^\s"]+$'}, ['"https://a.b/c"'], ['"ftp://a"']),
        (QUOTED, ['{"q":"\\"a\\""}'], ['{"q":"a"}']),
        (ACCOUNT, [r'"DOMAIN\\user"'], ['"user"']),
        ({**FREE, "additionalProperties": True}, ['{"a":"x"}', '{"a":"x","b":1}'], ["{}"]),
        (FREE, ['{"a":"x"}'], ['{"a":"x","b":1}']),
        (NAMED, ['{"a":"x"}', '{"a":"x","x_1":2}'], ['{"a":"x","b":1}', '{"a":"x","x_1":"y"}']),
        (WIDE, ['{"a":"x","p799":1}'], ["1"]),
    ],
)  # fmt: skip
def test_what_llguidance_takes_by_itself_is_taken_with_closed_objects(settings, schema, allowed, refused):
    start = matcher(settings, schema, "yes")
    assert [text for text in allowed if not schema_suite.accepts(start, text)] == []
    assert [text for text in refused if schema_suite.accepts(start, text)] == []


@pytest.mark.parametrize("pattern", [r"^\p{L}+$", r"^[[:alpha:]]+$", r"^a(?i)b$"])
def test_patterns_that_python_reads_otherwise_are_left_to_the_grammar(
    settings: schema_suite.Settings, pattern: str
) -> None:
    grammar = resolved(
        settings, {"type": "array", "uniqueItems": True, "items": {"type": "string", "pattern": pattern}}
    )
    assert grammar.unchecked == ("uniqueItems",)
    assert answer_error(grammar, '["ab"]') == ""
    assert "uniqueItems" in answer_error(grammar, '["ab","ab"]')


def test_an_answer_that_is_too_deep_to_be_checked_is_let_through(settings: schema_suite.Settings) -> None:
    grammar = resolved(
        settings, {"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "#/$defs/a"}, "uniqueItems": True}}}
    )
    assert answer_error(grammar, "[" * 900 + "]" * 900) == ""


def test_closed_objects_have_the_properties_of_all_parts_and_no_others(settings: schema_suite.Settings) -> None:
    """Of what a schema negates, none is closed: that would allow more than the schema."""
    schema = {
        "properties": {"a": True},
        "allOf": [{"properties": {"b": True}}],
        "not": {"properties": {"c": {"const": 1}}},
    }
    with_c = '{"a":1,"b":2,"c":3}'
    for closing, other in (("no", True), ("safe", False), ("yes", False)):
        start = matcher(settings, schema, closing)
        assert schema_suite.accepts(start, with_c)
        assert not schema_suite.accepts(start, '{"a":1,"b":2,"c":1}')
        assert schema_suite.accepts(start, with_c.replace("}", ',"d":4}')) == other
    first, second = ({"type": "object", "properties": {name: {"type": "integer"}}} for name in "ab")
    overlapping = {"oneOf": [{**first, "required": ["a"]}, second]}
    assert not schema_suite.accepts(matcher(settings, overlapping, "yes"), '{"a":1}'), "both parts match"
    unlisted = {"type": "object", "not": {"required": ["a"]}}
    assert schema_suite.accepts(matcher(settings, unlisted, "yes"), '{"b":1}'), "it lists no properties"


def test_references_are_resolved_by_identifier_and_by_place(settings: schema_suite.Settings) -> None:
    inner = {"$id": "inner", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"const": 1}}}
    schema = {"$id": "https://example.com/s", "$ref": "inner#/$defs/a", "$defs": {"x": inner, "b": {"const": 2}}}
    start = matcher(settings, schema)
    assert (schema_suite.accepts(start, "1"), schema_suite.accepts(start, "2")) == (True, False)


def test_white_space_is_that_of_the_request(settings: schema_suite.Settings) -> None:
    schema = {"type": "array", "contains": {"const": 1}}
    texts = ["[0,1]", "[ 0 , 1 ]", "[\t0,1]", "[" + " " * 65 + "1]"]
    allowed = {
        "usual": matcher(settings, schema),
        "none": matcher(settings, schema, disable_any_whitespace=True),
        "own": matcher(settings, schema, whitespace_pattern="\t"),
    }
    accepted = {name: [schema_suite.accepts(start, text) for text in texts] for name, start in allowed.items()}
    assert accepted == {
        "usual": [True, True, True, False],
        "none": [True, False, False, False],
        "own": [True, False, True, False],
    }


def test_unique_items_of_any_value_are_checked_in_the_answer(settings: schema_suite.Settings) -> None:
    tags = {"type": "array", "uniqueItems": True}
    grammar = resolved(settings, {"anyOf": [{"properties": {"x": tags}, "required": ["x"]}, {"type": "string"}]})
    assert grammar.unchecked == ("uniqueItems",)
    for value in ({"x": [1, "1", True, 0, False, {"a": 1}, {"a": 2}]}, {"x": []}, "x"):
        assert answer_error(grammar, json.dumps(value)) == ""
    for value in ({"x": [1, 1.0]}, {"x": [{"a": 1, "b": 2}, {"b": 2, "a": 1}]}):
        assert answer_error(grammar, json.dumps(value)) == "the answer violates the JSON schema (uniqueItems)"
    assert "not JSON" in answer_error(grammar, '{"x":')


def test_a_name_that_is_written_twice_counts_once(settings: schema_suite.Settings) -> None:
    grammar = resolved(settings, {"type": "object", "minProperties": 3, "required": ["a"]})
    assert grammar.unchecked == ("minProperties",)
    assert answer_error(grammar, '{"a":1,"b":2,"c":3}') == ""
    assert "minProperties" in answer_error(grammar, '{"a":1,"b":2,"b":3}')
    for settled in ({"minProperties": 1}, {"minProperties": 2, "required": ["a"]}):
        assert resolved(settings, {"type": "object", **settled}).unchecked == ()


def test_what_is_checked_cannot_be_a_part_of_an_answer(settings: schema_suite.Settings) -> None:
    def tag(schema: object) -> str:
        content = {"type": "json_schema", "json_schema": schema}
        structural = {"format": {"type": "tag", "begin": "<", "content": content, "end": ">"}}
        return guidance_text(StructuredOutputsParams(structural_tag=structural), {})

    start = settings.library.compile(tag({"not": {"type": "array"}, "type": ["array", "null"]}))
    assert schema_suite.accepts(start, "<null>")
    assert not schema_suite.accepts(start, "<[]>")
    pairs = {"type": "object", "minProperties": 2, "additionalProperties": {"type": "integer"}}
    assert settings.library.resolved(tag(pairs)).unchecked == (), "llguidance takes it, if names are not repeated"
    with pytest.raises(GrammarError, match="uniqueItems cannot be enforced in a part of an answer"):
        settings.library.resolved(tag({"type": "array", "uniqueItems": True}))


def test_unknown_formats_are_no_constraint_and_named(settings: schema_suite.Settings) -> None:
    schema = {"properties": {"format": {"format": "path"}, "b": {"format": "date"}}, "enum": [{"format": "z"}]}
    assert resolved(settings, schema).ignored_formats == ("path",)


def nested(keyword: str, depth: int) -> Any:
    schema: Any = {"type": "string", "not": {"const": "a"}}
    for _ in range(depth):
        schema = {keyword: schema}
    return schema


def objects(count: int, name: str = "p") -> list[Any]:
    return [{"properties": {f"{name}{i}": {"type": "null"}}, "required": [f"{name}{i}"]} for i in range(count)]


@each_row(
    ("schema", "words"),
    [
        ({"not": {}}, "no value matches the JSON schema"),
        ({"not": 3}, "must be an object, true or false, not '3'"),
        ({"contains": {"type": "banana"}}, "type 'banana' is unknown"),
        ({"uniqueItems": True, "minItems": -1}, "minItems must be a whole number of at least 0"),
        ({"dependentRequired": ["a"]}, "dependentRequired must be an object"),
        ({"if": True, "oneOf": {}}, "oneOf must be a list of schemas"),
        ({"not": {"multipleOf": 0}}, "multipleOf must be greater than 0"),
        ({"$dynamicRef": "#/$defs/a"}, "points to no schema"),
        ({"not": {"$ref": "https://example.com/s"}}, "points to another document; add it to $defs"),
        ({"$defs": {"a": {"not": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"}, "refers to itself"),
        ({"$defs": {"a": {"required": ["n"], "properties": {"n": {"$ref": "#/$defs/a"}}, "type": "object", "if": {}}},
          "$ref": "#/$defs/a"}, "no value matches"),
        (nested("not", 700), "nested too deeply"),
        (nested("items", 900), "nested too deeply"),
        ({"contains": True, "minContains": 100_000}, "more than 20000 grammar rules"),
        ({"allOf": [{"anyOf": objects(8, name)} for name in "abcdef"], "if": {}}, "more than 1024 alternatives"),
        ({"not": {"pattern": "("}, "const": "a"}, "the pattern '(' cannot be used here"),
    ],
)  # fmt: skip
def test_what_is_refused(settings, schema, words):
    with pytest.raises(GrammarError, match=words.replace("(", r"\(").replace("$", r"\$")) as caught:
        settings.library.compile(resolved(settings, schema).text)
    assert "\n" not in str(caught.value)


def test_alternatives_that_exclude_each_other_stay_few(settings: schema_suite.Settings) -> None:
    """The complement of each of many objects has many parts; one suffices."""
    shared = {"type": "object", "properties": {"x": {"type": "null"}}, "required": ["x"]}
    alike = [
        {"properties": {"sub": shared, **part["properties"]}, "required": ["sub", *part["required"]]}
        for part in objects(6)
    ]
    start = matcher(settings, {"oneOf": alike}, "safe")
    assert schema_suite.accepts(start, '{"sub":{"x":null},"p4":null}')
    text = resolved(settings, {"oneOf": objects(12)}, "safe").text
    assert len(text) < 60_000
    start = settings.library.compile(text)
    for number, other in itertools.pairwise(range(12)):
        assert schema_suite.accepts(start, f'{{"p{number}":null}}')
        assert not schema_suite.accepts(start, f'{{"p{number}":null,"p{other}":null}}')
