"""Sleep mode of AsyncLLM, LLM and the routes. Tests of the memory itself are in test_sleep of the backend."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.checkpoints.byte_text import byte_tokenizer
from support.engines.fake_engine import PROGRAM, build
from support.servers.live_server import live_server

from pagoda.common.errors import ConfigError, EngineDeadError, RequestError, SleepError
from pagoda.common.sampling_params import SamplingParams
from pagoda.server.async_llm import AsyncLLM
from pagoda.server.core_client.engine import ThreadClient
from pagoda.server.core_client.process_client import ProcessClient
from pagoda.server.llm import LLM
from pagoda.server.llm_engine import LLMEngine
from pagoda.server.settings.flags import AsyncEngineArgs, EngineArgs
from pagoda.server.settings.resolve import resolve

TEXT = byte_tokenizer()
SLEEPY = {"enable_sleep_mode": True}


def make(model: str = "fake", *, program: bool = False, **args: Any) -> AsyncLLM:
    config = AsyncEngineArgs(model, **{**SLEEPY, **args}).create_engine_config()
    client = ProcessClient(config, PROGRAM) if program else ThreadClient(config, build)
    return AsyncLLM(config, client=client, open_text=lambda _: TEXT)


@pytest.fixture(params=[False, True], ids=["thread", "process"])
async def llm(request: pytest.FixtureRequest) -> AsyncIterator[AsyncLLM]:
    llm = make(program=request.param)
    yield llm
    llm.shutdown()


async def answer(llm: AsyncLLM, request_id: str, prompt: str = "abcdefghij", max_tokens: int = 2) -> Any:
    last = None
    async for output in llm.generate(prompt, SamplingParams(max_tokens=max_tokens), request_id):
        last = output
    assert last is not None
    return last


async def test_requests_are_refused_until_all_parts_are_awake(llm: AsyncLLM) -> None:
    assert (await answer(llm, "before")).outputs[0].text == "kl"
    await llm.sleep()
    for tag in ("kv_cache", "weights"):
        assert await llm.is_sleeping()
        with pytest.raises(SleepError, match="POST /wake_up"):
            await answer(llm, "asleep")
        await llm.wake_up([tag])
    assert not await llm.is_sleeping()
    after = await answer(llm, "after")
    assert after.outputs[0].text == "kl"
    assert after.num_cached_tokens == 0, "the prefix cache went with the KV cache"


async def test_sleep_aborts_or_waits_for_running_requests() -> None:
    llm = make("fake:slow")
    running = asyncio.ensure_future(answer(llm, "a", max_tokens=40))
    while not llm.stats.running and not running.done():
        await asyncio.sleep(0)
    await llm.sleep(2)
    assert (await running).outputs[0].finish_reason == "abort"
    await llm.wake_up()
    running = asyncio.ensure_future(answer(llm, "b", max_tokens=20))
    while not llm.stats.running and not running.done():
        await asyncio.sleep(0)
    await llm.sleep(1, mode="wait")
    completion = (await running).outputs[0]
    assert (completion.finish_reason, len(completion.token_ids)) == ("length", 20)
    llm.shutdown()


async def test_an_engine_with_kept_requests_does_not_sleep() -> None:
    llm = make("fake:slow")
    running = asyncio.ensure_future(answer(llm, "a", max_tokens=20))
    while not llm.stats.running and not running.done():
        await asyncio.sleep(0)
    await llm.pause_generation(mode="keep")
    with pytest.raises(SleepError, match="resume generation or abort"):
        await llm.sleep(1, mode="wait")
    assert not await llm.is_sleeping()
    await llm.resume_generation()
    assert len((await running).outputs[0].token_ids) == 20
    llm.shutdown()


async def test_failed_wake_up_raises_and_leaves_the_engine_alive() -> None:
    config = AsyncEngineArgs("fake", **SLEEPY).create_engine_config()
    engines: list[Any] = []

    def remembered(config: Any, usage: str) -> Any:
        engines.append(build(config, usage))
        return engines[0]

    llm = AsyncLLM(config, client=ThreadClient(config, remembered), open_text=lambda _: TEXT)
    await llm.sleep(2)
    engines[0].backend.full = True
    with pytest.raises(SleepError, match="weights cannot wake up"):
        await llm.wake_up()
    assert await llm.is_sleeping()
    await llm.check_health()
    engines[0].backend.full = False
    await llm.wake_up()
    assert engines[0].backend.weights == "read 1"
    assert (await answer(llm, "a")).outputs[0].text == "kl"
    llm.shutdown()


async def test_engine_death_fails_a_pending_sleep() -> None:
    llm = make()
    asking = asyncio.ensure_future(llm.sleep())
    await asyncio.sleep(0)
    llm.shutdown()
    with pytest.raises(EngineDeadError):
        await asking


async def test_invalid_sleep_arguments_are_refused() -> None:
    llm, plain = make(), make(enable_sleep_mode=False)
    for ask, name in (
        (llm.sleep(3), "level"),
        (llm.sleep(1, mode="keep"), "mode"),
        (llm.wake_up(["weights", "graphs"]), "tag graphs"),
    ):
        with pytest.raises(RequestError, match=name):
            await ask
    for ask in (plain.sleep(), plain.wake_up()):
        with pytest.raises(ConfigError, match="--enable-sleep-mode"):
            await ask
    assert not await llm.is_sleeping()
    llm.shutdown()
    plain.shutdown()


def test_offline_sleep_and_wake_up() -> None:
    config = EngineArgs("fake", **SLEEPY).create_engine_config()
    llm = LLM.from_engine(LLMEngine(config, build=build, open_text=lambda _: TEXT))
    params = SamplingParams(max_tokens=2)
    llm.generate("abcdefghij", params, use_tqdm=False)
    llm.llm_engine.add_request("left over", "abc", params)
    llm.llm_engine.step()
    with pytest.raises(RequestError, match="unfinished"):
        llm.sleep(mode="wait")
    llm.sleep(level=1)
    with pytest.raises(SleepError, match=r"wake_up\(\)"):
        llm.generate("abc", params, use_tqdm=False)
    llm.wake_up(tags=["weights"])
    assert llm.llm_engine.is_sleeping()
    llm.wake_up()
    (output,) = llm.generate("abcdefghij", params, use_tqdm=False)
    assert (output.outputs[0].text, output.num_cached_tokens) == ("kl", 0)


@pytest.mark.setting("--enable-sleep-mode")
def test_sleep_routes() -> None:
    request = {"model": "fake", "prompt": "abc", "max_tokens": 1}
    with live_server(server_dev_mode=True, engine=SLEEPY) as server:
        assert server.get("/is_sleeping") == (200, {"is_sleeping": False})
        assert b'sleep_state="awake"} 1.0' in server.get("/metrics")[1]
        assert server.post("/sleep?level=2", None) == (200, b"")
        assert server.get("/is_sleeping") == (200, {"is_sleeping": True})
        assert b'sleep_state="discard_all"} 1.0' in server.get("/metrics")[1]
        status, body = server.post("/v1/completions", request)
        assert status == 503
        assert "POST /wake_up" in body["error"]["message"]
        assert server.get("/health")[0] == 200, "a liveness probe must not restart it"
        assert server.get("/ready")[0] == 503
        assert server.post("/wake_up?tags=weights", None) == (200, b"")
        assert server.get("/is_sleeping") == (200, {"is_sleeping": True})
        assert server.post("/wake_up?tags=weights&tags=kv_cache", None) == (200, b"")
        assert server.get("/is_sleeping") == (200, {"is_sleeping": False})
        assert server.post("/v1/completions", request)[0] == 200
        for wrong in ("/sleep?level=3", "/sleep?level=x", "/sleep?mode=keep", "/wake_up?tags=graphs"):
            assert server.post(wrong, None)[0] == 400
    with live_server(server_dev_mode=True) as server:
        status, body = server.post("/sleep", None)
        assert (status, "--enable-sleep-mode" in body["error"]["message"]) == (400, True)
    with live_server(engine=SLEEPY) as server:
        assert server.post("/sleep", None)[0] == 404


@pytest.mark.parametrize(("name", "value"), [("enable_sleep_mode", True), ("cpu_offload_gb", 2.0)])
def test_backends_without_sleep_mode_refuse_it(name: str, value: Any, tmp_path: Any) -> None:
    config = EngineArgs(str(tmp_path), backend="reference", **{name: value}).create_engine_config()
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ConfigError, match=f"{flag}: reference cannot move its weights; .* --backend torch_cuda"):
        resolve(config, "llm")
