import asyncio
import gc
import os
import signal
import stat
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.byte_text import byte_tokenizer
from support.engines.fake_engine import PROGRAM
from support.servers.served import environment
from support.suite.clock import Clock
from support.suite.watching import PATIENCE, gone, until, variables_of

from pagoda.common.config.engine import EngineConfig
from pagoda.common.errors import ConfigError, EngineDeadError, ModelError
from pagoda.common.sampling_params import SamplingParams
from pagoda.server.async_llm import AsyncLLM
from pagoda.server.core_client.ipc_messages import Shutdown
from pagoda.server.core_client.process_client import ProcessClient
from pagoda.server.settings.flags import AsyncEngineArgs

TEXT = byte_tokenizer()
OWN_INTERPRETER = (sys.executable, "-c", "import sys; sys.stdin.read()")
"""A program that is not forked, for tests of what the kernel knows about an engine's process."""


class Started:
    """Starts engines, which are ended with the test."""

    def __init__(self) -> None:
        self.clients: list[ProcessClient] = []
        self.clock = Clock()

    def client(self, model: str = "fake", program: tuple[str, ...] = PROGRAM, **args: Any) -> ProcessClient:
        config = AsyncEngineArgs(model, **args).create_engine_config()
        self.clients.append(ProcessClient(config, program, clock=self.clock))
        return self.clients[-1]

    def llm(self, model: str = "fake", **args: Any) -> AsyncLLM:
        client = self.client(model, **args)
        config = AsyncEngineArgs(model, **args).create_engine_config()
        return AsyncLLM(config, client=client, open_text=lambda _: TEXT)


@pytest.fixture
def started() -> Iterator[Started]:
    started = Started()
    yield started
    for client in started.clients:
        client.close()


async def text_of(llm: AsyncLLM, request_id: str, prompt: str, **params: Any) -> str:
    async for output in llm.generate(prompt, SamplingParams(**params), request_id):
        text = output.outputs[0].text
    return text


async def test_requests_run_in_an_engine_process(started: Started) -> None:
    llm = started.llm()
    texts = await asyncio.gather(*(text_of(llm, str(i), chr(97 + i), max_tokens=3) for i in range(10)))
    assert texts == ["".join(chr(97 + i + k) for k in (1, 2, 3)) for i in range(10)]
    await llm.check_health()
    assert await llm.reset_prefix_cache()
    client = started.clients[0]
    folder = client._folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    llm.shutdown()
    assert client._process.returncode == 0
    assert not folder.exists()


@pytest.mark.parametrize("arenas", [None, "4"])
async def test_an_engine_has_one_arena_of_memory_unless_the_environment_sets_it(
    started: Started, monkeypatch: pytest.MonkeyPatch, arenas: str | None
) -> None:
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    if arenas is not None:
        monkeypatch.setenv("MALLOC_ARENA_MAX", arenas)
    client = started.client(program=OWN_INTERPRETER)  # that of a forked process is the fork server's
    assert f"MALLOC_ARENA_MAX={arenas or 1}".encode() in variables_of(client.pid)


async def test_closing_a_stream_aborts_in_the_engine_process(started: Started) -> None:
    llm = started.llm("fake:slow")
    stream = llm.generate("abc", SamplingParams(max_tokens=60), "r")
    await anext(stream)
    await stream.aclose()
    await until(lambda: not (llm.stats.running or llm.stats.kv_blocks_used))


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        ("fake:config", ConfigError, "^--dtype: not today; use another$"),
        ("fake:bug", EngineDeadError, "^KeyError: 'a bug'$"),
    ],
)
def test_startup_errors_reach_the_client_with_type_and_message(
    started: Started, model: str, error: type[Exception], words: str
) -> None:
    client = started.client(model)
    with pytest.raises(error, match=words):
        client.wait_ready()
    assert client._process is not None
    assert client._process.wait(PATIENCE) == 1  # not killed, as a client does that is closed
    with pytest.raises(error, match=words):
        started.llm(model)


def test_exit_status_of_a_failed_engine_program_is_reported(started: Started) -> None:
    client = started.client(program=(sys.executable, "-c", "raise SystemExit(3)"))
    with pytest.raises(EngineDeadError, match="exit status 3"):
        client.wait_ready()


def test_an_engine_that_cannot_be_started_leaves_nothing_behind(started: Started, tmp_path: Path) -> None:
    """Neither a folder nor a ZeroMQ context: one with open sockets blocks for ever when it is collected."""
    with pytest.raises(FileNotFoundError) as caught:
        started.client(program=("/nowhere/at/all",), rpc_base_path=str(tmp_path))
    frames = [entry.frame.f_locals.get("self") for entry in caught.traceback]
    (client,) = {frame for frame in frames if isinstance(frame, ProcessClient)}
    assert client._context.closed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("model", ["/nowhere/at/all", "/nowhere/at/all.gguf"])
def test_the_real_engine_process_names_a_wrong_path(started: Started, model: str) -> None:
    client = started.client(model, program=(sys.executable, "-P", "-m", "pagoda.server.core_client.engine"))
    with pytest.raises(ModelError, match=r"^/nowhere/at/all.*no such file or folder"):
        client.wait_ready()


