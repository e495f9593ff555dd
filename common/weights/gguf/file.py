"""Read the GGUF container: metadata and tensors under their own names.

The `gguf` package's reader creates several numpy arrays per vocabulary entry and takes seconds; this takes 0.1 s.
The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pagoda.common.errors import WeightError
from pagoda.common.weights.files import map_file
from pagoda.common.weights.gguf.dequantize import BlockType, block_type, can_dequantize, dequantize
from pagoda.common.weights.quantization.schemes import Blocks
from pagoda.common.weights.quantization.tensors import QuantizedTensor

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_DEFAULT_ALIGNMENT = 32
_MAX_ELEMENTS = 1 << 48  # Largest size of a dimension; with an empty dimension the product checks nothing.

SPLIT_NAME: Final = re.compile(r"-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf$")
"""End of the name of one part of a split model."""

_STRING = 8
_ARRAY = 9
_BOOL = 7
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", _BOOL: "<?", 10: "<Q", 11: "<q", 12: "<d"}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Location of a tensor in the file."""

    name: str
    shape: tuple[int, ...]  # The order is that of numpy: rows first.
    type: BlockType
    offset: int  # Bytes after the header.
    size: int  # Size in bytes.


class GgufFile:
    """An open model. `metadata` maps keys to int, float, bool, str or lists of those; tensors are read on demand.

    A model split into several files (NAME-00001-of-00003.gguf ...) is opened by any of them. Raises WeightError if a
    file is missing or corrupt.
    """

    def __init__(self, path: Path) -> None:
        opened = _Part(path)
        count = opened.metadata.get("split.count", 1)
        parts = [opened] if count <= 1 else _all_parts(opened, count)
        self.path = parts[0].path
        self.metadata: Mapping[str, Any] = parts[0].metadata
        self._parts = {name: part for part in parts for name in part.tensors}
        self.tensors: Mapping[str, GgufTensor] = {name: part.tensors[name] for name, part in self._parts.items()}
        total = sum(len(part.tensors) for part in parts)
        if not len(self.tensors) == total == self.metadata.get("split.tensors.count", total):
            raise WeightError(f"{self.path}: the parts of the model do not belong together; download them again")

    def tensor(self, name: str) -> npt.NDArray[np.generic]:
        """Return one tensor: float32 if it is quantised, else a view of the stored values.

        Raises KeyError for an unknown name, WeightError for an unsupported quantisation type.
        """
        return dequantize(self._bytes(name), self.tensors[name].type, self.tensors[name].shape)

    def blocks(self, name: str) -> QuantizedTensor:
        """Return a tensor of blocks, a view of the file. Raises as `tensor`."""
        *rows, _ = self.tensors[name].shape
        data = self._bytes(name).reshape(*rows, -1)
        return QuantizedTensor(self.block_scheme(name), data, np.empty(0, np.float32), ())

    def block_scheme(self, name: str) -> Blocks:
        """Return the scheme of `blocks` of a name. Raises KeyError for an unknown one."""
        return Blocks(self.tensors[name].type)

    def _bytes(self, name: str) -> npt.NDArray[np.uint8]:
        part = self._parts[name]
        info = self.tensors[name]
        if not can_dequantize(info.type):
            raise WeightError(f"{part.path}: tensor {name}: type {info.type.name} cannot be dequantised")
        return part.data[info.offset : info.offset + info.size]


