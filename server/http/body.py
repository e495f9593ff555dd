"""Request bodies: read within limits, parsed into typed fields, with errors that name the field.

JSON only, plain or compressed. Fields that are declared unsupported are refused; unknown fields and hints are accepted
without effect and reported in `x-pagoda-ignored`, or refused with --strict-requests.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Final, Literal, Protocol, TypeVar, cast, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, ErrorDetails, core_schema, from_json
from starlette.requests import ClientDisconnect, Request

from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.errors import RequestError
from pagoda.common.request_bounds import INT64_MAX, INT64_MIN, MAX_OBJECTS_OF_LIST, Bound, bound_of
from pagoda.server.http.errors import ClientDisconnectedError, HttpError

BodyT = TypeVar("BodyT", bound="RequestBody")

Int64 = Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)]


async def read_body(request: Request, body_type: type[BodyT], config: ServerConfig) -> BodyT:
    """Read and parse the body. Raise HttpError (413, 415), RequestError or ClientDisconnectedError."""
    raw = await read_json(request, config)
    if len(raw) > SMALL:  # In a thread, the event loop runs between the Python parts of the validation.
        return await asyncio.to_thread(parse_body, request, body_type, raw, config)
    return parse_body(request, body_type, raw, config)


def parse_body(request: Request, body_type: type[BodyT], raw: bytes, config: ServerConfig) -> BodyT:
    """Parse the body and note its ignored parts for the response header. Raise RequestError."""
    if config.strict_requests:
        return parse(body_type, raw)
    body, ignored = parse_tolerant(body_type, raw)
    if ignored:
        note_ignored(request, ignored)
    return body


async def read_json(request: Request, config: ServerConfig) -> bytes:
    """Return the unparsed JSON body. Raise HttpError (413, 415) or ClientDisconnectedError."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HttpError(415, f"content-type {kind[:80]!r} is not supported; send application/json")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    decompressor = None if coding in ("", "identity") else _decompressor(coding)
    raw = await _read(request, config.max_body_bytes)
    if decompressor is not None:
        raw = await asyncio.to_thread(_decompressed, raw, decompressor, coding, config.max_body_bytes)
    if len(raw) > SMALL:
        await asyncio.to_thread(check_size, raw)
    return raw


async def _read(request: Request, limit: int) -> bytes:
    length_text = request.headers.get("content-length", "")
    if length_text.isascii() and length_text.isdigit() and int(length_text[:20]) > limit:
        raise _too_large(limit)
    raw = bytearray()
    try:
        async for chunk in request.stream():
            raw += chunk
            if len(raw) > limit:
                raise _too_large(limit)
    except ClientDisconnect:
        raise ClientDisconnectedError from None
    return bytes(raw)


# Compressed bodies. Each library is asked for as many bytes as are allowed, so that a small body cannot fill memory.

_ZSTD_WINDOW_LOG: Final = 23
"""RFC 9659: a body needs a window of at most 8 MiB, which is memory of the decoder."""


class _Decompressor(Protocol):
    """zlib's and zstd's decoder of one stream."""

    @property
    def eof(self) -> bool:
        """True once the stream has ended."""
        ...

    @property
    def unused_data(self) -> bytes:
        """What follows the end of the stream."""
        ...

    def decompress(self, data: bytes, limit: int, /) -> bytes:
        """Return the next bytes, at most `limit`."""
        ...


def _decompressor(coding: str) -> Callable[[], _Decompressor]:
    """Return what makes a decoder of one stream. Raise HttpError (415) for a coding that cannot be read."""
    if coding in ("gzip", "x-gzip"):
        return lambda: zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    if coding == "zstd":
        try:
            zstd = importlib.import_module("backports.zstd")
        except ImportError:
            raise HttpError(415, "content-encoding zstd needs a server with pagoda[zstd]; send gzip") from None
        options = {zstd.DecompressionParameter.window_log_max: _ZSTD_WINDOW_LOG}
        return lambda: cast(_Decompressor, zstd.ZstdDecompressor(options=options))
    raise HttpError(415, f"content-encoding {coding[:80]!r} is not supported; send gzip, zstd or no coding")


MAX_STREAMS: Final = 16
"""Maximum gzip members or zstd frames of a body: what follows a stream is copied before the next one is read."""


