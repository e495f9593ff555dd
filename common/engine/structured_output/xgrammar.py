"""xgrammar as a library of grammars, for those who choose it. It is imported when the first grammar comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, cast

import msgspec
import numpy as np

from pagoda.common.engine.structured_output.grammar import (
    Bits,
    GrammarError,
    Matcher,
    Vocabulary,
    json_schema,
    not_installed,
    one_line,
    refused,
)
from pagoda.common.engine.structured_output.lark import quoted
from pagoda.common.engine.structured_output.structural_tags import tag_format
from pagoda.common.sampling_params import StructuredOutputsParams

# What a request asks of its answer's form -> the text that `xgrammar_library` compiles: kind, text, switches.

Kind = Literal["json_schema", "regex", "grammar", "structural_tag"]

ANY_OBJECT: Final = {"type": "object"}


class Source(msgspec.Struct, frozen=True):
    """A grammar as xgrammar takes it. `closed`: objects hold no properties but those of their schema."""

    kind: Kind
    text: str
    any_whitespace: bool = True
    closed: bool = False


def xgrammar_text(asked: StructuredOutputsParams) -> str:
    """The grammar of an answer. Raises RequestError."""
    if asked.whitespace_pattern is not None:
        raise refused("whitespace_pattern needs a server whose structured output runs on guidance; leave it out")
    kind, text = _source(asked)
    any_whitespace, closed = not asked.disable_any_whitespace, asked.disable_additional_properties
    return msgspec.json.encode(Source(kind, text, any_whitespace, closed)).decode()


def _source(asked: StructuredOutputsParams) -> tuple[Kind, str]:
    if asked.json is not None:
        return "json_schema", _json(json_schema(asked.json))
    if asked.json_object:
        return "json_schema", _json(ANY_OBJECT)
    if asked.choice:
        return "grammar", "root ::= " + " | ".join(map(quoted, asked.choice))
    if asked.regex is not None:
        return "regex", asked.regex
    if asked.grammar is not None:
        if "::=" not in asked.grammar:
            raise refused("this server reads grammars in EBNF (root ::= ...); Lark needs the guidance backend")
        return "grammar", asked.grammar
    assert asked.structural_tag is not None, "one of them is set"
    return "structural_tag", _json({"type": "structural_tag", "format": tag_format(asked.structural_tag)})


def _json(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (RecursionError, TypeError, ValueError) as error:
        raise refused(f"the schema is nested too deeply or holds what JSON cannot ({error})") from None


MAX_THREADS: Final = 4
CACHE_BYTES: Final = 256 << 20


class XgrammarMatcher:
    """Implements matcher.Matcher."""

    error: str | None = None

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def accept(self, token: int) -> bool:
        """See Matcher."""
        return bool(self.inner.accept_token(token))

    def rollback(self, count: int) -> None:
        """See Matcher."""
        if count:
            self.inner.rollback(count)

    def copy(self) -> XgrammarMatcher:
        """See Matcher."""
        return XgrammarMatcher(self.inner.fork())


class Xgrammar:
    """Implements matcher.Library."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        try:
            import xgrammar
        except ImportError:
            raise GrammarError(not_installed("xgrammar")) from None
        # A token of no bytes is one that no text spells.
        spelt = [b"" if token in vocabulary.special else each for token, each in enumerate(vocabulary.tokens)]
        info = xgrammar.TokenizerInfo(spelt, vocab_size=len(vocabulary), stop_token_ids=list(vocabulary.ends))
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=MAX_THREADS, cache_limit_bytes=CACHE_BYTES)
        self._make = xgrammar.GrammarMatcher

    def compile(self, text: str) -> XgrammarMatcher:
        """See Library."""
        source = msgspec.json.decode(text, type=Source)
        try:
            return XgrammarMatcher(self._make(self._compiled(source)))
        except Exception as error:  # its errors have no class in common
            raise GrammarError(one_line(str(error))) from None

    def _compiled(self, source: Source) -> Any:
        match source.kind:
            case "json_schema":
                return self._compiler.compile_json_schema(
                    source.text, any_whitespace=source.any_whitespace, strict_mode=source.closed
                )
            case "regex":
                return self._compiler.compile_regex(source.text)
            case "structural_tag":
                return self._compiler.compile_structural_tag(source.text)
            case _:
                return self._compiler.compile_grammar(source.text)

    def fill(self, matchers: Sequence[Matcher], bits: Bits) -> None:
        """See Library."""
        bits.fill(0xFFFFFFFF)  # it leaves a row alone where every token may come
        signed = bits.view(np.int32)
        for index, matcher in enumerate(matchers):
            cast(XgrammarMatcher, matcher).inner.fill_next_token_bitmask(signed, index)
