"""What all request bodies have in common: typed fields, unsupported ones refused by name, errors that name the field,
and the parts of a request that are accepted without effect.

Knows pydantic. Does not know HTTP, nor what a field does.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Final, Literal, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    WithJsonSchema,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, ErrorDetails, core_schema, from_json

from pagoda.common.errors import RequestError

# Schemas of bodies whose validation costs no more than what is right in them: it stops at a list's first wrong item.
#
# pydantic reports each wrong item of a list, which costs seconds and hundreds of megabytes for a list of millions.
# Knows pydantic's core schemas. Does not know what a body holds.

MAX_OBJECTS: Final = 16_384
"""Most items of a list of objects that declares no maximum of its own: each costs microseconds, and is rendered."""

_PLAIN: Final = frozenset({"any", "bool", "float", "int", "literal", "str"})
"""Kinds of items that are no objects."""

_FAIL_FAST: Final = frozenset(
    kind
    for kind, schema in {
        "dict": core_schema.DictSchema,
        "list": core_schema.ListSchema,
        "set": core_schema.SetSchema,
        "tuple": core_schema.TupleSchema,
    }.items()
    if "fail_fast" in schema.__annotations__
)
"""Kinds of schemas that can stop at the first error; dictionaries cannot in older versions of pydantic."""

_NO_SCHEMAS: Final = frozenset({"cls", "default", "metadata", "serialization"})
"""Keys of a schema under which no schema is that validates."""


def bounded(schema: Any) -> Any:
    """The core schema, with lists that stop at their first error and have a greatest length where items are objects."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(bounded, schema))
    if not isinstance(schema, Mapping):
        return schema
    kind = schema.get("type")
    if not isinstance(kind, str):  # schemas by name, of fields or of the choices of a union
        return {name: bounded(each) for name, each in schema.items()}
    found = {key: value if key in _NO_SCHEMAS else bounded(value) for key, value in schema.items()}
    if kind in _FAIL_FAST:
        found["fail_fast"] = True
    if kind == "list" and found.get("items_schema", {}).get("type", "any") not in _PLAIN:
        found.setdefault("max_length", MAX_OBJECTS)
    return found


INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1

_LOOKED_AT: Final = 64
"""Errors of a body that are compared to tell the best one; a body may have as many as it has values."""

Int64 = Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)]

BodyT = TypeVar("BodyT", bound="RequestBody")

_Parts = tuple[int | str, ...]

_UNSUPPORTED: Final = "unsupported"
_HINT: Final = "hint"
_WITHOUT_EFFECT: Final[tuple[Any, ...]] = (None, False, [], {})
_INDEX: Final = re.compile(r"\[\d+\]")

MAX_IGNORED: Final = 64
"""Ignored parts of one request that are remembered."""


@dataclass(frozen=True, slots=True)
class Ignored:
    """A part of a request that is accepted without effect.

    `path`: where it is, such as `input[2].phase`. `kind`: "unknown" (a field that no body here declares), "hint" (one
    that only a provider's service acts on) or "tool" (a tool that this server cannot offer to a model). `reason`: the
    message of the 400 that a strict server answers. `type`: of a tool.
    """

    path: str
    kind: Literal["unknown", "hint", "tool"]
    reason: str = ""
    type: str = ""

    @property
    def name(self) -> str:
        """The path without list indexes, the same for all elements of a list; for a tool `tools[type=...]`."""
        return f"tools[type={self.type[:64]}]" if self.kind == "tool" else _INDEX.sub("[]", self.path)


