"""One configuration field = one flag: default, help, choices, parser and what becomes of it live in the field."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NoReturn

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


# Values as people write them on a command line: numbers with a suffix, JSON.

_DECIMAL: Final = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY: Final = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SUFFIXED: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kKmMgGtT])")


def human_readable_int(text: str) -> int:
    """1k = 1000, 1K = 1024, 25.6k = 25600. Raises ValueError, also for a fraction before a binary suffix."""
    match = _SUFFIXED.fullmatch(text.strip())
    if match is None:
        try:
            return int(text)
        except ValueError:
            raise ValueError("not a whole number; write it like 4096, 4k (4000) or 4K (4096)") from None
    number, suffix = match.groups()
    if suffix in _BINARY and "." in number:
        raise ValueError(f"a fraction needs a decimal suffix; did you mean {number}{suffix.lower()}?")
    if suffix in _BINARY:
        return int(number) * _BINARY[suffix]
    return int(float(number) * _DECIMAL[suffix]) if "." in number else int(number) * _DECIMAL[suffix]


def human_readable_int_or_auto(text: str) -> int | None:
    """Like human_readable_int; `auto` and -1 give None."""
    if text.strip().lower() in {"auto", "-1"}:
        return None
    return human_readable_int(text)


def json_object(text: str) -> dict[str, Any]:
    """A JSON object. Raises ValueError on anything else."""
    try:
        found = json.loads(text, parse_constant=_no_number)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError('a JSON object is needed, such as {"key": 1}')
    return found


def json_or_text(text: str) -> Any:
    """JSON where the text reads as JSON, else the text itself."""
    try:
        return json.loads(text, parse_constant=_no_number)
    except ValueError:
        return text


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


# The name that was probably meant.


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean x?` for the end of an error, or nothing when no name is close."""
    import difflib  # only errors need it

    match = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {match[0]}?" if match else ""


# Settings handed over whole, as JSON, to parts of the engine that stand beside the usual path.

_NO_TRANSFER: Final = "prefill and decode run in one engine here; drop it"


def names(text: str) -> tuple[str, ...]:
    """Names between commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtensionConfig:
    """Speculation, transfer, profiling, and settings that only a plugin knows."""

    speculative_config: Mapping[str, Any] = option(
        {}, "Speculative decoding as JSON.", parse=json_object, refused="speculation is not in this version; drop it"
    )
    kv_transfer_config: Mapping[str, Any] = option(
        {}, "KV transfer between engines as JSON.", parse=json_object, refused=_NO_TRANSFER
    )
    kv_events_config: Mapping[str, Any] = option(
        {}, "Events of the KV cache as JSON.", parse=json_object, refused="KV events are not sent; read /metrics"
    )
    ec_transfer_config: Mapping[str, Any] = option(
        {}, "Encoder cache transfer as JSON.", parse=json_object, refused=_NO_TRANSFER
    )
    profiler_config: Mapping[str, Any] = option(
        {}, "Settings of the profiler as JSON.", parse=json_object, refused="there is no built-in profiler; use py-spy"
    )
    additional_config: Mapping[str, Any] = option(
        {}, "JSON that plugins find in the configuration; the engine itself reads nothing in it.", parse=json_object
    )
    plugins: tuple[str, ...] | None = option(
        None, "Names of installed plugins to load; default: all of them.", parse=names
    )
    aggregate_engine_logging: bool = option(
        False, "One log line for all engines.", no_effect="there is one engine, so its line is the sum"
    )
    tokens_only: bool = option(
        False, "Serve token ids only; as --skip-tokenizer-init.", becomes=lambda on: {"skip_tokenizer_init": bool(on)}
    )