def _decompressed(raw: bytes, make: Callable[[], _Decompressor], coding: str, limit: int) -> bytes:
    """Return the bytes of all streams of a body. Raise HttpError (413) for more than `limit`, RequestError."""
    decoded = bytearray()
    for _ in range(MAX_STREAMS):
        if not raw:
            return bytes(decoded)
        stream = make()
        try:
            decoded += stream.decompress(raw, limit + 1 - len(decoded))
        except Exception as error:  # zlib and zstd have errors of their own.
            raise RequestError("", f"the body is not valid {coding}: {str(error)[:200]}") from None
        if len(decoded) > limit:
            raise HttpError(413, f"the body is larger than {limit} bytes once decompressed (--max-body-bytes)")
        if not stream.eof:
            raise RequestError("", f"the body ends within its {coding} stream")
        raw = stream.unused_data
    raise RequestError("", f"the body has more than {MAX_STREAMS} {coding} streams; compress it as one")


def _too_large(limit: int) -> HttpError:
    return HttpError(413, f"the body is larger than {limit} bytes (--max-body-bytes)")


# Limits on the number of JSON values, checked before parsing: a parser creates an object per value while holding the
# GIL, so a body of millions of empty lists would block all streams for seconds. numpy counts without objects or GIL.

MAX_VALUES: Final = 1 << 21
"""Maximum items of all lists and objects of a body: the token ids of two 1M-token contexts."""

MAX_OBJECTS: Final = 1 << 17
"""Maximum number of lists and objects of a body."""

MAX_KEYS: Final = 1 << 17
"""Maximum number of object keys of a body."""

SMALL: Final = MAX_OBJECTS
"""Size in bytes up to which a body cannot exceed any of these limits."""

_CHUNK: Final = 1 << 20
_ITEM = 1
_KEY = 2
_OPEN = 3
_QUOTE = 4
_KINDS: Final = np.zeros(256, np.uint8)
for _characters, _kind in ((b",", _ITEM), (b":", _KEY), (b"[{", _OPEN), (b'"', _QUOTE)):
    for _character in _characters:
        _KINDS[_character] = _kind


def check_size(raw: bytes) -> None:
    """Raise HttpError (413) if JSON text has too many values. Invalid JSON may pass."""
    items = keys = opened = 0
    in_string = False
    for chunk in _chunks(raw):
        kinds = _KINDS[np.frombuffer(chunk, np.uint8)]
        quotes = np.cumsum(kinds == _QUOTE, dtype=np.int32) + in_string
        counts = np.bincount(kinds[(quotes & 1) == 0], minlength=_QUOTE)
        in_string = bool(quotes[-1] & 1)
        items += int(counts[_ITEM])
        keys += int(counts[_KEY])
        opened += int(counts[_OPEN])
        for count, limit, what in (
            (items + opened, MAX_VALUES, "values"),
            (opened, MAX_OBJECTS, "lists and objects"),
            (keys, MAX_KEYS, "keys"),
        ):
            if count > limit:
                raise HttpError(413, f"the body has more than {limit} {what}; split it into several requests")


def _chunks(raw: bytes) -> Iterator[bytes]:
    """Yield the text in chunks, without escaped backslashes and quotes."""
    start = 0
    while start < len(raw):
        end = min(start + _CHUNK, len(raw))
        chunk = raw[start:end]
        backslashes = len(chunk) - len(chunk.rstrip(b"\\"))
        if backslashes % 2 and end < len(raw):  # An escape sequence must not be split.
            end += 1
            chunk = raw[start:end]
        start = end
        if b"\\" in chunk:
            chunk = chunk.replace(b"\\\\", b"").replace(b'\\"', b"")
        if chunk:
            yield chunk


# Validation schemas that stop at a list's first invalid item: pydantic reports every invalid item, which costs seconds
# and hundreds of megabytes for a list of millions.

MAX_LIST_OBJECTS: Final = MAX_OBJECTS_OF_LIST
"""Default maximum length of lists of objects: each item costs microseconds to validate and to render."""

_SCALARS: Final = frozenset({"any", "bool", "float", "int", "literal", "str"})

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
"""Schema types that can stop at the first error; dict cannot in older versions of pydantic."""

_NO_SCHEMAS: Final = frozenset({"cls", "default", "metadata", "serialization"})
"""Keys of a core schema whose values are not validation schemas."""