@pytest.mark.parametrize(
    ("model", "words"), [("fake:crash", "RuntimeError: the device is gone"), ("fake:exit", "exit status 7")]
)
async def test_death_in_a_step_fails_every_request(started: Started, model: str, words: str) -> None:
    llm = started.llm(model)
    tasks = [asyncio.create_task(text_of(llm, str(i), "abc", max_tokens=30)) for i in range(3)]
    for task in tasks:
        with pytest.raises(EngineDeadError, match=words):
            await task
    with pytest.raises(EngineDeadError, match=words):
        await llm.check_health()
    with pytest.raises(EngineDeadError, match=words):
        await text_of(llm, "x", "abc")
    assert llm.errored


async def test_a_killed_engine_fails_every_request(started: Started) -> None:
    llm = started.llm("fake:endless")
    task = asyncio.create_task(text_of(llm, "r", "abc", max_tokens=60_000))
    await until(lambda: llm.stats.running)
    os.kill(started.clients[0].pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="killed by SIGKILL: out of memory"):
        await task


async def test_an_idle_engine_that_is_killed_is_noticed(started: Started) -> None:
    llm = started.llm()
    await llm.wait_until_ready()
    os.kill(started.clients[0].pid, signal.SIGABRT)
    await until(lambda: llm.errored)
    assert "SIGABRT" in str(llm.dead_error)


async def silent(started: Started, llm: AsyncLLM, seconds: float) -> EngineDeadError:
    """Let time pass until the engine is unhealthy: again and again, messages of before may arrive late."""
    found: list[EngineDeadError] = []

    def is_unhealthy() -> bool:
        try:
            llm._engine.check()
        except EngineDeadError as error:
            found.append(error)
        return bool(found)

    await until(is_unhealthy, lambda: started.clock.advance(seconds))
    return found[0]


@pytest.mark.setting("--rpc-timeout")
@pytest.mark.variable("PAGODA_RPC_TIMEOUT")
async def test_silent_engine_is_unhealthy_after_the_rpc_timeout(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_RPC_TIMEOUT", "2000")
    llm = started.llm()
    await llm.check_health()
    pid = started.clients[0].pid
    os.kill(pid, signal.SIGSTOP)
    assert str(await silent(started, llm, 2.1)) == "the engine has not answered for 2 s"  # the default is 15
    os.kill(pid, signal.SIGCONT)


@pytest.mark.setting("--engine-iteration-timeout-s")
@pytest.mark.variable("PAGODA_ENGINE_ITERATION_TIMEOUT_S")
async def test_stuck_step_is_unhealthy_after_the_iteration_timeout(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENGINE_ITERATION_TIMEOUT_S", "5")
    llm = started.llm("fake:hang")
    task = asyncio.create_task(text_of(llm, "r", "abc", max_tokens=60))
    await until(lambda: started.clients[0]._supervisor._busy)
    started.clock.advance(4.9)
    await llm.check_health()
    assert str(await silent(started, llm, 1)) == "the engine has been in one step for 6 s"
    llm.shutdown(timeout=0.1)  # by force: it does not listen
    with pytest.raises(EngineDeadError):
        await task


async def test_idle_engine_is_healthy(started: Started) -> None:
    llm = started.llm(engine_iteration_timeout_s=0.05)
    await text_of(llm, "r", "abc", max_tokens=2)
    started.clock.advance(0.2)
    await llm.check_health()


@pytest.mark.setting("--rpc-base-path")
@pytest.mark.variable("PAGODA_RPC_BASE_PATH")
def test_rpc_base_path_holds_the_sockets(started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    client = started.client()
    client.wait_ready()
    (folder,) = tmp_path.iterdir()
    assert stat.S_ISSOCK((folder / "engine.in").stat().st_mode)
    client.close()
    assert not folder.exists()


@pytest.mark.parametrize("name", ["missing", "x" * 99])
def test_unusable_rpc_base_path_is_refused(started: Started, tmp_path: Path, name: str) -> None:
    if name != "missing":
        (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match="--rpc-base-path: "):
        started.client(rpc_base_path=str(tmp_path / name))


def test_shutdown_while_starting(started: Started) -> None:
    client = started.client(program=(sys.executable, "-c", "import signal; signal.pause()"))
    client.close()
    with pytest.raises(EngineDeadError, match="shut down"):
        client.wait_ready()
    with pytest.raises(EngineDeadError):
        client.send(Shutdown())


def running(program: Callable[[], None]) -> subprocess.Popen[str]:
    """Run a function of this file in another process."""
    words = [sys.executable, "-P", __file__, program.__name__]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment())


def forgets_its_client() -> None:
    client = ProcessClient(EngineConfig(), PROGRAM)
    client.wait_ready()
    print(client.pid, flush=True)
    client.itself = client  # type: ignore[attr-defined]
    left = weakref.ref(client)
    del client
    gc.collect()
    print(left())


def waits_for_ever() -> None:
    client = ProcessClient(EngineConfig(), PROGRAM)
    client.wait_ready()
    print(client.pid, flush=True)
    signal.pause()


def test_engine_ends_when_its_client_is_garbage_collected() -> None:
    """The client is in a reference cycle: it is collected late, when weak references to it are cleared already."""
    process = running(forgets_its_client)
    assert process.stdout is not None
    try:
        engine = int(process.stdout.readline())
        left, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.wait()
    assert left == "None\n"
    assert gone(engine)


def test_no_orphan_when_the_parent_is_killed() -> None:
    process = running(waits_for_ever)
    assert process.stdout is not None
    engine = int(process.stdout.readline())
    process.kill()
    process.wait()
    assert gone(engine)
    process.stdout.close()


if __name__ == "__main__":
    {each.__name__: each for each in (forgets_its_client, waits_for_ever)}[sys.argv[1]]()
