"""llguidance as a grammar library, imported when the first grammar is compiled; requests as its grammar texts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

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
from pagoda.common.engine.structured_output.schemas import CLOSED, OPTIONS, Closing, resolved
from pagoda.common.engine.structured_output.structural_tags import SpecialTokens, TagGrammar, choice_grammar, tag_format
from pagoda.common.sampling_params import StructuredOutputsParams

MAX_THREADS: Final = 8
"""Threads that compute masks; a mask takes about 50 us, so more threads only wait for each other."""

MAX_ITEMS_IN_ROW: Final = 10_000
"""Parser items per position of an answer: a schema of 1,000 optional properties has 4,000."""

_MESSAGES: Final = {
    "NoExtension": "the answer is complete, nothing can follow",
    "NoExtensionBias": "no text fits the grammar",
    "ParserTooComplex": "the grammar leaves too many possibilities open; make it simpler",
    "LexerTooComplex": "a pattern of the grammar is too complex; make it simpler",
}
"""Messages in place of the library's internal ones."""


def import_llguidance() -> Any:
    """Import the package. Raises GrammarError with the command that installs it."""
    try:
        import llguidance
    except ImportError:
        raise GrammarError(not_installed("guidance")) from None
    return llguidance


class GuidanceMatcher(Matcher):
    """A matcher of llguidance."""

    def __init__(self, inner: Any, ends: frozenset[int]) -> None:
        self.inner = inner
        self._ends = ends

    def accept(self, token: int) -> bool:
        fits = self.inner.is_accepting() if token in self._ends else self.inner.validate_tokens([token]) == 1
        return bool(fits and self.inner.consume_token(token))

    def rollback(self, count: int) -> None:
        if count:
            self.inner.rollback(count)

    def copy(self) -> GuidanceMatcher:
        return GuidanceMatcher(self.inner.deep_copy(), self._ends)

    @property
    def error(self) -> str | None:
        if not self.inner.is_error():
            return None
        message = one_line(self.inner.get_error())
        return _MESSAGES.get(message) or _MESSAGES.get(self.inner.stop_reason()) or message


class Guidance(Library):
    """llguidance with one vocabulary, which takes about a second to read if it is large."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        package = import_llguidance()
        self._make = package.LLMatcher
        self._limits = package.LLParserLimits(max_items_in_row=MAX_ITEMS_IN_ROW, verbose_errors=False)
        wrapper = package.TokenizerWrapper(_TokenizerAdapter(vocabulary))
        self._tokenizer = package.LLTokenizer(wrapper, n_vocab=len(vocabulary), eos_token=list(vocabulary.ends))
        self._ends = frozenset(vocabulary.ends)
        self._executor = package.LLExecutor(min(MAX_THREADS, os.cpu_count() or 1))

    def resolved(self, text: str) -> ResolvedGrammar:
        return resolved(text, lambda native: self._matcher(native).error)

    def compile(self, text: str) -> GuidanceMatcher:
        matcher = self._matcher(self.resolved(text).text)
        if matcher.error is not None:
            raise GrammarError(matcher.error)
        return matcher

    def _matcher(self, text: str) -> GuidanceMatcher:
        return GuidanceMatcher(self._make(self._tokenizer, text, log_level=0, limits=self._limits), self._ends)

    def fill(self, matchers: Sequence[Matcher], bits: Bits) -> None:
        inner = [cast(GuidanceMatcher, matcher).inner for matcher in matchers]
        if len(inner) == 1:
            inner[0].unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            return
        indexed = [(matcher, index) for index, matcher in enumerate(inner)]
        self._executor.unsafe_compute_mask_ptr(indexed, bits.ctypes.data, bits.shape[1] * 4, len(bits))


class _TokenizerAdapter:
    """A vocabulary with the attributes that llguidance reads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.ends[0]
        self.bos_token_id = None
        self.tokens = vocabulary.tokens
        self.special_token_ids = sorted(vocabulary.special)
        self._encode = vocabulary.encode

    def __call__(self, text: bytes | str) -> list[int]:
        """Return the token ids of a text; invalid UTF-8 becomes replacement characters."""
        return self._encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)


# StructuredOutputsParams -> the text that llguidance compiles.

MAX_EBNF_CHARS: Final = 1 << 18
"""What the converter, in Python, reads in a second or two; no timeout applies to it."""


def guidance_text(params: StructuredOutputsParams, special: SpecialTokens, *, closing: Closing = "no") -> str:
    """Return the grammar of an answer, whose schemas are to be resolved. Raises RequestError.

    `special`: text of each special token -> its id. `closing`: of the objects of the answer's schema, unless `params`
    say so for all.
    """
    if params.disable_additional_properties:
        closing = "yes"
    if params.json is not None:
        return _grammars({"json_schema": _with_options(json_schema(params.json), params), CLOSED: closing})
    if params.json_object:
        return _grammars({"json_schema": _with_options(ANY_OBJECT, params)})
    if params.choice:
        return _grammars({"lark_grammar": choice_grammar(params.choice)})
    if params.regex is not None:
        return _grammars({"lark_grammar": f"start: /{_in_lark(whole_pattern(params.regex))}/"})
    if params.grammar is not None:
        return _grammars({"lark_grammar": _lark_of(params.grammar)})
    assert params.structural_tag is not None, "one of them is set"
    grammar = TagGrammar(special, lambda schema: _with_options(json_schema(schema), params), _in_lark)
    main = grammar.text(tag_format(params.structural_tag))
    others: list[dict[str, Any]] = [
        {"name": name, "lark_grammar": _lark_of(text)} for name, text in grammar.others.items()
    ]
    others += [
        {"name": name, "json_schema": schema, CLOSED: "yes" if params.disable_additional_properties else "no"}
        for name, schema in grammar.schemas.items()
    ]
    return _grammars({"name": "main", "lark_grammar": main}, *others)


def _grammars(*grammars: dict[str, Any]) -> str:
    return json_text({"grammars": grammars})


def _with_options(schema: Mapping[str, Any], params: StructuredOutputsParams) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if params.disable_any_whitespace:
        options["whitespace_flexible"] = False
    if params.whitespace_pattern is not None:
        options["whitespace_pattern"] = params.whitespace_pattern
    if not options and OPTIONS not in schema:
        options["whitespace_pattern"] = rf"[ \n\r\t]{{1,{MAX_WHITESPACE}}}"
    return {**schema, OPTIONS: options} if options else dict(schema)


def whole_pattern(pattern: str) -> str:
    """Return the pattern without anchors at its ends: it matches the whole answer anyway."""
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
    """Return a grammar in Lark, converted from EBNF (GBNF) if necessary."""
    if "::=" not in text:
        return text
    if len(text) > MAX_EBNF_CHARS:
        raise refused(f"the EBNF grammar has {len(text)} characters; at most {MAX_EBNF_CHARS} are allowed")
    try:
        import_llguidance()
        from llguidance.gbnf_to_lark import any_to_lark

        # Without blank lines: the converter takes hours for a million of them.
        return str(any_to_lark("\n".join(line for line in text.split("\n") if line.strip())))
    except GrammarError as error:
        raise refused(error) from None
    except Exception as error:  # the converter's errors have no class in common
        raise refused(f"the EBNF grammar cannot be read: {one_line(str(error))}") from None
