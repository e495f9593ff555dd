"""LoRA adapters over HTTP: every API by model name, loading and unloading, resolvers, metrics, bad input."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.checkpoints.adapters import llama_modules, write_adapter
from support.checkpoints.tiny_folder import write_model
from support.servers.live_server import LiveServer, live_server

from pagoda.backends.registry import load_backend
from pagoda.common.config.groups.model import LoRAConfig
from pagoda.common.engine.lora.adapter import Adapter
from pagoda.common.errors import ConfigError, RequestError
from pagoda.server.async_llm import AsyncLLM
from pagoda.server.http import adapters as adapters_module
from pagoda.server.http.adapters import ServedAdapters, lora_modules
from pagoda.server.processing.adapters import AdapterRegistry
from pagoda.server.vllm.request_types import LoRARequest, LoRAResolver, LoRAResolverRegistry

MODULES = llama_modules(32, 48, 4, 2, 2)
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
ENGINE = {
    "dtype": "float32",
    "backend": "reference",
    "enable_lora": True,
    "max_loras": 2,
    "served_model_name": ["base"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    load_backend("reference")  # its import takes longer than a server may
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    base = {"base_model_name_or_path": "base"}
    return {name: write_adapter(root / name, MODULES, seed=seed, **base) for seed, name in enumerate("abcd", 1)}


@pytest.fixture
def server(model: Path, folders: dict[str, Path]) -> Iterator[LiveServer]:
    second = json.dumps({"name": "b", "path": str(folders["b"]), "base_model_name": "other"})
    modules = (f"a={folders['a']}", second)
    with live_server(str(model), ready=False, engine=ENGINE, lora_modules=modules, chat_template=TEMPLATE) as running:
        running.call(running.state.wait_until_ready(), 60)
        yield running


def completed(server: LiveServer, model: str, **more: Any) -> Any:
    body = {"model": model, "prompt": "abcdefgh", "max_tokens": 6, "temperature": 0, "ignore_eos": True, **more}
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    assert answer["model"] == model
    return answer["choices"][0]["text"]


@pytest.mark.setting("--lora-modules")
def test_the_models_list_has_the_adapters(server: LiveServer, model: Path, folders: dict[str, Path]) -> None:
    _, answer = server.request("GET", "/v1/models")
    rows = [(card["id"], card["root"], card["parent"]) for card in answer["data"]]
    assert rows == [
        ("base", str(model), None),
        ("a", str(folders["a"]), "base"),
        ("b", str(folders["b"]), "other"),
    ]
    assert server.request("GET", "/v1/models/b")[1]["parent"] == "other"


def test_every_api_takes_an_adapter_as_its_model(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "abcdefgh"}]
    common = {"max_tokens": 6, "temperature": 0}
    texts: dict[str, set[str]] = {}
    for name in ("base", "a", "b"):
        chat = server.post("/v1/chat/completions", {"model": name, "messages": messages, **common})[1]
        completion = server.post("/v1/completions", {"model": name, "prompt": "abcdefgh", **common})[1]
        body = {"model": name, "input": "abcdefgh", "max_output_tokens": 6, "temperature": 0}
        response = server.post("/v1/responses", body)[1]
        message = server.post("/v1/messages", {"model": name, "messages": messages, **common})[1]
        cohere = server.post("/v2/chat", {"model": name, "messages": messages, **common})[1]
        beams = {"model": name, "prompt": "abcdefgh", "max_tokens": 6, "use_beam_search": True}
        search = server.post("/v1/completions", {**beams, "temperature": 0})[1]
        texts[name] = {
            chat["choices"][0]["message"]["content"],
            completion["choices"][0]["text"],
            response["output"][0]["content"][0]["text"],
            message["content"][0]["text"],
            cohere["message"]["content"][0]["text"],
            search["choices"][0]["text"],
        }
        assert len(texts[name]) == 1, texts[name]
    assert len(texts["base"] | texts["a"] | texts["b"]) == 3


def test_unknown_names_are_not_found(server: LiveServer) -> None:
    status, answer = server.post("/v1/completions", {"model": "x", "prompt": "a"})
    assert (status, answer["error"]["param"]) == (404, "model")
    assert "served models: base, a, b" in answer["error"]["message"]


def test_adapters_are_not_loaded_at_run_time_unless_allowed(server: LiveServer, folders: dict[str, Path]) -> None:
    body = {"lora_name": "c", "lora_path": str(folders["c"])}
    status, answer = server.post("/v1/load_lora_adapter", body)
    assert (status, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in answer["error"]["message"]) == (403, True)
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "a"})[0] == 403


@pytest.mark.variable("VLLM_ALLOW_RUNTIME_LORA_UPDATING")
@pytest.mark.field("LoadLoRAAdapterRequest.lora_name|lora_path|load_inplace")
@pytest.mark.field("UnloadLoRAAdapterRequest.lora_name|lora_int_id")
def test_adapters_come_and_go(
    server: LiveServer, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "true")
    load = {"lora_name": "c", "lora_path": str(folders["c"])}
    status, text = server.post("/v1/load_lora_adapter", load)
    assert (status, text) == (200, b"Success: LoRA adapter 'c' added successfully.")
    of_c = completed(server, "c")
    status, answer = server.post("/v1/load_lora_adapter", load)
    assert (status, "load_inplace" in answer["error"]["message"]) == (400, True)
    in_place = {**load, "lora_path": str(folders["d"]), "load_inplace": True}
    assert server.post("/v1/load_lora_adapter", in_place)[0] == 200
    of_d = completed(server, "c")
    assert of_d != of_c
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "c"})[0] == 200
    assert server.post("/v1/completions", {"model": "c", "prompt": "a"})[0] == 404
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "c"})[0] == 404
    assert server.post("/v1/load_lora_adapter", load)[0] == 200
    assert completed(server, "c") == of_c


def test_bad_adapters_are_refused_and_the_server_goes_on(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    other = write_adapter(tmp_path / "other", llama_modules(64, 48, 4, 2, 2))
    deep = write_adapter(tmp_path / "deep", llama_modules(32, 48, 4, 2, 3))
    high = write_adapter(tmp_path / "high", MODULES, rank=17)
    for name, path, words in (
        ("x", other, "the adapter is of another base model"),
        ("x", deep, "the model has no module model.layers.2.self_attn.q_proj"),
        ("x", high, "r is 17, above --max-lora-rank 16"),
        ("x", tmp_path / "none", "is not a folder on the server"),
        ("base", other, "base is the name of the model"),
        ("", other, "lora_name must have 1 to 256 characters"),
    ):
        status, answer = server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        expected = 404 if path.name == "none" else 400
        assert (status, words in answer["error"]["message"]) == (expected, True), answer
    assert completed(server, "a")


@pytest.mark.variable("VLLM_LORA_RESOLVER_CACHE_DIR")
def test_unknown_names_are_looked_up_in_a_folder(
    server: LiveServer, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = folders["c"].parent
    monkeypatch.setenv("VLLM_LORA_RESOLVER_CACHE_DIR", str(cache))
    assert server.post("/v1/completions", {"model": "c", "prompt": "a"})[0] == 404
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    assert completed(server, "c") != completed(server, "base")
    write_adapter(tmp_path / "outside", MODULES, base_model_name_or_path="base")
    write_adapter(cache / "strange", MODULES, base_model_name_or_path="another")
    aliases = "./d", "././d", "d/", "d//", "c/../d", "d/."
    for name in ("../outside", str(tmp_path / "outside"), "strange", ".", "c/..", "nothing", *aliases):
        assert server.post("/v1/completions", {"model": name, "prompt": "a"})[0] == 404, name
    body = {"lora_name": "y", "lora_path": str(tmp_path / "outside")}
    status, answer = server.post("/v1/load_lora_adapter", body)
    assert (status, "is outside VLLM_LORA_RESOLVER_CACHE_DIR" in answer["error"]["message"]) == (400, True)


@pytest.mark.variable("VLLM_LORA_RESOLVER_CACHE_DIR")
def test_an_adapter_that_cannot_be_used_is_read_again_only_once_its_files_change(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_LORA_RESOLVER_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    read: list[str] = []
    load = AsyncLLM.load_adapter

    async def noted(llm: AsyncLLM, adapter: Adapter) -> None:
        read.append(adapter.name)
        await load(llm, adapter)

    monkeypatch.setattr(AsyncLLM, "load_adapter", noted)
    base = {"base_model_name_or_path": "base"}
    write_adapter(tmp_path / "e", MODULES, rank=17, **base)
    for _ in range(3):
        status, answer = server.post("/v1/completions", {"model": "e", "prompt": "a"})
        assert (status, "r is 17, above --max-lora-rank 16" in answer["error"]["message"]) == (400, True)
    assert read == ["e"]
    write_adapter(tmp_path / "e", MODULES, rank=8, **base)
    completed(server, "e")
    assert read == ["e", "e"]


@pytest.mark.variable("VLLM_LORA_RESOLVER_CACHE_DIR")
def test_adapters_found_for_requests_make_room_for_each_other(
    server: LiveServer, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_LORA_RESOLVER_CACHE_DIR", str(folders["c"].parent))
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    monkeypatch.setattr(adapters_module, "MAX_RESOLVED", 1)
    of_c = completed(server, "c")
    completed(server, "d")
    assert [model["id"] for model in server.request("GET", "/v1/models")[1]["data"]] == ["base", "a", "b", "d"]
    text = server.request("GET", "/metrics")[1].decode()
    assert ('lora_name="c"' in text, 'lora_name="d"' in text) == (False, True)
    assert completed(server, "c") == of_c


def test_plugins_resolve_names(server: LiveServer, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    class Known(LoRAResolver):
        async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
            assert base_model_name == "base"
            return LoRARequest(lora_name, 7, str(folders["d"])) if lora_name == "known" else None

    monkeypatch.setattr(LoRAResolverRegistry, "_resolvers", {})
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    LoRAResolverRegistry.register_resolver("known", Known())
    assert LoRAResolverRegistry.get_supported_resolvers() == {"known"}
    assert isinstance(LoRAResolverRegistry.get_resolver("known"), Known)
    assert completed(server, "known") != completed(server, "base")
    assert server.post("/v1/completions", {"model": "unknown", "prompt": "a"})[0] == 404


def test_metrics_count_tokens_of_each_adapter(server: LiveServer) -> None:
    completed(server, "a")
    completed(server, "a")
    completed(server, "base")
    text = server.request("GET", "/metrics")[1].decode()
    assert 'pagoda:lora_tokens_total{kind="generation",lora_name="a",model_name="fake"} 12.0' in text
    assert 'lora_name="b"' not in text
    labels = 'vllm:lora_requests_info{max_lora="2",running_lora_adapters="",waiting_lora_adapters=""}'
    assert labels in text


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("a", "neither name=path nor JSON"),
        ("a=", "needs a name and a path"),
        ('{"name": "a"}', "needs a name and a path"),
        ('{"name": "a", "path": "/a", "rank": 4}', "is not an object with the texts name, path, base_model_name"),
        ('[{"name": "a", "path": "/a"}, {"name": "a", "path": "/b"}]', "two adapters have the name a"),
    ],
)
def test_bad_entries_of_lora_modules(entry: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        lora_modules([entry])


def adapters(entry: str, *, enabled: bool = True) -> ServedAdapters:
    """Those of a server whose engine finds no file."""

    async def refuse(adapter: Adapter) -> None:
        raise RequestError("lora_request", f"{adapter.path}: no such folder")

    config = LoRAConfig(enable_lora=enabled)
    engine = SimpleNamespace(config=SimpleNamespace(lora=config), names=("base",), load_adapter=refuse)
    engine.adapters = AdapterRegistry(config)
    return ServedAdapters(cast(AsyncLLM, engine), [entry])


def test_lora_modules_that_cannot_be_served_end_the_start() -> None:
    with pytest.raises(ConfigError, match="--lora-modules: adapters need --enable-lora"):
        adapters("a=/a", enabled=False)
    with pytest.raises(ConfigError, match="--lora-modules: base is the name of the model"):
        adapters("base=/a")
    with pytest.raises(ConfigError, match="--lora-modules: x: /a: no such folder"):
        asyncio.run(adapters("x=/a").load_modules())
