"""Unions told apart by their `type`, in which kinds that are not served are refused by name.

Knows pydantic. Tags are no identifiers, so that error messages leave them out of the path of a field.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, model_validator
from pydantic_core import PydanticCustomError

from pagoda.server.http.body import Ignored, RequestBody

OTHER = "<other>"
"""Tag of what is refused."""

TEXT, LIST = "<text>", "<list>"
"""Tags of a union of plain text and a list."""


def by_type(*known: str, default: str | None = None) -> Discriminator:
    """Tags `<type>` for the known types, OTHER for the rest. `default`: of an object without a type."""

    def tag(value: Any) -> str:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        kind = default if kind is None else kind
        return f"<{kind}>" if kind in known else OTHER

    return Discriminator(tag)


def text_or_list() -> Discriminator:
    """Tags TEXT for a string, LIST for anything else."""
    return Discriminator(lambda value: TEXT if isinstance(value, str) else LIST)


class Unsupported(RequestBody):
    """Anything of another type."""

    type: str | None = None

    @model_validator(mode="before")
    @classmethod
    def refuse(cls, value: Any) -> Any:
        """Name the type."""
        if not isinstance(value, dict):
            raise PydanticCustomError("not_an_object", "must be an object with a type")
        kind = value.get("type")
        shown = repr(kind[:60]) if isinstance(kind, str) else "that is missing"
        raise PydanticCustomError(
            "unsupported", "type {kind} is not supported by this version of pagoda", {"kind": shown}
        )


class OtherTool(RequestBody):
    """A tool of a type that this server cannot offer to a model, whatever its fields. It is dropped."""

    type: str

    def ignored(self, path: str = "") -> Iterator[Ignored]:
        """Yield this tool alone, without its fields."""
        reason = f"{path}: type {self.type[:60]!r} is not supported by this version of pagoda"
        yield Ignored(path, "tool", reason, self.type)


def _refuse_value(harmless: Sequence[Any]) -> BeforeValidator:
    def check(value: Any) -> Any:
        if value is None or any(type(value) is type(each) and value == each for each in harmless):
            return value
        raise PydanticCustomError("unsupported", "is not supported by this version of pagoda; leave it out")

    return BeforeValidator(check)


def refused(*harmless: Any) -> Any:
    """For Annotated: a field within a field that exists elsewhere and not here. null and `harmless` pass."""
    return _refuse_value(harmless)


Null = Annotated[Any, refused()]
"""A field that exists elsewhere and not here."""
