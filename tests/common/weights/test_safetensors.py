"""The reader against the safetensors library, and every kind of broken file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.suite.rows import each_row

from pagoda.common.errors import WeightError
from pagoda.common.weights import dtypes
from pagoda.common.weights.safetensors import SafetensorsFile

NUMPY = {
    torch.bool: np.bool_,
    torch.uint8: np.uint8,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float16: np.float16,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.complex64: np.complex64,
    torch.bfloat16: dtypes.BFLOAT16,
    torch.float8_e4m3fn: dtypes.FLOAT8_E4M3FN,
    torch.float8_e5m2: dtypes.FLOAT8_E5M2,
}


@each_row("dtype", NUMPY, ids=str)
def test_every_dtype_equals_the_library(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = (torch.randn(3, 5, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    save_file({"a": tensor, "none": tensor[:0].clone(), "scalar": tensor[0, 0].clone()}, tmp_path / "f.safetensors")
    file = SafetensorsFile(tmp_path / "f.safetensors")
    array = file.tensor("a")
    assert array.dtype == NUMPY[dtype]
    assert array.shape == (3, 5)
    assert array.tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes()
    assert (file.tensor("none").shape, file.tensor("scalar").shape) == ((0, 5), ())
    assert file.sizes["a"] == array.nbytes


def test_values_are_mapped_not_copied_and_private(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    save_file({"a": torch.ones(4)}, path)
    file, before = SafetensorsFile(path), path.read_bytes()
    array = file.tensor("a")
    assert np.shares_memory(array, file.tensor("a"))
    array[...] = 7
    assert path.read_bytes() == before


def test_unaligned_tensors_are_readable(tmp_path: Path) -> None:
    entries = {"byte": _entry("U8", [1], 0, 1), "floats": _entry("F32", [2], 1, 9)}
    data = b"\x05" + np.array([1.5, -2], np.float32).tobytes()
    np.testing.assert_array_equal(SafetensorsFile(_write(tmp_path, entries, data)).tensor("floats"), [1.5, -2])


@pytest.mark.parametrize("shift", [0, 1])
def test_tagged_tensors_are_aligned(shift: int, tmp_path: Path) -> None:
    entries = {"bytes": _entry("U8", [1 + shift], 0, 1 + shift), "a": _entry("BF16", [2], 1 + shift, 5 + shift)}
    array = SafetensorsFile(_write(tmp_path, entries, b"\0" * (1 + shift) + b"\x80\x3f\0\xc0")).tensor("a")
    assert dtypes.as_uint(array).flags.aligned
    assert dtypes.to_float32(array).tolist() == [1, -2]


def _entry(dtype: Any, shape: Any, begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def _write(folder: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "f.safetensors"
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def _refused(path: Path, message: str) -> None:
    with pytest.raises(WeightError, match=message) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_truncated_file_states_both_sizes(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    save_file({"a": torch.ones(100)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    _refused(path, f"truncated: expected {len(whole)} bytes, the file has {len(whole) - 10}")
    path.write_bytes(whole[:30])
    _refused(path, "truncated: the header needs .* bytes, the file has 30")
    path.write_bytes(whole[:5])
    _refused(path, "truncated: 5 bytes")
    path.write_bytes(b"")
    _refused(path, "the file is empty")
    path.write_bytes(whole + b"more")
    _refused(path, f"describes {len(whole)} bytes, the file has {len(whole) + 4}")


def test_missing_file(tmp_path: Path) -> None:
    _refused(tmp_path / "none.safetensors", "no such file")


@each_row(
    ("header", "data", "message"),
    [
        (b"{", b"", "corrupt header"),
        (b"\xff\xfe", b"", "corrupt header"),
        (b"[1]", b"", "not a JSON object"),
        (b'{"a": 1}', b"", "no description"),
        (b'{"a": {}, "a": {}}', b"", "occurs twice"),
        (b"[" * 100_000, b"", "corrupt header"),
        ({"a": _entry("F4", [2], 0, 1)}, b"\0", "dtype F4 is not supported; supported: BOOL"),
        ({"a": _entry("F32", [2], 0, 4)}, b"\0" * 4, "needs 8 bytes, data_offsets 0 to 4 give 4"),
        ({"a": _entry("F32", [-1], 0, -4)}, b"", "corrupt header"),
        ({"a": _entry("F32", [1.0], 0, 4)}, b"\0" * 4, "corrupt header"),
        ({"a": _entry("F32", [True], 0, 4)}, b"\0" * 4, "corrupt header"),
        ({"a": _entry("F32", None, 0, 4)}, b"\0" * 4, "corrupt header"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}, b"\0" * 8, "corrupt header"),
        ({"a": _entry("F32", [1 << 62, 1 << 62], 0, 1 << 62)}, b"", "corrupt header"),
        ({"a": _entry("U8", [1 << 62], 0, 1 << 62)}, b"", "truncated"),
        ({"a": _entry("U8", [1 << 64], 0, 1 << 64)}, b"", "corrupt header"),
        ({"a": _entry("F32", [0, 1 << 40, 1 << 40], 0, 0)}, b"", "corrupt header"),
        ({"a": _entry("U8", [4], 0, 4), "b": _entry("U8", [4], 2, 6)}, b"\0" * 6, "tensor b at byte 2 overlaps a"),
        (
            {"a": _entry("U8", [4], 0, 4), "b": _entry("U8", [4], 6, 10)},
            b"\0" * 10,
            "b at byte 6 leaves a hole after a",
        ),
        ({"a": _entry("U8", [4], 2, 6)}, b"\0" * 6, "hole after the header"),
    ],
)
def test_corrupt_headers_are_refused(header: Any, data: bytes, message: str, tmp_path: Path) -> None:
    _refused(_write(tmp_path, header, data), message)


def test_giant_header_length_is_refused(tmp_path: Path) -> None:
    _refused(_write(tmp_path, {}, length=1 << 60), re.escape("is it a safetensors file?"))


def test_random_damage_never_escapes_as_another_error(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    save_file({"a": torch.ones(3, 4), "b": torch.zeros(5, dtype=torch.bfloat16)}, path)
    whole, rng, refused = path.read_bytes(), np.random.default_rng(0), 0
    for _ in range(300):
        damaged = bytearray(whole)
        for at in rng.integers(0, len(whole), rng.integers(1, 4)):
            damaged[at] = rng.integers(256)
        path.write_bytes(damaged[: rng.integers(1, len(whole) + 1)])
        try:
            file = SafetensorsFile(path)
            for name in file.sizes:
                file.tensor(name)
        except WeightError:
            refused += 1
    assert refused > 200
