"""Declaration of a configuration field with its flag: help, choices, parser and support status."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NoReturn

from pagoda.common.errors import ConfigError

Status = Literal["implemented", "no effect", "refused"]

MapsTo = Callable[[Any], Mapping[str, Any]]
"""Maps a deprecated setting's value to the settings that replace it."""


@dataclass(frozen=True, slots=True)
class Option:
    """Command-line metadata of a configuration field. See `option`."""

    help: str
    flag: str | None
    aliases: tuple[str, ...]
    choices: tuple[str, ...] | None
    parse: Callable[[str], Any] | None
    status: Status
    reason: str  # Why it has no effect or is refused; empty if implemented.
    accepts: tuple[Any, ...]
    refused_values: Mapping[str, str]  # Value of vLLM's that is refused -> why, and the remedy.
    same_values: Mapping[str, str]  # Other name of a value -> the value.
    deprecated: str | None
    maps_to: MapsTo | None
    stands_for: str
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
    refused_values: Mapping[str, str] | None = None,
    same_values: Mapping[str, str] | None = None,
    deprecated: str | None = None,
    maps_to: MapsTo | None = None,
    stands_for: str = "",
    optional_value: Any = None,
) -> Any:
    """Return a dataclass field with its command-line metadata.

    `flag`: flag name if it differs from the field's (`cache_dtype` is `--kv-cache-dtype`).
    `parse`: converts the flag's text; by default derived from the field's type.
    `no_effect`: why the setting changes nothing; a non-default value logs one warning.
    `refused`: why values other than the default and `accepts` are errors, and the remedy.
    `refused_values`: values of vLLM's that are not supported here -> the reason and the remedy; not among the choices.
    `same_values`: other names of values -> the value.
    `deprecated`: the replacement named in a warning; `maps_to` converts the value to the replacing settings.
    `stands_for`: the setting that `maps_to` sets, whose status it has.
    `optional_value`: value of the flag when given without an argument.
    """
    assert not (no_effect and refused), "a setting is refused or has no effect, not both"
    status: Status = "refused" if refused else "no effect" if no_effect else "implemented"
    metadata = Option(
        help=help,
        flag=flag,
        aliases=tuple(aliases),
        choices=None if choices is None else tuple(choices),
        parse=parse,
        status=status,
        reason=refused or no_effect or "",
        accepts=tuple(accepts),
        refused_values=refused_values or {},
        same_values=same_values or {},
        deprecated=deprecated,
        maps_to=maps_to,
        stands_for=stands_for,
        optional_value=optional_value,
    )
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata={"option": metadata})
    return field(default=default, metadata={"option": metadata})


# Checks of values.


def flag_of(name: str) -> str:
    """Return the flag of a field."""
    return "--" + name.replace("_", "-")


def need_positive(config: object, *names: str, remedy: str = "use 1 or more") -> None:
    """Raise ConfigError naming the flag and the remedy if a field is set and less than 1."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(flag_of(name), f"{value} is not positive; {remedy}")


def need_not_negative(config: object, *names: str, remedy: str = "use 0 or more") -> None:
    """Raise ConfigError naming the flag and the remedy if a field is set and less than 0."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 0:
            raise ConfigError(flag_of(name), f"{value} is negative; {remedy}")


def check_port(port: int) -> None:
    """Raise ConfigError if --port is out of range."""
    if not 0 <= port <= 65535:
        raise ConfigError("--port", f"{port} is not a port; use 1 to 65535, or 0 for any free one")


# Parsers of flag values.

_DECIMAL: Final = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY: Final = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SUFFIXED: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kKmMgGtT])")


def human_readable_int(text: str) -> int:
    """Parse an integer with an optional suffix: 1k = 1000, 1K = 1024, 25.6k = 25600.

    Raise ValueError for anything else, including a fraction with a binary suffix.
    """
    match = _SUFFIXED.fullmatch(text.strip())
    if match is None:
        try:
            return int(text)
        except ValueError:
            raise ValueError("not an integer; write it like 4096, 4k (4000) or 4K (4096)") from None
    number, suffix = match.groups()
    if suffix in _BINARY and "." in number:
        raise ValueError(f"a fraction needs a decimal suffix; did you mean {number}{suffix.lower()}?")
    if suffix in _BINARY:
        return int(number) * _BINARY[suffix]
    return int(float(number) * _DECIMAL[suffix]) if "." in number else int(number) * _DECIMAL[suffix]


def human_readable_int_or_auto(text: str) -> int | None:
    """Like human_readable_int; return None for `auto` and -1."""
    if text.strip().lower() in {"auto", "-1"}:
        return None
    return human_readable_int(text)


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object. Raise ValueError for anything else."""
    try:
        value = json.loads(text, parse_constant=_reject_constant)
    except ValueError as error:
        raise ValueError(f"invalid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError('must be a JSON object, such as {"key": 1}')
    return value


def json_or_text(text: str) -> Any:
    """Return the parsed JSON value, or the text if it is not valid JSON."""
    try:
        return json.loads(text, parse_constant=_reject_constant)
    except ValueError:
        return text


def _reject_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not allowed in JSON")


def comma_separated(text: str) -> tuple[str, ...]:
    """Split at commas; drop white space and empty items."""
    return tuple(item.strip() for item in text.split(",") if item.strip())


def did_you_mean(word: str, known_words: Iterable[str]) -> str:
    """Return `; did you mean X?` for the known name that means the same or is spelled alike; empty if there is none."""
    import difflib  # Only errors need this module.

    by_stem = {_stem(known): known for known in reversed(list(known_words))}
    stem = _stem(word)
    meant = SAME_MEANING.get(stem)
    if meant in by_stem:
        return f"; did you mean {by_stem[meant]}?"
    cutoff = _SIMILAR if len(stem) > _SHORT else _SIMILAR_IF_SHORT
    match = difflib.get_close_matches(stem, list(by_stem), n=1, cutoff=cutoff)
    return f"; did you mean {by_stem[match[0]]}?" if match else ""


def _stem(name: str) -> str:
    return name.lstrip("-").replace("_", "-")


SAME_MEANING: Final[Mapping[str, str]] = {
    **dict.fromkeys(("accelerator", "chip", "chips", "device", "gpu", "gpu-type", "machine"), "hardware"),
    **dict.fromkeys(("gpus", "n-gpus", "num-gpus", "num-shard", "tensor-parallel", "tp-size"), "tensor-parallel-size"),
    **dict.fromkeys(("context-length", "context-size", "ctx-size", "max-seq-len", "num-ctx"), "max-model-len"),
    **dict.fromkeys(("batch-size", "max-batch-size", "max-running-requests", "parallel"), "max-num-seqs"),
    **dict.fromkeys(("chunked-prefill-size", "max-batch-tokens"), "max-num-batched-tokens"),
    **dict.fromkeys(("dp-size", "num-replicas", "replicas"), "data-parallel-size"),
    **dict.fromkeys(("gpu-memory-fraction", "mem-fraction-static"), "gpu-memory-utilization"),
    **dict.fromkeys(("checkpoint", "model-id", "model-path"), "model"),
    **dict.fromkeys(("alias", "model-name"), "served-model-name"),
    **dict.fromkeys(("quant", "quantize"), "quantization"),
    "qps": "request-rate",
    "rate": "request-rate",
}
"""Name of a setting in other programs, or a word for it -> the setting here that means the same."""

_SIMILAR: Final = 0.75
_SIMILAR_IF_SHORT: Final = 0.6
_SHORT: Final = 3
"""Names are alike from this ratio of difflib on; one letter is much of a name of at most _SHORT letters."""
