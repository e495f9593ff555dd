"""llguidance as a library of grammars. It is imported when the first grammar comes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from pagoda.common.engine.structured_output.grammar import (
    Bits,
    GrammarError,
    Matcher,
    Vocabulary,
    closed,
    json_schema,
    not_installed,
    one_line,
    refused,
)
from pagoda.common.engine.structured_output.lark import Special, TagGrammar, choices
from pagoda.common.engine.structured_output.structural_tags import tag_format
from pagoda.common.sampling_params import StructuredOutputsParams

MAX_THREADS: Final = 8
"""Threads that fill masks at once; a mask takes some 50 us, so that more only wait for each other."""

MAX_ITEMS_IN_ROW: Final = 10_000
"""Open possibilities at one place of an answer: a schema of 1,000 optional properties has 4,000."""

_WORDS: Final = {
    "NoExtension": "the answer is complete, nothing can follow",
    "NoExtensionBias": "no text fits the grammar",
    "ParserTooComplex": "the grammar leaves too many possibilities open; make it simpler",
    "LexerTooComplex": "a pattern of the grammar is too complex; make it simpler",
}
"""Why an answer cannot go on, where the library's own words are of its inside."""


def import_llguidance() -> Any:
    """The package. Raises GrammarError with the command that installs it."""
    try:
        import llguidance
    except ImportError:
        raise GrammarError(not_installed("guidance")) from None
    return llguidance


class GuidanceMatcher:
    """Implements matcher.Matcher."""

    def __init__(self, inner: Any, ends: frozenset[int]) -> None:
        self.inner = inner
        self._ends = ends

    def accept(self, token: int) -> bool:
        """See Matcher."""
        fits = self.inner.is_accepting() if token in self._ends else self.inner.validate_tokens([token]) == 1
        return bool(fits and self.inner.consume_token(token))

    def rollback(self, count: int) -> None:
        """See Matcher."""
        if count:
            self.inner.rollback(count)

    def copy(self) -> GuidanceMatcher:
        """See Matcher."""
        return GuidanceMatcher(self.inner.deep_copy(), self._ends)

    @property
    def error(self) -> str | None:
        """See Matcher."""
        if not self.inner.is_error():
            return None
        said = one_line(self.inner.get_error())
        return _WORDS.get(said) or _WORDS.get(self.inner.stop_reason()) or said


class Guidance:
    """Implements matcher.Library. Making it walks the vocabulary: a second or so for a large one."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        package = import_llguidance()
        self._make = package.LLMatcher
        self._limits = package.LLParserLimits(max_items_in_row=MAX_ITEMS_IN_ROW, verbose_errors=False)
        wrapper = package.TokenizerWrapper(_Spelling(vocabulary))
        self._tokenizer = package.LLTokenizer(wrapper, n_vocab=len(vocabulary), eos_token=list(vocabulary.ends))
        self._ends = frozenset(vocabulary.ends)
        self._executor = package.LLExecutor(min(MAX_THREADS, os.cpu_count() or 1))

    def compile(self, text: str) -> GuidanceMatcher:
        """See Library."""
        inner = self._make(self._tokenizer, text, log_level=0, limits=self._limits)
        matcher = GuidanceMatcher(inner, self._ends)
        if matcher.error is not None:
            raise GrammarError(matcher.error)
        return matcher

    def fill(self, matchers: Sequence[Matcher], bits: Bits) -> None:
        """See Library."""
        inner = [cast(GuidanceMatcher, matcher).inner for matcher in matchers]
        if len(inner) == 1:
            inner[0].unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            return
        places = [(matcher, index) for index, matcher in enumerate(inner)]
        self._executor.unsafe_compute_mask_ptr(places, bits.ctypes.data, bits.shape[1] * 4, len(bits))


class _Spelling:
    """A vocabulary under the names that llguidance asks for."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.ends[0]
        self.bos_token_id = None
        self.tokens = vocabulary.tokens
        self.special_token_ids = sorted(vocabulary.special)
        self._encode = vocabulary.encode

    def __call__(self, text: bytes | str) -> list[int]:
        """The token ids of a text; bytes that are no UTF-8 become what they cannot be mistaken for."""
        return self._encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)


# What a request asks of its answer's form -> the text that llguidance compiles.

ANY_OBJECT: Final = {"type": "object"}

MAX_EBNF_CHARS: Final = 1 << 18
"""What a converter in Python reads in a second or two: before that, nothing watches its time."""


def guidance_text(asked: StructuredOutputsParams, special: Special) -> str:
    """The grammar of an answer. `special`: text of each special token -> its id. Raises RequestError."""
    if asked.json is not None:
        return _grammars({"json_schema": _with_options(json_schema(asked.json), asked)})
    if asked.json_object:
        return _grammars({"json_schema": _with_options(ANY_OBJECT, asked)})
    if asked.choice:
        return _grammars({"lark_grammar": choices(asked.choice)})
    if asked.regex is not None:
        return _grammars({"lark_grammar": f"start: /{_in_lark(whole_pattern(asked.regex))}/"})
    if asked.grammar is not None:
        return _grammars({"lark_grammar": _lark_of(asked.grammar)})
    assert asked.structural_tag is not None, "one of them is set"
    found = TagGrammar(special, lambda schema: _with_options(json_schema(schema), asked), _in_lark)
    main = found.text(tag_format(asked.structural_tag))
    others = [{"name": name, "lark_grammar": _lark_of(text)} for name, text in found.others.items()]
    return _grammars({"name": "main", "lark_grammar": main}, *others)


def _grammars(*grammars: dict[str, Any]) -> str:
    try:
        return msgspec.json.encode({"grammars": grammars}).decode()
    except (RecursionError, TypeError, ValueError) as error:
        raise refused(f"the schema is nested too deeply or holds what JSON cannot ({error})") from None


def _with_options(schema: Mapping[str, Any], asked: StructuredOutputsParams) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if asked.disable_any_whitespace:
        options["whitespace_flexible"] = False
    if asked.whitespace_pattern is not None:
        options["whitespace_pattern"] = asked.whitespace_pattern
    if asked.disable_additional_properties:
        schema = closed(schema)
    return {**schema, "x-guidance": options} if options else dict(schema)


def whole_pattern(pattern: str) -> str:
    """A pattern is of the whole answer anyway; anchors at its ends are dropped."""
    pattern = pattern.removeprefix("^")
    bare = pattern.removesuffix("$")
    escapes = len(bare) - len(bare.rstrip("\\"))
    return bare if escapes % 2 == 0 else pattern


def _in_lark(pattern: str) -> str:
    try:
        escaped: str = import_llguidance().regex_to_lark(pattern)
    except GrammarError as error:
        raise refused(error) from None
    return escaped


def _lark_of(text: str) -> str:
    """Lark as it is; EBNF (GBNF) as Lark."""
    if "::=" not in text:
        return text
    if len(text) > MAX_EBNF_CHARS:
        raise refused(f"the EBNF grammar has {len(text)} characters; at most {MAX_EBNF_CHARS} are allowed")
    try:
        import_llguidance()
        from llguidance.gbnf_to_lark import any_to_lark

        # Blank lines go first: the converter takes hours over a million of them.
        return str(any_to_lark("\n".join(line for line in text.split("\n") if line.strip())))
    except GrammarError as error:
        raise refused(error) from None
    except Exception as error:  # the converter's errors have no class in common
        raise refused(f"the EBNF grammar cannot be read: {one_line(str(error))}") from None
