"""Read what torch.save wrote without torch and without executing pickled code.

`TorchFile` reads a state dict (.bin, .pt), `read_tensor` one tensor from untrusted bytes in memory.

A file is a zip archive: `data.pkl` describes the tensors, `data/N` are their bytes, normally uncompressed and then
memory-mapped. Unpickling admits only the names of a state dict, each mapped to a function of this module.
Source of the format: https://docs.pytorch.org/docs/stable/notes/serialization.html
"""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pagoda.common.errors import WeightError
from pagoda.common.weights import dtypes
from pagoda.common.weights.files import map_file

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
    "bfloat16": dtypes.BFLOAT16,
    "float8_e4m3fn": dtypes.FLOAT8_E4M3FN,
    "float8_e5m2": dtypes.FLOAT8_E5M2,
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

_MAX_PICKLE = 1 << 28  # Size in bytes, enough for millions of tensors.
_MAX_INFLATION: Final = 64
"""Maximum ratio of a compressed record's size to its size in the file; weights shrink by less than half."""
_SMALL_RECORD: Final = 1 << 16  # Size in bytes; a smaller record counts as this many.
_LOCAL_MAGIC: Final = b"PK\3\4"
_LOCAL_HEADER: Final = 30  # Bytes of a zip local header before the name.


class TorchFile:
    """An open, validated file. Opening reads the description; tensor bytes are paged in when accessed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = map_file(path)
        self._archive = _open_archive(path, self._data)
        self._root = _root(path, self._archive)
        self._tensors = _describe(path, self._archive, self._root)
        for name, tensor in self._tensors.items():
            self._check(name, tensor)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of each tensor by name."""
        return {name: tensor.size for name, tensor in self._tensors.items()}

    def tensor(self, name: str) -> npt.NDArray[np.generic]:
        """Return one tensor, as a view of the mapped file if it is stored uncompressed."""
        tensor = self._tensors[name]
        begin = tensor.offset * tensor.dtype.itemsize
        itemsize = tensor.dtype.itemsize
        storage = self._storage(tensor)
        if (storage.ctypes.data + begin) % itemsize:
            return tensor._replace(offset=0).array(storage[begin : tensor.extent].copy().data)
        return tensor.array(storage.data)

    def _check(self, name: str, tensor: TensorView) -> None:
        try:
            available = self._entry(tensor).file_size
        except KeyError:
            raise WeightError(f"{self.path}: tensor {name}: its record data/{tensor.key} is missing") from None
        if tensor.extent > available:
            raise WeightError(
                f"{self.path}: tensor {name} needs {tensor.extent} bytes, its record data/{tensor.key} has {available}"
            )

    def _entry(self, tensor: TensorView) -> zipfile.ZipInfo:
        return self._archive.getinfo(f"{self._root}data/{tensor.key}")

    def _storage(self, tensor: TensorView) -> npt.NDArray[np.uint8]:
        entry = self._entry(tensor)
        if entry.compress_type != zipfile.ZIP_STORED:
            return np.frombuffer(bytearray(_read(self.path, self._archive, entry.filename)), np.uint8)
        stored = _stored_bytes(self._data.data, entry)
        if stored is None:
            raise WeightError(f"{self.path}: corrupt record data/{tensor.key}; download it again")
        return np.frombuffer(stored, np.uint8)


def _open_archive(path: Path, data: npt.NDArray[np.uint8]) -> zipfile.ZipFile:
    if data[:2].tobytes() != b"PK":
        legacy = data[:1].tobytes() == b"\x80"
        kind = "is in the format torch used before 1.6" if legacy else "is not a file of torch.save"
        raise WeightError(f"{path}: {kind}; save it again with a newer torch, or use a safetensors checkpoint")
    try:
        return zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        raise WeightError(
            f"{path}: truncated or corrupt archive of {len(data)} bytes (no zip directory at its end); "
            "download it again"
        ) from None


def _root(path: Path, archive: zipfile.ZipFile) -> str:
    """The archive's top folder with its slash. Also checks the byte order."""
    pickles = _pickles(archive)
    if len(pickles) != 1:
        raise WeightError(f"{path}: is not a file of torch.save: the archive has {len(pickles)} data.pkl, expected 1")
    root = pickles[0].removesuffix("data.pkl")
    if f"{root}byteorder" in archive.namelist() and _read(path, archive, f"{root}byteorder") != b"little":
        raise WeightError(f"{path}: was saved on a big-endian machine, which is not supported")
    return root


