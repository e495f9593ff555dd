"""Schemas of bodies whose validation costs no more than what is right in them: it stops at a list's first wrong item.

pydantic reports each wrong item of a list, which costs seconds and hundreds of megabytes for a list of millions. Knows
pydantic's core schemas. Does not know what a body holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic_core import core_schema

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
