"""The grammars of an engine: compiled in threads beside the step loop, kept for the next request, given out as guides.

The vocabulary is read when the first one comes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Final

from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.structured_output.grammar import (
    Grammar,
    GrammarEngine,
    GrammarError,
    Library,
    Matcher,
    Vocabulary,
    refused,
)
from pagoda.common.engine.structured_output.guidance import Guidance
from pagoda.common.engine.structured_output.token_mask import TokenMaskState, settle

MAX_GRAMMARS: Final = 256
"""Compiled grammars that are kept, those used last."""

MAX_KEPT_CHARS: Final = 8 << 20
"""Their texts, together; what a compiled grammar weighs grows with its text."""

THREADS: Final = 2
STACK_BYTES: Final = 64 << 20
"""Of a compiling thread: the libraries recurse along a grammar. Only what it touches is memory."""


class Structured:
    """Makes guides. `make_vocabulary`: called once, in a thread; raises RequestError. Safe to use from threads."""

    def __init__(self, make_vocabulary: Callable[[], Vocabulary]) -> None:
        self._make_vocabulary = make_vocabulary
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._libraries: dict[GrammarEngine, Library] = {}
        self._compiled: OrderedDict[Grammar, Matcher] = OrderedDict()
        self._chars = 0

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(THREADS, "pagoda-grammar")

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return self._make_vocabulary()

    def begin(self, request: EngineRequest) -> Future[TokenMaskState]:
        """The guide of a request with a grammar or thinking, soon. Its future raises RequestError."""
        usual = threading.stack_size(STACK_BYTES)
        try:
            return self._pool.submit(self.guide, request)
        finally:
            threading.stack_size(usual)

    def guide(self, request: EngineRequest) -> TokenMaskState:
        """The guide of a request, now. Raises RequestError naming the field."""
        try:
            library, matcher = (None, None) if request.grammar is None else self.matcher(request.grammar)
            with self._loading:
                vocabulary = self._vocabulary
            guide = TokenMaskState(
                request.rules,
                len(vocabulary),
                vocabulary.ends,
                library=library,
                matcher=matcher,
                thinking=request.thinking,
            )
            settle([(guide, ())])
        except GrammarError as error:
            raise refused(error) from None
        if guide.error is not None:
            raise refused(guide.error)
        return guide

    def matcher(self, grammar: Grammar) -> tuple[Library, Matcher]:
        """A new answer in a grammar. Raises GrammarError or RequestError."""
        with self._loading:
            library = self._libraries.get(grammar.engine)
            if library is None:
                library = self._libraries[grammar.engine] = load(grammar.engine, self._vocabulary)
        with self._lock:
            kept = self._compiled.get(grammar)
            if kept is not None:
                self._compiled.move_to_end(grammar)
                return library, kept.copy()
        compiled = library.compile(grammar.text)
        with self._lock:
            if grammar not in self._compiled:
                self._compiled[grammar] = compiled
                self._chars += len(grammar.text)
            while len(self._compiled) > MAX_GRAMMARS or self._chars > MAX_KEPT_CHARS:
                self._chars -= len(self._compiled.popitem(last=False)[0].text)
        return library, compiled.copy()


def load(engine: GrammarEngine, vocabulary: Vocabulary) -> Library:
    """A library for a vocabulary. Raises GrammarError when it is not installed."""
    if engine == "xgrammar":
        from pagoda.common.engine.structured_output.xgrammar import Xgrammar

        return Xgrammar(vocabulary)
    return Guidance(vocabulary)
