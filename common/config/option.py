"""One configuration field = one flag: default, help, choices, parser and what becomes of it live in the field."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["implemented", "no effect", "refused"]

Becomes = Callable[[Any], Mapping[str, Any]]
"""A deprecated setting's value -> the settings that replace it."""


@dataclass(frozen=True, slots=True)
class Option:
    """What a configuration field says about its flag. See `option`."""

    help: str
    flag: str | None
    aliases: tuple[str, ...]
    choices: tuple[str, ...] | None
    parse: Callable[[str], Any] | None
    status: Status
    why: str
    accepts: tuple[Any, ...]
    deprecated: str | None
    becomes: Becomes | None
    optional_value: Any


def option(
    default: Any,
    help: str,
    *,
    flag: str | None = None,
    aliases: Sequence[str] = (),
    choices: Sequence[str] | None = None,
    parse: Callable[[str], Any] | None = None,
    no_effect: str | None = None,
    refused: str | None = None,
    accepts: Sequence[Any] = (),
    deprecated: str | None = None,
    becomes: Becomes | None = None,
    optional_value: Any = None,
) -> Any:
    """A dataclass field with its command line attached.

    `flag`: the flag's name when it is not the field's own (`cache_dtype` is `--kv-cache-dtype`).
    `parse`: turns the flag's text into the value; the default follows from the field's type.
    `no_effect`: why the setting changes nothing here; a value other than the default is accepted with one warning.
    `refused`: why another value than the default or one of `accepts` cannot be had, and what to do instead.
    `deprecated`: what to use instead, said in a warning; `becomes` turns the value into those settings.
    `optional_value`: the value of the flag without a word after it.
    """
    assert not (no_effect and refused), "a setting is refused or has no effect, not both"
    status: Status = "refused" if refused else "no effect" if no_effect else "implemented"
    about = Option(
        help=help,
        flag=flag,
        aliases=tuple(aliases),
        choices=None if choices is None else tuple(choices),
        parse=parse,
        status=status,
        why=refused or no_effect or "",
        accepts=tuple(accepts),
        deprecated=deprecated,
        becomes=becomes,
        optional_value=optional_value,
    )
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata={"option": about})
    return field(default=default, metadata={"option": about})
