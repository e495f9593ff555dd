"""Read a .safetensors file through a memory map: names, sizes and zero-copy arrays. Write one.

The safetensors library's numpy reader does not support bfloat16. The format (https://huggingface.co/docs/safetensors):
an unsigned 64-bit header length, a JSON header, then the tensors back to back without holes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pagoda.common.errors import WeightError
from pagoda.common.weights import dtypes
from pagoda.common.weights.files import array_at, map_file

_LENGTH_BYTES = 8
_MAX_HEADER = 100_000_000  # Limit of the format, in bytes.

_DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "C64": np.dtype("<c8"),
    "BF16": dtypes.BFLOAT16,
    "F8_E4M3": dtypes.FLOAT8_E4M3FN,
    "F8_E5M2": dtypes.FLOAT8_E5M2,
    "F8_E4M3FNUZ": dtypes.FLOAT8_E4M3FNUZ,
    "F8_E5M2FNUZ": dtypes.FLOAT8_E5M2FNUZ,
    "F8_E8M0": dtypes.FLOAT8_E8M0FNU,
}


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int  # Bytes after the header.
    end: int


class SafetensorsFile:
    """An open, validated file. Opening reads the header only; tensor bytes are paged in when accessed.

    `data`: the file's bytes, if already in memory, instead of a memory map.
    """

    def __init__(self, path: Path, data: npt.NDArray[np.uint8] | None = None) -> None:
        self.path = path
        self._data = map_file(path) if data is None else data
        header_bytes, header = _header(path, self._data)
        self._start = _LENGTH_BYTES + header_bytes
        self._entries = {
            name: _entry(f"{path}: tensor {name}", value) for name, value in header.items() if name != "__metadata__"
        }
        _check_extents(path, self._entries, len(self._data) - self._start, self._start)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of each tensor, in the order of the header."""
        return {name: entry.end - entry.begin for name, entry in self._entries.items()}

    def tensor(self, name: str) -> npt.NDArray[np.generic]:
        """Return one tensor as a view of the mapped file. Raises KeyError for an unknown name."""
        entry = self._entries[name]
        return array_at(self._data, self._start + entry.begin, entry.dtype, entry.shape)


def write_safetensors(path: Path, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write a file. Raises OSError."""
    names = {dtype: name for name, dtype in _DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in tensors.items():
        begin = end
        end = end + array.nbytes
        header[name] = {"dtype": names[array.dtype], "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # Tensors begin at a multiple of 8.
    with path.open("wb") as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())


def _header(path: Path, data: npt.NDArray[np.uint8]) -> tuple[int, dict[str, Any]]:
    if len(data) < _LENGTH_BYTES:
        raise WeightError(f"{path}: truncated: {len(data)} bytes are too few for a header; download it again")
    length = int.from_bytes(data[:_LENGTH_BYTES].tobytes(), "little")
    if length > _MAX_HEADER:
        raise WeightError(f"{path}: corrupt: states a header of {length} bytes; is it a safetensors file?")
    if _LENGTH_BYTES + length > len(data):
        raise WeightError(
            f"{path}: truncated: the header needs {_LENGTH_BYTES + length} bytes, the file has {len(data)}; "
            "download it again"
        )
    try:
        text = data[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes().decode("utf-8")
        header = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise WeightError(f"{path}: corrupt header ({error}); download it again") from None
    if not isinstance(header, dict):
        raise WeightError(f"{path}: corrupt header (not a JSON object); download it again")
    return length, header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _entry(where: str, value: object) -> _Entry:
    if not isinstance(value, dict):
        raise WeightError(f"{where}: corrupt header (no description)")
    dtype = _DTYPES.get(str(value.get("dtype")))
    if dtype is None:
        raise WeightError(f"{where}: dtype {value.get('dtype')} is not supported; supported: {', '.join(_DTYPES)}")
    shape = _sizes(value.get("shape"))
    offsets = _sizes(value.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise WeightError(f"{where}: corrupt header (shape {value.get('shape')}, offsets {value.get('data_offsets')})")
    if (
        prod(size or 1 for size in shape) * dtype.itemsize >= 1 << 63
    ):  # An empty dimension must not hide the others' sizes.
        raise WeightError(f"{where}: corrupt header (shape {list(shape)})")
    begin, end = offsets
    needed = prod(shape) * dtype.itemsize
    if end - begin != needed:
        raise WeightError(
            f"{where}: corrupt header: {list(shape)} of {value['dtype']} needs {needed} bytes, "
            f"data_offsets {begin} to {end} give {end - begin}"
        )
    return _Entry(dtype, shape, begin, end)


def _sizes(value: object) -> tuple[int, ...] | None:
    """A JSON list of non-negative 63-bit integers; None for anything else."""
    if isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value):
        return tuple(value)
    return None


def _check_extents(path: Path, entries: Mapping[str, _Entry], available: int, start: int) -> None:
    position = 0
    previous = "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            problem = "overlaps" if entry.begin < position else "leaves a hole after"
            raise WeightError(
                f"{path}: corrupt header: tensor {name} at byte {entry.begin} {problem} {previous}, "
                f"which ends at {position}"
            )
        position = entry.end
        previous = name
    if position > available:
        raise WeightError(
            f"{path}: truncated: expected {start + position} bytes, the file has {start + available}; download it again"
        )
    if position < available:
        raise WeightError(
            f"{path}: corrupt: the header describes {start + position} bytes, the file has {start + available}"
        )
