"""The process that compiles grammars first, because a grammar may crash its compiler or take an hour.

    python -P -m pagoda.server.processing.grammar_worker SECONDS        (started by grammar_check, never by hand)

Length-prefixed frames are read from stdin and written to stdout: the vocabulary once, then one grammar at a time. The
reply is the grammar's error, or empty. SIGPROF ends the process in a grammar that takes more than SECONDS of processor
time, and EOF between two. Grammars compile on a smaller stack than the engine's:
what passes here does not overflow there.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from typing import BinaryIO, Final

import msgspec
import numpy as np

from pagoda.common.engine.structured_output.compiler import load_library
from pagoda.common.engine.structured_output.grammar import Grammar, GrammarEngine, GrammarError, Library, Vocabulary

STACK_BYTES: Final = 2 << 20
MEMORY_BYTES: Final = 6 << 30
"""Limit of the address space; a vocabulary and its tables take under 1 GiB."""

READY: Final = b"ready"


class Words(msgspec.Struct, frozen=True):
    """A vocabulary as a message."""

    tokens: tuple[bytes, ...]
    special: frozenset[int]
    ends: tuple[int, ...]


def write_frame(stream: BinaryIO, data: bytes) -> None:
    """Write a frame and flush."""
    stream.write(len(data).to_bytes(4, "big") + data)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes | None:
    """Read the next frame; None at EOF."""
    size = stream.read(4)
    return stream.read(int.from_bytes(size, "big")) if len(size) == 4 else None


def longest_first(words: Words) -> Callable[[str], list[int]]:
    """Return an encoder that always takes the longest matching token: all that compiling needs of a tokenizer."""
    ids = {spelling: token for token, spelling in enumerate(words.tokens) if spelling and token not in words.special}
    longest = max(map(len, ids), default=1)

    def encode(text: str) -> list[int]:
        data, tokens, start = text.encode(), [], 0
        while start < len(data):
            size = next((size for size in range(longest, 0, -1) if data[start : start + size] in ids), 0)
            if size:
                tokens.append(ids[data[start : start + size]])
            start += size or 1
        return tokens

    return encode


def serve(seconds: float) -> None:
    """Check grammars until EOF, each in at most so many seconds of processor time."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # libraries may print
    first = read_frame(sys.stdin.buffer)
    if first is None:
        return
    words = msgspec.msgpack.decode(first, type=Words)
    vocabulary = Vocabulary(words.tokens, words.special, words.ends, longest_first(words))
    libraries: dict[GrammarEngine, Library] = {}
    write_frame(replies, READY)
    while (data := read_frame(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        error = _checked(msgspec.msgpack.decode(data, type=Grammar), vocabulary, libraries)
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(replies, error.encode())


def _checked(grammar: Grammar, vocabulary: Vocabulary, libraries: dict[GrammarEngine, Library]) -> str:
    """Return the error of a grammar, empty if there is none."""
    errors: list[str] = []

    def check() -> None:
        try:
            if grammar.engine not in libraries:
                libraries[grammar.engine] = load_library(grammar.engine, vocabulary)
            library = libraries[grammar.engine]
            matcher = library.compile(grammar.text)
            bits = np.zeros((1, -(-len(vocabulary) // 32)), np.uint32)
            library.fill([matcher], bits)
            if matcher.error is not None:
                raise GrammarError(matcher.error)
            if not bits.any():
                raise GrammarError("no token sequence matches the grammar")
        except GrammarError as error:
            errors.append(str(error) or "the grammar cannot be compiled")

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=check)
    thread.start()
    thread.join()
    return errors[0] if errors else ""


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        serve(float(sys.argv[1]))
