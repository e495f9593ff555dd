"""One configuration field = one flag: default, help, choices and parser live in the field itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any


def option(
    default: Any,
    help: str,
    *,
    flag: str | None = None,
    aliases: Sequence[str] = (),
    choices: Sequence[str] | None = None,
    parse: Callable[[str], Any] | None = None,
) -> Any:
    """A dataclass field with its command line attached.

    `flag`: the flag's name when it is not the field's own (`cache_dtype` is `--kv-cache-dtype`).
    `parse`: turns the flag's text into the value; the default follows from the field's type.
    """
    metadata = {"help": help, "flag": flag, "aliases": tuple(aliases), "choices": choices, "parse": parse}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)