def bounded(schema: Any, owner: str) -> Any:
    """Return the core schema of the class `owner` with the bounds of its fields, with fail-fast collections and bounded
    lists of objects, and with fields that convert numbers.
    """
    if isinstance(schema, list | tuple):
        return type(schema)(bounded(item, owner) for item in schema)
    if not isinstance(schema, Mapping):
        return schema
    kind = schema.get("type")
    if not isinstance(kind, str):  # This is a mapping of names to schemas.
        return {name: bounded(item, owner) for name, item in schema.items()}
    if kind == "model-fields" and schema.get("model_name") == owner:
        fields = {name: _within(field, bound_of(owner, name)) for name, field in schema["fields"].items()}
        schema = {**schema, "fields": fields}
    copy = {key: value if key in _NO_SCHEMAS else bounded(value, owner) for key, value in schema.items()}
    if kind in _FAIL_FAST:
        copy["fail_fast"] = True
    if kind == "list" and copy.get("items_schema", {}).get("type", "any") not in _SCALARS:
        copy.setdefault("max_length", MAX_LIST_OBJECTS)
    if kind == "model-field":
        copy["schema"] = _converting(copy["schema"])
    return copy


_WRAPPED: Final = ("schema", "steps", "choices", "items_schema", "values_schema", "json_schema", "python_schema")
"""Keys of a core schema with schemas of the same value or of its entries."""


def _within(schema: Any, bound: Bound | None) -> Any:
    """Return the schema of a field with its bounds, unless SamplingParams checks it."""
    if bound is None or bound.sampled:
        return schema
    if isinstance(schema, list | tuple):
        return type(schema)(_within(item, bound) for item in schema)
    if not isinstance(schema, Mapping):
        return schema
    kind = schema.get("type")
    if not isinstance(kind, str):  # These are choices by their tags.
        return {name: _within(item, bound) for name, item in schema.items()}
    if kind in ("model", "definition-ref"):  # It has bounds of its own.
        return schema
    copy = {key: _within(value, bound) if key in _WRAPPED else value for key, value in schema.items()}
    limits: dict[str, float | None] = {}
    if kind in ("int", "float"):
        limits = {"gt" if bound.above else "ge": bound.low, "le": bound.high}
    elif kind == "str":
        limits = {"max_length": bound.characters}
    elif kind in ("list", "dict"):
        limits = {"max_length": bound.entries}
    for name, limit in limits.items():
        if limit is not None:
            tightest = max if name in ("gt", "ge") else min
            copy[name] = tightest(limit, copy.get(name, limit))
    return copy


# Fields that are numbers or booleans accept the same value in another type: clients send 16.0, "16" and "true". Items
# of lists do not: each conversion is a call into Python, and lists of token ids have millions of items.

_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,19}(\.0*)?")
_DECIMAL: Final = re.compile(r"[+-]?([0-9]{1,40}(\.[0-9]{0,40})?|\.[0-9]{1,40})([eE][+-]?[0-9]{1,3})?")
_BOOLEANS: Final[Mapping[str, bool]] = {"true": True, "false": False, "1": True, "0": False}


def _as_integer(value: Any) -> Any:
    """Return the integer of a float or text with an integral value; other values as they are."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
        return int(value.strip().partition(".")[0])
    return value


def _as_float(value: Any) -> Any:
    return float(value) if isinstance(value, str) and _DECIMAL.fullmatch(value.strip()) else value


def _as_boolean(value: Any) -> Any:
    if isinstance(value, str):
        return _BOOLEANS.get(value.strip().lower(), value)
    return bool(value) if type(value) is int and value in (0, 1) else value


_CONVERSIONS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "int": _as_integer,
    "float": _as_float,
    "bool": _as_boolean,
}


def _converting(schema: Any) -> Any:
    """Return the schema of a field with the conversion of its type, if it is a number or a boolean."""
    kind = schema["type"]
    if kind in ("default", "nullable"):
        return {**schema, "schema": _converting(schema["schema"])}
    convert = _CONVERSIONS.get(kind)
    return schema if convert is None else core_schema.no_info_before_validator_function(convert, schema)


# Ignored parts of a request.

MAX_IGNORED: Final = 64
"""Maximum number of ignored parts recorded per request."""

IGNORED_STATE: Final = "ignored"
"""Key of the ASGI scope's state under which `note_ignored` records them."""

_INDEX: Final = re.compile(r"\[\d+\]")


@dataclass(frozen=True, slots=True)
class Ignored:
    """A part of a request that is accepted without effect."""

    path: str  # Path such as `input[2].phase`.
    # "unknown": an undeclared field. "hint": a field only a hosted service acts on. "tool", "item": a tool, or an item
    # of the conversation, of an unsupported type.
    kind: Literal["unknown", "hint", "tool", "item"]
    reason: str = ""  # Message of the 400 that a strict server returns.
    type: str = ""  # Type of a tool or item.

    @property
    def name(self) -> str:
        """The path without list indexes, `input[].phase`; of a tool or item with its type, `tools[type=...]`."""
        path = _INDEX.sub("[]", self.path)
        return f"{path.removesuffix('[]')}[type={self.type[:64]}]" if self.type else path


