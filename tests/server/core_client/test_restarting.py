"""An engine that dies is replaced (--restart-engine), one that is stuck fails its requests or is ended."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from support.byte_text import byte_tokenizer
from support.fake_engine import PROGRAM

from pagoda.common.config.groups.runtime import RuntimeConfig
from pagoda.common.errors import ConfigError, EngineDeadError, EngineUnavailableError
from pagoda.common.observe.metrics import Metrics
from pagoda.common.sampling_params import RequestOutputKind, SamplingParams
from pagoda.server.async_llm import AsyncLLM
from pagoda.server.core_client import check_start
from pagoda.server.core_client.client import EngineClient
from pagoda.server.core_client.process_client import ProcessClient
from pagoda.server.core_client.restarting import RestartingClient
from pagoda.server.settings.flags import AsyncEngineArgs

TEXT = byte_tokenizer()
GRACE = 20.0
DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


class Engine:
    """An AsyncLLM over processes with a fake engine."""

    def __init__(self, model: str = "fake:slow", **args: Any) -> None:
        self.config = AsyncEngineArgs(model, **args).create_engine_config()
        self.started: list[ProcessClient] = []
        limit = self.config.runtime.restart_engine
        client: EngineClient = RestartingClient(self._start, limit) if limit else self._start()
        self.metrics = Metrics("fake")
        self.llm = AsyncLLM(self.config, client=client, open_text=lambda _: TEXT, metrics=self.metrics)

    def _start(self) -> ProcessClient:
        self.started.append(ProcessClient(self.config, PROGRAM))
        return self.started[-1]

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

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(GRACE):
            while not condition():
                await asyncio.sleep(0.01)

    async def is_healthy(self) -> bool:
        try:
            await self.llm.check_health()
        except EngineDeadError:
            return False
        return True


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def start(*args: Any, **kwargs: Any) -> Engine:
        engines.append(Engine(*args, **kwargs))
        return engines[-1]

    yield start
    for engine in engines:
        engine.llm.shutdown()
        assert all(client._process.poll() is not None for client in engine.started), "no engine outlives its client"


@pytest.mark.setting("--restart-engine")
async def test_killed_engine_is_replaced_and_runs_again_what_was_not_sent(make: Callable[..., Engine]) -> None:
    engine = make(restart_engine=1)
    alone = await engine.tokens("alone", FINAL)
    whole = [asyncio.ensure_future(engine.tokens(f"w{index}", FINAL)) for index in range(5)]
    several = asyncio.ensure_future(engine.tokens("n", FINAL, n=3))
    streamed = asyncio.ensure_future(engine.tokens("s", DELTA, max_tokens=60))
    # tokens of all of them are known here, but only those of the stream went to a caller
    sequences = engine.llm._ready().requests._processor._sequences
    await engine.until(lambda: len(sequences) == 9 and all(len(each.token_ids) > 2 for each in sequences.values()))
    os.kill(engine.pid, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(EngineUnavailableError, match="killed by SIGKILL"):
        await streamed
    assert time.monotonic() - killed < 1
    assert not await engine.is_healthy()
    with pytest.raises(EngineUnavailableError, match=r"being restarted: .*SIGKILL"):
        await engine.tokens("refused", FINAL)
    async with asyncio.timeout(GRACE):
        assert await asyncio.gather(*whole) == [alone] * 5
        assert await several == alone * 3
    assert await engine.is_healthy()
    assert await engine.tokens("after", DELTA) == alone
    assert len(engine.started) == 2
    assert engine.llm.num_unfinished == 0


async def test_request_that_waits_for_its_first_token_streams_after_a_restart(make: Callable[..., Engine]) -> None:
    engine = make(restart_engine=1, max_num_seqs=1)
    first = asyncio.ensure_future(engine.tokens("first", DELTA, max_tokens=60))
    waiting = asyncio.ensure_future(engine.tokens("waiting", DELTA))
    await engine.until(lambda: engine.llm.stats.waiting == 1)
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineUnavailableError):
        await first
    async with asyncio.timeout(GRACE):
        assert len(await waiting) == 20


async def test_engine_that_reaches_the_limit_of_restarts_is_dead(make: Callable[..., Engine]) -> None:
    engine = make(restart_engine=1)
    for pid in (engine.pid, None):
        request = asyncio.ensure_future(engine.tokens("r", FINAL))
        await engine.until(lambda: engine.llm.stats.running == 1)
        os.kill(pid or engine.pid, signal.SIGKILL)
        if pid:
            assert len(await request) == 20
    with pytest.raises(EngineDeadError, match="SIGKILL") as death:
        await request
    assert not isinstance(death.value, EngineUnavailableError), "no further restart"
    assert engine.llm.errored
    assert len(engine.started) == 2


async def test_engine_that_does_not_start_again_is_dead(make: Callable[..., Engine]) -> None:
    engine = make(restart_engine=2)
    engine.config = AsyncEngineArgs("fake:config").create_engine_config()
    request = asyncio.ensure_future(engine.tokens("r", FINAL))
    await engine.until(lambda: engine.llm.stats.running == 1)
    os.kill(engine.pid, signal.SIGKILL)
    async with asyncio.timeout(GRACE):
        with pytest.raises(EngineDeadError, match=r"SIGKILL.*; it did not start again: --dtype: not today"):
            await request
    assert len(engine.started) == 3, "it was tried as often as the limit allows"


@pytest.mark.setting("--rpc-timeout")
async def test_stopped_engine_fails_its_requests_and_serves_again_once_it_continues(
    make: Callable[..., Engine],
) -> None:
    engine = make("fake:endless", rpc_timeout=2000)
    running = [asyncio.ensure_future(engine.tokens(f"r{index}", DELTA, max_tokens=60_000)) for index in range(3)]
    await engine.until(lambda: engine.llm.stats.running == 3)
    os.kill(engine.pid, signal.SIGSTOP)
    try:
        late = asyncio.ensure_future(engine.tokens("late", FINAL))
        async with asyncio.timeout(4):
            for request in (*running, late):
                with pytest.raises(EngineUnavailableError, match="has not answered for"):
                    await request
        assert not await engine.is_healthy()
        before = time.monotonic()
        with pytest.raises(EngineUnavailableError, match="has not answered for"):
            await engine.tokens("refused", FINAL)
        assert time.monotonic() - before < 0.2, "it is refused, it does not wait"
        assert not engine.llm.errored
    finally:
        os.kill(engine.pid, signal.SIGCONT)
    async with asyncio.timeout(5):
        while not await engine.is_healthy():
            await asyncio.sleep(0.01)
    assert len(await engine.tokens("again", FINAL)) == 20, "a healthy server takes requests at once"
    await engine.until(lambda: engine.llm.stats.running == 0)  # the requests that failed were aborted


@pytest.mark.setting("--exit-on-stuck-engine")
async def test_stuck_engine_is_ended(make: Callable[..., Engine], capfd: pytest.CaptureFixture[str]) -> None:
    engine = make("fake:hang", engine_iteration_timeout_s=0.3, exit_on_stuck_engine=True)
    async with asyncio.timeout(GRACE):
        with pytest.raises(EngineDeadError, match="has been in one step for"):
            await engine.tokens("r", FINAL)
    assert engine.llm.errored
    assert engine.started[0]._process.wait(5) == -signal.SIGKILL
    assert "in hang" in capfd.readouterr().err, "the stacks of its threads are in the log"


async def test_request_that_hangs_every_engine_is_run_again_once(make: Callable[..., Engine]) -> None:
    engine = make("fake:hang", engine_iteration_timeout_s=0.3, restart_engine=2)
    async with asyncio.timeout(GRACE):
        with pytest.raises(EngineUnavailableError, match="has been in one step for"):
            await engine.tokens("stuck", FINAL)
    await engine.until(lambda: len(engine.started) == 3)
    async with asyncio.timeout(GRACE):
        while not await engine.is_healthy():
            await asyncio.sleep(0.01)
    assert await engine.tokens("other", FINAL, prompt="x", max_tokens=2) == [ord("y"), ord("z")]


async def test_shutdown_during_a_restart_leaves_no_engine(make: Callable[..., Engine]) -> None:
    engine = make(restart_engine=1)
    request = asyncio.ensure_future(engine.tokens("r", FINAL))
    await engine.until(lambda: engine.llm.stats.running == 1)
    os.kill(engine.pid, signal.SIGKILL)
    await engine.until(lambda: len(engine.started) == 2)
    engine.llm.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        await request


def test_restart_needs_a_process_and_one_host() -> None:
    config = AsyncEngineArgs("fake", restart_engine=1).create_engine_config()
    with pytest.raises(ConfigError, match=r"--restart-engine.*--disable-frontend-multiprocessing"):
        check_start(config, in_process=True)
    with pytest.raises(ConfigError, match="--restart-engine"):
        RuntimeConfig(restart_engine=-1)
