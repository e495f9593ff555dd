"""Settings that select the model and how it is read, each tested on a running engine."""

from __future__ import annotations

import io
import json
import logging
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants
from support.checkpoints.tiny_folder import write_model
from support.servers.hub_server import HubServer
from support.suite.rows import each_row

from pagoda.common.errors import ConfigError, ModelError, RequestError
from pagoda.common.sampling_params import SamplingParams
from pagoda.server.cli import main
from pagoda.server.core_client.ipc_messages import EngineInfo
from pagoda.server.llm import LLM
from pagoda.server.llm_engine import LLMEngine
from pagoda.server.settings.flags import EngineArgs, FlagParser
from pagoda.server.settings.resolve import resolve
from pagoda.server.settings.tokenizer import open_tokenizer
from pagoda.server.startup.engine import build_engine
from pagoda.tests.common.weights.gguf.gguf_writing import convert

PROMPT = [7 * i % 251 for i in range(1, 25)]
WINDOWED = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8}
MIXED = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "use_sliding_window": True,
    "sliding_window": 8,
    "max_window_layers": 1,
}


def args(model: object, **more: Any) -> EngineArgs:
    return EngineArgs(str(model), **{"skip_tokenizer_init": True, "num_gpu_blocks_override": 64} | more)


def info(model: object, **more: Any) -> EngineInfo:
    built = build_engine(args(model, **more).create_engine_config(), "llm")
    built.backend.close()
    return built.info


def engine(model: object, **more: Any) -> LLMEngine:
    return LLMEngine.from_engine_args(args(model, **more))


def answer(model: object, prompt: list[int] = PROMPT, max_tokens: int = 8, **more: Any) -> list[int]:
    running = engine(model, **more)
    try:
        return run(running, prompt, max_tokens)
    finally:
        running.shutdown()