def split_path(field: str) -> tuple[str, str]:
    """Return the field that a path begins with, and the rest: `messages[0].role` is `messages` and `[0].role`."""
    name = field.partition(".")[0].partition("[")[0]
    return name, field.removeprefix(name)


def note_ignored(
    request: Request, ignored: Iterable[Ignored], own_name: Callable[[str], str] = lambda field: field
) -> None:
    """Record ignored parts for the response header. `own_name` maps a path to the field name of the client's API."""
    noted: list[Ignored] = request.scope.setdefault("state", {}).setdefault(IGNORED_STATE, [])
    noted += [replace(field, path=own_name(field.path)) for field in ignored]


class RequestBody(BaseModel):
    """A JSON object with typed fields, without NaN. `parse` forbids undeclared fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    def ignored(self, path: str = "") -> Iterator[Ignored]:
        """Yield the ignored parts of this object, located at `path`, and remove its undeclared fields."""
        undeclared = self.__pydantic_extra__
        if undeclared:
            yield from (Ignored(_joined(path, name), "unknown") for name in undeclared)
            undeclared.clear()
        set_fields = self.model_fields_set
        for name, field in _examined_fields(type(self)):
            if name in set_fields:
                yield from _ignored_within(getattr(self, name), field, _joined(path, name))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler, /) -> CoreSchema:
        schema: CoreSchema = bounded(handler(source), cls.__name__)
        return schema

    def own_name(self, field: str) -> str:
        """Return the name of a SamplingParams field in this API."""
        return field

    def in_own_names(self, error: RequestError) -> RequestError:
        """Return the error with the field name of SamplingParams, or of chat completions, replaced by this API's."""
        field = self.own_name(error.field)
        if field == error.field:
            name, path = split_path(field)
            field = self.own_name(name) + path
        message = str(error)
        if error.field and message.startswith(error.field):
            message = field + message.removeprefix(error.field)
        return error.renamed(field, message)


# Field declarations.

_UNSUPPORTED: Final = "unsupported"
_HINT: Final = "hint"
_IDLE: Final = "idle"
_WITHOUT_EFFECT: Final[tuple[Any, ...]] = (None, False, [], {})


def unsupported(default: Any = None, *, harmless: Sequence[Any] = (), why: str = "", idle: bool = False) -> Any:
    """Declare a field of another server's API that is refused unless it is the default, null or in `harmless`.

    `why` is part of the error message and of the API reference. `idle`: an object whose values are all null, false, 0
    or empty asks for nothing, and is a hint.
    """
    marks: dict[str, Any] = {_UNSUPPORTED: True} | ({_IDLE: True} if idle else {})
    return Field(default, json_schema_extra=marks, examples=list(harmless) or None, description=why or None)


def hint(default: Any = None, *, harmless: Sequence[Any] = (), why: str = "") -> Any:
    """Declare a field that is accepted without effect, because ignoring it cannot make a response wrong.

    A value other than the default, null, false (unless the default is true), an empty one or `harmless` is reported as
    ignored, and refused by strict servers. `why` is part of their error message and of the API reference.
    """
    return Field(default, json_schema_extra={_HINT: True}, examples=list(harmless) or None, description=why or None)


def is_hint(field: FieldInfo) -> bool:
    """Return whether a field is declared with `hint`."""
    return _is_marked(field, _HINT)


def is_unsupported(field: FieldInfo) -> bool:
    """Return whether a field is declared with `unsupported`."""
    return _is_marked(field, _UNSUPPORTED)


def _is_marked(field: FieldInfo, mark: str) -> bool:
    extra = field.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get(mark))


def harmless_values(field: FieldInfo) -> list[Any]:
    """Return the accepted values of an unsupported field, or the values of a hint that are not reported."""
    values: list[Any] = []
    for value in (*_WITHOUT_EFFECT, field.default, *(field.examples or ())):
        if value is False and field.default is True:
            continue  # It switches off what is on by default.
        if not any(type(value) is type(harmless) and value == harmless for harmless in values):
            values.append(value)
    return values


# Parsing.


def parse(body_type: type[BodyT], raw: bytes) -> BodyT:
    """Parse a JSON body. Raise RequestError for an invalid, unsupported or ignored field."""
    body, ignored = parse_tolerant(body_type, raw)
    if ignored:
        raise _refusal(body_type, ignored[0])
    return body


