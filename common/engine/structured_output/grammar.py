"""Types of structured output: grammars, reasoning sections, matchers and vocabularies; errors and JSON schemas.

`Grammar` and `Thinking` cross process boundaries; `token_mask` follows them.
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
"""The library that compiles a grammar's text."""

Bits = npt.NDArray[np.uint32]
"""Token t is bit t % 32 of word t // 32."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """The grammar of an answer."""

    text: str  # input of the engine's library
    engine: GrammarEngine = "guidance"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """The reasoning section of an answer, which the grammar does not constrain. Sequences are token ids."""

    ends: tuple[tuple[int, ...], ...]  # any of them ends the reasoning; a spent budget forces the first
    open: bool = True  # the prompt leaves the reasoning open
    starts: tuple[tuple[int, ...], ...] = ()  # sequences that open it at the beginning of the answer; (): none does
    budget: int | None = None  # maximum reasoning tokens; None: unlimited
    in_grammar: bool = False  # the grammar constrains the reasoning, too


class GrammarError(Exception):
    """A grammar that cannot be compiled or followed any further. The message is one line."""


class Matcher(Protocol):
    """The position of one answer in its grammar."""

    def accept(self, token: int) -> bool:
        """Advance by a token. Returns False, without a change, if the grammar does not allow it."""
        ...

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens."""
        ...

    def copy(self) -> Self:
        """Return an independent copy."""
        ...

    @property
    def error(self) -> str | None:
        """Why it cannot advance, for example an exceeded limit of the library."""
        ...


@dataclass(frozen=True, slots=True)
class ResolvedGrammar:
    """A grammar's text as its library takes it."""

    text: str
    schema: str = ""  # JSON of the answer's schema, if the grammar does not enforce all of it
    unchecked: tuple[str, ...] = ()  # keywords of the schema that the grammar does not enforce
    ignored_formats: tuple[str, ...] = ()  # formats of the schema that are unknown, and hence no constraint


class Library(Protocol):
    """A grammar library with one vocabulary."""

    def resolved(self, text: str) -> ResolvedGrammar:
        """Return a grammar whose JSON schemas are ones that the library takes. Raises GrammarError."""
        ...

    def compile(self, text: str) -> Matcher:
        """Return a matcher at the beginning of a grammar. Raises GrammarError."""
        ...

    def fill(self, matchers: Sequence[Matcher], bits: Bits) -> None:
        """Write the mask of each of n matchers into bits [n, ceil(V/32)]; check their `error` afterwards."""
        ...


def one_line(message: str, limit: int = 300) -> str:
    """Return the first line of a library's message and its last error line, cut to `limit` characters."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [line for line in lines[1:] if line.startswith("error:")]
    text = " ".join([*lines[:1], *errors[-1:]]) or "the grammar cannot be followed"
    return text if len(text) <= limit else text[:limit] + "..."


# Errors of structured output.

GRAMMAR_FIELD: Final = "structured_outputs"
"""The SamplingParams field that errors name; the API replaces it by the request's own spelling."""

_PACKAGES: Final[Mapping[GrammarEngine, tuple[str, str]]] = {
    "guidance": ("llguidance", "structured"),
    "xgrammar": ("xgrammar", "xgrammar"),
}
"""The package of each library, and the extra that installs it."""


MAX_WHITESPACE: Final = 64
"""Maximum consecutive white space characters between the tokens of JSON, without which a model may repeat them until
its output ends. Enough to indent 16 levels by 4."""


def is_installed(engine: GrammarEngine) -> bool:
    """True if the library is installed. It is not imported, which may take seconds."""
    return importlib.util.find_spec(_PACKAGES[engine][0]) is not None


def not_installed(engine: GrammarEngine) -> str:
    """Return the error message for a missing library, with the command that installs it."""
    package, extra = _PACKAGES[engine]
    return f"{package} is not installed; pip install 'pagoda[{extra}]'"


def refused(message: object) -> RequestError:
    """Return an error whose text begins with the field."""
    return RequestError(GRAMMAR_FIELD, f"{GRAMMAR_FIELD}: {message}")


