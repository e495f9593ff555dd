"""What holds an answer's tokens to a form: the grammar that they spell, and the thinking that may come before it.

Values that cross a process boundary; how they are followed is common.engine.guide's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, Self

import msgspec
import numpy as np
import numpy.typing as npt

from pagoda.common.errors import RequestError

if TYPE_CHECKING:  # the engine's messages import this module, and tokenizers take time to import
    from pagoda.common.text.tokenizer import Tokenizer

GrammarEngine = Literal["guidance", "xgrammar"]
"""The library that reads a grammar's text."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form of an answer. `text`: what the engine's library is given, made by common.structured."""

    text: str
    engine: GrammarEngine = "guidance"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """The part of an answer that no grammar holds. Each of `starts` and `ends` is a sequence of token ids.

    `ends`: any of them ends the thinking; the first is what a spent budget forces. `open`: the prompt leaves the
    thinking open. `starts`: what opens it if the answer begins with it; none: it stays closed. `budget`: most tokens
    of thinking; None: any number. `holds`: the grammar holds the thinking too.
    """

    ends: tuple[tuple[int, ...], ...]
    open: bool = True
    starts: tuple[tuple[int, ...], ...] = ()
    budget: int | None = None
    holds: bool = False


# The interface of a grammar's library: it compiles a text, and follows one answer in it token by token.

Bits = npt.NDArray[np.uint32]
"""Token t is bit t % 32 of word t // 32."""


class GrammarError(Exception):
    """A grammar that cannot be compiled or followed any further. The message is one line."""


class Matcher(Protocol):
    """Where one answer stands in its grammar."""

    def accept(self, token: int) -> bool:
        """Go on by a token; False, and nothing changed, when the grammar does not allow it."""
        ...

    def rollback(self, count: int) -> None:
        """Take the last `count` tokens back."""
        ...

    def copy(self) -> Self:
        """Another answer at the same place."""
        ...

    @property
    def error(self) -> str | None:
        """Why it cannot go on, such as a limit of the library that was passed."""
        ...


class Library(Protocol):
    """Compiles grammars for one vocabulary."""

    def compile(self, text: str) -> Matcher:
        """An answer at its beginning. Raises GrammarError."""
        ...

    def fill(self, matchers: Sequence[Matcher], bits: Bits) -> None:
        """Into bits [n, ceil(V/32)] what may follow in each of the n matchers; look at their `error` after."""
        ...


def one_line(message: str, limit: int = 300) -> str:
    """The first line of a library's message, with the line that names the error, cut to `limit` characters."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    named = [line for line in lines[1:] if line.startswith("error:")]
    text = " ".join([*lines[:1], *named[-1:]]) or "the grammar cannot be followed"
    return text if len(text) <= limit else text[:limit] + "..."


# Refusals of structured output, under the name of its field.

FIELD: Final = "structured_outputs"
"""The SamplingParams field that errors name; a request's own spelling of it is put in its place."""

_PACKAGES: Final[Mapping[GrammarEngine, tuple[str, str]]] = {
    "guidance": ("llguidance", "structured"),
    "xgrammar": ("xgrammar", "xgrammar"),
}
"""The package of each library, and the extra that brings it."""


def is_installed(engine: GrammarEngine) -> bool:
    """Whether a library can be imported; that is not tried, because it may take seconds."""
    return importlib.util.find_spec(_PACKAGES[engine][0]) is not None


def not_installed(engine: GrammarEngine) -> str:
    """The message for a library that is missing, with the command that installs it."""
    package, extra = _PACKAGES[engine]
    return f"{package} is not installed; pip install 'pagoda[{extra}]'"


def refused(message: object) -> RequestError:
    """An error whose text begins with the field."""
    return RequestError(FIELD, f"{FIELD}: {message}")


def no_tokenizer() -> RequestError:
    """The error of an engine that runs without the text of its tokens."""
    return RequestError(FIELD, "structured output needs a tokenizer, which is switched off (skip_tokenizer_init)")


# What a grammar's library must know of a tokenizer: the bytes of each token, which of them are no text, the ends.


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """`tokens[id]`: its bytes, b"" for an id that stands for nothing. `special`: ids that no text spells.

    `ends`: ids that end an answer. `encode`: the ids of a text taken literally.
    """

    tokens: tuple[bytes, ...]
    special: frozenset[int]
    ends: tuple[int, ...]
    encode: Callable[[str], list[int]]

    def __len__(self) -> int:
        return len(self.tokens)


def vocabulary_of(tokenizer: Tokenizer, size: int, ends: Sequence[int]) -> Vocabulary:
    """Of a model with `size` tokens, padding included. Raises RequestError where tokens do not stand for bytes."""
    table = tokenizer.byte_table
    if table is None:
        raise RequestError(
            FIELD, "structured output needs a byte-level or sentencepiece tokenizer, and this model's is neither"
        )
    own = tokenizer.eos_token_id
    known = tuple(dict.fromkeys(each for each in (own, *ends) if each is not None and 0 <= each < size))
    if not known:
        raise RequestError(FIELD, "structured output needs a token that ends the answer, and this model names none")
    return Vocabulary(
        tuple(table[token] for token in range(size)),
        tokenizer.special_ids | set(known),
        known,
        tokenizer.encode_ordinary,
    )


# JSON schemas as requests bring them.

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
