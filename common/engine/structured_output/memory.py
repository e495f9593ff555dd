"""What compiled grammars use of the engine's memory.

A library makes the states of a grammar's patterns while answers reach them and keeps them as long as the grammar, so
the size of a compiled grammar says little about what it takes in use: `a{100000}` takes 27 MB, other patterns of the
same length up to 180 MB. What the process grows by is measured where a grammar is compiled and where its masks take
long, and counted against the grammar.
"""

from __future__ import annotations

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


@dataclass(slots=True, eq=False, weakref_slot=True)
class CompiledGrammar:
    """A compiled grammar and what it uses, in bytes. `owner`: the key whose request had it compiled."""

    library: Library
    matcher: Matcher  # at the beginning
    first: Bits  # uint32 [ceil(V/32)] the tokens that may begin an answer
    owner: str
    size: int
    changed: Callable[[CompiledGrammar], None]  # called after it has grown or was spoiled
    is_spoiled: bool = field(default=False, init=False)  # it failed at an answer, so the next one gets another
    refused: str = field(default="", init=False)  # why its answers must end

    def grow(self, size: int) -> None:
        """Count further memory."""
        self.size += size
        self.changed(self)

    def spoil(self) -> None:
        """Note that its library failed at an answer."""
        if not self.is_spoiled:
            self.is_spoiled = True
            self.changed(self)


class GrammarMemory:
    """All compiled grammars that are in use or kept. Thread-safe."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._grammars: weakref.WeakSet[CompiledGrammar] = weakref.WeakSet()

    def add(self, grammar: CompiledGrammar) -> None:
        """Count a grammar for as long as it exists."""
        with self._lock:
            self._grammars.add(grammar)

    def refuse_largest(self) -> None:
        """End the answers of the largest grammar of the key with most, if all take too much."""
        with self._lock:
            grammars = [each for each in self._grammars if not each.refused]
            if sum(each.size for each in grammars) <= self._max_bytes:
                return
            sizes = Counter[str]()
            for each in grammars:
                sizes[each.owner] += each.size
            owner = max(sizes, key=sizes.__getitem__)
            largest = max((each for each in grammars if each.owner == owner), key=lambda each: each.size)
        largest.refused = (
            f"its patterns take {largest.size >> 20} MiB, more than is left for grammars; make them simpler"
        )