def _pickles(archive: zipfile.ZipFile) -> list[str]:
    """Return the names of the descriptions in an archive; torch.save writes one."""
    return [name for name in archive.namelist() if name == "data.pkl" or name.endswith("/data.pkl")]


def _stored_bytes(data: memoryview, entry: zipfile.ZipInfo) -> memoryview | None:
    """Return the bytes of an uncompressed entry of the archive `data`; None if the entry is corrupt or truncated."""
    header = bytes(data[entry.header_offset : entry.header_offset + _LOCAL_HEADER])
    name_bytes = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    begin = entry.header_offset + _LOCAL_HEADER + name_bytes
    stored = data[begin : begin + entry.file_size]
    return stored if header[:4] == _LOCAL_MAGIC and len(stored) == entry.file_size else None


def _read(path: Path, archive: zipfile.ZipFile, name: str) -> bytes:
    entry = archive.getinfo(name)
    if entry.file_size > _MAX_INFLATION * max(entry.compress_size, _SMALL_RECORD):
        raise WeightError(
            f"{path}: refused: record {name} inflates {entry.compress_size} bytes to {entry.file_size}; save it again "
            "with torch.save, which does not compress"
        )
    if entry.header_offset + entry.compress_size > path.stat().st_size:  # The module zipfile would allocate that much.
        raise WeightError(f"{path}: truncated: record {name} states {entry.compress_size} bytes; download it again")
    if entry.compress_type == zipfile.ZIP_STORED and entry.file_size != entry.compress_size:
        raise WeightError(
            f"{path}: corrupt record {name} ({entry.file_size} bytes in {entry.compress_size}); download it again"
        )
    try:
        return archive.read(name)
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError) as error:
        raise WeightError(f"{path}: corrupt record {name} ({error}); download it again") from None


def _describe(path: Path, archive: zipfile.ZipFile, root: str) -> dict[str, TensorView]:
    if archive.getinfo(f"{root}data.pkl").file_size > _MAX_PICKLE:
        raise WeightError(f"{path}: refused: its description of the tensors exceeds {_MAX_PICKLE} bytes")
    pickled = _read(path, archive, f"{root}data.pkl")
    try:
        state = _StateDictUnpickler(io.BytesIO(pickled)).load()
    except WeightError as error:
        raise WeightError(f"{path}: {error}") from None
    except Exception as error:  # A hostile or broken pickle may raise anything.
        raise WeightError(f"{path}: corrupt description of the tensors ({type(error).__name__}: {error})") from None
    if isinstance(state, dict) and isinstance(model := dict.get(state, "model_key"), str):
        state = dict.get(state, model)  # The library fairseq2 keeps the state dict beside its name.
    if not isinstance(state, dict):
        raise WeightError(f"{path}: contains no state dict but a {type(state).__name__}")
    for name, value in dict.items(state):
        if not isinstance(name, str) or not isinstance(value, TensorView):
            raise WeightError(f"{path}: entry {name!r} of the state dict is no tensor")
    return dict(dict.items(state))


# Unpickled objects must be immutable (tuples, strings): a pickle can assign to attributes.
class _Storage(NamedTuple):
    """The archive's record `data/{key}`."""

    key: str
    dtype_name: str  # A key of DTYPES.


class TensorView(NamedTuple):
    """A strided view of a storage; `offset` and `strides` in elements."""

    key: str
    dtype_name: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        return DTYPES[self.dtype_name]

    @property
    def size(self) -> int:
        """Bytes of the tensor's elements."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def extent(self) -> int:
        """Bytes of the storage up to the last element."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides))
        return (self.offset + last + 1) * self.dtype.itemsize

    def array(self, storage: memoryview) -> npt.NDArray[np.generic]:
        """Return the tensor as a view of its storage. Raises ValueError if it reaches outside."""
        if not self.size:
            return np.empty(self.shape, self.dtype)
        strides = tuple(stride * self.dtype.itemsize for stride in self.strides)
        return np.ndarray(self.shape, self.dtype, storage, self.offset * self.dtype.itemsize, strides)


