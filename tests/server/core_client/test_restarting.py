"""An engine that dies is replaced (--restart-engine), one that is stuck fails its requests or is ended."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.byte_text import byte_tokenizer
from support.engines.fake_engine import PROGRAM, allow
from support.suite.clock import Clock
from support.suite.watching import PATIENCE, until

from pagoda.common.config.groups.runtime import RuntimeConfig
from pagoda.common.errors import ConfigError, EngineDeadError, EngineRestartingError, EngineUnavailableError
from pagoda.common.observe.metrics import Metrics
from pagoda.common.sampling_params import RequestOutputKind, SamplingParams
from pagoda.server.async_llm import AsyncLLM
from pagoda.server.core_client import check_start
from pagoda.server.core_client.client import EngineClient
from pagoda.server.core_client.process_client import ProcessClient
from pagoda.server.core_client.restarting import START_SECONDS, RestartingClient
from pagoda.server.settings.flags import AsyncEngineArgs

TEXT = byte_tokenizer()
DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


class Engine:
    """An AsyncLLM over processes with a fake engine.

    Sequences grow to as many tokens as `allow` says, and engines that replace another start once `may_restart` is set.
    """

    def __init__(self, folder: Path, model: str = "", **args: Any) -> None:
        self._limit = folder / "tokens"
        self.allow(100_000)
        self.config = AsyncEngineArgs(model or f"fake:held@{self._limit}", **args).create_engine_config()
        self.clock = Clock()
        self.may_restart = threading.Event()
        self.may_restart.set()
        self.refused = 0  # how many further engines the system has no memory for
        self.started: list[ProcessClient] = []
        limit = self.config.runtime.restart_engine
        restarting = RestartingClient(self._start, limit, self.clock, pause=0.0) if limit else None
        client: EngineClient = restarting or self._start()
        self.metrics = Metrics("fake")
        self.llm = AsyncLLM(self.config, client=client, open_text=lambda _: TEXT, metrics=self.metrics)

    def _start(self) -> ProcessClient:
        assert not self.started or self.may_restart.wait(PATIENCE)
        if self.started and self.refused:
            self.refused -= 1
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        self.started.append(ProcessClient(self.config, PROGRAM, clock=self.clock))
        return self.started[-1]

    def allow(self, tokens: int) -> None:
        self._allowed = tokens
        allow(self._limit, tokens)

    def grow(self) -> None:
        """Allow one token more, as a step in which the engine also looks for new requests."""
        self.allow(self._allowed + 1)

    @property
    def pid(self) -> int:
        return self.started[-1].pid

    async def tokens(self, request_id: str, kind: RequestOutputKind, prompt: str = "abc", **params: Any) -> list[int]:
        """The tokens of a request, as a caller reads them."""
        read: list[int] = []
        params = {"max_tokens": 20} | params
        async for output in self.llm.generate(prompt, SamplingParams(output_kind=kind, **params), request_id):
            for each in output.outputs:
                read += each.token_ids
        return read

    async def kill_while_running(self) -> None:
        """Kill the engine in the middle of a request."""
        await until(lambda: self.llm.stats.running == 1)
        os.kill(self.pid, signal.SIGKILL)
        self.allow(100_000)

    def pass_time_in_step(self) -> None:
        """Let 3 s pass if the newest engine has said that it is in a step."""
        if self.started[-1]._supervisor._busy:
            self.clock.advance(3)

    async def is_healthy(self) -> bool:
        try:
            await self.llm.check_health()
        except EngineDeadError:
            return False
        return True

    async def until_healthy(self) -> None:
        async with asyncio.timeout(PATIENCE):
            while not await self.is_healthy():
                await asyncio.sleep(0)


Make = Callable[..., Engine]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    engines: list[Engine] = []

    def start(*args: Any, **kwargs: Any) -> Engine:
        engines.append(Engine(tmp_path, *args, **kwargs))
        return engines[-1]

    yield start
    for engine in engines:
        engine.llm.shutdown()
        assert all(client._process.poll() is not None for client in engine.started), "no engine outlives its client"


@pytest.mark.setting("--restart-engine")
async def test_killed_engine_is_replaced_and_runs_again_what_was_not_sent(make: Make) -> None:
    engine = make(restart_engine=1)
    alone = await engine.tokens("alone", FINAL, max_tokens=300)
    engine.allow(3)
    whole = [asyncio.ensure_future(engine.tokens(f"w{index}", FINAL, max_tokens=300)) for index in range(5)]
    several = asyncio.ensure_future(engine.tokens("n", FINAL, n=3, max_tokens=300))
    streamed = asyncio.ensure_future(engine.tokens("s", DELTA, max_tokens=300))
    # tokens of all of them are known here, but only those of the stream went to a caller
    sequences = engine.llm._ready().requests._processor._sequences
    await until(lambda: len(sequences) == 9)
    await until(lambda: all(len(each.token_ids) > 2 for each in sequences.values()), engine.grow)
    engine.may_restart.clear()
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineUnavailableError, match="killed by SIGKILL"):
        await streamed
    with pytest.raises(EngineRestartingError, match=r"being restarted: .*SIGKILL"):
        await engine.llm.check_health()
    with pytest.raises(EngineUnavailableError, match=r"being restarted: .*SIGKILL"):
        await engine.tokens("refused", FINAL)
    assert b'pagoda:engine_restarts_total{model_name="fake"} 1.0' in engine.metrics.exposition()[0]
    assert len(engine.started) == 1, "neither waits for the new engine"
    engine.allow(100_000)
    engine.may_restart.set()
    assert await asyncio.gather(*whole) == [alone] * 5
    assert await several == alone * 3
    assert await engine.is_healthy()
    assert await engine.tokens("after", DELTA, max_tokens=300) == alone
    assert len(engine.started) == 2
    assert engine.llm.num_unfinished == 0


async def test_a_restart_that_does_not_end_is_no_health(make: Make) -> None:
    engine = make(restart_engine=1, engine_iteration_timeout_s=10**6, rpc_timeout=10**9)
    await engine.tokens("first", FINAL)
    engine.may_restart.clear()
    os.kill(engine.pid, signal.SIGKILL)
    await until(lambda: engine.llm._engine._unavailable is not None)
    engine.clock.advance(START_SECONDS - 1)
    with pytest.raises(EngineRestartingError):
        await engine.llm.check_health()
    engine.clock.advance(2)
    with pytest.raises(EngineUnavailableError, match=r"has been restarting for 1801 s: .*SIGKILL") as late:
        await engine.llm.check_health()
    assert not isinstance(late.value, EngineRestartingError)
    engine.may_restart.set()


async def test_request_that_waits_for_its_first_token_streams_after_a_restart(make: Make) -> None:
    engine = make(restart_engine=1, max_num_seqs=1)
    engine.allow(8)
    first = asyncio.ensure_future(engine.tokens("first", DELTA, max_tokens=60_000))
    waiting = asyncio.ensure_future(engine.tokens("waiting", DELTA))
    await until(lambda: engine.llm.stats.waiting == 1, engine.grow)
    os.kill(engine.pid, signal.SIGKILL)
    engine.allow(100_000)
    with pytest.raises(EngineUnavailableError):
        await first
    assert len(await waiting) == 20


async def test_engine_that_reaches_the_limit_of_restarts_within_an_hour_is_dead(make: Make) -> None:
    # hours pass at once, in which no engine can answer
    engine = make(restart_engine=1, engine_iteration_timeout_s=10**6, rpc_timeout=10**9)
    for hours in (0.0, 1.01):
        engine.clock.advance(hours * 3600)
        engine.allow(8)
        request = asyncio.ensure_future(engine.tokens("r", FINAL))
        await engine.kill_while_running()
        assert len(await request) == 20
    engine.clock.advance(0.99 * 3600)
    engine.allow(8)
    request = asyncio.ensure_future(engine.tokens("r", FINAL))
    await engine.kill_while_running()
    with pytest.raises(EngineDeadError, match="SIGKILL") as death:
        await request
    assert not isinstance(death.value, EngineUnavailableError), "no further restart"
    assert engine.llm.errored
    assert len(engine.started) == 3


async def test_engine_that_does_not_start_again_is_dead(make: Make) -> None:
    engine = make(restart_engine=2)
    engine.config = AsyncEngineArgs("fake:config").create_engine_config()
    engine.allow(8)
    request = asyncio.ensure_future(engine.tokens("r", FINAL))
    await engine.kill_while_running()
    with pytest.raises(EngineDeadError, match=r"SIGKILL.*; it did not start again: --dtype: not today"):
        await request
    assert len(engine.started) == 3, "it was tried as often as the limit allows"


async def test_a_process_that_cannot_be_started_is_a_restart_that_failed(make: Make) -> None:
    engine = make(restart_engine=3)
    engine.allow(8)
    request = asyncio.ensure_future(engine.tokens("r", FINAL))
    engine.refused = 2
    await engine.kill_while_running()
    assert len(await request) == 20, "the third time there was memory"
    engine.allow(8)
    request = asyncio.ensure_future(engine.tokens("s", FINAL))
    await engine.kill_while_running()
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await request


@pytest.mark.setting("--rpc-timeout")
async def test_stopped_engine_fails_its_requests_and_serves_again_once_it_continues(make: Make) -> None:
    engine = make("fake:endless", rpc_timeout=2000)
    running = [asyncio.ensure_future(engine.tokens(f"r{index}", DELTA, max_tokens=60_000)) for index in range(3)]
    await until(lambda: engine.llm.stats.running == 3)
    os.kill(engine.pid, signal.SIGSTOP)
    try:
        requests = [*running, asyncio.ensure_future(engine.tokens("late", FINAL))]
        # again and again: messages of before may arrive late
        await until(lambda: all(each.done() for each in requests), lambda: engine.clock.advance(2.1))
        for request in requests:
            with pytest.raises(EngineUnavailableError, match="has not answered for"):
                await request
        assert not await engine.is_healthy()
        with pytest.raises(EngineUnavailableError, match="has not answered for"):
            await engine.tokens("refused", FINAL)  # at once: the engine cannot answer
        assert not engine.llm.errored
    finally:
        os.kill(engine.pid, signal.SIGCONT)
    await engine.until_healthy()
    assert len(await engine.tokens("again", FINAL)) == 20, "a healthy server takes requests at once"
    await until(lambda: engine.llm.stats.running == 0)  # the requests that failed were aborted


@pytest.mark.setting("--exit-on-stuck-engine")
async def test_stuck_engine_is_ended(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    engine = make("fake:hang", engine_iteration_timeout_s=2, rpc_timeout=10**9, exit_on_stuck_engine=True)
    request = asyncio.ensure_future(engine.tokens("r", FINAL))
    await until(request.done, engine.pass_time_in_step)
    with pytest.raises(EngineDeadError, match="has been in one step for"):
        await request
    assert engine.llm.errored
    assert engine.started[0]._process.wait(PATIENCE) == -signal.SIGKILL
    assert "in hang" in capfd.readouterr().err, "the stacks of its threads are in the log"


async def test_request_that_hangs_every_engine_is_run_again_once(make: Make) -> None:
    engine = make("fake:hang", engine_iteration_timeout_s=2, rpc_timeout=10**9, restart_engine=2)
    request = asyncio.ensure_future(engine.tokens("stuck", FINAL))
    await until(request.done, engine.pass_time_in_step)
    with pytest.raises(EngineUnavailableError, match="has been in one step for"):
        await request
    await until(lambda: len(engine.started) == 3)
    await engine.until_healthy()
    assert await engine.tokens("other", FINAL, prompt="x", max_tokens=2) == [ord("y"), ord("z")]


async def test_shutdown_during_a_restart_leaves_no_engine(make: Make) -> None:
    engine = make(restart_engine=1)
    engine.allow(8)
    request = asyncio.ensure_future(engine.tokens("r", FINAL))
    await until(lambda: engine.llm.stats.running == 1)
    os.kill(engine.pid, signal.SIGKILL)
    await until(lambda: len(engine.started) == 2)
    engine.llm.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        await request


def test_restart_needs_a_process_and_one_host() -> None:
    config = AsyncEngineArgs("fake", restart_engine=1).create_engine_config()
    with pytest.raises(ConfigError, match=r"--restart-engine.*--disable-frontend-multiprocessing"):
        check_start(config, in_process=True)
    with pytest.raises(ConfigError, match="--restart-engine"):
        RuntimeConfig(restart_engine=-1)
