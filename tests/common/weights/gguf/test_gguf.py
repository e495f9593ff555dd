"""The GGUF container against the gguf package, and every kind of broken file."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from support.suite.rows import each_row

from pagoda.common.errors import ModelError, WeightError
from pagoda.common.weights.checkpoint import open_checkpoint
from pagoda.common.weights.gguf.file import GgufFile

METADATA = {
    "an.int": 7,
    "a.negative": -3,
    "a.float": 0.5,
    "a.bool": True,
    "a.string": "grüß 👋",
    "some.strings": ["a", "", "ß", "long" * 100],
    "some.ints": [1, 2, 3],
    "some.floats": [0.5, -1.0],
    "some.bools": [True, False],
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A small file with every kind of metadata and three tensors."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for key, value in METADATA.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    writer.add_uint64("a.uint64", 1 << 40)
    writer.add_float64("a.float64", 0.1)
    writer.add_tensor("f32", rng.standard_normal((3, 32), dtype=np.float32))
    writer.add_tensor("f16", rng.standard_normal(5, dtype=np.float32).astype(np.float16))
    quants = gguf.quants.quantize(rng.standard_normal((2, 64), dtype=np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("q8", quants, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "m.gguf"


def test_metadata_and_tensors_equal_the_gguf_package(path: Path) -> None:
    file, oracle = GgufFile(path), gguf.GGUFReader(path)
    expected = {key: field.contents() for key, field in oracle.fields.items() if not key.startswith("GGUF.")}
    assert file.metadata == expected
    assert {**file.metadata, **METADATA} == file.metadata
    assert list(file.tensors) == [tensor.name for tensor in oracle.tensors] == ["f32", "f16", "q8"]
    for tensor in oracle.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(file.tensor(tensor.name), values)
    assert file.tensor("q8").shape == (2, 64)
    assert file.tensor("f16").dtype == np.float16


def test_other_alignment(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_custom_alignment(64)
    for name in "ab":
        writer.add_tensor(name, np.full(3, ord(name), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "m.gguf")
    assert file.tensor("b").tolist() == [98.0] * 3
    assert file.tensors["b"].offset % 64 == 0


def _refused(path: Path, message: str) -> None:
    with pytest.raises(WeightError, match=message) as caught:
        GgufFile(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_truncated_file_states_both_sizes(path: Path) -> None:
    whole = path.read_bytes()
    end = max(info.offset + info.size for info in GgufFile(path).tensors.values())
    path.write_bytes(whole[: end - 1])
    _refused(path, f"truncated: expected at least {end} bytes, the file has {end - 1}")
    for size in (6, 20, 60, 300, 700):
        path.write_bytes(whole[:size])
        _refused(path, f"truncated: the head needs at least .* the file has {size}")
    path.write_bytes(b"")
    _refused(path, "the file is empty")


def test_wrong_magic_and_versions(path: Path) -> None:
    whole = path.read_bytes()
    for start, message in (
        (b"PK\3\4", "is not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1), "version 1 is not supported"),
        (b"GGUF" + struct.pack(">I", 3), "big-endian"),
    ):
        path.write_bytes(start + whole[len(start) :])
        _refused(path, message)


def _head(pairs: bytes = b"", tensors: bytes = b"", num_pairs: int = 0, num_tensors: int = 0) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_pairs) + pairs + tensors
    return head + b"\0" * (-len(head) % 32 + 64)


def _text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def _tensor(name: bytes, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return _text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


U32, STRING, ARRAY = (struct.pack("<I", kind) for kind in (4, 8, 9))


@each_row(
    ("data", "message"),
    [
        (_head(tensors=_tensor(b"a", (8,), 0, 0) + _tensor(b"b", (8,), 0, 0), num_tensors=2), "b overlaps a"),
        (_head(tensors=_tensor(b"a", (8,), 0, 0) + _tensor(b"a", (8,), 0, 32), num_tensors=2), "a occurs twice"),
        (_head(tensors=_tensor(b"a", (8,), 0, 5), num_tensors=1), "not a multiple of 32"),
        (_head(tensors=_tensor(b"a", (8,), 999, 0), num_tensors=1), "type number 999 is unknown"),
        (_head(tensors=_tensor(b"a", (1,) * 5, 0, 0), num_tensors=1), "5 dimensions"),
        (_head(tensors=_tensor(b"a", (20,), 2, 0), num_tensors=1), "not a multiple of Q4_0's 32"),
        (_head(tensors=_tensor(b"a", (1 << 40, 1 << 40), 0, 0), num_tensors=1), "truncated: expected"),
        (_head(num_tensors=1 << 60), "truncated|corrupt"),
        (_head(num_pairs=1 << 60), "truncated|corrupt"),
        (_head(_text(b"k") + struct.pack("<I", 99), num_pairs=1), "metadata of type 99"),
        (_head(_text(b"k") + ARRAY + struct.pack("<IQ", 9, 1), num_pairs=1), "metadata of type 9"),
        (_head(_text(b"k") + ARRAY + struct.pack("<IQ", 8, 1 << 60), num_pairs=1), "truncated"),
        (_head(_text(b"k") + ARRAY + struct.pack("<IQ", 4, 1 << 61), num_pairs=1), "truncated"),
        (_head(_text(b"k") + STRING + struct.pack("<Q", (1 << 64) - 9), num_pairs=1), "truncated"),
        (_head(_text(b"k") + STRING + _text(b"\xff\xfe"), num_pairs=1), "not UTF-8"),
        (_head((_text(b"k") + U32 + b"\1\0\0\0") * 2, num_pairs=2), "key k occurs twice"),
        (_head(_text(b"general.alignment") + U32 + b"\0\0\0\0", num_pairs=1), "alignment 0"),
        (
            _head(_text(b"split.count") + U32 + b"\2\0\0\0", num_pairs=1),
            "is one of 2 parts of a split model, but is not named NAME-00001-of-00002",
        ),
    ],
)
def test_corrupt_files_are_refused(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(data)
    _refused(tmp_path / "m.gguf", message)


def split_model(folder: Path, extra: int = 0) -> dict[str, np.ndarray]:
    """Write a model in three parts as llama-gguf-split does: metadata in the first, tensors in all."""
    rng = np.random.default_rng(1)
    tensors = {f"t{i}": rng.standard_normal((2, 3), dtype=np.float32) for i in range(5)}
    for part, names in enumerate((["t3"], ["t0", "t4"], ["t1", "t2"])):
        writer = gguf.GGUFWriter(folder / f"m-Q8_0-{part + 1:05}-of-00003.gguf", "llama")
        if part == 0:
            writer.add_string("a.key", "value")
        writer.add_uint16("split.no", part)
        writer.add_uint16("split.count", 3)
        writer.add_int32("split.tensors.count", 5 + extra)
        for name in names:
            writer.add_tensor(name, tensors[name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return tensors


@pytest.mark.parametrize("part", [1, 2, 3])
def test_a_split_model_is_opened_by_any_of_its_parts(part: int, tmp_path: Path) -> None:
    tensors = split_model(tmp_path)
    file = GgufFile(tmp_path / f"m-Q8_0-{part:05}-of-00003.gguf")
    assert file.path.name == "m-Q8_0-00001-of-00003.gguf"
    assert file.metadata["a.key"] == "value"
    assert file.tensors.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(file.tensor(name), array)


def test_a_split_model_needs_all_its_parts(tmp_path: Path) -> None:
    split_model(tmp_path)
    (tmp_path / "m-Q8_0-00002-of-00003.gguf").unlink()
    with pytest.raises(WeightError, match=r"m-Q8_0-00002-of-00003.gguf: no such file; the checkpoint is incomplete"):
        GgufFile(tmp_path / "m-Q8_0-00001-of-00003.gguf")
    split_model(tmp_path, extra=1)
    with pytest.raises(WeightError, match="do not belong together"):
        GgufFile(tmp_path / "m-Q8_0-00001-of-00003.gguf")


def test_an_unsupported_type_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(_head(tensors=_tensor(b"a", (32,), 9, 0), num_tensors=1))
    with pytest.raises(WeightError, match="tensor a: type Q8_1 cannot be dequantised"):
        GgufFile(tmp_path / "m.gguf").tensor("a")


def test_random_damage_never_escapes_as_another_error(path: Path) -> None:
    whole, rng, refused = path.read_bytes(), np.random.default_rng(0), 0
    for _ in range(400):
        damaged = bytearray(whole)
        for at in rng.integers(0, 900, rng.integers(1, 4)):
            damaged[at] = rng.integers(256)
        path.write_bytes(damaged[: rng.integers(1, len(whole) + 1)] if rng.random() < 0.3 else damaged)
        try:
            open_checkpoint(path)
        except ModelError:
            refused += 1
    assert refused > 200