def parse_tolerant(body_type: type[BodyT], raw: bytes) -> tuple[BodyT, list[Ignored]]:
    """Parse a JSON body and return it with its first MAX_IGNORED ignored parts.

    Raise RequestError for the first invalid or unsupported field.
    """
    try:
        body = body_type.model_validate_json(raw, extra="allow")
    except ValidationError as error:
        raise _request_error(raw, error) from None
    for name in body.model_fields_set & _unsupported_fields(body_type):
        _refuse_unsupported(body, name)
    ignored: list[Ignored] = []
    for field in body.ignored():
        if len(ignored) < MAX_IGNORED:
            ignored.append(field)
    return body, ignored


@cache
def _unsupported_fields(body_type: type[RequestBody]) -> frozenset[str]:
    return frozenset(name for name, field in body_type.model_fields.items() if is_unsupported(field))


@cache
def _examined_fields(body_type: type[RequestBody]) -> tuple[tuple[str, FieldInfo], ...]:
    """Return the fields that are hints or may contain request bodies."""
    fields = body_type.model_fields.items()
    marked = (_HINT, _IDLE)
    return tuple(
        (name, field)
        for name, field in fields
        if any(_is_marked(field, mark) for mark in marked) or _may_hold_bodies(field.annotation)
    )


def _ignored_within(value: Any, field: FieldInfo, path: str) -> Iterator[Ignored]:
    if isinstance(value, RequestBody):
        yield from value.ignored(path)
    elif is_hint(field) or _is_marked(field, _IDLE):
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
    path = ignored.path
    message = ignored.reason or f"unknown field {path!r}" + _nearest(path, list(body_type.model_fields))
    return RequestError(path, message)


def _refuse_unsupported(body: RequestBody, name: str) -> None:
    field = type(body).model_fields[name]
    value = getattr(body, name)
    if _is_marked(field, _IDLE) and isinstance(value, dict) and not any(value.values()):
        return
    if not _is_harmless(value, field):
        raise RequestError(name, _unsupported_message(name, field))


def _is_harmless(value: Any, field: FieldInfo) -> bool:
    return any(_json_type(value) is _json_type(harmless) and value == harmless for harmless in harmless_values(field))


def _json_type(value: Any) -> type:
    """The type of a value in JSON, which has one kind of numbers."""
    return float if type(value) is int else type(value)


def _unsupported_message(path: str, field: FieldInfo) -> str:
    why = field.description or "this version of pagoda does not have it"
    return f"{path} is not supported: {why}; leave it out"


# Errors: the field path of pydantic's most specific error.

_MAX_COMPARED: Final = 64
"""Number of validation errors that are compared; a body may have one per value."""

_Parts = tuple[int | str, ...]


def _request_error(raw: bytes, error: ValidationError) -> RequestError:
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    if errors[0]["type"] == "json_invalid":
        return RequestError("", f"the body is not valid JSON: {errors[0]['msg'].removeprefix('Invalid JSON: ')}")
    parts, chosen = _deepest(errors, from_json(raw))
    field = _path(parts)
    if not field:
        return RequestError("", "the body must be a JSON object")
    return RequestError(field, f"{field}: {_lowered(chosen['msg'])}")


def _deepest(errors: Sequence[ErrorDetails], value: Any) -> tuple[_Parts, ErrorDetails]:
    """Return the deepest error within the value of the first error: of a union, the closest alternative's."""
    located = [(_parts(error["loc"], value, error["type"] == "missing"), error) for error in errors[:_MAX_COMPARED]]
    first = located[0][0]
    within = [candidate for candidate in located if candidate[0][: len(first)] == first]
    return max(within, key=lambda candidate: len(candidate[0]))


def _parts(loc: _Parts, value: Any, missing: bool) -> _Parts:
    """Return the path of an error within the given JSON, without the union tags that pydantic adds."""
    if not loc:
        return ()
    part = loc[0]
    following = loc[1:]
    skipped = _parts(following, value, missing)
    is_known = part in value if isinstance(value, dict) else isinstance(value, list) and part in range(len(value))
    if is_known:
        taken = (part, *_parts(following, value[part], missing))
    elif missing and not following:
        taken = (part,)
    else:
        return skipped
    return max(taken, skipped, key=lambda parts: (parts[-1:] == loc[-1:], len(parts)))


def _path(parts: _Parts) -> str:
    """Return the path as text, `messages[0].role`."""
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path[:200]


def _nearest(name: str, known_names: list[str]) -> str:
    near = difflib.get_close_matches(name.rsplit(".", 1)[-1], known_names, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]
