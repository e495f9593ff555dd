"""JSON schemas as requests bring them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from pagoda.common.structured.refusal import refused

_OF_NAMES: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values map names to schemas, so that a key there is no keyword."""
_OF_DATA: Final = ("enum", "const", "default", "examples")
"""Keywords whose values are data, not schemas."""


def json_schema(value: str | Mapping[str, Any] | bool) -> Mapping[str, Any]:
    """A schema given as JSON text, object, or true (any value). Raises RequestError."""
    schema: Any = value
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise refused(f"the JSON schema is not JSON: {error}") from None
    if schema is True:
        return {}
    if schema is False:
        raise refused("the JSON schema false allows no answer")
    if not isinstance(schema, Mapping):
        raise refused("a JSON schema must be an object")
    return schema


def closed(schema: Any) -> Any:
    """The schema with additionalProperties false in every object that does not say."""
    try:
        return _closed(schema)
    except RecursionError:
        raise refused("the JSON schema is nested too deeply") from None


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {key: value if key in _OF_DATA else _closed_under(key, value) for key, value in schema.items()}
    if "properties" in found and "additionalProperties" not in found:
        found["additionalProperties"] = False
    return found


def _closed_under(key: str, value: Any) -> Any:
    if key in _OF_NAMES and isinstance(value, Mapping):
        return {name: _closed(each) for name, each in value.items()}
    return _closed(value)
