"""sentence-transformers folders: supported modules and rejected ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.suite.rows import each_row

from pagoda.common.errors import ModelError
from pagoda.common.models.spec import Dense
from pagoda.common.weights.sentence_modules import module_tensors, read_sentence_modules

MEAN = {"word_embedding_dimension": 8, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}


def write(folder: Path, *kinds: str, pooling: dict[str, Any] = MEAN, **files: Any) -> Path:
    """modules.json with these modules, each in a folder of its own; `files`: further JSON files by stem."""
    names = ["", *(f"{index}_{kind}" for index, kind in enumerate(kinds) if index)]
    listed = [
        {"idx": index, "name": str(index), "path": name, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, name) in enumerate(zip(kinds, names))
    ]
    files = {"modules": list(reversed(listed)), **files}
    for name, kind in zip(names, kinds):
        (folder / name).mkdir(exist_ok=True)
        if kind == "Pooling":
            (folder / name / "config.json").write_text(json.dumps(pooling))
    for stem, content in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(content))
    return folder


def test_a_folder_without_pooling_module_has_no_modules(tmp_path: Path):
    assert read_sentence_modules(tmp_path) is None
    assert read_sentence_modules(write(tmp_path, "Transformer")) is None


@each_row(
    ("pooling", "kind"),
    [
        (MEAN, "mean"),
        ({"word_embedding_dimension": 8, "pooling_mode_cls_token": True, "include_prompt": True}, "first"),
        ({"word_embedding_dimension": 8, "pooling_mode_lasttoken": True}, "last"),
        ({"embedding_dimension": 8, "pooling_mode": "lasttoken"}, "last"),
    ],
)
def test_pooling_kinds(tmp_path: Path, pooling: dict[str, Any], kind: str):
    modules = read_sentence_modules(write(tmp_path, "Transformer", "Pooling", pooling=pooling))
    assert modules is not None
    assert (modules.kind, modules.width, modules.normalise, modules.dense) == (kind, 8, False, ())


def test_dense_layers_and_the_rest(tmp_path: Path):
    write(
        tmp_path,
        *("Transformer", "Pooling", "Dropout", "Dense", "Dense", "Normalize"),
        sentence_bert_config={"max_seq_length": 77},
        config_sentence_transformers={"prompts": {"query": "task: search | query: "}},
    )
    for name, width, activation in (("3_Dense", 24, "Tanh"), ("4_Dense", 6, None)):
        kind = f"activation.{activation}" if activation else "linear.Identity"
        config = {"in_features": 8, "out_features": width, "bias": activation is not None}
        config["activation_function"] = f"torch.nn.modules.{kind}"
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        save_file({"linear.weight": np.full((width, 8), width, np.float32)}, tmp_path / name / "model.safetensors")
    modules = read_sentence_modules(tmp_path)
    assert modules is not None
    assert modules.dense == (Dense(24, "tanh"), Dense(6, None, bias=False))
    assert modules.normalise
    assert modules.max_seq_length == 77
    assert modules.prompts == {"query": "task: search | query: "}
    tensors = dict(module_tensors(modules))
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        "sentence_modules.0.linear.weight": (24, 8),
        "sentence_modules.1.linear.weight": (6, 8),
    }
    (tmp_path / "3_Dense/model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"3_Dense: no weights: expected model.safetensors"):
        dict(module_tensors(modules))


@each_row(
    ("kinds", "pooling", "words"),
    [
        (("Transformer", "Pooling", "WordWeights"), MEAN, "has Transformer, Pooling, WordWeights"),
        (("Transformer", "Pooling", "Normalize", "Dense"), MEAN, "in this order"),
        (("Transformer", "Dense", "Pooling"), MEAN, "in this order"),
        (("Transformer", "Pooling"), {**MEAN, "pooling_mode_max_tokens": True}, "mean_tokens and pooling_mode_max"),
        (("Transformer", "Pooling"), {**MEAN, "pooling_mode_mean_tokens": False}, "no mode"),
        (("Transformer", "Pooling"), {"pooling_mode": "max", "embedding_dimension": 8}, "uses max"),
        (("Transformer", "Pooling"), {"pooling_mode": "mean"}, "no word_embedding_dimension"),
    ],
)
def test_unsupported_modules_are_refused(tmp_path: Path, kinds: tuple[str, ...], pooling: dict[str, Any], words: str):
    with pytest.raises(ModelError, match=words):
        read_sentence_modules(write(tmp_path, *kinds, pooling=pooling))


@each_row("modules", [{}, [{"idx": 0}], [1], [{"idx": 0, "path": "../x", "type": "a.Pooling"}]])
def test_corrupt_lists(tmp_path: Path, modules: Any):
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match=r"modules\.json"):
        read_sentence_modules(tmp_path)
