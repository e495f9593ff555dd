"""Unions discriminated by `type`, in which unsupported types are refused by name.

Tags are not identifiers, so that error messages can leave them out of a field's path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, model_validator
from pydantic_core import PydanticCustomError

from pagoda.server.http.body import Ignored, RequestBody

OTHER = "<other>"
"""Tag of unsupported types."""

TEXT, LIST = "<text>", "<list>"
"""Tags of a union of a string and a list."""


def by_type(*known: str, default: str | None = None) -> Discriminator:
    """Return a discriminator: `<type>` for the known types, else OTHER. `default`: type of an object without one."""

    def tag(value: Any) -> str:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        kind = default if kind is None else kind
        return f"<{kind}>" if kind in known else OTHER

    return Discriminator(tag)


def text_or_list() -> Discriminator:
    """Return a discriminator: TEXT for a string, else LIST."""
    return Discriminator(lambda value: TEXT if isinstance(value, str) else LIST)


class Unsupported(RequestBody):
    """An object of an unsupported type; always refused."""

    type: str | None = None

    @model_validator(mode="before")
    @classmethod
    def refuse(cls, value: Any) -> Any:
        """Raise an error that names the type."""
        if not isinstance(value, dict):
            raise PydanticCustomError("not_an_object", "must be an object with a type")
        kind = value.get("type")
        name = repr(kind[:60]) if isinstance(kind, str) else "(missing)"
        raise PydanticCustomError(
            "unsupported", "type {kind} is not supported by this version of pagoda", {"kind": name}
        )


class OtherTool(RequestBody):
    """A tool of an unsupported type, with any fields. It is dropped."""

    type: str

    def ignored(self, path: str = "") -> Iterator[Ignored]:
        """Yield this tool, but not its fields."""
        reason = f"{path}: type {self.type[:60]!r} is not supported by this version of pagoda"
        yield Ignored(path, "tool", reason, self.type)


def _refuse_value(harmless: Sequence[Any]) -> BeforeValidator:
    def check(value: Any) -> Any:
        if value is None or any(type(value) is type(each) and value == each for each in harmless):
            return value
        raise PydanticCustomError("unsupported", "is not supported by this version of pagoda; leave it out")

    return BeforeValidator(check)


def refused(*harmless: Any) -> Any:
    """Return Annotated metadata of an unsupported nested field that accepts null and `harmless` only."""
    return _refuse_value(harmless)


Null = Annotated[Any, refused()]
"""An unsupported nested field: null only."""
