"""xgrammar as a library of grammars, for those who choose it. It is imported when the first grammar comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import msgspec
import numpy as np

from pagoda.common.structured.matcher import Bits, GrammarError, Matcher, one_line
from pagoda.common.structured.refusal import not_installed
from pagoda.common.structured.vocabulary import Vocabulary
from pagoda.common.structured.xgrammar_text import Source

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
