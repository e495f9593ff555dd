"""What compiled grammars use of the engine's memory.

A library makes the states of a grammar's patterns while answers reach them and keeps them as long as the grammar, so
the size of a compiled grammar says little about what it takes in use: `a{100000}` takes 27 MB, other patterns of the
same length up to 180 MB. What the process grows by is measured where a grammar is compiled and where its masks take
long, and counted against the grammar.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from pagoda.common.engine.structured_output.grammar import Bits, Library, Matcher

MAX_CACHED_BYTES: Final = 64 << 20
"""Of grammars that are kept for further requests."""

MAX_BYTES: Final = 512 << 20
"""Of all grammars, those of running requests included."""

TRIM_BYTES: Final = 16 << 20
"""Of released grammars, at which free memory is given back: else the process keeps the most that it ever used."""

PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class ResidentMemory:
    """The resident memory of this process, for differences. 0 where the system does not tell."""

    def __init__(self) -> None:
        try:
            self._file = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1
            return
        weakref.finalize(self, os.close, self._file)

    @property
    def bytes(self) -> int:
        """What is resident now."""
        return 0 if self._file < 0 else int(os.pread(self._file, 128, 0).split()[1]) * PAGE


def give_back() -> None:
    """Give free memory back to the system, where the C library can."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


@dataclass(slots=True, eq=False, weakref_slot=True)
class CompiledGrammar:
    """A compiled grammar and what it uses, in bytes. `owner`: the key whose request had it compiled."""

    library: Library
    matcher: Matcher  # matcher at the beginning of an answer
    first: Bits  # uint32 [ceil(V/32)] the tokens that may begin an answer
    owner: str
    size: int
    changed: Callable[[CompiledGrammar], None]  # called after it has grown, was spoiled or lost its last answer
    lock: threading.RLock  # guards the fields below and the keeper's
    answers: int = field(default=1, init=False)  # answers that use it, counting the one it was compiled for
    is_spoiled: bool = field(default=False, init=False)  # its answers failed or must end: the next one gets another
    refused: str = field(default="", init=False)  # why its answers must end

    def grow(self, size: int) -> None:
        """Count further memory."""
        with self.lock:
            self.size += size
            self.changed(self)

    def spoil(self) -> None:
        """Note that the next answer must get another: the library failed at one, or they must end."""
        with self.lock:
            if not self.is_spoiled:
                self.is_spoiled = True
                self.changed(self)

    def leave(self) -> None:
        """Note that an answer uses it no more."""
        with self.lock:
            self.answers -= 1
            if not self.answers:
                self.changed(self)


class GrammarMemory:
    """All compiled grammars that are in use or kept. Thread-safe."""

    def __init__(self, resident: ResidentMemory, trim: Callable[[], object], max_bytes: int = MAX_BYTES) -> None:
        """`trim`: called from time to time after grammars were released, by whatever released the last."""
        self._resident = resident
        self._trim = trim
        self._max_bytes = max_bytes
        self._before: int | None = None  # what the process used before the first grammar
        self._released = 0  # bytes since the last trim
        self._lock = threading.Lock()
        self._grammars: weakref.WeakSet[CompiledGrammar] = weakref.WeakSet()

    def add(self, grammar: CompiledGrammar) -> None:
        """Count a grammar for as long as it exists."""
        with self._lock:
            if self._before is None:
                self._before = self._resident.bytes - grammar.size
            self._grammars.add(grammar)

    def release(self, grammar: CompiledGrammar) -> None:
        """Forget a grammar that nothing uses any more."""
        del grammar.matcher
        with self._lock:
            self._grammars.discard(grammar)
        self._released += grammar.size
        if self._released >= TRIM_BYTES:
            self._released = 0
            self._trim()

    def refuse_largest(self) -> None:
        """End the answers of the largest grammar of the key with most, if all take too much."""
        with self._lock:
            grammars = [grammar for grammar in self._grammars if not grammar.refused]
            # What other threads took meanwhile is counted, too, hence also what the process has grown by.
            grown = self._resident.bytes - (self._before or 0)
            if min(grown, sum(grammar.size for grammar in grammars)) <= self._max_bytes:
                return
            sizes = Counter[str]()
            for grammar in grammars:
                sizes[grammar.owner] += grammar.size
            owner = max(sizes, key=sizes.__getitem__)
            largest = max((grammar for grammar in grammars if grammar.owner == owner), key=lambda grammar: grammar.size)
        largest.refused = (
            f"its patterns take {largest.size >> 20} MiB, more than is left for grammars; make them simpler"
        )
        largest.spoil()  # a later request may have room for it