class _StateDictUnpickler(pickle.Unpickler):
    """Builds dicts, lists, numbers, strings and `TensorView`s; raises WeightError for any other global name."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._globals = _allowed_globals()

    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and name in DTYPES:
            return name
        if (module, name) in self._globals:
            return self._globals[module, name]
        raise WeightError(f"refused: its pickle refers to {module}.{name}, which no state dict needs")

    def persistent_load(self, pid: Any) -> _Storage:
        texts = isinstance(pid, tuple) and len(pid) == 5 and isinstance(pid[1], str) and isinstance(pid[2], str)
        if not texts or pid[0] != "storage":
            raise WeightError("corrupt: a storage is not described as torch does")
        return _Storage(pid[2], pid[1])


def _allowed_globals() -> dict[tuple[str, str], Callable[..., Any]]:
    """Functions a pickle may call. Created per file, as a pickle can set attributes on them."""

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
        not isinstance(dtype, str)  # Checked first: hashing or printing a deeply nested tuple could overflow the stack.
        or dtype not in DTYPES
        or len(shape) != len(strides)
        or not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)
    ):
        raise WeightError("corrupt: the dtype, shape, strides or offset of a tensor")
    return TensorView(key, dtype, offset, tuple(shape), tuple(strides))


# One tensor in memory, such as a request's prompt embeddings. It is read with tight limits: a pickle of a few kilobytes
# whose opcodes build only tuples and numbers, no compression, no view larger than its storage. Memory use is bounded by
# the bytes sent.

_MAX_TENSOR_PICKLE: Final = 4096  # Size in bytes; a tensor needs about 150.
_MAX_ENTRIES: Final = 64  # Number of entries of the archive; a tensor needs 7.
_ENTRY_MAGIC: Final = b"PK\1\2"

_NOT_A_TENSOR: Final = "it contains something else than one dense tensor"

_OPCODES: Final = frozenset(
    (
        *("PROTO", "FRAME", "STOP", "MARK", "TUPLE", "EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "NONE"),
        *("NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE"),
        *("GLOBAL", "STACK_GLOBAL", "BINPUT", "MEMOIZE", "BINGET", "BINPERSID", "REDUCE"),
    )
)
"""Allowed pickle opcodes: no dicts (their keys are hashed), no attributes, no memo index of arbitrary size."""


class _TensorUnpickler(_StateDictUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return tuple  # The tensor's empty dict of hooks.
        try:
            return super().find_class(module, name)
        except WeightError:
            raise WeightError(_NOT_A_TENSOR) from None


def read_tensor(data: bytes) -> npt.NDArray[np.generic]:
    """Return the tensor as a view of `data`; bfloat16 as in `common.weights.dtypes`. Raises WeightError."""
    if data.count(_ENTRY_MAGIC) > _MAX_ENTRIES:
        raise WeightError("it is an archive of more files than a tensor has")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return _read_tensor(data, archive)
    except WeightError:
        raise
    except Exception:  # A hostile or broken archive may raise anything.
        raise WeightError("it is not what torch.save writes of a tensor") from None


def _read_tensor(data: bytes, archive: zipfile.ZipFile) -> npt.NDArray[np.generic]:
    pickles = _pickles(archive)
    if len(pickles) != 1:
        raise WeightError("it is not what torch.save writes of a tensor")
    root = pickles[0].removesuffix("data.pkl")
    if f"{root}byteorder" in archive.namelist() and bytes(_entry(data, archive, f"{root}byteorder")) != b"little":
        raise WeightError("it was saved on a big-endian machine")
    view = _unpickle(bytes(_entry(data, archive, pickles[0], _MAX_TENSOR_PICKLE)))
    storage = _entry(data, archive, f"{root}data/{view.key}")
    if view.size > len(storage):
        raise WeightError("it repeats the values of a smaller storage; save tensor.contiguous()")
    if view.extent > len(storage):
        raise WeightError("its shape reaches outside of its storage")
    return view.array(storage)


def _entry(data: bytes, archive: zipfile.ZipFile, name: str, max_size: int | None = None) -> memoryview:
    """Return the bytes of one archive entry."""
    entry = archive.getinfo(name)
    if entry.compress_type != zipfile.ZIP_STORED or (max_size is not None and entry.file_size > max_size):
        raise WeightError("it is compressed, or describes more than a tensor")
    stored = _stored_bytes(memoryview(data), entry)
    if stored is None:
        raise WeightError("it is truncated or corrupt")
    return stored


def _unpickle(pickled: bytes) -> TensorView:
    for opcode, _, _ in pickletools.genops(pickled):
        if opcode.name not in _OPCODES:
            raise WeightError(_NOT_A_TENSOR)
    view = _TensorUnpickler(io.BytesIO(pickled)).load()
    if not isinstance(view, TensorView):
        raise WeightError(_NOT_A_TENSOR)
    return view
