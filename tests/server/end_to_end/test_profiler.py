"""Profiles through every interface: LLM, AsyncLLM over an engine process, HTTP, and traces of real models."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import support.devices.jax_devices  # noqa: F401
import torch
from support.checkpoints.byte_text import byte_tokenizer
from support.checkpoints.tiny_encoder import write_encoder
from support.checkpoints.tiny_folder import write_model
from support.engines.fake_engine import PROGRAM
from support.servers.live_server import live_server
from support.suite.slow_matrix import some

from pagoda.backends.reference.profiler import TorchTracer
from pagoda.common.config.groups.nested.profiler import profiler_of
from pagoda.common.errors import ConfigError, RequestError
from pagoda.common.sampling_params import SamplingParams
from pagoda.server.async_llm import AsyncLLM
from pagoda.server.core_client.process_client import ProcessClient
from pagoda.server.llm import LLM
from pagoda.server.settings.flags import AsyncEngineArgs, EngineArgs
from pagoda.server.startup.engine import check_engine

SMALL = {"max_model_len": 64, "max_num_seqs": 2, "dtype": "float32"}
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
FAKE_PROFILER = {"profiler": "torch", "torch_profiler_dir": "/nowhere"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model")))


def profiler(folder: Path, **settings: Any) -> dict[str, Any]:
    return {"profiler": "torch", "torch_profiler_dir": str(folder), "torch_profiler_with_stack": False, **settings}


def operators(trace: str | Path) -> Counter[str]:
    """How often each operator is in a trace."""
    path = Path(trace)
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return Counter(event["name"] for event in json.loads(text)["traceEvents"] if event.get("cat") == "cpu_op")


def attentions(trace: str | Path) -> int:
    """How often a trace has attention of a layer."""
    return operators(trace)["aten::scaled_dot_product_attention"]


@pytest.mark.setting("--profiler-config")
def test_a_trace_of_a_served_model(model: str, tmp_path: Path) -> None:
    folder = tmp_path / "made" / "when missing"
    request = {"model": "fake", "prompt": "abcd", "max_tokens": 3, "ignore_eos": True}
    settings = {"backend": "reference", **SMALL, "profiler_config": profiler(folder)}
    with live_server(model, engine=settings) as server:
        assert server.post("/v1/completions", request)[0] == 200
        assert server.request("POST", "/start_profile") == (200, b"")
        assert server.post("/v1/completions", request)[0] == 200
        status, answer = server.request("POST", "/stop_profile")
        assert status == 200
        assert server.post("/v1/completions", request)[0] == 200
        (trace,) = folder.iterdir()
        assert answer == {"path": str(trace)}
        assert trace.name.startswith("pagoda_")
        assert trace.name.endswith(".pt.trace.json.gz")
        seen = operators(trace)
        assert seen["aten::index_copy_"] >= 3, "the KV cache is written in each step"
        assert attentions(trace) == 6, "of two layers, in three steps: no request before or after"
        assert (
            server.request("POST", "/start_profile?profile_prefix=mine&delay_iterations=1&max_iterations=1")[0] == 200
        )
        assert server.post("/v1/completions", request)[0] == 200
        (path,) = folder.glob("mine_*.pt.trace.json.gz")
        assert attentions(path) == 2, "one step of three, written before the stop"
        assert server.request("POST", "/stop_profile") == (200, {"path": str(path)})


def test_errors_of_the_routes_leave_the_server_serving() -> None:
    request = {"model": "fake", "prompt": "abc", "max_tokens": 2}
    with live_server(engine={"profiler_config": FAKE_PROFILER}) as server:
        for path, message in (
            ("/stop_profile", "no profile was started"),
            ("/start_profile?profile_prefix=../x", "profile_prefix '../x' is no beginning of a file name"),
            ("/start_profile?delay_iterations=x", "delay_iterations 'x' is not an integer of 0 or more"),
            ("/start_profile?max_iterations=-1", "max_iterations '-1' is not an integer of 0 or more"),
            ("/start_profile?max_iterations=99999999999999999999", "max_iterations must be an integer"),
            ("/start_profile", ""),
            ("/start_profile", "a profile is being taken; stop it first"),
        ):
            status, answer = server.request("POST", path)
            assert status == (400 if message else 200), answer
            if message:
                assert message in answer["error"]["message"]
            assert server.post("/v1/completions", request)[0] == 200
        assert server.request("POST", "/stop_profile")[0] == 200
        assert server.get("/start_profile")[0] == 405


def test_the_routes_need_the_flag_and_the_key() -> None:
    with live_server(server_dev_mode=True) as server:
        for path in ("/start_profile", "/stop_profile"):
            assert server.request("POST", path)[0] == 404
            assert path not in server.get("/openapi.json")[1]["paths"]
    with live_server(api_key=("key",), engine={"profiler_config": FAKE_PROFILER}) as server:
        key = {"authorization": "Bearer key"}
        for path in ("/start_profile", "/stop_profile"):
            assert server.request("POST", path)[0] == 401
            assert server.request("POST", path, headers=key)[0] == 200
            assert path in server.request("GET", "/openapi.json", headers=key)[1]["paths"]


async def test_an_engine_process_is_profiled() -> None:
    config = AsyncEngineArgs("fake", profiler_config=FAKE_PROFILER).create_engine_config()
    llm = AsyncLLM(config, client=ProcessClient(config, PROGRAM), open_text=lambda _: byte_tokenizer())
    try:
        with pytest.raises(RequestError, match="no profile was started"):
            await llm.stop_profile()
        await llm.start_profile("mine", max_iterations=2)
        with pytest.raises(RequestError, match="a profile is being taken"):
            await llm.start_profile()
        async for _ in llm.generate("abcd", SamplingParams(max_tokens=4), "a"):
            pass
        assert (await llm.stop_profile()).startswith("mine_")
        await llm.start_profile(delay_iterations=9)
        with pytest.raises(RequestError, match="no trace was written") as error:
            await llm.stop_profile()
        assert error.value.field == "delay_iterations"
        with pytest.raises(RequestError, match="profile_prefix"):
            await llm.start_profile("a/b")
    finally:
        llm.shutdown()


async def test_no_profile_without_the_flag() -> None:
    config = AsyncEngineArgs("fake").create_engine_config()
    llm = AsyncLLM(config, client=ProcessClient(config, PROGRAM), open_text=lambda _: byte_tokenizer())
    try:
        for ask in (llm.start_profile(), llm.stop_profile()):
            with pytest.raises(ConfigError, match="--profiler-config: the profiler is off; set it"):
                await ask
    finally:
        llm.shutdown()


def test_offline_traces_have_what_was_configured(model: str, tmp_path: Path) -> None:
    settings = profiler(
        tmp_path, torch_profiler_with_stack=True, torch_profiler_record_shapes=True, torch_profiler_with_memory=True
    )
    llm = LLM(model, backend="reference", **SMALL, profiler_config=settings | {"torch_profiler_use_gzip": False})
    llm.start_profile()
    llm.generate("abcd", PARAMS, use_tqdm=False)
    trace = llm.stop_profile()
    assert trace.endswith(".pt.trace.json")
    events = json.loads(Path(trace).read_text())["traceEvents"]
    assert {"cpu_op", "python_function", "cpu_instant_event"} <= {event.get("cat") for event in events}
    assert any("Input Dims" in event.get("args", {}) for event in events)
    assert list(tmp_path.iterdir()) == [Path(trace)], "no unfinished file is left"
    llm.start_profile("few", delay_iterations=2, max_iterations=3)
    llm.generate("abcd", PARAMS, use_tqdm=False)
    assert attentions(llm.stop_profile()) == 3 * 2
    with pytest.raises(RequestError, match="no profile was started"):
        llm.stop_profile()
    llm.shutdown()


def test_operators_of_all_threads_are_traced(tmp_path: Path) -> None:
    worker = ThreadPoolExecutor(1)
    config = profiler_of(profiler(tmp_path, torch_profiler_with_flops=True))
    assert config is not None
    tracer = TorchTracer(config, lambda work: worker.submit(work).result())
    tracer.start("threads")
    ThreadPoolExecutor(1).submit(lambda: torch.ones(3, 3) @ torch.ones(3, 3)).result()
    worker.submit(lambda: torch.ones(3).exp()).result()
    trace = tracer.stop()
    assert operators(trace) >= Counter({"aten::mm": 1, "aten::exp": 1})
    assert b"Input Dims" in gzip.decompress(trace.read_bytes()), "of which FLOP are computed"


def test_no_profile_offline_without_the_flag(model: str) -> None:
    llm = LLM(model, backend="reference", **SMALL)
    for ask in (llm.start_profile, llm.stop_profile):
        with pytest.raises(ConfigError, match="--profiler-config: the profiler is off; set it"):
            ask()
    llm.shutdown()


def test_a_folder_that_goes_away_fails_the_stop_only(model: str, tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    llm = LLM(model, backend="reference", **SMALL, profiler_config=profiler(folder))
    llm.start_profile()
    llm.generate("abcd", PARAMS, use_tqdm=False)
    folder.rmdir()
    with pytest.raises(RequestError, match="the trace could not be written: "):
        llm.stop_profile()
    folder.mkdir()
    llm.start_profile()
    llm.generate("abcd", PARAMS, use_tqdm=False)
    assert attentions(llm.stop_profile()) == 2 * 6
    llm.shutdown()


def test_a_folder_that_cannot_be_made(model: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--profiler-config: torch_profiler_dir .*file/x: Not a directory; name a"):
        LLM(model, backend="reference", **SMALL, profiler_config=profiler(tmp_path / "file" / "x"))


@pytest.mark.parametrize(
    ("backend", "settings", "message"),
    [
        ("torch_cuda", {"tensor_parallel_size": 2}, "several ranks .--tensor-parallel-size."),
        ("jax_tpu", {"nnodes": 2}, "several hosts .--nnodes."),
        ("jax_tpu", {"profiler": {"torch_profiler_record_shapes": True}}, "torch_profiler_record_shapes is not"),
        ("jax_tpu", {"profiler": {"torch_profiler_use_gzip": False}}, "torch_profiler_use_gzip: jax's profiler"),
    ],
)
def test_what_is_not_profiled_is_refused_at_the_start(
    backend: str, settings: dict[str, Any], message: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGODA_TORCH_CUDA_DEVICE", "cpu")
    more = dict(settings)
    config = profiler(tmp_path, **more.pop("profiler", {}))
    args = EngineArgs(model, backend=backend, **SMALL, **more, profiler_config=config)
    with pytest.raises(ConfigError, match=f"--profiler-config: .*{message}"):
        check_engine(args.create_engine_config(), "llm")


def test_a_trace_of_torch_cuda(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGODA_TORCH_CUDA_DEVICE", "cpu")
    llm = LLM(model, backend="torch_cuda", block_size=16, **SMALL, profiler_config=profiler(tmp_path))
    llm.start_profile(max_iterations=2)
    llm.generate("abcd", PARAMS, use_tqdm=False)
    few = operators(llm.stop_profile())
    llm.start_profile()
    llm.generate("abcd", PARAMS, use_tqdm=False)
    many = operators(llm.stop_profile())
    llm.shutdown()
    assert few["aten::mm"] + few["aten::linear"] > 0
    assert many["aten::embedding"] + many["aten::index_select"] > few["aten::embedding"] + few["aten::index_select"] > 0


def test_a_trace_of_jax_tpu(model: str, tmp_path: Path) -> None:
    pytest.importorskip("flax")
    config = profiler(tmp_path, torch_profiler_with_stack=True)
    settings = SMALL | {"max_model_len": 32, "max_num_seqs": 1, "data_parallel_size": 2, "max_num_batched_tokens": 16}
    llm = LLM(model, backend="jax_tpu", **settings, profiler_config=config)
    llm.start_profile("steps")
    llm.generate(["abcd", "efgh"], PARAMS, use_tqdm=False)
    folder = Path(llm.stop_profile())
    llm.shutdown()
    assert folder.parent == tmp_path
    assert folder.name.startswith("steps_")
    (trace,) = folder.rglob("*.trace.json.gz")
    names = Counter(event.get("name", "") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"])
    assert names["ThunkExecutor::Execute"] >= 6, "the programs of six steps, which both replicas run"
    assert any("execute_shards" in name for name in names), "Python calls"


@pytest.mark.parametrize("backend", some(["reference", "torch_cuda", "jax_tpu"], ["reference", "torch_cuda"]))
def test_a_trace_of_a_pooling_model(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGODA_TORCH_CUDA_DEVICE", "cpu")
    folder, traces = write_encoder(tmp_path / "model"), tmp_path / "traces"
    settings: dict[str, Any] = {
        "dtype": "float32",
        "runner": "pooling",
        "max_num_seqs": 2,
        "max_num_batched_tokens": 32,
    }
    llm = LLM(str(folder), backend=backend, max_model_len=32, profiler_config=profiler(traces), **settings)
    llm.start_profile()
    llm.embed(["the cat sat"], use_tqdm=False)
    trace = Path(llm.stop_profile())
    llm.shutdown()
    if backend == "jax_tpu":
        assert list(trace.rglob("*.trace.json.gz"))
    else:
        assert operators(trace)["aten::gelu"] == 2
