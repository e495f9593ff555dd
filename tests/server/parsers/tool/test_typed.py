"""Parameter types from schemas, and unquoted values and Python literals as JSON."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.suite.rows import each_row

from pagoda.server.parsers.parser import Tool
from pagoda.server.parsers.tool.schemas import arguments_shape, as_json, parameter_types

STRING = {"type": "string"}


@each_row(
    ("schema", "types"),
    [
        (STRING, {"string"}),
        ({"type": "integer"}, {"number"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"anyOf": [STRING, {"type": "null"}]}, {"string", "null"}),
        ({"oneOf": [{"allOf": [STRING]}]}, {"string"}),
        ({"enum": ["a", 1, None, [], {}, True]}, {"string", "number", "null", "array", "object", "boolean"}),
        ({"const": False}, {"boolean"}),
        ({"$ref": "#/$defs/a~1b"}, {"string"}),
        ({"$ref": "#/$defs/loop"}, set()),
        ({"$ref": "#/nowhere/at/all"}, set()),
        ({"$ref": 5}, set()),
        ({"type": 5}, set()),
        ({"properties": {"b": STRING}}, {"object"}),
        ({"additionalProperties": True}, {"object"}),
        ({"items": STRING}, {"array"}),
        ({"type": [[], "string"]}, {"string"}),
        ({"anyOf": 5}, set()),
        ({"enum": 5}, set()),
        ({}, set()),
        ([], set()),
        (None, set()),
    ],
)
def test_types_of_a_parameter(schema: Any, types: set[str]) -> None:
    tool = Tool(
        "f", {"properties": {"a": schema}, "$defs": {"a/b": STRING, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}]}}}
    )
    assert parameter_types([tool], "f", "a") == types
    assert parameter_types([tool], "f", "b") == parameter_types([tool], "g", "a") == frozenset()


def test_nested_shapes() -> None:
    schema = {
        "properties": {
            "a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/list"}]},
            "b": {"additionalProperties": STRING},
        },
        "$defs": {"list": {"items": {"properties": {"c": {"type": "boolean"}}}}},
    }
    shape = arguments_shape([Tool("f", schema)], "f")
    assert shape.property("a").types == {"null", "array"}
    assert shape.property("a").item().property("c").types == {"boolean"}
    assert shape.property("b").property("whatever").types == {"string"}
    assert shape.property("c").item().property("d").types == frozenset()


@each_row("parameters", [{}, {"properties": 5}, {"properties": None}, None, 5])
def test_tools_without_types(parameters: Any) -> None:
    assert parameter_types([Tool("f", parameters)], "f", "a") == frozenset()


@each_row(
    ("text", "types", "value"),
    [
        ("5", "", 5),
        (" 5\n", "number", 5),
        ("5", "string null", "5"),
        (" 5 ", "string null", " 5 "),
        ("5", "string number", 5),
        ("null", "string null", None),
        ('"a"', "string null", '"a"'),
        ('"a"', "", "a"),
        ("five", "number", "five"),
        ("True", "boolean", True),
        ("True", "", True),
        (" TRUE", "boolean string", True),
        ("1", "boolean", True),
        ("0", "boolean null", False),
        ("1", "boolean string", "1"),
        ("0", "boolean number", 0),
        ("NULL", "number null", None),
        ("true", "number", True),
        ("{'a': [1, None]}", "object", {"a": [1, None]}),
        ("{'a': [1, None]}", "", {"a": [1, None]}),
        ("(1, 2)", "array", [1, 2]),
        ("a, b", "array", "a, b"),
        ("+49 30", "number", "+49 30"),
        ("+49", "", "+49"),
        ("+49", "number", 49),
        ("007", "", "007"),
        ("007", "number", 7),
        (".5", "number", 0.5),
        ("2025-08-01", "", "2025-08-01"),
        ("NaN", "number", "NaN"),
        ("Infinity", "", "Infinity"),
        ("__import__('os')", "", "__import__('os')"),
        ("[f()]", "array", "[f()]"),
        ("{'a': 1} b", "object", "{'a': 1} b"),
        ("[" * 100_000, "array", "[" * 100_000),
        ("{'a':" * 100, "", "{'a':" * 100),
        ("1" * 5000, "number", "1" * 5000),
        ("", "", ""),
        ("", "number", ""),
        ("'", "", "'"),
        ("'\\u12'", "", "'\\u12'"),
        ("'\\U00110000'", "", "'\\U00110000'"),
    ],
)
def test_values(text: str, types: str, value: Any) -> None:
    converted = as_json(text, frozenset(types.split()))
    if len(text) == 5000:
        assert converted in (text, f'"{text}"')
    else:
        assert json.loads(converted) == value
        assert type(json.loads(converted)) is type(value)


literals = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text("a'\"\\\n\x00é🗼\u2028", max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text("a'\"\\", max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(literals)
def test_python_literals(value: Any) -> None:
    assert json.loads(as_json(repr(value), frozenset({"array", "object", "number"}))) == json.loads(json.dumps(value))


@given(st.text("[](){},:'\"\\ abNtfx01.-+eE\n", max_size=20))
def test_any_text_becomes_valid_json(text: str) -> None:
    json.loads(as_json(text, frozenset()))
    json.loads(as_json(text, frozenset({"number", "object"})))
