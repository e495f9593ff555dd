"""A few hundred mutated files of each format; part fuzz-files of `make test-full` opens 20,000."""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from fuzz_files import FORMATS, Findings, run_in_child
from fuzz_files import _fast_start as fast_start
from fuzz_files import _write as write

from pagoda.common.errors import ModelError, WeightError, reading
from pagoda.common.models.registry import spec_from_config
from pagoda.common.weights.gguf.file import GgufFile
from pagoda.common.weights.torch_bin import TorchFile

CASES = {"gguf": 300, "torch": 200, "tensor": 200, "config": 400, "modules": 150, "index": 100}


@pytest.mark.parametrize("name", FORMATS)
def test_mutated_files_are_refused_by_one_line(name: str) -> None:
    findings = run_in_child(name, range(CASES.get(name, 250)), seed=32)  # a death there does not end the test's process
    assert findings.failures == {}
    assert 0 < findings.refused < findings.cases


@pytest.mark.parametrize("name", FORMATS)
def test_examples_are_valid(name: str) -> None:
    kind = FORMATS[name]
    for number, files in enumerate(kind.examples()):
        if (name, number) == ("gguf", 2):  # blocks without a model
            continue
        with tempfile.TemporaryDirectory() as folder, fast_start():
            write(Path(folder) / "model", files)
            kind.read(Path(folder) / "model")


def test_findings_keep_the_first_case_of_a_kind() -> None:
    findings = Findings()
    findings.add("a", 1, "x")
    findings.add("a", 2, "y")
    assert findings.failures == {"a": (1, "x")}


@pytest.mark.parametrize("record", ["data.pkl", "data/0"])
def test_a_zip_bomb_is_not_inflated(tmp_path: Path, record: str) -> None:
    torch.save({"a": torch.zeros(50_000_000, dtype=torch.uint8)}, tmp_path / "plain.bin")
    path = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(tmp_path / "plain.bin") as old, zipfile.ZipFile(path, "w") as new:
        for entry in old.infolist():
            bomb = entry.filename.endswith(record)
            content = b"\x80\x02" + bytes(100_000_000) if bomb and record == "data.pkl" else old.read(entry)
            new.writestr(entry.filename, content, zipfile.ZIP_DEFLATED if bomb else zipfile.ZIP_STORED)
    with pytest.raises(WeightError, match=r"refused: record .* inflates"):
        TorchFile(path).tensor("a")


LLAMA = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 257, "hidden_size": 32},
    **{"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128},
    **{"rms_norm_eps": 1e-5},
}


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_hidden_layers", 10**6), ("hidden_size", 10**400), ("rms_norm_eps", 10**400), ("vocab_size", -(10**400))],
)
def test_numbers_beyond_all_models_are_refused(key: str, value: int) -> None:
    spec_from_config(LLAMA)
    with pytest.raises(ModelError, match=rf"config.json: {key} is .*; it must be at (most|least)"):
        spec_from_config({**LLAMA, key: value})


@pytest.mark.parametrize("shape", [(), (0, 1 << 62)])
def test_shapes_of_gguf_tensors(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = tmp_path / "m.gguf"
    sizes = np.array(shape[::-1], "<u8").tobytes()
    tensor = b"\x01\0\0\0\0\0\0\0a" + len(shape).to_bytes(4, "little") + sizes + (8).to_bytes(4, "little") + bytes(8)
    head = b"GGUF" + (3).to_bytes(4, "little") + (1).to_bytes(8, "little") + bytes(8)
    path.write_bytes(head + tensor + bytes(256))
    with pytest.raises(WeightError, match=r"m\.gguf: corrupt: (rows of )?tensor a ha(s|ve)"):
        GgufFile(path)


def test_what_a_reader_raises_names_the_file() -> None:
    with (
        pytest.raises(ModelError, match=r"f.json: its values are invalid .*KeyError.*; fetch it again"),
        reading("f.json", "fetch it again"),
    ):
        {}["x"]
    with pytest.raises(WeightError, match=r"^as it is$"), reading("f.json", "x"):
        raise WeightError("as it is")
    with pytest.raises(MemoryError), reading("f.json", "x"):
        raise MemoryError


def test_messages_of_models_are_one_line() -> None:
    text = str(ModelError("path: " + "x\n\x1b" * 5_000 + "; download it again"))
    assert text.isprintable()
    assert len(text) < 1_100
    assert text.startswith("path: ")
    assert text.endswith("; download it again")


@pytest.mark.parametrize(
    ("name", "case"),
    [("tokenizer", 4550), ("tokenizer", 13466), ("tokenizer", 82147), ("quantization", 2546), ("config", 16103)],
)
def test_files_that_once_had_no_error_of_ours(name: str, case: int) -> None:
    found = run_in_child(name, range(case, case + 1), seed=0)
    assert (found.cases, found.failures) == (1, {})
