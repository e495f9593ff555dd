"""pagoda convert and --load-format sharded_state: what is written, served from and refused. On CPU devices."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flax")
pytest.importorskip("orbax.checkpoint")

import support.devices.jax_devices  # noqa: F401
from support.checkpoints.tiny_folder import write_model

from pagoda.common.errors import ConfigError, ModelError
from pagoda.common.sampling_params import SamplingParams
from pagoda.common.text.tokenizer import load_tokenizer
from pagoda.common.weights.hub import plan_download
from pagoda.server.cli import main
from pagoda.server.llm import LLM
from pagoda.server.settings.flags import EngineArgs
from pagoda.server.settings.resolve import Resolved, resolve
from pagoda.tests.common.weights.gguf.gguf_writing import convert as write_gguf

PROMPT = [{"prompt_token_ids": [5, 17, 3, 80, 41, 2, 9]}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "max_model_len": 32,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "block_size": 8,
    "backend": "jax_tpu",
    "disable_log_stats": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("convert") / "tiny")
    (folder / "generation_config.json").write_text('{"eos_token_id": 256, "temperature": 0.5}')
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    return folder


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compile cache: the model on one device is compiled once, however it is stored."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def wanted(model: Path, compiled: Path) -> list[int]:
    return tokens(model, xla_cache_path=str(compiled))


@pytest.fixture(scope="module")
def converted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("converted") / "deep" / "out"
    assert main.main(["convert", str(model), str(out), "--tensor-parallel-size", "4", "--dtype", "float32"]) == 0
    return out


def tokens(folder: Path, **more: Any) -> list[int]:
    llm = LLM(str(folder), dtype="float32", **SETTINGS | more)
    try:
        return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    finally:
        llm.llm_engine.shutdown()


def resolved(model: Path, **more: Any) -> Resolved:
    return resolve(EngineArgs(str(model), **more).create_engine_config(), "llm")


def error(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the error line of a failing command."""
    assert main.main(list(words)) != 0
    text = capsys.readouterr().err.strip().splitlines()[-1]
    assert text.startswith("pagoda: error: ")
    return text.removeprefix("pagoda: error: ")


@pytest.mark.command("convert")
@pytest.mark.setting("--tensor-parallel-size", "--load-format")
def test_a_converted_model_is_served(model: Path, converted: Path, wanted: list[int]) -> None:
    names = {"config.json", "generation_config.json", "manifest.json", "arrays"}
    assert names <= {path.name for path in converted.iterdir()}
    assert list(converted.parent.iterdir()) == [converted]
    manifest = json.loads((converted / "manifest.json").read_text())
    assert (manifest["tensor_parallel_size"], manifest["dtype"]) == (4, "float32")
    assert manifest["leaves"]["embed"]["shape"] == [260, 32]  # 257 words on 4 devices
    assert json.loads((converted / "config.json").read_text())["dtype"] == "float32"
    for name in ("", "generation_config.json"):
        assert (converted / name).stat().st_mode & 0o444 == 0o444
    ours, theirs = load_tokenizer(converted), load_tokenizer(model)
    assert ours.encode("a b<eos>") == theirs.encode("a b<eos>")
    assert (ours.special_tokens, ours.chat_templates) == (theirs.special_tokens, theirs.chat_templates)
    assert tokens(converted, load_format="sharded_state", tensor_parallel_size=2) == wanted
    known = resolved(converted, backend="jax_tpu")
    assert {row.name: row.value for row in known.rows}["load_format"] == "sharded_state"
    assert known.generation.sampling["temperature"] == 0.5


@pytest.mark.setting("--dtype", "--skip-tokenizer-init")
def test_every_checkpoint_format_is_converted(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], compiled: Path, wanted: list[int]
) -> None:
    file, out = tmp_path / "tiny.gguf", tmp_path / "out"
    write_gguf(model, file, "llama")
    out.mkdir()
    assert main.main(["convert", str(file), str(out), "--dtype", "float32", "--skip-tokenizer-init"]) == 0
    assert capsys.readouterr().out == f"{out}: 31,968 float32 elements in 9 arrays, laid out for 1 device\n"
    assert not (out / "tokenizer.json").exists()
    assert tokens(out, skip_tokenizer_init=True, xla_cache_path=str(compiled)) == wanted


def test_other_backends_refuse_converted_models(converted: Path, model: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    for load_format in ("auto", "sharded_state"):
        with pytest.raises(ConfigError) as refused:
            resolved(converted, backend="reference", load_format=load_format)
        assert str(refused.value) == (
            "--load-format: sharded_state is not read by reference; use --backend jax_tpu, or serve the model that was "
            "converted"
        )
    write_gguf(model, tmp_path / "tiny.gguf", "llama")
    with pytest.raises(ModelError, match="is a file, but --load-format sharded_state reads a folder"):
        resolved(tmp_path / "tiny.gguf", backend="jax_tpu", load_format="sharded_state")
    shutil.copytree(converted, tmp_path / "newer")
    manifest = tmp_path / "newer" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 2', '"format": 7'))
    with pytest.raises(ModelError, match="has format 7, this version reads 2; convert the model again"):
        resolved(tmp_path / "newer", backend="jax_tpu")


def test_invalid_conversions(
    model: Path, converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert "is already converted and loads on any" in error(capsys, "convert", str(converted), str(out))
    assert "jax_tpu does not support float16; use bfloat16" in error(
        capsys, "convert", str(model), str(out), "--dtype", "half"
    )
    assert "8 devices cannot share 4 query heads; use 4 or less" in error(
        capsys, "convert", str(model), str(out), "-tp", "8"
    )
    assert "0 is not positive; use 1" in error(capsys, "convert", str(model), str(out), "-tp", "0")
    (tmp_path / "file").touch()
    assert "cannot be written" in error(capsys, "convert", str(model), str(tmp_path / "file" / "out"))
    assert "is not an empty folder; use another" in error(capsys, "convert", str(model), str(tmp_path))
    torn = shutil.copytree(model, tmp_path / "torn")
    weights = torn / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors" in error(capsys, "convert", str(torn), str(out))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'pagoda[tpu]'" in error(capsys, "convert", str(model), str(out))
    assert {path.name for path in tmp_path.iterdir()} == {"file", "torn"}


def test_arrays_of_a_repository_are_downloaded_without_other_weights() -> None:
    names = ["config.json", "manifest.json", "arrays/_METADATA", "arrays/d/0123", "tokenizer.json"]
    for load_format in ("auto", "sharded_state"):
        assert "arrays/*" in plan_download(names, load_format).patterns
    assert "arrays/*" not in plan_download([*names, "model.safetensors"], "auto").patterns
    assert "arrays/*" not in plan_download(names, "auto", weights=False).patterns