def run(running: LLMEngine, prompt: list[int] = PROMPT, max_tokens: int = 8) -> list[int]:
    running.add_request("r", prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
    outputs = []
    while running.has_unfinished_requests():
        outputs += running.step()
    return list(outputs[-1].outputs[0].token_ids)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


# --- names ---


@pytest.mark.setting("--model", "--served-model-name")
def test_served_model_names(folder: Path) -> None:
    assert info(folder).names == (str(folder),)
    assert info(folder, served_model_name=["first", "second"]).names == ("first", "second")


@pytest.fixture
def quants(folder: Path, tmp_path: Path) -> Path:
    """Write two GGUF files that differ in their context."""
    other = write_model(tmp_path / "other", max_position_embeddings=64)
    gguf = tmp_path / "gguf"
    gguf.mkdir()
    convert(folder, gguf / "tiny-Q8_0.gguf", "llama")
    convert(other, gguf / "tiny-Q4_K_M.gguf", "llama")
    return gguf


@pytest.mark.setting("--model", "--quantization")
def test_a_folder_of_gguf_files_and_a_quantisation(quants: Path) -> None:
    assert info(f"{quants}:Q8_0").limits.max_model_len == 128
    assert info(f"{quants}:q4_k_m", quantization="gguf").limits.max_model_len == 64
    with pytest.raises(ModelError, match=r"several GGUF files; name one after a colon.*Q4_K_M.gguf, tiny-Q8_0.gguf"):
        info(quants)
    with pytest.raises(ModelError, match=r"no GGUF file in it is Q5_K_M; there are: tiny-Q4_K_M.gguf"):
        info(f"{quants}:Q5_K_M")


def test_quantization_gguf_wants_a_gguf_file(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--quantization: the model is not a GGUF file; name one"):
        info(folder, quantization="gguf")


def test_an_unsupported_quantization_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--quantization: 'aqlm' is not supported: .*; serve a GGUF file"):
        EngineArgs("m", quantization="aqlm").create_engine_config()
    with pytest.raises(ConfigError, match=r"^--quantization: 'gtpq' is not one of gguf, .*; did you mean gptq\?"):
        EngineArgs("m", quantization="gtpq").create_engine_config()


# --- the hub ---


@pytest.fixture
def hub(folder: Path, quants: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    older = {path.name: path.read_bytes() for path in (tmp_path / "other").iterdir()}
    repositories = {
        "org/tiny": {"main": files, "old": older},
        "org/tiny-GGUF": {"main": {path.name: path.read_bytes() for path in quants.iterdir()}},
        "org/aqlm": {
            "main": {**files, "config.json": _quantised(folder, {"quant_method": "aqlm", "bits": 4, "group_size": 128})}
        },
    }
    with HubServer(repositories) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield server


def _quantised(folder: Path, details: dict[str, Any]) -> bytes:
    return json.dumps({**json.loads((folder / "config.json").read_text()), "quantization_config": details}).encode()


@pytest.mark.setting("--revision", "--hf-token", "--download-dir", "--ignore-patterns")
def test_a_model_from_the_hub(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    assert answer("org/tiny", hf_token="secret") == answer(folder)
    assert hub.tokens - {None} == {"secret"}
    assert info("org/tiny", revision="old", download_dir=str(tmp_path / "mine")).limits.max_model_len == 64
    assert (tmp_path / "mine" / "models--org--tiny").is_dir()
    with pytest.raises(ModelError, match="org/tiny: the hub has no revision new; drop or correct --revision"):
        info("org/tiny", revision="new")
    with pytest.raises(ModelError, match=r"no weights: expected model.safetensors"):
        info("org/tiny", revision="old", ignore_patterns=["*.safetensors"], download_dir=str(tmp_path / "none"))


def test_an_explanation_of_a_hub_model_fetches_no_weights(hub: HubServer) -> None:
    resolved = resolve(args("org/tiny").create_engine_config(), "server")
    (row,) = (row for row in resolved.rows if row.name == "revision")
    assert (row.value, row.reason) == (None, "the repository's default branch")
    assert resolved.limits.max_model_len == 128
    assert "model.safetensors" not in hub.fetched


def test_a_gguf_repository_and_a_quantisation(hub: HubServer) -> None:
    assert info("org/tiny-GGUF:Q4_K_M").limits.max_model_len == 64
    assert "tiny-Q8_0.gguf" not in hub.fetched
    with pytest.raises(ModelError, match=r"^org/tiny-GGUF: it has several GGUF files"):
        info("org/tiny-GGUF")


def test_quantised_weights_are_refused_before_they_are_fetched(hub: HubServer) -> None:
    with pytest.raises(
        ModelError, match=r"^org/aqlm: .*quantised by aqlm, which this version does not read .it reads .*; serve a GG"
    ):
        info("org/aqlm")
    assert "model.safetensors" not in hub.fetched


def test_the_tokenizer_of_a_hub_model_fetches_no_weights(hub: HubServer) -> None:
    tokenizer = open_tokenizer(args("org/tiny", skip_tokenizer_init=False).create_engine_config())
    assert tokenizer is not None
    assert tokenizer.encode("ab") == [97, 98]
    assert hub.fetched == {"config.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.mark.setting("--tokenizer", "--tokenizer-revision", "--skip-tokenizer-init")
def test_another_tokenizer_at_its_own_revision(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    def tokenizer(**more: Any) -> Any:
        return open_tokenizer(args("org/tiny", **{"skip_tokenizer_init": False} | more).create_engine_config())

    tokenizer(revision="old", tokenizer_revision="main")
    asked = {path for path, _ in hub.requests if "/revision/" in path}
    assert asked == {"/api/models/org/tiny/revision/main"}
    hub.requests.clear()
    tokenizer(revision="old")
    assert "/api/models/org/tiny/revision/old" in {path for path, _ in hub.requests}
    hub.requests.clear()
    # Another repository does not have the model's revisions.
    assert tokenizer(revision="old", tokenizer=str(folder)).encode("a") == [97]
    assert not hub.requests
    assert tokenizer(skip_tokenizer_init=True) is None


# --- the config ---


@pytest.mark.setting("--hf-overrides", "--rope-theta", "--rope-scaling")
def test_overrides_reach_the_model(folder: Path) -> None:
    plain = answer(folder)
    assert info(folder, hf_overrides={"max_position_embeddings": 77}).limits.max_model_len == 77
    theta = answer(folder, hf_overrides={"rope_theta": 17.0})
    assert theta != plain
    assert answer(folder, rope_theta=17.0) == theta
    scaling = {"rope_type": "linear", "factor": 4.0}
    assert info(folder, rope_scaling=scaling).limits.max_model_len == 512
    with pytest.raises(ModelError, match=r"config.json: no_such_key unknown key that could change the result"):
        info(folder, hf_overrides={"no_such_key": 1})


@pytest.mark.parametrize("source", ["flag", "dotted flag", "file"])
def test_unknown_config_key_names_the_override(folder: Path, tmp_path: Path, source: str) -> None:
    """The flags that the error suggests, given as they are, make the model load."""
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    plain = write_model(tmp_path / "plain", rope_parameters=rope)
    wobbly = write_model(tmp_path / "wobbly", rope_parameters={**rope, "wobble": 3}, swirl=1)
    expected = answer(plain)
    flags: list[str] = []
    for _ in range(2):
        with pytest.raises(ModelError) as caught:
            info(wobbly, hf_overrides=overrides(flags, source, tmp_path))
        stated = re.search(r"--hf-overrides .*$", str(caught.value))
        assert stated is not None
        flags += shlex.split(stated[0])
    assert flags[1::2] == ['{"rope_parameters": {"wobble": null}}', '{"swirl": null}']
    assert answer(wobbly, hf_overrides=overrides(flags, source, tmp_path)) == expected


def overrides(flags: list[str], source: str, folder: Path) -> Any:
    """Return the overrides of these flags, given as flags, as dotted flags or in a configuration file."""
    if source == "dotted flag":
        dotted = {"rope_parameters": "--hf-overrides.rope_parameters.wobble", "swirl": "--hf-overrides.swirl"}
        flags = [word for said in flags[1::2] for word in (dotted[next(iter(json.loads(said)))], "null")]
    if source == "file":
        merged = {key: value for said in flags[1::2] for key, value in json.loads(said).items()}
        (folder / "config.yaml").write_text(json.dumps({"hf-overrides": merged}))
        flags = ["--config", str(folder / "config.yaml")]
    parser = EngineArgs.add_cli_args(FlagParser())
    return EngineArgs.from_cli_args(parser.parse_args(flags)).create_engine_config().model.hf_overrides


@pytest.mark.setting("--hf-config-path")
def test_hf_config_path(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 33}))
    assert info(folder, hf_config_path=str(tmp_path)).limits.max_model_len == 33
    with pytest.raises(ConfigError, match=r"--hf-config-path: /no/where: no such file or folder"):
        info(folder, hf_config_path="/no/where")


@each_row(
    ("details", "method"),
    [
        ({"quant_method": "aqlm", "bits": 2}, "aqlm"),
        ({"quant_method": "quip", "bits": 4}, "quip"),
        ({"bits": 4}, "a method it does not name"),
    ],
)
def test_quantised_weights_name_method_and_remedy(details: dict[str, Any], method: str, tmp_path: Path) -> None:
    write_model(tmp_path, quantization_config=details)
    with pytest.raises(ModelError, match=rf"quantised by {method}, which .*; serve a GGUF file of the model"):
        info(tmp_path)
    assert info(tmp_path, hf_overrides={"quantization_config": None}).limits.max_model_len == 128


@pytest.mark.parametrize(
    ("details", "problem"),
    [
        ({"quant_method": "newquant", "bits": 3}, "the weights are quantised by newquant, "),
        (["newquant"], "the weights are quantised by a method it does not name, "),
        ({"quant_method": "fp8", "surprise": 1}, "surprise is 1, which this version does not read; "),
    ],
)
def test_a_quantisation_nobody_knows_is_one_line(
    details: Any, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(write_model(tmp_path, quantization_config=details))
    with pytest.raises(ModelError) as caught:
        LLM(folder)
    error = str(caught.value)
    assert error.startswith(f"{folder}: config.json: quantization_config: {problem}")
    assert error.endswith("; serve a GGUF file of the model (org/name:Q4_K_M), or its unquantised weights")
    for flags in ([], ["--explain-config"]):
        assert main.main(["serve", folder, *flags]) == 1
        shown = capsys.readouterr().err
        assert shown.strip().splitlines()[-1] == f"pagoda: error: {error}"
        assert "Traceback" not in shown


@pytest.mark.setting("--max-model-len")
@each_row("asked", [None, -1, "auto", "AUTO"])
def test_unset_max_model_len_is_the_models(asked: object, folder: Path) -> None:
    assert info(folder, max_model_len=asked).limits.max_model_len == 128
    assert info(folder, max_model_len=asked, block_size=16, num_gpu_blocks_override=3).limits.max_model_len == 32


@pytest.mark.variable("PAGODA_ALLOW_LONG_MAX_MODEL_LEN")
def test_allow_long_max_model_len(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="exceeds the model's maximum context length, 128"):
        info(folder, max_model_len=200)
    monkeypatch.setenv("PAGODA_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert len(answer(folder, [5] * 150, max_model_len=200)) == 8


# --- the generation config ---


@pytest.fixture
def generating(tmp_path: Path) -> Path:
    write_model(tmp_path)
    _generation(tmp_path, temperature=0.6, max_new_tokens=5, eos_token_id=[9, 256])
    return tmp_path


def _generation(folder: Path, **values: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps(values))


@pytest.mark.setting("--generation-config", "--override-generation-config")
def test_generation_config_and_what_overrides_it(generating: Path, tmp_path: Path) -> None:
    over = {"temperature": 0.1, "top_k": 3}
    assert info(generating).sampling_defaults == {"temperature": 0.6, "max_tokens": 5}
    assert info(generating, override_generation_config=over).sampling_defaults == {
        "temperature": 0.1,
        "top_k": 3,
        "max_tokens": 5,
    }
    alone = info(generating, generation_config="vllm", override_generation_config=over)
    assert (alone.sampling_defaults, alone.eos_token_ids) == (over, (256,))
    other = tmp_path / "other"
    other.mkdir()
    _generation(other, min_p=0.1)
    merged = info(generating, generation_config=str(other), override_generation_config=over)
    assert merged.sampling_defaults == {"min_p": 0.1, **over}
    assert info(generating, override_generation_config={"eos_token_id": 3}).eos_token_ids == (3,)


@each_row(
    ("over", "error", "words"),
    [
        (
            {"num_beams": 4},
            ConfigError,
            "--override-generation-config: num_beams is not supported; use repetition_penalty",
        ),
        ({"top_k": "x"}, ModelError, "top_k is 'x', not a number"),
        ({"max_new_tokens": 0}, ModelError, "max_new_tokens is 0, not a positive number"),
        ({"max_new_tokens": 1.5}, ModelError, "max_new_tokens is 1.5, not a positive number"),
    ],
)
def test_overrides_that_set_nothing_are_errors(
    over: dict[str, Any], error: type[Exception], words: str, folder: Path
) -> None:
    with pytest.raises(error, match=words):
        info(folder, override_generation_config=over)


def test_max_new_tokens_caps_every_request(generating: Path) -> None:
    running = engine(generating)
    assert len(run(running, max_tokens=50)) == 5
    assert len(run(running, max_tokens=3)) == 3
    with pytest.raises(RequestError, match="min_tokens 6 is above what the generation config allows, 5"):
        running.add_request("r", PROMPT, SamplingParams(min_tokens=6, max_tokens=50))
    running.shutdown()


# --- windows and KV groups ---


@pytest.mark.setting("--disable-sliding-window")
def test_disable_sliding_window(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path, **WINDOWED)
    assert info(tmp_path).limits.max_model_len == 128
    with caplog.at_level(logging.INFO):
        assert info(tmp_path, disable_sliding_window=True).limits.max_model_len == 8
    assert "--disable-sliding-window: the context length is capped at the window size, 8" in caplog.text
    # Within the window both see everything.
    assert answer(tmp_path, PROMPT[:4], 4, disable_sliding_window=True) == answer(tmp_path, PROMPT[:4], 4)
    with pytest.raises(ConfigError, match="--max-model-len: 9 exceeds the size of the disabled sliding window, 8"):
        info(tmp_path, disable_sliding_window=True, max_model_len=9)


def test_disable_sliding_window_without_windows_changes_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert info(folder, disable_sliding_window=True).limits.max_model_len == 128
    assert "the model has no sliding windows" in caplog.text


@pytest.mark.setting("--disable-hybrid-kv-cache-manager")
def test_one_kv_group_for_layers_with_and_without_a_window(tmp_path: Path) -> None:
    write_model(tmp_path, **MIXED)
    hybrid, single = engine(tmp_path), engine(tmp_path, disable_hybrid_kv_cache_manager=True)
    assert (len(hybrid._core._kv_managers[0].rules), len(single._core._kv_managers[0].rules)) == (2, 1)
    assert run(hybrid) == run(single)
    assert run(hybrid) != answer(tmp_path, hf_overrides={"use_sliding_window": False}), "the window counts"
    hybrid.shutdown()
    single.shutdown()


# --- weights ---


@pytest.mark.setting("--safetensors-load-strategy")
def test_eager_loading_reads_the_whole_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    from pagoda.common.weights import folder as module

    def read_file(path: Path) -> np.ndarray:
        read.append(path)
        return np.fromfile(path, np.uint8)

    monkeypatch.setattr(module, "read_file", read_file)
    plain = answer(folder)
    assert not read
    assert answer(folder, safetensors_load_strategy="eager") == plain
    assert read == [folder / "model.safetensors"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.setting("--use-tqdm-on-load")
def test_use_tqdm_on_load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for shown in (True, False):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        info(folder, use_tqdm_on_load=shown)
        assert ("Loading weights" in terminal.getvalue()) is shown


@pytest.mark.setting("--load-format", "--seed")
def test_load_formats(folder: Path, tmp_path: Path) -> None:
    assert answer(folder, load_format="safetensors") == answer(folder)
    assert answer(folder, load_format="dummy") != answer(folder)
    assert answer(folder, load_format="dummy", seed=1) != answer(folder, load_format="dummy", seed=2)
    with pytest.raises(ModelError, match=r"no weights: expected pytorch_model.bin"):
        info(folder, load_format="pt")
    with pytest.raises(ModelError, match=r"no .gguf file in this folder"):
        info(folder, load_format="gguf")
    with pytest.raises(ConfigError, match=r"^--load-format: sharded_state is not read by reference; use --backend jax"):
        info(folder, load_format="sharded_state")
    for other, name in {"hf": "auto", "npcache": "pt", "runai_streamer": "safetensors", "bitsandbytes": "auto"}.items():
        assert args("m", load_format=other).create_engine_config().load.load_format == name


@each_row(
    ("format_", "words"),
    [
        ("tensorizer", "use the safetensors files"),
        ("runai_streamer_sharded", "use safetensors"),
        ("modelexpress", "use auto"),
        ("mistral", "use auto"),
        ("zip", "auto, safetensors, pt, gguf, sharded_state, dummy"),
    ],
)
def test_unsupported_load_formats_name_the_remedy(format_: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^--load-format: .*{words}"):
        args("m", load_format=format_).create_engine_config()


# --- code of repositories ---

TRAP = "import pathlib; pathlib.Path({marker!r}).touch(); raise SystemExit('sprung')\n"


@pytest.mark.parametrize("trusted", [False, True])
def test_code_of_a_repository_is_not_executed(trusted: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, marker = tmp_path / "model", tmp_path / "sprung"
    parts = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")
    write_model(folder, auto_map={part: f"modeling_trap.{part}" for part in parts})
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": ["tokenization_trap.Trap", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name in ("modeling_trap", "configuration_trap", "tokenization_trap", "__init__", "tokenizer"):
        (folder / f"{name}.py").write_text(TRAP.format(marker=str(marker)))
    running = engine(folder, trust_remote_code=trusted, skip_tokenizer_init=False)
    assert len(run(running)) == 8
    assert running.get_tokenizer().encode("a") == [97]
    running.shutdown()
    assert not marker.exists()
    assert ("--trust-remote-code has no effect" in caplog.text) is trusted


# --- command lines of vLLM's documentation ---


@each_row(
    ("words", "status", "line"),
    [
        (
            "RedHatAI/Llama-3.2-1B-Instruct-FP8 --tensor-parallel-size 2 --gpu-memory-utilization 0.8 "
            "--max-model-len 16384 --max-num-batched-tokens 2048",
            2,
            "--tensor-parallel-size: reference runs a model on one device; use 1, or --backend jax_tpu",
        ),
        ("m --tokenizer-mode mistral", 2, "--tokenizer-mode: 'mistral' is not supported: "),
        ("m --tokenizer-mode slow", 2, "--tokenizer-mode: 'slow' is not supported: "),
        ("m --quantization qqq", 2, "--quantization: 'qqq' is not supported: "),
        ("m --load-format tensorizer", 2, "--load-format: 'tensorizer' is not supported: "),
    ],
)
def test_refused_model_settings_are_one_error_line(
    words: str, status: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["serve", *words.split()]) == status
    shown = capsys.readouterr().err
    assert f"pagoda: error: {line}" in shown
    assert len(shown.strip().splitlines()[-1:]) == 1
    assert "Traceback" not in shown
