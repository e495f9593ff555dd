"""pagoda compile and --compiled-bundle: what is printed, kept, started from and refused. On CPU devices."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flax")

import support.devices.jax_devices  # noqa: F401
from support.checkpoints.tiny_folder import write_model

from pagoda.backends.jax_tpu.execution.programs import CompileCache
from pagoda.backends.jax_tpu.execution.step_programs import Forward
from pagoda.common.engine.steps.shapes import StepShape
from pagoda.common.errors import ConfigError
from pagoda.server.cli import main
from pagoda.server.llm import LLM
from pagoda.server.settings.flags import EngineArgs
from pagoda.server.startup.engine import build_engine

SMALL = ("--max-model-len", "32", "--max-num-seqs", "1", "--max-num-batched-tokens", "16", "--block-size", "8")
SETTINGS: dict[str, Any] = {
    "max_model_len": 32,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 16,
    "block_size": 8,
    "backend": "jax_tpu",
    "tensor_parallel_size": 2,
    "disable_log_stats": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("compile") / "tiny")


@pytest.fixture(scope="module")
def bundle(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles") / "one"
    words = ["compile", str(model), *SMALL, "--topology", "cpu:2", "--output", str(folder)]
    assert main.main(words) == 0
    return folder


PROMPT = [{"prompt_token_ids": [5, 17, 3, 80, 41, 2, 9]}]


def tokens(model: Path, **settings: Any) -> list[int]:
    llm = LLM(str(model), **{**SETTINGS, **settings})
    token_ids = llm.generate(PROMPT, use_tqdm=False)[0].outputs[0].token_ids
    llm.llm_engine.shutdown()
    return list(token_ids)


@pytest.fixture(scope="module")
def first_start(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A compile cache with the programs of an engine, and what that has answered."""
    cache = tmp_path_factory.mktemp("cache")
    answer = tokens(model, xla_cache_path=str(cache))
    return cache, answer


