"""Replicas in engines of their own: one client over all of them (--data-parallel-mode engines)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import row_items
from support.checkpoints.byte_text import byte_tokenizer
from support.engines.fake_engine import PROGRAM, allow
from support.suite.watching import PATIENCE, until, variables_of

from pagoda.backends import registry
from pagoda.common.config.engine import EngineConfig, Limits
from pagoda.common.config.groups.model import ModelConfig
from pagoda.common.config.groups.parallel import ParallelConfig
from pagoda.common.config.groups.runtime import RuntimeConfig
from pagoda.common.engine.lora.adapter import Adapter
from pagoda.common.engine.messages import EngineOutput, EngineRequest, EngineStats, StepOutputs
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.steps.contract import EMBEDDED
from pagoda.common.errors import ConfigError, EngineDeadError, EngineUnavailableError
from pagoda.common.observe.metrics import Metrics
from pagoda.common.sampling_params import RequestOutputKind, SamplingParams
from pagoda.server.async_llm import AsyncLLM
from pagoda.server.core_client import check_start, engine_processes
from pagoda.server.core_client import replica_client as module
from pagoda.server.core_client.client import EngineClient, Listener
from pagoda.server.core_client.ipc_messages import (
    NO_OTHERS,
    Abort,
    AddRequest,
    Command,
    EngineInfo,
    Failed,
    FromEngine,
    OtherUse,
    Ready,
    Refused,
    RemoveAdapter,
    Reply,
    ResetDone,
    ResetPrefixCache,
    Restarting,
    SleepState,
    SnapshotTaken,
    StepReply,
    Suspend,
    SuspendDone,
    TakeSnapshot,
    ToEngine,
    WakeUp,
)
from pagoda.server.core_client.process_client import ProcessClient
from pagoda.server.core_client.replica_client import ReplicaClient, ReplicaRouter, merge_infos
from pagoda.server.core_client.restarting import RestartingClient
from pagoda.server.settings.flags import AsyncEngineArgs

LONG = list(range(200))
DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


def request(request_id: str, tokens: list[int] | None = None, **fields: Any) -> EngineRequest:
    return EngineRequest(
        request_id=request_id, prompt_token_ids=tokens or [1], rules=SamplingRules(), max_tokens=1, **fields
    )


# The router.


def test_the_least_loaded_replica_is_chosen() -> None:
    router = ReplicaRouter()
    assert router.choose(request("a"), {0: 2, 1: 1, 2: 3}) == 1
    assert router.choose(request("a"), {0: 2, 2: 3}) == 0


def test_the_replica_with_the_longest_prefix_is_chosen() -> None:
    router = ReplicaRouter()
    assert router.choose(request("a", LONG[:70]), {0: 0, 1: 1}) == 0
    assert router.choose(request("b", LONG), {0: 3, 1: 0}) == 1  # the home has too many sequences
    same_128 = [*LONG[:150], 7]
    assert router.choose(request("c", same_128), {0: 0, 1: 1}) == 1
    assert router.choose(request("d", LONG[:70]), {0: 0, 1: 1}) == 1, "the last one that computed it"
    assert router.choose(request("e", LONG[:63]), {0: 0, 1: 1}) == 0, "too short to be known"
    assert router.choose(request("f", [7, *LONG[1:]]), {0: 0, 1: 1}) == 0, "another first token"


def test_a_prefix_gives_way_to_balance() -> None:
    router = ReplicaRouter()
    assert router.choose(request("a", LONG), {0: 0, 1: 5}) == 0
    assert router.choose(request("b", LONG), {0: 11, 1: 8}) == 0  # 8 + 1 + 8 / 4
    assert router.choose(request("c", LONG), {0: 12, 1: 8}) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"cache_salt": "x"},
        {"adapter": Adapter(name="one", number=1, path="/one")},
        {"media": row_items([EMBEDDED] * 3, b"aabbcc")},
    ],
)
def test_prefixes_with_other_keys_are_not_the_same(other: dict[str, Any]) -> None:
    router = ReplicaRouter()
    assert router.choose(request("a", LONG), {0: 1, 1: 0}) == 1
    assert router.choose(request("b", LONG, **other), {0: 0, 1: 1}) == 0


def test_the_router_forgets_a_replica() -> None:
    router = ReplicaRouter()
    router.choose(request("a", LONG), {0: 1, 1: 0})
    router.forget(1)
    assert router.choose(request("b", LONG), {0: 0, 1: 1}) == 0


def test_a_cache_key_has_the_same_replica_in_every_process() -> None:
    idle = dict.fromkeys(range(4), 0)
    homes = {key: ReplicaRouter().choose(request("a", LONG, cache_key=key), idle) for key in map(str, range(40))}
    assert set(homes.values()) == set(idle)
    for key, home in homes.items():
        router = ReplicaRouter()
        router.choose(request("b", LONG), idle | {home: 1})
        keyed = request("c", LONG, cache_key=key)
        assert router.choose(keyed, idle | {home: 1}) == home, "not the one that computed the prefix"
        without = {replica: 0 for replica in idle if replica != home}
        others = [router.choose(request("d", [7], cache_key=other), without) for other in homes if homes[other] != home]
        assert others == [homes[other] for other in homes if homes[other] != home], "no other key moves"
        assert router.choose(keyed, idle | {home: 2}) == router.choose(keyed, without), "it has too many sequences"


def test_the_prefixes_that_are_used_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_PREFIXES", 2)
    router, first, second, third = ReplicaRouter(), [1] * 64, [2] * 64, [3] * 64
    for tokens in (first, second, first, third):
        router.choose(request("a", tokens), {0: 0, 1: 1})
    assert router.choose(request("b", first), {0: 1, 1: 0}) == 0, "it was used after the second"
    assert router.choose(request("c", second), {0: 1, 1: 0}) == 1


# The client, over engines that do what the test says.


class FakeClient:
    """Implements EngineClient."""

    def __init__(self) -> None:
        self.sent: list[ToEngine] = []
        self.tell: Listener = lambda message: None
        self.error: Exception | None = None
        self.others, self.killed, self.closed = NO_OTHERS, "", False
        self.polls_until_ready = 0

    def wait_ready(self) -> EngineInfo:
        return info()

    def poll_ready(self, timeout_ms: int) -> EngineInfo | None:
        if self.error is not None:
            raise self.error
        self.polls_until_ready -= 1
        return info() if self.polls_until_ready < 0 else None

    def listen(self, loop: Any, listener: Listener) -> None:
        self.tell = listener

    def send(self, command: ToEngine) -> None:
        if self.error is not None:
            raise self.error
        self.sent.append(command)

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def kill(self, cause: str) -> None:
        self.killed = cause

    def close(self, timeout: float = 2.0) -> None:
        self.closed = True


def info(**fields: Any) -> EngineInfo:
    usual: dict[str, Any] = {
        **{"names": ("m",), "vocab_size": 9, "eos_token_ids": (0,), "backend": "fake", "device": "none"},
        **{"dtype": "float32", "memory": "little", "phases": (), "num_blocks": 10, "max_concurrency": 2.0},
        "limits": Limits(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=8, block_size=4),
    }
    return EngineInfo(**usual | fields)


class Fakes:
    def __init__(self, count: int = 2) -> None:
        self.engines = [FakeClient() for _ in range(count)]
        self.client = ReplicaClient(self.engines)
        self.told: list[FromEngine] = []
        self.client.listen(asyncio.new_event_loop(), self.told.append)

    def add(self, *request_ids: str) -> list[int]:
        """Add requests; the replica of each."""
        places = []
        for each in request_ids:
            self.client.send(AddRequest(request(each)))
            places += [i for i, e in enumerate(self.engines) if e.sent and e.sent[-1] == AddRequest(request(each))]
        return places


@pytest.fixture
def fakes() -> Fakes:
    return Fakes()


def output(request_id: str, **fields: Any) -> EngineOutput:
    return EngineOutput(request_id=request_id, new_token_ids=[1], **fields)


def test_all_engines_are_awaited_and_the_first_error_ends_the_start(fakes: Fakes) -> None:
    fakes.engines[0].polls_until_ready, fakes.engines[1].polls_until_ready = 3, 1
    assert fakes.client.wait_ready().num_blocks == 20
    fakes.engines[0].polls_until_ready, fakes.engines[1].error = 10**9, EngineDeadError("no memory")
    with pytest.raises(EngineDeadError, match="no memory"):
        fakes.client.wait_ready()


def test_requests_are_spread_and_aborted_where_they_run(fakes: Fakes) -> None:
    assert fakes.add("a", "b", "c", "d", "e") == [0, 1, 0, 1, 0]
    fakes.client.send(Abort(["a", "b", "c", "unknown"]))
    assert fakes.engines[0].sent[-1] == Abort(["a", "c"])
    assert fakes.engines[1].sent[-1] == Abort(["b"])
    assert fakes.add("f", "g", "h") == [0, 1, 0], "one is left in each"


def test_sequences_of_one_prompt_stay_together_and_all_count(fakes: Fakes) -> None:
    fakes.client.send(AddRequest(request("a"), (("a-1", 5), ("a-2", 6))))
    assert fakes.add("b", "c", "d", "e") == [1, 1, 1, 0]


def test_a_sequence_counts_until_it_ends(fakes: Fakes) -> None:
    assert fakes.add("a", "b", "c") == [0, 1, 0]
    fakes.engines[0].tell(StepReply(StepOutputs(outputs=[output("a"), output("c", finish_reason="stop")])))
    assert fakes.add("d") == [0]
    fakes.engines[0].tell(Refused("a", "prompt", "no"))
    assert fakes.told[-1] == Refused("a", "prompt", "no")
    assert fakes.add("e") == [0]


def test_what_other_clients_run_counts(fakes: Fakes) -> None:
    fakes.engines[0].others = OtherUse(3, 30, 2, {"key": (3, 30)})
    fakes.engines[1].others = OtherUse(1, 5, 1, {"key": (1, 5)})
    assert fakes.add("a", "b", "c") == [1, 1, 0]
    assert fakes.client.others == OtherUse(4, 35, 3, {"key": (4, 35)})


def test_statistics_are_those_of_all_replicas(fakes: Fakes) -> None:
    first = EngineStats(running=2, steps=3, last_step_tokens=5)
    fakes.engines[0].tell(StepReply(StepOutputs(outputs=[output("a", scheduled=1.0)], stats=first)))
    second = EngineStats(running=1, steps=4, last_step_tokens=7)
    fakes.engines[1].tell(
        StepReply(StepOutputs(outputs=[output("b", scheduled=1.0), output("c")], stats=second, earlier=(first,)))
    )
    reply = fakes.told[-1]
    assert isinstance(reply, StepReply)
    assert (reply.outputs.stats.running, reply.outputs.stats.steps) == (3, 7)
    assert [each.running for each in reply.outputs.stats.replicas] == [2, 1]
    assert [each.last_step_tokens for each in reply.outputs.stats.replicas] == [0, 7], "each step is reported once"
    assert [each.last_step_tokens for each in reply.outputs.earlier[0].replicas] == [0, 5]
    assert [each.replica for each in reply.outputs.outputs] == [1, 0], "only first outputs say where they run"


@pytest.mark.parametrize(
    ("command", "reply"), [(ResetPrefixCache(4), ResetDone(4)), (Suspend(4), SuspendDone(4))], ids=["reset", "suspend"]
)
def test_a_command_is_answered_once_by_all(fakes: Fakes, command: Command, reply: Reply) -> None:
    fakes.client.send(command)
    assert [each.sent for each in fakes.engines] == [[command]] * 2
    fakes.engines[1].tell(reply)
    assert fakes.told == []
    fakes.engines[0].tell(reply)
    assert fakes.told == [reply]
    fakes.client.send(RemoveAdapter(3))
    assert all(each.sent[-1] == RemoveAdapter(3) for each in fakes.engines)


def test_replies_are_merged(fakes: Fakes) -> None:
    fakes.client.send(TakeSnapshot(1))
    fakes.engines[0].tell(SnapshotTaken(1, "/a"))
    fakes.engines[1].tell(SnapshotTaken(1, "/b"))
    assert fakes.told[-1] == SnapshotTaken(1, "/a, /b")
    fakes.client.send(WakeUp(2, ("weights",)))
    fakes.engines[0].tell(SleepState(2, ("weights",), "no memory"))
    fakes.engines[1].tell(SleepState(2, ()))
    assert fakes.told[-1] == SleepState(2, ("weights",), "no memory")


def test_a_replica_that_fails_ends_all(fakes: Fakes) -> None:
    fakes.engines[1].tell(Failed("EngineDeadError", "gone"))
    assert fakes.told == [Failed("EngineDeadError", "replica 1: gone")]
    fakes.engines[1].error = EngineDeadError("gone")
    with pytest.raises(EngineDeadError, match="gone"):
        fakes.client.check()


def test_only_a_stuck_replica_is_killed(fakes: Fakes) -> None:
    fakes.engines[1].error = EngineUnavailableError("stuck")
    with pytest.raises(EngineUnavailableError):
        fakes.client.check()
    fakes.client.kill("stuck")
    assert [each.killed for each in fakes.engines] == ["", "stuck"]
    fakes.client.close()
    assert all(each.closed for each in fakes.engines)


def test_others_serve_on_while_a_replica_is_replaced(fakes: Fakes) -> None:
    fakes.add("a", "b", "c")
    fakes.client.send(ResetPrefixCache(1))
    fakes.engines[1].tell(ResetDone(1))
    fakes.engines[0].error = EngineUnavailableError("restarting")
    fakes.engines[0].tell(Restarting("gone"))
    assert fakes.told == [Restarting("replica 0: gone", ["a", "c"]), ResetDone(1)]
    fakes.client.check()
    fakes.client.kill("stuck")
    assert fakes.engines[0].killed == "", "it is being replaced already"
    assert fakes.add("d", "e") == [1, 1]
    fakes.engines[0].error = None
    fakes.engines[0].tell(Ready(info()))
    assert len(fakes.told) == 2, "the server was ready all the time"
    assert fakes.add("f", "g") == [0, 0]


def test_a_new_engine_has_no_cached_prefix(fakes: Fakes) -> None:
    long = AddRequest(request("a", LONG))
    fakes.client.send(long)
    fakes.engines[0].tell(Restarting("gone"))
    fakes.engines[0].tell(Ready(info()))
    fakes.add("b")
    fakes.client.send(AddRequest(request("c", LONG)))
    assert fakes.engines[1].sent == [AddRequest(request("c", LONG))]


def test_a_replica_that_has_just_ended_is_passed_over(fakes: Fakes) -> None:
    fakes.engines[0].error = EngineUnavailableError("restarting")
    assert fakes.add("a") == [1]
    fakes.engines[1].error = EngineUnavailableError("restarting")
    with pytest.raises(EngineUnavailableError):
        fakes.add("b")


def test_without_any_replica_the_engine_restarts(fakes: Fakes) -> None:
    fakes.add("a", "b")
    for engine in fakes.engines:
        engine.error = EngineUnavailableError("restarting")
        engine.tell(Restarting("gone"))
    assert fakes.told == [Restarting("replica 0: gone", ["a"]), Restarting("replica 1: gone")]
    with pytest.raises(EngineUnavailableError):
        fakes.client.check()
    fakes.engines[1].error = None
    fakes.engines[1].tell(Ready(info()))
    assert fakes.told[-1] == Ready(info())
    assert fakes.add("c") == [1]


def test_a_command_is_repeated_if_all_that_had_it_have_ended(fakes: Fakes) -> None:
    fakes.engines[0].tell(Restarting("gone"))
    fakes.client.send(ResetPrefixCache(1))
    fakes.engines[0].tell(Ready(info()))
    fakes.engines[1].tell(Restarting("gone"))
    assert fakes.engines[0].sent == [ResetPrefixCache(1)]
    fakes.engines[0].tell(ResetDone(1))
    assert fakes.told[-1] == ResetDone(1)


def test_the_whole_of_equal_engines() -> None:
    short = replace(info().limits, max_model_len=32)
    merged = merge_infos([info(), info(num_blocks=8, limits=short, max_concurrency=1.5)])
    assert (merged.num_blocks, merged.limits.max_model_len, merged.max_concurrency) == (18, 32, 1.5)
    assert merged.memory == "2 x (little)"


# Real processes.

TEXT = byte_tokenizer()
OWN_INTERPRETER = (sys.executable, "-c", "import sys; sys.stdin.read()")
"""A program that is not forked: the kernel knows the environment that it was started with."""


class Engines:
    """An AsyncLLM over two processes with a fake engine, whose sequences grow to as many tokens as `allow` says."""

    def __init__(self, folder: Path, **args: Any) -> None:
        self._limit = folder / "tokens"
        self.allow(100_000)
        model = f"fake:held@{self._limit}"
        self.config = AsyncEngineArgs(model, data_parallel_size=2, **args).create_engine_config()
        self.started: list[ProcessClient] = []
        restarts = self.config.runtime.restart_engine
        clients: list[EngineClient] = [
            RestartingClient(self._start, restarts) if restarts else self._start() for _ in range(2)
        ]
        self.metrics = Metrics("fake", 2)
        self.llm = AsyncLLM(self.config, client=ReplicaClient(clients), open_text=lambda _: TEXT, metrics=self.metrics)

    def _start(self) -> ProcessClient:
        self.started.append(ProcessClient(self.config, PROGRAM))
        return self.started[-1]

    def allow(self, tokens: int) -> None:
        self._allowed = tokens
        allow(self._limit, tokens)

    def grow(self) -> None:
        """Allow one token more, as a step in which the engines also look for new requests."""
        self.allow(self._allowed + 1)

    async def tokens(self, request_id: str, kind: RequestOutputKind = FINAL) -> list[int]:
        read: list[int] = []
        async for each in self.llm.generate("abc", SamplingParams(output_kind=kind, max_tokens=30), request_id):
            read += each.outputs[0].token_ids
        return read

    def of_replicas(self, name: str) -> list[float]:
        values = (
            self.metrics.registry.get_sample_value(name, {"model_name": "fake", "engine": str(index)})
            for index in range(2)
        )
        return [value or 0.0 for value in values]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Callable[..., Engines]]:
    made: list[Engines] = []

    def start(*args: Any, **kwargs: Any) -> Engines:
        made.append(Engines(tmp_path, *args, **kwargs))
        return made[-1]

    yield start
    for each in made:
        each.llm.shutdown()


@pytest.mark.setting("--data-parallel-mode")
async def test_both_engines_generate(make: Callable[..., Engines]) -> None:
    engines = make()
    answers = await asyncio.gather(*(engines.tokens(f"r{i}") for i in range(4)))
    assert [len(each) for each in answers] == [30] * 4
    assert all(each == answers[0] for each in answers)
    assert engines.of_replicas("vllm:generation_tokens_total") == [60.0, 60.0]
    assert await engines.llm.reset_prefix_cache()


async def test_a_killed_replica_loses_what_was_sent_only(make: Callable[..., Engines]) -> None:
    engines = make(restart_engine=2)
    engines.allow(3)
    whole = [asyncio.ensure_future(engines.tokens(f"whole{i}")) for i in range(4)]
    streams = [asyncio.ensure_future(engines.tokens(f"stream{i}", DELTA)) for i in range(4)]
    await until(lambda: engines.llm.num_unfinished == 8)
    await until(lambda: min(engines.of_replicas("vllm:generation_tokens_total")) >= 8, engines.grow)
    async with asyncio.timeout(PATIENCE):
        os.kill(engines.started[0].pid, signal.SIGKILL)
        engines.allow(100_000)
        answers = await asyncio.gather(*whole)
        streamed = await asyncio.gather(*streams, return_exceptions=True)
        await engines.llm.check_health()
        assert [len(each) for each in answers] == [30] * 4
        assert [isinstance(each, EngineUnavailableError) for each in streamed].count(True) == 2
        assert [len(each) for each in streamed if not isinstance(each, BaseException)] == [30, 30]
        await until(lambda: len(engines.started) == 3 and engines.started[2]._supervisor.ready)
        before = engines.of_replicas("vllm:generation_tokens_total")[0]
        await asyncio.gather(*(engines.tokens(f"later{i}") for i in range(2)))
        assert engines.of_replicas("vllm:generation_tokens_total")[0] == before + 30


async def test_without_restarts_a_killed_replica_ends_all(make: Callable[..., Engines]) -> None:
    engines = make()
    engines.allow(3)
    answer = asyncio.ensure_future(engines.tokens("a"))
    other = asyncio.ensure_future(engines.tokens("b"))
    await until(lambda: min(engines.of_replicas("vllm:generation_tokens_total")) >= 1, engines.grow)
    os.kill(engines.started[1].pid, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE):
        for each in (answer, other):
            with pytest.raises(EngineDeadError, match="replica 1: the engine process was killed by SIGKILL"):
                await each


# Which engines are started, and with which devices.


def config(backend: str = "reference", runtime: RuntimeConfig | None = None, **parallel: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model="m", backend=backend),
        parallel=ParallelConfig(**parallel),
        runtime=runtime or RuntimeConfig(),
    )


def test_backends_without_such_a_program_have_an_engine_per_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 6})
    assert len(engine_processes(config())) == 1
    two = engine_processes(config(data_parallel_size=2))
    assert [each.config.runtime.cpu_omp_threads_bind for each in two] == ["0,1", "2,3,6"]
    assert {each.config.parallel.data_parallel_size for each in two} == {2}
    assert len(engine_processes(config("jax_tpu", data_parallel_size=2))) == 1
    assert len(engine_processes(config("jax_tpu", data_parallel_size=2, data_parallel_mode="engines"))) == 2


@pytest.mark.parametrize(("cores", "expected"), [("0-1|2", ["0-1", "2"]), ("nobind", ["nobind", "nobind"])])
def test_stated_cores(cores: str, expected: list[str]) -> None:
    processes = engine_processes(config(runtime=RuntimeConfig(cpu_omp_threads_bind=cores), data_parallel_size=2))
    assert [each.config.runtime.cpu_omp_threads_bind for each in processes] == expected


def test_core_lists_are_as_many_as_engines() -> None:
    three = RuntimeConfig(cpu_omp_threads_bind="0|1|2")
    with pytest.raises(ConfigError, match="--cpu-omp-threads-bind: 3 core lists for 2 replicas"):
        engine_processes(config(runtime=three, data_parallel_size=2))
    with pytest.raises(ConfigError, match="3 core lists for one engine"):
        _ = three.cores


def test_more_replicas_than_cores_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5})
    processes = engine_processes(config(data_parallel_size=2))
    assert [each.config.runtime.cpu_omp_threads_bind for each in processes] == ["auto", "5"]


def gpus(monkeypatch: pytest.MonkeyPatch, folder: Path, count: int) -> None:
    for index in range(count):
        (folder / f"0000:0{index}:00.0").mkdir()
    monkeypatch.setattr(registry, "_NVIDIA_GPUS", folder)
    monkeypatch.delenv("PAGODA_TORCH_CUDA_DEVICE", raising=False)


def test_each_engine_sees_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpus(monkeypatch, tmp_path, 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    pairs = ParallelConfig(data_parallel_size=2, tensor_parallel_size=2)
    own = [registry.device_env("torch_cuda", pairs, engine) for engine in range(2)]
    assert own == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]
    with pytest.raises(ConfigError, match="replica 2 needs GPUs 4 to 5 and 4 are visible"):
        registry.device_env("torch_cuda", pairs, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-ab,1")
    one = ParallelConfig(data_parallel_size=3)
    assert [dict(registry.device_env("torch_cuda", one, each)) for each in range(3)] == [
        {"CUDA_VISIBLE_DEVICES": "3"},
        {"CUDA_VISIBLE_DEVICES": "GPU-ab"},
        {"CUDA_VISIBLE_DEVICES": "1"},
    ]


def test_gpus_that_are_not_listed_are_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpus(monkeypatch, tmp_path, 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert registry.device_env("torch_cuda", ParallelConfig(data_parallel_size=2), 1) == {"CUDA_VISIBLE_DEVICES": "1"}


def test_an_environment_reaches_the_engine_process() -> None:
    started = ProcessClient(config("fake"), OWN_INTERPRETER, env={"CUDA_VISIBLE_DEVICES": "7"})
    try:
        assert b"CUDA_VISIBLE_DEVICES=7" in variables_of(started.pid)
    finally:
        started.close(timeout=0)


@pytest.mark.parametrize(
    ("parallel", "in_process", "error"),
    [
        ({"data_parallel_size": 2}, True, "--data-parallel-size: each replica needs an engine process of its own"),
        (
            {"data_parallel_size": 2, "data_parallel_mode": "engines", "nnodes": 2},
            False,
            "--data-parallel-mode: engines run on one host",
        ),
    ],
)
def test_where_replicas_cannot_run_apart(parallel: dict[str, Any], in_process: bool, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        check_start(config(**parallel), in_process=in_process)


def test_a_sleeping_replica_is_not_replaced_by_one_that_is_awake() -> None:
    model = ModelConfig(model="m", backend="reference", enable_sleep_mode=True)
    both = replace(config(data_parallel_size=2, runtime=RuntimeConfig(restart_engine=1)), model=model)
    with pytest.raises(ConfigError, match="--restart-engine: a replica would restart awake among sleeping ones"):
        check_start(both, in_process=False)
