"""Long texts: few characters are tokenised at a time, in order, and what is cancelled stops after a chunk."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator

import pytest
from support.checkpoints.byte_text import byte_tokenizer
from support.suite.watching import until

from pagoda.common.text.tokenizer import TokenisingCancelledError
from pagoda.server.core_client.client import OverLimitError
from pagoda.server.processing.workers.waiting_lines import MAX_CHARACTERS, MAX_WAITING, TextThreads


@pytest.fixture
async def threads() -> AsyncGenerator[TextThreads, None]:
    made = TextThreads([].append)
    yield made
    made.close()


class Running:
    """Work that runs until it is allowed to end; notes how many run together."""

    def __init__(self) -> None:
        self.go, self.now, self.most, self.order = threading.Event(), 0, 0, list[int]()
        self._lock = threading.Lock()

    def __call__(self, name: int) -> int:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
            self.order.append(name)
        assert self.go.wait(60)
        with self._lock:
            self.now -= 1
        return name


async def test_characters_in_the_threads_are_bounded(threads: TextThreads) -> None:
    running = Running()
    tasks = [asyncio.create_task(threads.run(MAX_CHARACTERS // 2, running, name)) for name in range(5)]
    tasks.append(asyncio.create_task(threads.run(3 * MAX_CHARACTERS, running, 5)))  # alone
    tasks.append(asyncio.create_task(threads.run(1, running, 6)))  # in order: behind the long one
    await until(lambda: running.now == 2)
    assert len(threads._line) == 5
    assert sorted(running.order) == [0, 1]
    running.go.set()
    assert await asyncio.gather(*tasks) == list(range(7))
    assert running.order == list(range(7))
    assert running.most == 2
    assert (threads._running, threads._waiting) == (0, 0)


async def test_waiting_characters_are_bounded(threads: TextThreads) -> None:
    running = Running()
    first = asyncio.create_task(threads.run(MAX_CHARACTERS, running, 0))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(threads.run(MAX_WAITING, running, 1))
    await asyncio.sleep(0)
    with pytest.raises(OverLimitError, match="too many long texts"):
        await threads.run(1, running, 2)
    waiting.cancel()
    running.go.set()
    assert await first == 0
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await threads.run(MAX_WAITING, running, 3) == 3
    assert running.order == [0, 3]


async def test_what_is_cancelled_stops_after_the_next_chunk(threads: TextThreads) -> None:
    tokenizer, began, ended = byte_tokenizer(), threading.Event(), list[int]()

    def encode_often() -> None:
        try:
            for _ in range(1_000_000):
                tokenizer.encode("abc")
                began.set()
        except TokenisingCancelledError:
            ended.append(1)
            raise

    task = asyncio.create_task(threads.run(MAX_CHARACTERS, encode_often))
    await asyncio.to_thread(began.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.wait_for(threads.run(MAX_CHARACTERS, lambda: "next"), 60) == "next"
    assert ended == [1]


async def test_a_mistake_of_one_text_is_its_own(threads: TextThreads) -> None:
    def fail() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        await threads.run(MAX_CHARACTERS, fail)
    assert await threads.run(MAX_CHARACTERS, lambda: 1) == 1