def compile_error(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the error line of a failing command."""
    assert main.main(["compile", *words]) == main.USAGE_ERROR
    text = capsys.readouterr().err.strip()
    assert "\n" not in text
    return text


def altered(bundle: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of the bundle with another manifest."""
    copy = shutil.copytree(bundle, tmp_path / "copy")
    manifest = json.loads((copy / "manifest.json").read_text())
    change(manifest)
    (copy / "manifest.json").write_text(json.dumps(manifest))
    return copy


@pytest.mark.command("compile")
@pytest.mark.setting("--topology", "--config-only", "--budget-only", "--output-json", "--data-parallel-size")
def test_config_only(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(model / "config.json", tmp_path / "config.json")
    words = ["--config-only", "--budget-only", "--topology", "cpu:4", "--output-json", str(tmp_path / "table.json")]
    assert main.main(["compile", str(tmp_path / "config.json"), *SMALL, *words, "-dp", "2"]) == 0
    text = capsys.readouterr().out
    for part in (
        "programs for cpu:4, 4 of 4 devices",
        "step 16 tokens, 1 rows",
        "weights",
        "KV cache",
        "--max-num-seqs",
    ):
        assert part in text
    table = json.loads((tmp_path / "table.json").read_text())
    assert table["budget"]["weights"] > 0
    assert (table["tensor_parallel_size"], table["data_parallel_size"]) == (2, 2)
    assert {row["program"].split()[0] for row in table["programs"]} >= {"step", "decode", "sample", "set"}


@pytest.mark.setting("--output", "--compiled-bundle")
def test_an_engine_from_a_bundle_gives_equal_output(
    model: Path, bundle: Path, first_start: tuple[Path, list[int]]
) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert manifest["facts"]["tensor_parallel_size"] == 2
    assert {each["file"] for each in manifest["programs"]} | {"manifest.json"} == {f.name for f in bundle.iterdir()}
    assert tokens(model, compiled_bundle=str(bundle)) == first_start[1]


FACTS = {
    "pagoda": "0.0",
    "sources": "0",
    "jax": "0.1",
    "jaxlib": "0.1",
    "libtpu": "0.0.1",
    "XLA_FLAGS": "--xla_other",
    "LIBTPU_INIT_ARGS": "--other",
    "device": "TPU v9",
    "processor": "another",
    "data_parallel_size": 2,
    "devices": [1, 0],
    "model": "another",
    "dtype": "float32",
    "quantization": "int8",
    "kv_cache_dtype": "float32",
    "logprobs_mode": "raw_logits",
    "max_model_len": 64,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 4,
    "block_size": 16,
}


@pytest.mark.parametrize("name", FACTS)
def test_each_mismatch_is_named(name: str, model: Path, bundle: Path, tmp_path: Path) -> None:
    folder = altered(bundle, tmp_path, lambda manifest: manifest["facts"].update({name: FACTS[name]}))
    with pytest.raises(
        ConfigError,
        match=rf"--compiled-bundle: .* was compiled for {name} .*this engine has .*run pagoda compile --output again",
    ):
        LLM(str(model), compiled_bundle=str(folder), **SETTINGS)


def test_another_number_of_blocks_or_devices(model: Path, bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"num_blocks \d+, but this engine has 7"):
        LLM(str(model), compiled_bundle=str(bundle), num_gpu_blocks_override=7, **SETTINGS)
    with pytest.raises(ConfigError, match=r"was compiled for tensor_parallel_size 2, but this engine has 1"):
        LLM(str(model), compiled_bundle=str(bundle), **{**SETTINGS, "tensor_parallel_size": 1})


def test_damage_is_detected_before_unpickling(model: Path, bundle: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(bundle, tmp_path / "copy")
    file = folder / "000.xla"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(ConfigError, match=r"000.xla is damaged: its SHA-256 differs"):
        LLM(str(model), compiled_bundle=str(folder), **SETTINGS)
    file.unlink()
    with pytest.raises(ConfigError, match=r"000.xla: No such file"):
        LLM(str(model), compiled_bundle=str(folder), **SETTINGS)


def cached(caplog: pytest.LogCaptureFixture) -> str:
    """How many programs came from the cache at the last start."""
    return next(r.getMessage() for r in reversed(caplog.records) if "from the compile cache" in r.getMessage())


@pytest.mark.setting("--xla-cache-path")
@pytest.mark.variable("PAGODA_XLA_CACHE_PATH")
def test_the_second_start_compiles_nothing(
    model: Path,
    tmp_path: Path,
    first_start: tuple[Path, list[int]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level("INFO")
    cache, first = first_start
    folder = shutil.copytree(cache, tmp_path / "copy")
    monkeypatch.setenv("VLLM_XLA_CACHE_PATH", str(folder))
    files = sorted(folder.glob("*.xla"))
    count = len(files)
    files[0].write_bytes(files[0].read_bytes()[:-1] + b"!")
    files[1].unlink()
    assert tokens(model) == first
    assert f"{count} programs in" in cached(caplog)
    assert f", {count - 2} of them" in cached(caplog)
    assert f"{files[0]} is damaged" in caplog.text
    assert tokens(model) == first
    assert f", {count} of them" in cached(caplog)


@pytest.mark.slow_matrix
def test_other_programs_and_a_start_without_a_cache_are_compiled(
    model: Path, tmp_path: Path, first_start: tuple[Path, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    folder = shutil.copytree(first_start[0], tmp_path / "copy")
    count = len(list(folder.glob("*.xla")))
    assert tokens(model, dtype="float32", xla_cache_path=str(folder))
    assert len(list(folder.glob("*.xla"))) > count
    assert tokens(model, xla_cache_path="") == first_start[1]
    assert ", 0 of them" in cached(caplog)


@pytest.mark.setting("--xla-check-recompilation")
@pytest.mark.variable("PAGODA_XLA_CHECK_RECOMPILATION")
def test_compiling_while_serving_may_be_an_error(
    model: Path, first_start: tuple[Path, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_XLA_CHECK_RECOMPILATION", "1")
    config = EngineArgs(str(model), xla_cache_path=str(first_start[0]), **SETTINGS).create_engine_config()
    backend = build_engine(config, "llm").backend
    with pytest.raises(RuntimeError, match="was not compiled before serving"):
        backend._serving.programs[Forward(StepShape(3, 3, 3, 1, True))]
    backend.close()


def test_least_recently_used_programs_are_evicted(tmp_path: Path) -> None:
    for age in range(4):
        (tmp_path / f"{age}.xla").write_bytes(bytes(10))
        os.utime(tmp_path / f"{age}.xla", (0, 1000 - age))
    CompileCache(tmp_path, max_bytes=25).trim()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["0.xla", "1.xla"]


def test_invalid_bundles(model: Path, bundle: Path, tmp_path: Path) -> None:
    def start(folder: Path, **settings: Any) -> None:
        LLM(str(model), compiled_bundle=str(folder), **{**SETTINGS, **settings})

    with pytest.raises(ConfigError, match="No such file or directory; make one with pagoda compile --output"):
        start(tmp_path)
    with pytest.raises(ConfigError, match="not supported by reference"):
        start(bundle, backend="reference", tensor_parallel_size=1)
    with pytest.raises(ConfigError, match="has format 99, this version reads 1"):
        start(altered(bundle, tmp_path / "a", lambda manifest: manifest.update(format=99)))
    with pytest.raises(ConfigError, match=r"lacks 1 programs, first Forward"):
        start(altered(bundle, tmp_path / "b", lambda manifest: manifest["programs"].pop(0)))
    with pytest.raises(ConfigError, match="is not a valid manifest"):
        start(altered(bundle, tmp_path / "c", lambda manifest: manifest["programs"][0].update(file="../000.xla")))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--topology: required: the chips"),
        (["--topology", "v9:1x1"], "--topology: v9:1x1 is unknown; use one of v5e:1x1"),
        (["--topology", "v6e"], "--topology: v6e is unknown; use one of v5e:1x1"),
        (["--topology", "cpu:99"], "--topology: cpu:99: this machine has 8 CPU devices; use cpu or cpu:1 to cpu:8"),
        (["--topology", "cpu", "-tp", "0"], "--tensor-parallel-size: 0 is not positive"),
        (["--topology", "cpu", "-tp", "2"], "--tensor-parallel-size: 2 needs 2 devices, 1 available (cpu)"),
        (
            ["--topology", "cpu:2", "-dp", "4"],
            "--data-parallel-size: 4 needs 4 devices, 2 available (cpu); use at most",
        ),
        (["--topology", "cpu:8"], "--tensor-parallel-size: 8 devices cannot share 4 query heads; use 4 or less"),
        (["--topology", "cpu", "--backend", "reference"], "--backend: reference has no ahead-of-time compilation"),
        (["--topology", "cpu", "--budget-only", "--output", "x"], "--budget-only: does not compile all programs"),
        (["--topology", "cpu", "--dtype", "float16"], "--dtype: jax_tpu does not support float16"),
    ],
)
def test_bad_input_is_one_line(words: list[str], message: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in compile_error(capsys, str(model), *SMALL, *words)


def test_without_libtpu(model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from pagoda.backends.jax_tpu.ahead_of_time import topology

    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None if name == "libtpu" else object())
    text = compile_error(capsys, str(model), "--topology", "v6e:1x1")
    assert "compiling for a TPU needs libtpu, not a TPU; pip install 'pagoda[tpu]'" in text
