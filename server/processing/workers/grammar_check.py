"""Resolves and compiles grammars in separate processes before the engine gets them, and caches which passed.

The processes also check the answers whose grammars do not enforce all of their schemas. A grammar that takes too long
or crashes its process is refused; the next one gets a new process. There are two processes, of which one key uses one
at a time: a flood of one key's grammars does not keep another's waiting.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Final

import msgspec

from pagoda.common.config.engine import EngineConfig
from pagoda.common.engine.structured_output.compiler import Structured
from pagoda.common.engine.structured_output.grammar import (
    Grammar,
    ResolvedGrammar,
    Vocabulary,
    no_tokenizer,
    refused,
    vocabulary_of,
)
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.core_client.ipc_messages import EngineInfo
from pagoda.server.processing.workers.grammar_worker import GrammarJob, GrammarReply, Words
from pagoda.server.processing.workers.waiting_lines import FairLine
from pagoda.server.processing.workers.worker import ChildWorker, WorkerEndedError, WorkerTimeoutError
from pagoda.server.settings.tokenizer import open_tokenizer

logger = logging.getLogger(__name__)

WORKER: Final = (sys.executable, "-P", "-m", "pagoda.server.processing.workers.grammar_worker")
SECONDS: Final = 5.0
"""Maximum compile time of a grammar, in seconds of processor time: a busy machine refuses none."""
ELAPSED_SECONDS: Final = 60.0
"""Maximum time until the process answers, on however busy a machine."""
PROCESSES: Final = 2
"""The second starts when a key's grammar comes while another key's is compiled."""
MAX_PASSED: Final = 4096
MAX_PASSED_CHARACTERS: Final = 64 << 20
"""Of the resolved texts of grammars that passed."""
MAX_WAITING: Final = 64
"""Maximum number of grammars in line; requests with further ones get HTTP 429."""


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
        self._seconds = seconds
        self._elapsed = elapsed
        self._threads = ThreadPoolExecutor(PROCESSES, "pagoda-grammar-check")
        words = _Once(lambda: _words(make_vocabulary()))
        self._workers = [
            ChildWorker(program, seconds, elapsed, words, name="grammar check", clock=clock) for _ in range(PROCESSES)
        ]
        self._idle = self._workers[::-1]  # The last worker is used first.
        self._passed: OrderedDict[bytes, ResolvedGrammar] = OrderedDict()
        self._passed_characters = 0
        self._line = FairLine(MAX_WAITING, "new grammars", places=PROCESSES)
        self._results: dict[bytes, asyncio.Future[GrammarReply | None]] = {}  # Digest -> reply, of grammars in line.

    async def check(self, grammar: Grammar, owner: str = "", most_of_owner: int = MAX_WAITING) -> ResolvedGrammar:
        """Return a grammar that compiles, resolved.

        Raises RequestError if it does not compile, QueueFullError if too many are in line. `owner`: of the request,
        which may have `most_of_owner` grammars in line. Requests with a grammar that is in line already wait for its
        result, in no line.
        """
        name = sha256(f"{grammar.engine} {grammar.text}".encode("utf-8", "surrogatepass")).digest()
        while (result := self._results.get(name)) is not None:
            await asyncio.wait({result})
            if (reply := result.result()) is not None:  # None: the request that compiled it was cancelled.
                break
        else:
            reply = await self._check_new(name, grammar, owner, most_of_owner)
        if reply.resolved is None:
            raise refused(reply.error)
        return reply.resolved

    async def _check_new(self, name: bytes, grammar: Grammar, owner: str, most_of_owner: int) -> GrammarReply:
        if name in self._passed:
            self._passed.move_to_end(name)
            return GrammarReply(resolved=self._passed[name])
        self._results[name] = asyncio.get_running_loop().create_future()
        try:
            await self._line.enter(owner, most_of_owner)
        except BaseException:
            self._end(name, None)
            raise
        return await asyncio.shield(self._run(GrammarJob(grammar), owner, name))

    async def answer_error(self, grammar: ResolvedGrammar, answer: str, owner: str = "") -> str:
        """Return why a finished answer violates the schema of its grammar, empty if it does not."""
        await self._line.enter(owner, None)
        reply = await asyncio.shield(self._run(GrammarJob(checked=grammar, answer=answer), owner))
        return reply.error

    def _run(self, job: GrammarJob, owner: str, name: bytes | None = None) -> asyncio.Future[GrammarReply]:
        """Have a process do a job; the owner's turn lasts until then, even if its request was cancelled.

        `name`: of the grammar that others may wait for.
        """
        worker = self._idle.pop()

        def done(result: asyncio.Future[GrammarReply]) -> None:
            self._idle.append(worker)
            if name is not None:
                self._end(name, None if result.cancelled() or result.exception() else result.result())
            self._line.leave(owner)

        try:
            result = asyncio.get_running_loop().run_in_executor(self._threads, self._try, worker, job)
        except RuntimeError:  # The worker was closed.
            if name is not None:
                self._end(name, None)
            self._line.leave(owner)
            raise
        result.add_done_callback(done)
        return result

    def _end(self, name: bytes, reply: GrammarReply | None) -> None:
        """Tell all who wait for a grammar. None: it was not compiled."""
        self._results.pop(name).set_result(reply)
        if reply is not None and reply.resolved is not None:
            if formats := reply.resolved.ignored_formats:
                logger.info("formats of a JSON schema that are unknown and constrain nothing: %s", _shown(formats))
            self._passed[name] = reply.resolved
            self._passed_characters += _characters(reply.resolved)
            while len(self._passed) > MAX_PASSED or self._passed_characters > MAX_PASSED_CHARACTERS:
                self._passed_characters -= _characters(self._passed.popitem(last=False)[1])

    def close(self) -> None:
        """End the processes. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def _try(self, worker: ChildWorker, job: GrammarJob) -> GrammarReply:
        """Return the result of a job. Runs in a thread."""
        try:
            data = msgspec.msgpack.encode(job)
        except ValueError:  # The text has half of a surrogate pair.
            return GrammarReply("the grammar has invalid characters (lone surrogates)")
        try:
            return msgspec.msgpack.decode(worker.call(data), type=GrammarReply)
        except (WorkerTimeoutError, WorkerEndedError) as error:
            return GrammarReply(self._too_much(error, job))

    def _too_much(self, error: WorkerTimeoutError | WorkerEndedError, job: GrammarJob) -> str:
        """Return why a process ended before its job did."""
        if job.grammar is None:
            return "the answer takes too long to check against its JSON schema"
        if isinstance(error, WorkerTimeoutError):
            return f"not compiled within {self._elapsed:g} s; make it simpler, or try again on a less busy server"
        if error.out_of_time:
            return f"the grammar takes more than {self._seconds:g} s to compile; make it simpler"
        return "the grammar is too large or nested too deeply to compile; make it simpler"


def _characters(resolved: ResolvedGrammar) -> int:
    """Return what a resolved grammar takes of the bound of those that are kept."""
    return len(resolved.text) + len(resolved.schema) + sum(map(len, resolved.ignored_formats))


def _shown(words: Sequence[str]) -> str:
    """Return words of a request as part of a log line."""
    return repr(list(words))[1:-1][:200]


class _Once:
    """Makes something when it is first called, and returns the same from then on. Thread-safe."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: bytes | None = None

    def __call__(self) -> bytes:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made


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
