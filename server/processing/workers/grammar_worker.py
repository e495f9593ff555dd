"""The process that compiles grammars first, because a grammar may crash its compiler or take an hour.

    python -P -m pagoda.server.processing.workers.grammar_worker        (started by grammar_check, never by hand)

The first frame has the vocabulary, each further one a `GrammarJob`: a grammar to resolve and compile, or a finished
answer to hold against its schema. The reply is a `GrammarReply`. Grammars compile on a smaller stack than the engine's:
what passes here does not overflow there.
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
    ResolvedGrammar,
    Vocabulary,
)
from pagoda.common.engine.structured_output.schemas import answer_error
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


class GrammarJob(msgspec.Struct, frozen=True):
    """What the process is to do: compile a grammar, or check an answer."""

    grammar: Grammar | None = None
    checked: ResolvedGrammar | None = None
    answer: str = ""


class GrammarReply(msgspec.Struct, frozen=True):
    """The result. `error`: empty if there is none."""

    error: str = ""
    resolved: ResolvedGrammar | None = None


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
    return lambda data: msgspec.msgpack.encode(
        _done(msgspec.msgpack.decode(data, type=GrammarJob), vocabulary, libraries)
    )


def _done(job: GrammarJob, vocabulary: Vocabulary, libraries: dict[GrammarEngine, Library]) -> GrammarReply:
    """Return the result of a job. Whatever a compiler raises is the grammar's error."""
    reply = GrammarReply("the grammar cannot be compiled")

    def carry_out() -> None:
        nonlocal reply
        try:
            if job.grammar is None:
                assert job.checked is not None, "it is one of the two"
                reply = GrammarReply(answer_error(job.checked, job.answer))
            else:
                reply = GrammarReply(resolved=_compiled(job.grammar, vocabulary, libraries))
        except GrammarError as raised:
            reply = GrammarReply(str(raised) or reply.error)

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=carry_out)
    thread.start()
    thread.join()
    return reply


def _compiled(grammar: Grammar, vocabulary: Vocabulary, libraries: dict[GrammarEngine, Library]) -> ResolvedGrammar:
    """Resolve and compile a grammar, and follow it for some tokens. Raises GrammarError."""
    if grammar.engine not in libraries:
        libraries[grammar.engine] = load_library(grammar.engine, vocabulary)
    library = libraries[grammar.engine]
    resolved = library.resolved(grammar.text)
    matcher = library.compile(resolved.text)
    bits = _next_mask(library, matcher, len(vocabulary))
    if not bits.any():
        raise GrammarError("no token sequence matches the grammar")
    _enter(library, matcher, bits, vocabulary)
    return resolved


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