class _Part:
    """One file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = map_file(path)
        reader = _Reader(path, self.data)
        num_tensors, num_pairs = reader.start()
        self.metadata = reader.pairs(num_pairs)
        self.tensors = reader.tensors(num_tensors, self.metadata)


def _all_parts(opened: _Part, count: int) -> list[_Part]:
    """Open the other parts of a split model, which lie beside this one; the first has the metadata."""
    split_name = SPLIT_NAME.search(opened.path.name)
    if split_name is None or int(split_name["count"]) != count:
        raise WeightError(
            f"{opened.path}: is one of {count} parts of a split model, but is not named NAME-00001-of-{count:05}.gguf; "
            "give the parts their names again, or merge them (llama-gguf-split --merge)"
        )
    stem = opened.path.name[: split_name.start()]
    paths = [opened.path.with_name(f"{stem}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1)]
    return [opened if path == opened.path else _Part(path) for path in paths]


class _Reader:
    """A bounds-checked cursor over the file's header."""

    def __init__(self, path: Path, data: npt.NDArray[np.uint8]) -> None:
        self._path = path
        self._file_size = len(data)
        self._buffer = data.data
        self._at = 0

    def start(self) -> tuple[int, int]:
        """Check magic and version; return the number of tensors and of metadata pairs."""
        magic = self._take(4)
        if magic != _MAGIC:
            raise WeightError(f"{self._path}: is not a GGUF file (it begins with {bytes(magic)!r})")
        version = self._scalar("<I")
        if version not in _VERSIONS:
            big = int.from_bytes(version.to_bytes(4, "big"), "little")
            hint = "big-endian; convert it with gguf-convert-endian" if big in _VERSIONS else "convert it again"
            raise WeightError(f"{self._path}: GGUF version {version} is not supported ({hint})")
        return self._scalar("<Q"), self._scalar("<Q")

    def pairs(self, count: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for _ in range(count):
            key = self._string()
            if key in result:
                raise WeightError(f"{self._path}: corrupt: metadata key {key} occurs twice")
            result[key] = self._value(self._scalar("<I"))
        return result

    def tensors(self, count: int, metadata: Mapping[str, Any]) -> dict[str, GgufTensor]:
        """Return the tensors with absolute offsets, checked to lie within the file."""
        described = [self._tensor() for _ in range(count)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0:
            raise WeightError(f"{self._path}: corrupt: alignment {alignment}")
        start = -(-self._at // alignment) * alignment
        result: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in described:
            if name in result:
                raise WeightError(f"{self._path}: corrupt: tensor {name} occurs twice")
            if offset % alignment:
                raise WeightError(
                    f"{self._path}: corrupt: tensor {name} at offset {offset}, not a multiple of {alignment}"
                )
            result[name] = GgufTensor(name, shape, kind, start + offset, prod(shape) // kind.elements * kind.bytes)
        self._check_extents(result)
        return result

    def _check_extents(self, tensors: Mapping[str, GgufTensor]) -> None:
        position = 0
        previous = ""
        for info in sorted(tensors.values(), key=lambda info: info.offset):
            if info.offset < position:
                raise WeightError(f"{self._path}: corrupt: tensor {info.name} overlaps {previous}")
            position = info.offset + info.size
            previous = info.name
        if position > self._file_size:
            raise WeightError(
                f"{self._path}: truncated: expected at least {position} bytes, the file has {self._file_size}; "
                "download it again"
            )

    def _tensor(self) -> tuple[str, tuple[int, ...], BlockType, int]:
        name = self._string()
        num_dims = self._scalar("<I")
        if num_dims > _MAX_DIMS:
            raise WeightError(f"{self._path}: corrupt: tensor {name} has {num_dims} dimensions")
        shape = tuple(self._scalar("<Q") for _ in range(num_dims))[::-1]
        number = self._scalar("<I")
        offset = self._scalar("<Q")
        kind = block_type(number)
        if kind is None:
            raise WeightError(f"{self._path}: tensor {name}: type number {number} is unknown to this version")
        if any(size > _MAX_ELEMENTS for size in shape):
            raise WeightError(f"{self._path}: corrupt: tensor {name} has the shape {list(shape)}; download it again")
        row = shape[-1] if shape else 1
        if row % kind.elements:
            raise WeightError(
                f"{self._path}: corrupt: rows of tensor {name} have {row} elements, "
                f"not a multiple of {kind.name}'s {kind.elements}"
            )
        return name, shape, kind, offset

    def _take(self, size: int) -> memoryview:
        end = self._at + size
        if end > self._file_size:
            raise WeightError(
                f"{self._path}: truncated: the head needs at least {end} bytes, the file has {self._file_size}; "
                "download it again"
            )
        piece = self._buffer[self._at : end]
        self._at = end
        return piece

    def _scalar(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        # Start-up hot loop (two strings per vocabulary entry): bounds are checked by unpack_from and once at the end.
        buffer = self._buffer
        offset = self._at
        length_of = struct.Struct("<Q").unpack_from
        result = []
        try:
            for _ in range(count):
                (length,) = length_of(buffer, offset)
                offset += 8 + length
                result.append(str(buffer[offset - length : offset], "utf-8"))
        except (struct.error, OverflowError):
            self._take(self._file_size)  # The text ran past the end of the file: this raises.
        except UnicodeDecodeError as error:
            self._take(offset - self._at)  # This raises if the end of the file cuts the string.
            raise WeightError(
                f"{self._path}: corrupt: a string near byte {offset} is not UTF-8 ({error.reason})"
            ) from None
        self._take(offset - self._at)
        return result

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._scalar("<I"), self._scalar("<Q"))
        return self._scalar(self._form(kind))

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return self._strings(count)
        dtype = np.dtype(self._form(kind))
        values: list[Any] = np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()
        return values

    def _form(self, kind: int) -> str:
        form = _SCALARS.get(kind)
        if form is None:
            raise WeightError(f"{self._path}: corrupt: metadata of type {kind} before byte {self._at}")
        return form
