"""Compiles grammars in threads beside the step loop, keeps them, and makes mask states of requests.

The vocabulary is read when the first grammar is needed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import cached_property
from typing import Any, Final

import numpy as np

from pagoda.common.engine.fairness.shares import Shares
from pagoda.common.engine.fairness.turns import TurnThreads
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.structured_output.grammar import (
    Grammar,
    GrammarEngine,
    GrammarError,
    Library,
    Vocabulary,
    refused,
)
from pagoda.common.engine.structured_output.guidance import Guidance
from pagoda.common.engine.structured_output.memory import (
    MAX_CACHED_BYTES,
    CompiledGrammar,
    GrammarMemory,
    ResidentMemory,
    give_back,
)
from pagoda.common.engine.structured_output.token_mask import TokenMaskState, refresh_masks

MAX_GRAMMARS: Final = 256
"""Compiled grammars that are kept, least recently used out first."""

THREADS: Final = 2
STACK_BYTES: Final = 64 << 20
"""Stack of a compiling thread: the libraries recurse along a grammar. Only touched pages use memory."""


class Structured:
    """Makes mask states. Thread-safe."""

    def __init__(self, make_vocabulary: Callable[[], Vocabulary], *, max_cached_bytes: int = MAX_CACHED_BYTES) -> None:
        """`make_vocabulary`: called once, in a thread; raises RequestError."""
        self._make_vocabulary = make_vocabulary
        self._lock = threading.RLock()
        self._loading = threading.Lock()
        self._libraries: dict[GrammarEngine, Library] = {}
        self._kept: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._shares: Shares[str] = Shares(MAX_GRAMMARS, max_cached_bytes)
        self._counted: dict[Grammar, int] = {}  # bytes of each kept grammar, as in `_shares`
        self._resident = ResidentMemory()
        self._memory = GrammarMemory(self._resident, lambda: self._threads.submit("", give_back))

    @cached_property
    def _threads(self) -> TurnThreads[Any]:
        return TurnThreads(THREADS, "pagoda-grammar", STACK_BYTES)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return self._make_vocabulary()

    def submit(self, request: EngineRequest) -> Future[TokenMaskState]:
        """Make the mask state of a request in a thread, the keys in turn. The future raises RequestError."""
        return self._threads.submit(request.owner, lambda: self.mask_state(request))

    def mask_state(self, request: EngineRequest) -> TokenMaskState:
        """Return the mask state of a request. Raises RequestError naming the field."""
        try:
            with self._loading:
                vocabulary = self._vocabulary
            compiled = None if request.grammar is None else self.compiled(request.grammar, request.owner)
            state = TokenMaskState(
                request.rules, len(vocabulary), vocabulary.ends, compiled=compiled, thinking=request.thinking
            )
            if compiled is not None and state.consults_grammar:
                state.refresh(compiled.first, ())
            else:
                refresh_masks([(state, ())])
        except GrammarError as error:
            raise refused(error) from None
        if state.error is not None:
            state.release()
            raise refused(state.error)
        return state

    def compiled(self, grammar: Grammar, owner: str = "") -> CompiledGrammar:
        """Return a compiled grammar, from those kept if possible. `owner`: the key that asks for it.

        It is in use until its `leave` is called. Raises GrammarError or RequestError.
        """
        with self._loading:
            library = self._libraries.get(grammar.engine)
            if library is None:
                library = self._libraries[grammar.engine] = load_library(grammar.engine, self._vocabulary)
        with self._lock:
            kept = self._kept.get(grammar)
            if kept is not None:
                self._kept.move_to_end(grammar)
                kept.answers += 1
                return kept
        before = self._resident.bytes
        matcher = library.compile(grammar.text)
        first = np.zeros((1, -(-len(self._vocabulary) // 32)), np.uint32)
        library.fill([matcher], first)
        size = max(self._resident.bytes - before, len(grammar.text))
        compiled = CompiledGrammar(
            library=library,
            matcher=matcher,
            first=first[0],
            owner=owner,
            size=size,
            changed=lambda each: self._recount(grammar, each),
            lock=self._lock,
        )
        self._memory.add(compiled)
        if matcher.error is not None:  # what fails is not kept
            raise GrammarError(matcher.error)
        compiled = self._keep(grammar, compiled)
        self._memory.refuse_largest()
        return compiled

    def _keep(self, grammar: Grammar, compiled: CompiledGrammar) -> CompiledGrammar:
        """Return the one that is kept: another thread may have compiled the same in the meantime."""
        with self._lock:
            if (other := self._kept.get(grammar)) is not None:
                other.answers += 1
                self._memory.release(compiled)
                return other
            self._kept[grammar], self._counted[grammar] = compiled, compiled.size
            self._shares.add(compiled.owner, count=1, size=compiled.size)
            self._make_room()
            return compiled

    def _recount(self, grammar: Grammar, compiled: CompiledGrammar) -> None:
        """Count what a grammar has grown by; one that failed at an answer is not kept."""
        with self._lock:
            if self._kept.get(grammar) is compiled:
                if compiled.is_spoiled:
                    self._forget(grammar)
                else:
                    self._shares.add(compiled.owner, size=compiled.size - self._counted[grammar])
                    self._counted[grammar] = compiled.size
                    self._make_room()
            elif not compiled.answers:
                self._memory.release(compiled)
                return
        self._memory.refuse_largest()

    def _make_room(self) -> None:
        """Forget grammars of the key that uses most, those that were not used for longest."""
        while (owner := self._shares.over()) is not None:
            self._forget(next(grammar for grammar, each in self._kept.items() if each.owner == owner))

    def _forget(self, grammar: Grammar) -> None:
        """Keep a grammar no longer than its requests run."""
        compiled = self._kept.pop(grammar)
        self._shares.add(compiled.owner, count=-1, size=-self._counted.pop(grammar))
        if not compiled.answers:
            self._memory.release(compiled)


def load_library(engine: GrammarEngine, vocabulary: Vocabulary) -> Library:
    """Return a library for a vocabulary. Raises GrammarError if it is not installed."""
    if engine == "xgrammar":
        from pagoda.common.engine.structured_output.xgrammar import Xgrammar

        return Xgrammar(vocabulary)
    return Guidance(vocabulary)
