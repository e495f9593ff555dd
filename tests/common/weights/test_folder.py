"""Checkpoint folders: whole, sharded, in either format, and the errors of broken ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pagoda.common.errors import ModelError, WeightError
from pagoda.common.weights.checkpoint import open_checkpoint
from pagoda.common.weights.dtypes import dtype_name, to_float32

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.zeros(1)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "x", "vocab_size": 3}')
    return tmp_path


def _shards(folder: Path, weight_map: dict[str, str] | None = None, suffix: str = "safetensors") -> Path:
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    first, second = (f"{stem}-0000{n}-of-00002.{suffix}" for n in (1, 2))
    save: Any = save_file if suffix == "safetensors" else torch.save
    save({name: TENSORS[name] for name in "ab"}, folder / first)
    save({"c": TENSORS["c"]}, folder / second)
    index = folder / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"weight_map": weight_map or {"a": first, "b": first, "c": second}}))
    return folder


def _check(folder: Path, load_format: str = "auto") -> None:
    checkpoint = open_checkpoint(folder, load_format)
    tensors = dict(checkpoint.tensors())
    assert sorted(tensors) == ["a", "b", "c"]
    for name, tensor in TENSORS.items():
        assert dtype_name(tensors[name].dtype) == str(tensor.dtype).removeprefix("torch.")
        np.testing.assert_array_equal(to_float32(tensors[name]), tensor.float().numpy())
    assert checkpoint.num_tensors == 3
    assert checkpoint.num_bytes == sum(array.nbytes for array in tensors.values()) == 24 + 8 + 4
    assert checkpoint.config() == {"model_type": "x", "vocab_size": 3}
    assert (checkpoint.folder, checkpoint.gguf_metadata) == (folder, None)


def test_one_safetensors_file(folder: Path) -> None:
    save_file(TENSORS, folder / "model.safetensors")
    _check(folder)
    _check(folder, "safetensors")


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_sharded(folder: Path, suffix: str) -> None:
    _check(_shards(folder, suffix=suffix))


def test_shards_without_an_index(folder: Path) -> None:
    (_shards(folder) / "model.safetensors.index.json").unlink()
    _check(folder)
    save_file({"a": TENSORS["a"]}, folder / "model-00003.safetensors")
    with pytest.raises(WeightError, match=r"tensor a is in model-00001-of-00002\.safetensors too"):
        open_checkpoint(folder)


def test_torch_file_and_preference_for_safetensors(folder: Path) -> None:
    torch.save(TENSORS, folder / "pytorch_model.bin")
    _check(folder)
    save_file({"other": TENSORS["a"]}, folder / "model.safetensors")
    assert [name for name, _ in open_checkpoint(folder).tensors()] == ["other"]
    _check(folder, "pt")


def test_a_fairseq2_file_is_read_where_there_is_no_other(folder: Path) -> None:
    torch.save({"model_key": "m", "m": TENSORS}, folder / "model.pt")
    _check(folder)
    torch.save({"other": TENSORS["a"]}, folder / "pytorch_model.bin")
    assert [name for name, _ in open_checkpoint(folder).tensors()] == ["other"]


def test_generation_config(folder: Path) -> None:
    assert open_checkpoint(folder, "dummy").generation_config() == {}
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert open_checkpoint(folder, "dummy").generation_config() == {"eos_token_id": [1, 2]}
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config.json: not valid JSON"):
        open_checkpoint(folder, "dummy").generation_config()


def test_dummy_needs_no_weights(folder: Path) -> None:
    checkpoint = open_checkpoint(folder, "dummy")
    assert (checkpoint.num_tensors, checkpoint.num_bytes, list(checkpoint.tensors())) == (0, 0, [])


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no config.json"), ("{", "not valid JSON"), ("[1]", "contains a JSON list, expected an object")],
)
def test_config_is_needed(content: str | None, message: str, tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        open_checkpoint(tmp_path)


def test_no_weights(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"no weights: expected model.safetensors or pytorch_model.bin"):
        open_checkpoint(folder)
    with pytest.raises(ModelError, match=r"no .gguf file"):
        open_checkpoint(folder, "gguf")


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", "a/../../b", "", "..\\x", "a\0b"])
def test_an_index_cannot_leave_its_folder(folder: Path, shard: str) -> None:
    save_file(TENSORS, folder.parent / "secret.safetensors")
    with pytest.raises(WeightError, match="not a file inside the checkpoint's folder"):
        open_checkpoint(_shards(folder, {"a": shard}))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "absent.safetensors"}}, "names the shard absent.safetensors, which is missing"),
        (
            {"weight_map": {"z": "model-00001-of-00002.safetensors"}},
            "tensor z is missing, which model.safetensors.index",
        ),
        ({"weight_map": {}}, "empty"),
        ({"weight_map": {"a": 1}}, "no weight_map"),
        ({}, "no weight_map"),
    ],
)
def test_broken_index(folder: Path, index: dict[str, Any], message: str) -> None:
    (_shards(folder) / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightError, match=message):
        open_checkpoint(folder)


def test_paths_without_a_model(folder: Path) -> None:
    save_file(TENSORS, folder / "model.safetensors")
    with pytest.raises(ModelError, match="give the folder that contains them"):
        open_checkpoint(folder / "model.safetensors")
    with pytest.raises(ModelError, match="no such file or folder"):
        open_checkpoint(folder / "none")
    with pytest.raises(ModelError, match=r"load format tensorizer is unknown; known: auto, safetensors"):
        open_checkpoint(folder, "tensorizer")


def test_several_gguf_files_are_ambiguous(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"several GGUF files; name one after a colon, like :a: a.gguf, b.gguf"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("eager", [False, True])
def test_eager_reads_a_file_before_its_first_tensor(folder: Path, eager: bool) -> None:
    path = folder / "model.safetensors"
    save_file({"a": torch.zeros(4096), "b": torch.zeros(4096)}, path)
    stream = open_checkpoint(folder, eager=eager).tensors()
    next(stream)
    with path.open("r+b") as file:
        file.seek(-4096 * 4, 2)
        file.write(np.ones(4096, np.float32).tobytes())
    name, values = next(stream)
    assert name == "b"
    assert set(np.asarray(values).tolist()) == {0.0 if eager else 1.0}


def test_without_weights_only_the_config_is_read(folder: Path) -> None:
    checkpoint = open_checkpoint(folder, weights=False)
    assert checkpoint.config()["vocab_size"] == 3
    assert list(checkpoint.tensors()) == []


@pytest.mark.parametrize("name", ["gs://bucket/llama", "s3://bucket/llama", "hf://meta/llama"])
def test_models_of_object_stores_are_refused_with_a_remedy(name: str) -> None:
    with pytest.raises(ModelError, match=r"^\w+://\S+: models are not read from object stores; copy it to a folder"):
        open_checkpoint(name)


@pytest.mark.parametrize("place", ["_CHECKPOINT_METADATA", "0/items/_METADATA", "0/_METADATA"])
def test_orbax_checkpoints_of_maxtext_are_refused_by_name(place: str, tmp_path: Path) -> None:
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text("{}")
    with pytest.raises(ModelError, match="Orbax checkpoints, as MaxText writes them, are not read"):
        open_checkpoint(tmp_path)
