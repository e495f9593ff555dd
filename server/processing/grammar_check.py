"""Compiles grammars in a separate process before the engine gets them, and caches which passed.

A grammar that takes too long or crashes the process is refused; the next one gets a new process.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Final

import msgspec

from pagoda.common.config.engine import EngineConfig
from pagoda.common.engine.messages import GRAMMAR_CHECKS, KEY_SHARE
from pagoda.common.engine.structured_output.compiler import Structured
from pagoda.common.engine.structured_output.grammar import Grammar, Vocabulary, no_tokenizer, refused, vocabulary_of
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.ipc_messages import EngineInfo
from pagoda.server.processing.grammar_worker import Words
from pagoda.server.processing.queue_use import OverLimitError
from pagoda.server.processing.worker import ChildWorker, WorkerEndedError, WorkerTimeoutError
from pagoda.server.settings.tokenizer import open_tokenizer

WORKER: Final = (sys.executable, "-P", "-m", "pagoda.server.processing.grammar_worker")
SECONDS: Final = 5.0
"""Maximum compile time of a grammar, in seconds of processor time: a busy machine refuses none."""
ELAPSED_SECONDS: Final = 60.0
"""Maximum time until the process answers, on however busy a machine."""
MAX_PASSED: Final = 4096
MAX_WAITING: Final = 64
"""Maximum number of grammars in line; requests with further ones get HTTP 429."""


class FairLine:
    """A line for what is served one at a time, in turn over the owners (API keys) that wait.

    At most `max_waiting` wait, the one that is served included. `what`: the plural of what is served, for errors.
    """

    def __init__(self, max_waiting: int, what: str) -> None:
        self._max_waiting, self._what = max_waiting, what
        self._lines: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # next owner first
        self._counts: dict[str, int] = {}  # waiting and served, by owner
        self._busy = False

    def __len__(self) -> int:
        return sum(self._counts.values())

    @asynccontextmanager
    async def turn(self, owner: str, most_of_owner: int) -> AsyncGenerator[None, None]:
        """Wait for the turn of an owner's request, which lasts as long as the context.

        Raise OverLimitError if the line, or the part of it that the owner may use, is full.
        """
        if len(self) >= self._max_waiting:
            raise OverLimitError(GRAMMAR_CHECKS, f"the server has too many {self._what} in line; try again later")
        if self._counts.get(owner, 0) >= most_of_owner:
            raise OverLimitError(
                KEY_SHARE, f"this API key has too many {self._what} in line (--max-key-share); try again later"
            )
        self._counts[owner] = self._counts.get(owner, 0) + 1
        try:
            await self._wait(owner)
            try:
                yield
            finally:
                self._next()
        finally:
            self._counts[owner] -= 1
            if not self._counts[owner]:
                del self._counts[owner]

    async def _wait(self, owner: str) -> None:
        if not self._busy:
            self._busy = True
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(owner, deque()).append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():  # cancelled just after its turn came
                self._next()
            raise

    def _next(self) -> None:
        """Give the turn to the next owner's first waiter."""
        while self._lines:
            owner, line = self._lines.popitem(last=False)
            waiter = line.popleft()
            if line:
                self._lines[owner] = line  # behind the other owners
            if not waiter.done():
                waiter.set_result(None)
                return
        self._busy = False


class GrammarCheck:
    """Compiles grammars to check them. `make_vocabulary`: called once, for the first grammar; raises RequestError."""

    def __init__(
        self,
        make_vocabulary: Callable[[], Vocabulary],
        program: Sequence[str] = WORKER,
        seconds: float = SECONDS,
        elapsed: float = ELAPSED_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds, self._elapsed = seconds, elapsed
        self._thread = ThreadPoolExecutor(1, "pagoda-grammar-check")
        self._worker = ChildWorker(
            program, seconds, elapsed, lambda: _words(make_vocabulary()), name="grammar check", clock=clock
        )
        self._passed: OrderedDict[bytes, None] = OrderedDict()
        self._line = FairLine(MAX_WAITING, "new grammars")
        self._results: dict[bytes, asyncio.Future[str | None]] = {}  # by digest, of grammars in line

    async def check(self, grammar: Grammar, owner: str = "", most_of_owner: int = MAX_WAITING) -> None:
        """Raise RequestError if the grammar does not compile, QueueFullError if too many are in line.

        `owner`: of the request, which may have `most_of_owner` grammars in line. Requests with a grammar that
        is in line already wait for its result, in no line.
        """
        name = sha256(f"{grammar.engine} {grammar.text}".encode("utf-8", "surrogatepass")).digest()
        while (result := self._results.get(name)) is not None:
            await asyncio.wait({result})
            if (error := result.result()) is not None:  # None: the request that compiled it was cancelled
                break
        else:
            error = await self._check_new(name, grammar, owner, most_of_owner)
        if error:
            raise refused(error)

    async def _check_new(self, name: bytes, grammar: Grammar, owner: str, most_of_owner: int) -> str:
        """Return the error of a grammar, empty if there is none."""
        if name in self._passed:
            self._passed.move_to_end(name)
            return ""
        result = self._results[name] = asyncio.get_running_loop().create_future()
        error: str | None = None
        try:
            async with self._line.turn(owner, most_of_owner):
                error = await asyncio.get_running_loop().run_in_executor(self._thread, self._try, grammar)
        finally:
            del self._results[name]
            result.set_result(error)
        if not error:
            self._passed[name] = None
            if len(self._passed) > MAX_PASSED:
                self._passed.popitem(last=False)
        return error

    def close(self) -> None:
        """End the process. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._worker.close()

    def _try(self, grammar: Grammar) -> str:
        """Return the error of a grammar, empty if there is none. Runs in the thread."""
        try:
            data = msgspec.msgpack.encode(grammar)
        except ValueError:  # half of a surrogate pair
            return "the grammar has invalid characters (lone surrogates)"
        try:
            return self._worker.call(data).decode("utf-8", "replace")
        except WorkerTimeoutError:
            return f"not compiled within {self._elapsed:g} s; make it simpler, or try again on a less busy server"
        except WorkerEndedError as error:
            if error.out_of_time:
                return f"the grammar takes more than {self._seconds:g} s to compile; make it simpler"
            return "the grammar is too large or nested too deeply to compile; make it simpler"


def _words(vocabulary: Vocabulary) -> bytes:
    return msgspec.msgpack.encode(Words(vocabulary.tokens, vocabulary.special, vocabulary.ends))


def structured_of(config: EngineConfig, info: EngineInfo) -> Structured | None:
    """Return the engine's grammar compiler, which opens the tokenizer for the first grammar; None without one."""
    if config.model.skip_tokenizer_init:
        return None

    def vocabulary() -> Vocabulary:
        tokenizer = open_tokenizer(config)
        return _vocabulary(tokenizer and tokenizer.with_vocab(info.vocab_size), info)

    return Structured(vocabulary)


def check_of(tokenizer: Tokenizer | None, info: EngineInfo) -> GrammarCheck:
    """Return the API process's grammar check."""
    return GrammarCheck(lambda: _vocabulary(tokenizer, info))


def _vocabulary(tokenizer: Tokenizer | None, info: EngineInfo) -> Vocabulary:
    if tokenizer is None:
        raise no_tokenizer()
    return vocabulary_of(tokenizer, info.vocab_size, info.eos_token_ids)
