"""xgrammar as a grammar library, imported when the first grammar is compiled; requests as its grammar texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, cast

import msgspec
import numpy as np

from pagoda.common.engine.structured_output.grammar import (
    ANY_OBJECT,
    MAX_WHITESPACE,
    Bits,
    GrammarError,
    Library,
    Matcher,
    ResolvedGrammar,
    Vocabulary,
    json_schema,
    json_text,
    not_installed,
    one_line,
    refused,
)
from pagoda.common.engine.structured_output.structural_tags import quoted, tag_format
from pagoda.common.sampling_params import StructuredOutputsParams

MAX_THREADS: Final = 4
CACHE_BYTES: Final = 256 << 20

Kind = Literal["json_schema", "regex", "grammar", "structural_tag"]


class Source(msgspec.Struct, frozen=True):
    """A grammar as xgrammar compiles it."""

    kind: Kind
    text: str
    any_whitespace: bool = True
    closed: bool = False  # objects have no properties beyond those of their schema


class XgrammarMatcher(Matcher):
    """A matcher of xgrammar."""

    error: str | None = None

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def accept(self, token: int) -> bool:
        return bool(self.inner.accept_token(token))

    def rollback(self, count: int) -> None:
        if count:
            self.inner.rollback(count)

    def copy(self) -> XgrammarMatcher:
        return XgrammarMatcher(self.inner.fork())


class Xgrammar(Library):
    """xgrammar with one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        try:
            import xgrammar
        except ImportError:
            raise GrammarError(not_installed("xgrammar")) from None
        # Tokens that no text spells are b"".
        tokens = [b"" if token in vocabulary.special else text for token, text in enumerate(vocabulary.tokens)]
        info = xgrammar.TokenizerInfo(tokens, vocab_size=len(vocabulary), stop_token_ids=list(vocabulary.ends))
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=MAX_THREADS, cache_limit_bytes=CACHE_BYTES)
        self._make = xgrammar.GrammarMatcher

    def resolved(self, text: str) -> ResolvedGrammar:
        return ResolvedGrammar(text)

    def compile(self, text: str) -> XgrammarMatcher:
        source = msgspec.json.decode(text, type=Source)
        try:
            return XgrammarMatcher(self._make(self._compiled(source)))
        except Exception as error:  # The library's errors share no class.
            raise GrammarError(one_line(str(error))) from None

    def _compiled(self, source: Source) -> Any:
        match source.kind:
            case "json_schema":
                return self._compiler.compile_json_schema(
                    source.text,
                    any_whitespace=source.any_whitespace,
                    max_whitespace_cnt=MAX_WHITESPACE if source.any_whitespace else None,
                    strict_mode=source.closed,
                )
            case "regex":
                return self._compiler.compile_regex(source.text)
            case "structural_tag":
                return self._compiler.compile_structural_tag(source.text)
            case _:
                return self._compiler.compile_grammar(source.text)

    def fill(self, matchers: Sequence[Matcher], bits: Bits) -> None:
        bits.fill(0xFFFFFFFF)  # rows that allow every token are not written
        signed = bits.view(np.int32)
        for index, matcher in enumerate(matchers):
            cast(XgrammarMatcher, matcher).inner.fill_next_token_bitmask(signed, index)


# StructuredOutputsParams -> the text that `Xgrammar.compile` reads.


def xgrammar_text(params: StructuredOutputsParams) -> str:
    """Return the grammar of an answer. Raises RequestError."""
    if params.whitespace_pattern is not None:
        raise refused("whitespace_pattern needs a server whose structured output runs on guidance; leave it out")
    kind, text = _source(params)
    any_whitespace = not params.disable_any_whitespace
    closed = params.disable_additional_properties
    return msgspec.json.encode(Source(kind, text, any_whitespace, closed)).decode()


def _source(params: StructuredOutputsParams) -> tuple[Kind, str]:
    if params.json is not None:
        return "json_schema", json_text(json_schema(params.json))
    if params.json_object:
        return "json_schema", json_text(ANY_OBJECT)
    if params.choice:
        return "grammar", "root ::= " + " | ".join(map(quoted, params.choice))
    if params.regex is not None:
        return "regex", params.regex
    if params.grammar is not None:
        if "::=" not in params.grammar:
            raise refused("this server reads grammars in EBNF (root ::= ...); Lark needs the guidance backend")
        return "grammar", params.grammar
    assert params.structural_tag is not None, "one of them is set"
    return "structural_tag", json_text({"type": "structural_tag", "format": tag_format(params.structural_tag)})
