"""What all request bodies have in common: strict fields, unsupported ones refused by name, errors that name the field.

Knows pydantic. Does not know HTTP, nor what a field does.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Annotated, Any, Final, TypeVar

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
from pydantic_core import CoreSchema, ErrorDetails, from_json

from pagoda.common.errors import RequestError
from pagoda.server.protocol.bounded import bounded

INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1

_LOOKED_AT: Final = 64
"""Errors of a body that are compared to tell the best one; a body may have as many as it has values."""

Int64 = Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)]

BodyT = TypeVar("BodyT", bound="Body")

_Parts = tuple[int | str, ...]

_UNSUPPORTED: Final = "unsupported"
_WITHOUT_EFFECT: Final[tuple[Any, ...]] = (None, False, [], {})


class Body(BaseModel):
    """A JSON object whose fields are all known: no conversions, no NaN, nothing extra."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

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


def is_unsupported(field: FieldInfo) -> bool:
    """Whether a field of a body is one that is refused by name."""
    extra = field.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get(_UNSUPPORTED))


def harmless_values(field: FieldInfo) -> list[Any]:
    """What may be said in a field that is refused."""
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
    """The request in a JSON body. Raises RequestError naming the first field that is wrong, unknown or unsupported."""
    try:
        body = body_type.model_validate_json(raw)
    except ValidationError as error:
        raise _request_error(body_type, raw, error) from None
    for name in body.model_fields_set:
        _refuse_unsupported(body, name)
    return body


def _refuse_unsupported(body: Body, name: str) -> None:
    field = type(body).model_fields[name]
    if not is_unsupported(field):
        return
    value = getattr(body, name)
    if not any(type(value) is type(each) and value == each for each in harmless_values(field)):
        why = field.description or "this version of pagoda does not have it"
        raise RequestError(name, f"{name} is not supported: {why}; leave it out")


def _request_error(body_type: type[Body], raw: bytes, error: ValidationError) -> RequestError:
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    if errors[0]["type"] == "json_invalid":
        return RequestError("", f"the body is not valid JSON: {errors[0]['msg'].removeprefix('Invalid JSON: ')}")
    parts, chosen = _deepest(errors, from_json(raw))
    field = _path(parts)
    if chosen["type"] == "extra_forbidden":
        return RequestError(field, f"there is no field {field!r}" + _nearest(field, list(body_type.model_fields)))
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
