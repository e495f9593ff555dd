"""What torch.save's pickle says of tensors, understood without torch and without running anything it says.

Unpickling admits only the names below, each mapped to a function of ours that builds a description.
Source of the format: https://docs.pytorch.org/docs/stable/notes/serialization.html
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from pagoda.common.errors import WeightError
from pagoda.common.weights import narrow

DTYPES: dict[str, np.dtype[Any]] = {
    "bool": np.dtype(np.bool_),
    "uint8": np.dtype("u1"),
    "int8": np.dtype("i1"),
    "int16": np.dtype("<i2"),
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
    "uint16": np.dtype("<u2"),
    "uint32": np.dtype("<u4"),
    "uint64": np.dtype("<u8"),
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
    "bfloat16": narrow.BFLOAT16,
    "float8_e4m3fn": narrow.FLOAT8_E4M3FN,
    "float8_e5m2": narrow.FLOAT8_E5M2,
}
_STORAGES = {
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "HalfStorage": "float16",
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "BFloat16Storage": "bfloat16",
    "UntypedStorage": "uint8",
}


# What unpickling hands out is immutable without exception (tuples, strings): a pickle can assign to attributes.
class _Storage(NamedTuple):
    """A record of the archive: `data/{key}`, of a dtype named in `DTYPES`."""

    key: str
    dtype_name: str


class TensorView(NamedTuple):
    """A strided view of a storage; `offset` and `strides` in elements."""

    key: str
    dtype_name: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the values."""
        return DTYPES[self.dtype_name]

    @property
    def size(self) -> int:
        """Bytes of the values."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def extent(self) -> int:
        """Bytes of the storage up to the last value."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides))
        return (self.offset + last + 1) * self.dtype.itemsize


class Unpickler(pickle.Unpickler):
    """Builds dicts, lists, numbers, strings and `TensorView`s; every other name is refused before anything runs."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._admitted = _admitted()

    def find_class(self, module: str, name: str) -> Any:
        """One of the admitted names."""
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and name in DTYPES:
            return name
        if (module, name) in self._admitted:
            return self._admitted[module, name]
        raise WeightError(f"refused: its pickle asks for {module}.{name}, which no state dict needs")

    def persistent_load(self, pid: Any) -> _Storage:
        """The storage that a tensor names."""
        texts = isinstance(pid, tuple) and len(pid) == 5 and isinstance(pid[1], str) and isinstance(pid[2], str)
        if not texts or pid[0] != "storage":
            raise WeightError("corrupt: a storage is not described as torch does")
        return _Storage(pid[2], pid[1])


def _admitted() -> dict[tuple[str, str], Callable[..., Any]]:
    """What a state dict's pickle may call. Made anew for each file: a pickle can set attributes on what it gets."""

    def rebuild(storage: _Storage, offset: int, shape: Sequence[int], strides: Sequence[int], *_: Any) -> TensorView:
        return _tensor(storage.key, storage.dtype_name, offset, shape, strides)

    def rebuild_typed(
        storage: _Storage,
        offset: int,
        shape: Sequence[int],
        strides: Sequence[int],
        grad: Any,
        hooks: Any,
        dtype: str,
        *_: Any,
    ) -> TensorView:
        return _tensor(storage.key, dtype, offset, shape, strides)

    def parameter(data: TensorView, *_: Any) -> TensorView:
        return data

    return {
        ("collections", "OrderedDict"): OrderedDict,
        ("torch._utils", "_rebuild_tensor_v2"): rebuild,
        ("torch._utils", "_rebuild_tensor_v3"): rebuild_typed,
        ("torch._utils", "_rebuild_parameter"): parameter,
    }


def _tensor(key: str, dtype: str, offset: int, shape: Sequence[int], strides: Sequence[int]) -> TensorView:
    numbers = (offset, *shape, *strides)
    if (
        not isinstance(dtype, str)  # nothing is hashed or printed that a pickle may have nested without end
        or dtype not in DTYPES
        or len(shape) != len(strides)
        or not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)
    ):
        raise WeightError("corrupt: the dtype, shape, strides or offset of a tensor")
    return TensorView(key, dtype, offset, tuple(shape), tuple(strides))
