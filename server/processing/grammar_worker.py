"""The process in which grammars of requests are compiled first, because one may take its compiler's life or an hour.

    python -P -m pagoda.server.processing.grammar_worker        (started by check.py, never by hand)

Frames come from stdin and go to stdout, each with its length before it: the vocabulary once, then a grammar each time,
answered by what is wrong with it, or nothing. The end of stdin is its end. Compiling runs on a stack that is smaller
than any of the engine's: what passes here does not overflow there.
"""

from __future__ import annotations

import contextlib
import os
import resource
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
"""Of address space; a vocabulary and its tables take under one GiB."""

READY: Final = b"ready"


class Words(msgspec.Struct, frozen=True):
    """A vocabulary on its way."""

    tokens: tuple[bytes, ...]
    special: frozenset[int]
    ends: tuple[int, ...]


def write_frame(stream: BinaryIO, data: bytes) -> None:
    """A frame, flushed."""
    stream.write(len(data).to_bytes(4, "big") + data)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame; None at the stream's end."""
    size = stream.read(4)
    return stream.read(int.from_bytes(size, "big")) if len(size) == 4 else None


def longest_first(words: Words) -> Callable[[str], list[int]]:
    """Spells a text with the longest token that fits, again and again: all that compiling asks of a tokenizer."""
    ids = {spelt: token for token, spelt in enumerate(words.tokens) if spelt and token not in words.special}
    longest = max(map(len, ids), default=1)

    def encode(text: str) -> list[int]:
        data, found, at = text.encode(), [], 0
        while at < len(data):
            size = next((size for size in range(longest, 0, -1) if data[at : at + size] in ids), 0)
            if size:
                found.append(ids[data[at : at + size]])
            at += size or 1
        return found

    return encode


def serve() -> None:
    """Answer grammars until stdin ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # a library's words are no frames
    first = read_frame(sys.stdin.buffer)
    if first is None:
        return
    words = msgspec.msgpack.decode(first, type=Words)
    vocabulary = Vocabulary(words.tokens, words.special, words.ends, longest_first(words))
    libraries: dict[GrammarEngine, Library] = {}
    write_frame(answers, READY)
    while (data := read_frame(sys.stdin.buffer)) is not None:
        write_frame(answers, _checked(msgspec.msgpack.decode(data, type=Grammar), vocabulary, libraries).encode())


def _checked(grammar: Grammar, vocabulary: Vocabulary, libraries: dict[GrammarEngine, Library]) -> str:
    """What is wrong with a grammar; empty: nothing."""
    found: list[str] = []

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
                raise GrammarError("no answer fits the grammar")
        except GrammarError as error:
            found.append(str(error) or "the grammar cannot be compiled")

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=check)
    thread.start()
    thread.join()
    return found[0] if found else ""


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        serve()
