"""Read one tensor saved by torch.save from untrusted bytes in memory (a request's prompt embeddings).

Read like a checkpoint, without torch, with tight limits: a pickle of a few kilobytes whose opcodes build only tuples
and numbers, no compression, and no view larger than its storage. Memory use is bounded by the bytes sent.
"""

from __future__ import annotations

import io
import pickletools
import zipfile
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pagoda.common.errors import WeightError
from pagoda.common.weights.torch_bin import TensorView, Unpickler

_MAX_PICKLE: Final = 4096  # bytes; a tensor needs about 150
_MAX_ENTRIES: Final = 64  # of the archive; a tensor needs 7
_ENTRY_MAGIC: Final = b"PK\1\2"
_LOCAL_MAGIC: Final = b"PK\3\4"
_LOCAL_HEADER: Final = 30  # bytes of a zip local header before the name

_NOT_A_TENSOR: Final = "it contains something else than one dense tensor"

_OPCODES: Final = frozenset(
    (
        *("PROTO", "FRAME", "STOP", "MARK", "TUPLE", "EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "NONE"),
        *("NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE"),
        *("GLOBAL", "STACK_GLOBAL", "BINPUT", "MEMOIZE", "BINGET", "BINPERSID", "REDUCE"),
    )
)
"""Allowed pickle opcodes: no dicts (their keys are hashed), no attributes, no memo index of arbitrary size."""


class _TensorUnpickler(Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return tuple  # the tensor's empty dict of hooks
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
            return _read(data, archive)
    except WeightError:
        raise
    except Exception:  # a hostile or broken archive may raise anything
        raise WeightError("it is not what torch.save writes of a tensor") from None


def _read(data: bytes, archive: zipfile.ZipFile) -> npt.NDArray[np.generic]:
    names = [name for name in archive.namelist() if name == "data.pkl" or name.endswith("/data.pkl")]
    if len(names) != 1:
        raise WeightError("it is not what torch.save writes of a tensor")
    root = names[0].removesuffix("data.pkl")
    if f"{root}byteorder" in archive.namelist() and bytes(_entry(data, archive, f"{root}byteorder")) != b"little":
        raise WeightError("it was saved on a big-endian machine")
    view = _unpickle(bytes(_entry(data, archive, names[0], _MAX_PICKLE)))
    storage = _entry(data, archive, f"{root}data/{view.key}")
    if view.size > len(storage):
        raise WeightError("it repeats the values of a smaller storage; save tensor.contiguous()")
    if view.extent > len(storage):
        raise WeightError("its shape reaches outside of its storage")
    strides = tuple(stride * view.dtype.itemsize for stride in view.strides)
    if not view.size:
        return np.empty(view.shape, view.dtype)
    begin = view.offset * view.dtype.itemsize
    return np.ndarray(view.shape, view.dtype, storage, begin, strides)  # checks the bounds again


def _entry(data: bytes, archive: zipfile.ZipFile, name: str, max_size: int | None = None) -> memoryview:
    """A view of the bytes of one archive entry."""
    entry = archive.getinfo(name)
    if entry.compress_type != zipfile.ZIP_STORED or (max_size is not None and entry.file_size > max_size):
        raise WeightError("it is compressed, or describes more than a tensor")
    header = data[entry.header_offset : entry.header_offset + _LOCAL_HEADER]
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    begin = entry.header_offset + _LOCAL_HEADER + lengths
    piece = memoryview(data)[begin : begin + entry.file_size]
    if header[:4] != _LOCAL_MAGIC or len(piece) != entry.file_size:
        raise WeightError("it is truncated or corrupt")
    return piece


def _unpickle(pickled: bytes) -> TensorView:
    for opcode, _, _ in pickletools.genops(pickled):
        if opcode.name not in _OPCODES:
            raise WeightError(_NOT_A_TENSOR)
    view = _TensorUnpickler(io.BytesIO(pickled)).load()
    if not isinstance(view, TensorView):
        raise WeightError(_NOT_A_TENSOR)
    return view
