"""Compiles grammars in threads beside the step loop, keeps them, and makes mask states of requests.

The vocabulary is read when the first grammar is needed.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any, Final, Generic, TypeVar

import numpy as np

from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.scheduling.shares import Shares
from pagoda.common.engine.structured_output.grammar import (
    Grammar,
    GrammarEngine,
    GrammarError,
    Library,
    ResolvedGrammar,
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
ResultT = TypeVar("ResultT")

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

    def resolved(self, grammar: Grammar) -> ResolvedGrammar:
        """Return a grammar whose schemas its library takes. Raises RequestError."""
        try:
            return self._library(grammar.engine).resolved(grammar.text)
        except GrammarError as error:
            raise refused(error) from None

    def _library(self, engine: GrammarEngine) -> Library:
        with self._loading:
            library = self._libraries.get(engine)
            if library is None:
                library = self._libraries[engine] = load_library(engine, self._vocabulary)
            return library

    def compiled(self, grammar: Grammar, owner: str = "") -> CompiledGrammar:
        """Return a compiled grammar, from those kept if possible. `owner`: the key that asks for it.

        It is in use until its `leave` is called. Raises GrammarError or RequestError.
        """
        library = self._library(grammar.engine)
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
        if matcher.error is not None:
            raise GrammarError(matcher.error)
        size = max(self._resident.bytes - before, len(grammar.text))
        compiled = CompiledGrammar(
            library=library,
            matcher=matcher,
            first=first[0],
            owner=owner,
            size=size,
            changed=lambda entry: self._recount(grammar, entry),
            lock=self._lock,
        )
        self._memory.add(compiled)
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
            self._kept[grammar] = compiled
            self._counted[grammar] = compiled.size
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
            self._forget(next(grammar for grammar, entry in self._kept.items() if entry.owner == owner))

    def _forget(self, grammar: Grammar) -> None:
        """Keep a grammar no longer than its requests run."""
        compiled = self._kept.pop(grammar)
        self._shares.add(compiled.owner, count=-1, size=-self._counted.pop(grammar))
        if not compiled.answers:
            self._memory.release(compiled)


class TurnThreads(Generic[ResultT]):
    """Runs calls in a few threads, the keys in turn, the calls of one key in order. Thread-safe.

    One thread is kept free of the calls of any one key ("", which is no key, may use all). Threads start when they are
    first needed and have `stack_bytes` of stack.
    """

    def __init__(self, threads: int, name: str, stack_bytes: int) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self._most_of_key = max(1, threads - 1)
        self._stack_bytes = stack_bytes
        self._lock = threading.Lock()
        self._lines: OrderedDict[str, deque[tuple[Future[ResultT], Callable[[], ResultT]]]] = OrderedDict()
        self._running: Counter[str] = Counter()

    def submit(self, owner: str, call: Callable[[], ResultT]) -> Future[ResultT]:
        """Run `call` once it is the owner's turn. The future can be cancelled until then."""
        future: Future[ResultT] = Future()
        with self._lock:
            self._lines.setdefault(owner, deque()).append((future, call))
        usual = threading.stack_size(self._stack_bytes)
        try:
            self._pool.submit(self._serve)
        finally:
            threading.stack_size(usual)
        return future

    def _serve(self) -> None:
        """Run calls while there are some that may; those of a key that may not are left to the thread that runs one."""
        while (entry := self._next()) is not None:
            owner, future, call = entry
            try:
                _run(future, call)
            finally:
                with self._lock:
                    self._running[owner] -= 1
            del entry, future, call  # their results are not kept while the next call runs

    def _next(self) -> tuple[str, Future[ResultT], Callable[[], ResultT]] | None:
        with self._lock:
            may_run = (owner for owner in self._lines if not owner or self._running[owner] < self._most_of_key)
            if (owner := next(may_run, None)) is None:
                return None
            line = self._lines.pop(owner)
            future, call = line.popleft()
            if line:
                self._lines[owner] = line  # The owner goes to the end of the line.
            self._running = +self._running  # without the keys that run nothing
            self._running[owner] += 1
            return owner, future, call


def _run(future: Future[ResultT], call: Callable[[], ResultT]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def load_library(engine: GrammarEngine, vocabulary: Vocabulary) -> Library:
    """Return a library for a vocabulary. Raises GrammarError if it is not installed."""
    if engine == "xgrammar":
        from pagoda.common.engine.structured_output.xgrammar import Xgrammar

        return Xgrammar(vocabulary)
    return Guidance(vocabulary)
