"""Compiles grammars in threads beside the step loop, caches them, and makes mask states of requests.

The vocabulary is read when the first grammar is needed.
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
from pagoda.common.engine.structured_output.token_mask import TokenMaskState, refresh_masks

MAX_GRAMMARS: Final = 256
"""Compiled grammars in the cache, least recently used out first."""

MAX_CACHED_CHARS: Final = 8 << 20
"""Length of their texts in total; the size of a compiled grammar grows with its text."""

THREADS: Final = 2
STACK_BYTES: Final = 64 << 20
"""Stack of a compiling thread: the libraries recurse along a grammar. Only touched pages use memory."""


class Structured:
    """Makes mask states. Thread-safe."""

    def __init__(self, make_vocabulary: Callable[[], Vocabulary]) -> None:
        """`make_vocabulary`: called once, in a thread; raises RequestError."""
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

    def submit(self, request: EngineRequest) -> Future[TokenMaskState]:
        """Make the mask state of a request in a thread. The future raises RequestError."""
        usual = threading.stack_size(STACK_BYTES)
        try:
            return self._pool.submit(self.mask_state, request)
        finally:
            threading.stack_size(usual)

    def mask_state(self, request: EngineRequest) -> TokenMaskState:
        """Return the mask state of a request. Raises RequestError naming the field."""
        try:
            library, matcher = (None, None) if request.grammar is None else self.matcher(request.grammar)
            with self._loading:
                vocabulary = self._vocabulary
            state = TokenMaskState(
                request.rules,
                len(vocabulary),
                vocabulary.ends,
                library=library,
                matcher=matcher,
                thinking=request.thinking,
            )
            refresh_masks([(state, ())])
        except GrammarError as error:
            raise refused(error) from None
        if state.error is not None:
            raise refused(state.error)
        return state

    def matcher(self, grammar: Grammar) -> tuple[Library, Matcher]:
        """Return a matcher at the beginning of a grammar, from the cache if possible.

        Raises GrammarError or RequestError.
        """
        with self._loading:
            library = self._libraries.get(grammar.engine)
            if library is None:
                library = self._libraries[grammar.engine] = load_library(grammar.engine, self._vocabulary)
        with self._lock:
            cached = self._compiled.get(grammar)
            if cached is not None:
                self._compiled.move_to_end(grammar)
                return library, cached.copy()
        compiled = library.compile(grammar.text)
        with self._lock:
            if grammar not in self._compiled:
                self._compiled[grammar] = compiled
                self._chars += len(grammar.text)
            while len(self._compiled) > MAX_GRAMMARS or self._chars > MAX_CACHED_CHARS:
                self._chars -= len(self._compiled.popitem(last=False)[0].text)
        return library, compiled.copy()


def load_library(engine: GrammarEngine, vocabulary: Vocabulary) -> Library:
    """Return a library for a vocabulary. Raises GrammarError if it is not installed."""
    if engine == "xgrammar":
        from pagoda.common.engine.structured_output.xgrammar import Xgrammar

        return Xgrammar(vocabulary)
    return Guidance(vocabulary)
