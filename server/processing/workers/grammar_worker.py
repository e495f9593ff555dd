"""The process that compiles grammars first, because a grammar may crash its compiler or take an hour.

    python -P -m pagoda.server.processing.workers.grammar_worker        (started by grammar_check, never by hand)

The first frame has the vocabulary, each further one a grammar. The reply is the grammar's error, or empty. Grammars
compile on a smaller stack than the engine's: what passes here does not overflow there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np

from pagoda.common.engine.structured_output.compiler import load_library
from pagoda.common.engine.structured_output.grammar import (
    Bits,
    Grammar,
    GrammarEngine,
    GrammarError,
    Library,
    Matcher,
    Vocabulary,
)
from pagoda.server.processing.workers.worker import Handler, serve

STACK_BYTES: Final = 2 << 20
MEMORY_BYTES: Final = 1 << 30
"""Address space for the tables of a vocabulary and all grammars. Those of a synthetic vocabulary of 256k tokens take
470 MiB while they are made and 410 MiB then, of which 150 MiB are resident."""

TRIED_TOKENS: Final = 4


class Words(msgspec.Struct, frozen=True):
    """A vocabulary as a message."""

    tokens: tuple[bytes, ...]
    special: frozenset[int]
    ends: tuple[int, ...]


def longest_first(words: Words) -> Callable[[str], list[int]]:
    """Return an encoder that always takes the longest matching token: all that compiling needs of a tokenizer."""
    ids = {spelling: token for token, spelling in enumerate(words.tokens) if spelling and token not in words.special}
    longest = max(map(len, ids), default=1)

    def encode(text: str) -> list[int]:
        data = text.encode()
        tokens = []
        start = 0
        while start < len(data):
            size = next((size for size in range(longest, 0, -1) if data[start : start + size] in ids), 0)
            if size:
                tokens.append(ids[data[start : start + size]])
            start += size or 1
        return tokens

    return encode


def handler(setup: bytes) -> Handler:
    """Return what checks the grammars of a vocabulary."""
    words = msgspec.msgpack.decode(setup, type=Words)
    vocabulary = Vocabulary(words.tokens, words.special, words.ends, longest_first(words))
    libraries: dict[GrammarEngine, Library] = {}
    return lambda data: _checked(msgspec.msgpack.decode(data, type=Grammar), vocabulary, libraries).encode()


def _checked(grammar: Grammar, vocabulary: Vocabulary, libraries: dict[GrammarEngine, Library]) -> str:
    """Return the error of a grammar, empty if there is none. Whatever the compiler raises is one."""
    error = "the grammar cannot be compiled"

    def check() -> None:
        nonlocal error
        try:
            if grammar.engine not in libraries:
                libraries[grammar.engine] = load_library(grammar.engine, vocabulary)
            library = libraries[grammar.engine]
            matcher = library.compile(grammar.text)
            bits = _next_mask(library, matcher, len(vocabulary))
            if not bits.any():
                raise GrammarError("no token sequence matches the grammar")
            _enter(library, matcher, bits, vocabulary)
        except GrammarError as raised:
            error = str(raised) or error
        else:
            error = ""

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=check)
    thread.start()
    thread.join()
    return error


def _next_mask(library: Library, matcher: Matcher, vocab: int) -> Bits:
    """Return the mask of the next token, uint32 [ceil(V/32)]. Raises GrammarError."""
    bits = np.zeros((1, -(-vocab // 32)), np.uint32)
    library.fill([matcher], bits)
    if matcher.error is not None:
        raise GrammarError(matcher.error)
    mask: Bits = bits[0]
    return mask


def _enter(library: Library, matcher: Matcher, bits: Bits, vocabulary: Vocabulary) -> None:
    """Follow a grammar for some tokens: some patterns are too large only once they are entered. Raises GrammarError."""
    for _ in range(TRIED_TOKENS):
        token = _first(bits, vocabulary.ends)
        if token is None:
            return
        accepted = matcher.accept(token)
        if matcher.error is not None:
            raise GrammarError(matcher.error)
        if not accepted:
            return
        bits = _next_mask(library, matcher, len(vocabulary))


def _first(bits: Bits, ends: Sequence[int]) -> int | None:
    """Return the lowest token of a mask that does not end the answer; None if there is none."""
    allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
    return next((token for token in allowed.tolist() if token not in ends), None)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        serve(handler, MEMORY_BYTES)