class RequestBody(BaseModel):
    """A JSON object with typed fields: no conversions, no NaN. `parse` forbids fields that are not declared."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    def ignored(self, path: str = "") -> Iterator[Ignored]:
        """Yield the parts without effect of this object, which is at `path`. Removes its undeclared fields."""
        undeclared = self.__pydantic_extra__
        if undeclared:
            yield from (Ignored(_joined(path, name), "unknown") for name in undeclared)
            undeclared.clear()
        for name, field in _examined_fields(type(self)):
            if name in self.model_fields_set:
                yield from _ignored_within(getattr(self, name), field, _joined(path, name))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler, /) -> CoreSchema:
        """The schema, bounded: see bounded.py."""
        schema: CoreSchema = bounded(handler(source))
        return schema

    def own_name(self, field: str) -> str:
        """The name of a SamplingParams field in this request."""
        return field

    def in_own_names(self, error: RequestError) -> RequestError:
        """An error of SamplingParams under the name that the field has in this request."""
        field, message = self.own_name(error.field), str(error)
        if message.startswith(error.field):
            message = field + message.removeprefix(error.field)
        return RequestError(field, message)


def unsupported(default: Any = None, *, harmless: Sequence[Any] = (), why: str = "") -> Any:
    """A field that exists elsewhere and not here: its default, null and `harmless` pass, any other value is refused.

    `why`: told to clients, and in the reference.
    """
    return Field(
        default, json_schema_extra={_UNSUPPORTED: True}, examples=list(harmless) or None, description=why or None
    )


def hint(default: Any = None, *, harmless: Sequence[Any] = (), why: str = "") -> Any:
    """A field that has no effect here and whose absence cannot make an answer wrong: any value of it is accepted.

    A value other than the default, null, an empty one and `harmless` is reported as ignored, and refused by strict
    servers. `why`: for clients of those, and for the reference.
    """
    return Field(default, json_schema_extra={_HINT: True}, examples=list(harmless) or None, description=why or None)


def is_hint(field: FieldInfo) -> bool:
    """Return whether a field is declared with `hint`."""
    return _is_marked(field, _HINT)


def is_unsupported(field: FieldInfo) -> bool:
    """Return whether a field is declared with `unsupported`, which is refused by name."""
    return _is_marked(field, _UNSUPPORTED)


def _is_marked(field: FieldInfo, mark: str) -> bool:
    extra = field.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get(mark))


def harmless_values(field: FieldInfo) -> list[Any]:
    """Return the values of an unsupported field or a hint that ask for nothing."""
    found: list[Any] = []
    for value in (*_WITHOUT_EFFECT, field.default, *(field.examples or ())):
        if not any(type(value) is type(each) and value == each for each in found):
            found.append(value)
    return found


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


StringOrList = Annotated[
    list[str],
    BeforeValidator(_as_list),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
"""One string or several; always a list once parsed."""


def parse(body_type: type[BodyT], raw: bytes) -> BodyT:
    """Return the request in a JSON body. Raises RequestError for a field that is wrong, unsupported or ignored."""
    body, ignored = parse_tolerant(body_type, raw)
    if ignored:
        raise _refusal(body_type, ignored[0])
    return body


def parse_tolerant(body_type: type[BodyT], raw: bytes) -> tuple[BodyT, list[Ignored]]:
    """Return the request in a JSON body, and the parts of it that have no effect, at most MAX_IGNORED of them.

    Raises RequestError for the first field that is wrong or unsupported.
    """
    try:
        body = body_type.model_validate_json(raw, extra="allow")
    except ValidationError as error:
        raise _request_error(raw, error) from None
    for name in body.model_fields_set & body_type.model_fields.keys():
        _refuse_unsupported(body, name)
    ignored: list[Ignored] = []
    for each in body.ignored():
        if len(ignored) < MAX_IGNORED:
            ignored.append(each)
    return body, ignored


@cache
def _examined_fields(body_type: type[RequestBody]) -> tuple[tuple[str, FieldInfo], ...]:
    """Return the fields of a body that are hints, or may hold bodies."""
    fields = body_type.model_fields.items()
    return tuple((name, field) for name, field in fields if is_hint(field) or _may_hold_bodies(field.annotation))


def _ignored_within(value: Any, field: FieldInfo, path: str) -> Iterator[Ignored]:
    """Yield the parts without effect of a field's value."""
    if isinstance(value, RequestBody):
        yield from value.ignored(path)
    elif is_hint(field):
        if not _is_harmless(value, field):
            yield Ignored(path, "hint", _unsupported_message(path, field))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, RequestBody):
                yield from item.ignored(f"{path}[{index}]")


def _may_hold_bodies(annotation: Any) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, RequestBody):
        return True
    return any(map(_may_hold_bodies, get_args(annotation)))


def _joined(path: str, name: str) -> str:
    return (f"{path}.{name}" if path else name)[:200]


def _refusal(body_type: type[RequestBody], ignored: Ignored) -> RequestError:
    """What a strict server answers to a request with this part."""
    path = ignored.path
    message = ignored.reason or f"there is no field {path!r}" + _nearest(path, list(body_type.model_fields))
    return RequestError(path, message)


def _refuse_unsupported(body: RequestBody, name: str) -> None:
    field = type(body).model_fields[name]
    if is_unsupported(field) and not _is_harmless(getattr(body, name), field):
        raise RequestError(name, _unsupported_message(name, field))


def _is_harmless(value: Any, field: FieldInfo) -> bool:
    return any(type(value) is type(each) and value == each for each in harmless_values(field))


def _unsupported_message(path: str, field: FieldInfo) -> str:
    why = field.description or "this version of pagoda does not have it"
    return f"{path} is not supported: {why}; leave it out"


def _request_error(raw: bytes, error: ValidationError) -> RequestError:
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    if errors[0]["type"] == "json_invalid":
        return RequestError("", f"the body is not valid JSON: {errors[0]['msg'].removeprefix('Invalid JSON: ')}")
    parts, chosen = _deepest(errors, from_json(raw))
    field = _path(parts)
    if not field:
        return RequestError("", "the body must be a JSON object")
    return RequestError(field, f"{field}: {_lowered(chosen['msg'])}")


def _deepest(errors: Sequence[ErrorDetails], given: Any) -> tuple[_Parts, ErrorDetails]:
    """The first error, or one within the same value: of several forms, the one that the value came closest to."""
    places = [(_parts(each["loc"], given, each["type"] == "missing"), each) for each in errors[:_LOOKED_AT]]
    first = places[0][0]
    within = [place for place in places if place[0][: len(first)] == first]
    return max(within, key=lambda place: len(place[0]))


def _parts(loc: _Parts, given: Any, missing: bool) -> _Parts:
    """Where in the given JSON an error is. Names that pydantic adds for the forms of a union are left out."""
    if not loc:
        return ()
    part, rest = loc[0], loc[1:]
    skipped = _parts(rest, given, missing)
    known = part in given if isinstance(given, dict) else isinstance(given, list) and part in range(len(given))
    if known:
        taken = (part, *_parts(rest, given[part], missing))
    elif missing and not rest:
        taken = (part,)
    else:
        return skipped
    return max(taken, skipped, key=lambda parts: (parts[-1:] == loc[-1:], len(parts)))


def _path(parts: _Parts) -> str:
    """`messages[0].role`."""
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path[:200]


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name.rsplit(".", 1)[-1], known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]