def no_tokenizer() -> RequestError:
    """Return the error of an engine without a tokenizer."""
    return RequestError(
        GRAMMAR_FIELD, "structured output needs a tokenizer, which is switched off (skip_tokenizer_init)"
    )


# What a library must know of a tokenizer.


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """The bytes of every token."""

    tokens: tuple[bytes, ...]  # bytes of each token by id; b"" for unused ids
    special: frozenset[int]  # ids that no text spells
    ends: tuple[int, ...]  # ids that end an answer
    encode: Callable[[str], list[int]]  # ids of a text, without special tokens

    def __len__(self) -> int:
        return len(self.tokens)


def vocabulary_of(tokenizer: Tokenizer, size: int, ends: Sequence[int]) -> Vocabulary:
    """Return the vocabulary of a model with `size` tokens, padding included.

    Raises RequestError if tokens do not stand for bytes or no token ends an answer.
    """
    table = tokenizer.byte_table
    if table is None:
        raise RequestError(
            GRAMMAR_FIELD,
            "structured output needs a byte-level or sentencepiece tokenizer, and this model's is neither",
        )
    eos = tokenizer.eos_token_id
    end_ids = tuple(dict.fromkeys(token for token in (eos, *ends) if token is not None and 0 <= token < size))
    if not end_ids:
        raise RequestError(
            GRAMMAR_FIELD, "structured output needs a token that ends the answer, and this model names none"
        )
    return Vocabulary(
        tuple(table[token] for token in range(size)),
        tokenizer.special_ids | set(end_ids),
        end_ids,
        tokenizer.encode_ordinary,
    )


# JSON schemas of requests.

SCHEMA_ENTRY: Final = "json_schema"
"""Key of a schema in a grammar text of llguidance."""

ANY_OBJECT: Final = {"type": "object"}

NAME_MAPS: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
"""Keywords whose values map names to schemas, so that their keys are not keywords."""
DATA: Final = frozenset({"enum", "const", "default", "examples"})
"""Keywords whose values are data, not schemas."""


def json_schema(value: str | Mapping[str, Any] | bool) -> Mapping[str, Any]:
    """Return a schema given as JSON text, object, or true (any value). Raises RequestError."""
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


def json_text(value: Any) -> str:
    """Return a value that contains a schema as JSON text. Raises RequestError."""
    try:
        return msgspec.json.encode(value).decode()
    except (RecursionError, TypeError, ValueError) as error:
        raise refused(f"the schema is nested too deeply or has values that JSON cannot represent ({error})") from None


def closed(schema: Any) -> Any:
    """Return the schema with additionalProperties false in every object that does not specify it."""
    try:
        return _closed(schema)
    except RecursionError:
        raise refused("the JSON schema is nested too deeply") from None


_COMPOSED: Final = ("anyOf", "oneOf", "$ref", "if", "dependentSchemas")
"""Keywords beside `properties` whose schemas may have further properties of the same object."""


def closes_safely(schema: Any) -> bool:
    """Return whether `closed` refuses no object for a property that another part of the schema has."""
    try:
        return _closes_safely(schema)
    except RecursionError:
        return False


def _closes_safely(schema: Any) -> bool:
    if isinstance(schema, list):
        return all(map(_closes_safely, schema))
    if not isinstance(schema, Mapping):
        return True
    parts = schema.get("allOf")
    if isinstance(parts, list) and len(parts) > 1:
        return False
    if "properties" in schema and {"allOf", *_COMPOSED} & schema.keys():
        return False
    return all(_closes_safely_under(key, value) for key, value in schema.items() if key not in DATA)


def _closes_safely_under(key: str, value: Any) -> bool:
    names = key in NAME_MAPS and isinstance(value, Mapping)
    return all(map(_closes_safely, value.values())) if names else _closes_safely(value)


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    result = {key: value if key in DATA else _closed_under(key, value) for key, value in schema.items()}
    if "properties" in result and "additionalProperties" not in result:
        result["additionalProperties"] = False
    return result


def _closed_under(key: str, value: Any) -> Any:
    if key in NAME_MAPS and isinstance(value, Mapping):
        return {name: _closed(item) for name, item in value.items()}
    return _closed(value)
