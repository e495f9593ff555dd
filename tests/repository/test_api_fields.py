"""vLLM's request fields, row by row: honoured, which a marked test sees, refused by name, or reported as ignored.

Marks are read from the test files: `field("CompletionRequest|ChatCompletionRequest.n|seed")` names four fields, and
`*` stands for every schema that has the field.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import interface
import pytest
from pydantic.fields import FieldInfo
from support.servers.api_bodies import LEAST, OTHER, path_of
from support.servers.live_server import LiveServer, live_server
from support.suite.marks import marks
from support.suite.rows import each_row

from pagoda.common import pooling_params, sampling_params
from pagoda.common.errors import RequestError
from pagoda.common.pooling_params import PoolingParams
from pagoda.common.sampling_params import SamplingParams
from pagoda.server.api.app import BODIES, bodies_of
from pagoda.server.http.body import RequestBody, is_hint, is_unsupported, parse, parse_tolerant

ROOT = Path(__file__).resolve().parents[2]
ROWS = interface.rows("api_fields")

SAME_ROUTE = {"BatchChatCompletionRequest": "ChatCompletionRequest"}
"""Bodies that inherit their fields with what reads them: what a test sees of one, it sees of the other."""


def http_rows() -> list[Any]:
    """The rows of schemas that we have."""
    return [
        pytest.param(row, id=f"{row['schema']}.{row['field']}")
        for row in ROWS
        if row["source"] != "python" and interface.body_of(row["schema"]) is not None
    ]


def body_of(schema: str) -> type[RequestBody]:
    found = interface.body_of(schema)
    assert found is not None
    return found


def read(schema: str, **fields: Any) -> RequestBody:
    return parse(body_of(schema), json.dumps(LEAST[schema] | fields).encode())


# --- nothing is forgotten ---


def test_nothing_was_left_out_of_the_lists() -> None:
    assert (len(ROWS), len(interface.rows("api_routes"))) == (605, 46)


def test_every_schema_is_ours_or_absent() -> None:
    schemas = {row["schema"] for row in ROWS if row["source"] != "python"}
    known = {schema for schema in schemas if interface.body_of(schema) is not None}
    assert sorted(known & set(interface.UNSUPPORTED_SCHEMAS)) == []
    assert sorted(schemas - known - set(interface.UNSUPPORTED_SCHEMAS)) == []


@each_row("row", http_rows)
def test_every_field_is_known(row: dict[str, str]) -> None:
    assert row["field"] in body_of(row["schema"]).model_fields


def test_every_field_of_sampling_params_is_known() -> None:
    ours = set(vars(SamplingParams()))
    theirs = {row["field"] for row in ROWS if row["schema"] == "SamplingParams" and not row["field"].startswith("_")}
    assert sorted(theirs - ours) == []


def test_every_field_of_pooling_params_is_known() -> None:
    theirs = {row["field"] for row in ROWS if row["schema"] == "PoolingParams"}
    assert theirs == set(vars(PoolingParams())) - {"truncate_prompt_tokens"}  # of former versions


# --- defaults and bounds ---


@each_row("row", http_rows)
def test_defaults_are_those_of_the_table(row: dict[str, str]) -> None:
    field = body_of(row["schema"]).model_fields[row["field"]]
    if row["required"] == "y":
        return
    default = json.loads(row["default"]) if row["default"] else None
    ours = field.get_default(call_default_factory=True)
    assert ours == default or (default in (None, False) and ours in ([], None, False))
    if row["field"] not in LEAST[row["schema"]]:
        read(row["schema"], **{row["field"]: ours})


def bound_rows() -> Iterator[Any]:
    """Field, value on its bound, value beyond it."""
    for param in http_rows():
        row = param.values[0]
        for bound in row["bounds"].split():
            name, _, text = bound.partition("=")
            edge = int(float(text))
            inside: Any = min(edge, 2**63 - 1)
            beyond: Any
            match name:
                case "minimum":
                    beyond = edge - 1
                case "maximum":
                    beyond = inside + 1
                case "minLength":
                    inside, beyond = "x" * edge, "x" * (edge - 1)
                case "maxLength":
                    inside, beyond = "x" * edge, "x" * (edge + 1)
                case "maxItems" if row["field"] in ("stop", "stop_sequences"):
                    continue  # limited by --max-stop-strings, tests/server/api/openai/chat/test_chat_variants.py
                case "maxItems":
                    inside, beyond = ["x"] * edge, ["x"] * (edge + 1)
                case "minItems":
                    inside, beyond = None, []
            yield pytest.param(row["schema"], row["field"], inside, beyond, id=f"{param.id}-{name}")


@each_row(("schema", "field", "inside", "beyond"), bound_rows)
def test_bounds_are_those_of_the_table(schema: str, field: str, inside: Any, beyond: Any) -> None:
    refused = is_unsupported(body_of(schema).model_fields[field])
    if not refused and inside is not None:
        read(schema, **{field: inside})
    with pytest.raises(RequestError) as error:
        read(schema, **{field: beyond})
    assert error.value.field == field


# --- honoured, or refused by name ---


def fields_marked(mark: Callable[[FieldInfo], bool]) -> list[Any]:
    """Path, schema and field of everything with a mark, in the table or not."""
    found: dict[tuple[str, str], str] = {}
    for path in BODIES:
        for body in bodies_of(path):
            for name, field in body.model_fields.items():
                if mark(field):
                    found[body.__name__, name] = path
    return [pytest.param(path, *names, id=".".join(names)) for names, path in found.items()]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(server_dev_mode=True) as server:
        yield server


@each_row(("path", "body", "field"), lambda: fields_marked(is_unsupported))
def test_a_refused_field_is_named(server: LiveServer, path: str, body: str, field: str) -> None:
    status, answer = server.post(path, LEAST[body] | {field: OTHER.get(field, {"x": 1})})
    assert status == 400, answer
    error = answer["error"]
    assert error.get("param", field) == field
    assert field in error["message"]


@each_row(("path", "body", "field"), lambda: fields_marked(is_hint))
def test_a_hint_is_reported_as_ignored(path: str, body: str, field: str) -> None:
    asked = json.dumps(LEAST[body] | {field: {"x": 1}}).encode()
    _, ignored = parse_tolerant(body_of(body), asked)
    assert [(each.name, each.kind) for each in ignored] == [(field, "hint")]
    with pytest.raises(RequestError, match=field) as error:
        parse(body_of(body), asked)
    assert error.value.field == field


def marked() -> set[str]:
    """`Schema.field` of every `pytest.mark.field(...)` in the test files, `*.field` among them."""
    found: set[str] = set()
    for value in marks()["field"]:
        schemas, _, fields = str(value).partition(".")
        found |= {f"{schema}.{field}" for schema in schemas.split("|") for field in fields.split("|")}
    return found


def is_without_effect(field: FieldInfo) -> bool:
    return is_unsupported(field) or is_hint(field)


def honoured() -> set[str]:
    """Every field that has an effect, or that is there to be read by others."""
    found = {
        f"SamplingParams.{name}"
        for name in vars(SamplingParams())
        if name not in sampling_params.NOT_YET and not name.startswith("_")
    }
    found |= {f"PoolingParams.{name}" for name in vars(PoolingParams()) if name not in pooling_params.NOT_YET}
    for row in ROWS:
        body = interface.body_of(row["schema"])
        if (
            body is not None
            and row["field"] in body.model_fields
            and not is_without_effect(body.model_fields[row["field"]])
        ):
            found.add(f"{row['schema']}.{row['field']}")
    renamed = set(interface.SAME_BODY.values())
    for path in BODIES:
        for body in bodies_of(path):
            if body.__name__ not in renamed:
                found |= {
                    f"{body.__name__}.{name}"
                    for name, field in body.model_fields.items()
                    if not is_without_effect(field)
                }
    return found


def test_honoured_fields_are_seen_by_a_test() -> None:
    seen = marked()
    unseen = sorted(name for name in honoured() if not names_of(name) & seen)
    assert not unseen, "\n".join(unseen)


def names_of(name: str) -> set[str]:
    """The marks that show that a field is honoured."""
    schema, _, field = name.partition(".")
    return {name, f"*.{field}", f"{SAME_ROUTE.get(schema, schema)}.{field}"}


def test_marks_name_what_there_is() -> None:
    known = honoured()
    fields = {name.partition(".")[2] for name in known}
    assert sorted(name for name in marked() - known if not (name[0] == "*" and name[2:] in fields)) == []


def test_every_posted_body_has_a_path() -> None:
    assert [schema for schema in LEAST if schema != "StreamOptions" and not path_of(schema)] == []
