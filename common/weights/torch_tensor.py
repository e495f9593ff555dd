"""One tensor of torch.save in memory, from somebody who is not trusted: what a request carries.

Read as a checkpoint is, without torch, and with bounds that no honest tensor meets: a description of a few kilobytes,
whose instructions can make tuples and numbers only; nothing compressed; and no view that is larger than its storage.
So reading costs no more memory than the bytes that were sent.
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

_MAX_PICKLE: Final = 4096  # bytes; a tensor's is some 150
_MAX_ENTRIES: Final = 64  # of the archive; a tensor's has 7
_ENTRY_MAGIC: Final = b"PK\1\2"
_LOCAL_MAGIC: Final = b"PK\3\4"
_LOCAL_HEADER: Final = 30  # bytes of a zip entry's own header before its name

_OTHER: Final = "it holds something else than one dense tensor"

_INSTRUCTIONS: Final = frozenset(
    (
        *("PROTO", "FRAME", "STOP", "MARK", "TUPLE", "EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "NONE"),
        *("NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE"),
        *("GLOBAL", "STACK_GLOBAL", "BINPUT", "MEMOIZE", "BINGET", "BINPERSID", "REDUCE"),
    )
)
"""What a pickle may do: no dictionaries, whose keys are hashed, no attributes, and no memo of any size at once."""


class _LoneTensor(Unpickler):
    """Builds one `TensorView`. Its hooks, an empty dictionary, are dropped."""

    def find_class(self, module: str, name: str) -> Any:
        """One of the admitted names."""
        if (module, name) == ("collections", "OrderedDict"):
            return tuple
        try:
            return super().find_class(module, name)
        except WeightError:
            raise WeightError(_OTHER) from None


def read_tensor(data: bytes) -> npt.NDArray[np.generic]:
    """The values, a view of `data`; bfloat16 tagged as in common.weights.narrow. Raises WeightError."""
    if data.count(_ENTRY_MAGIC) > _MAX_ENTRIES:
        raise WeightError("it is an archive of more files than a tensor has")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return _read(data, archive)
    except WeightError:
        raise
    except Exception:  # a hostile or broken archive may raise anything; none of it is a bug of ours
        raise WeightError("it is not what torch.save writes of a tensor") from None


def _read(data: bytes, archive: zipfile.ZipFile) -> npt.NDArray[np.generic]:
    names = [name for name in archive.namelist() if name == "data.pkl" or name.endswith("/data.pkl")]
    if len(names) != 1:
        raise WeightError("it is not what torch.save writes of a tensor")
    root = names[0].removesuffix("data.pkl")
    if f"{root}byteorder" in archive.namelist() and bytes(_entry(data, archive, f"{root}byteorder")) != b"little":
        raise WeightError("it was saved on a big-endian machine")
    view = _described(bytes(_entry(data, archive, names[0], _MAX_PICKLE)))
    storage = _entry(data, archive, f"{root}data/{view.key}")
    if view.size > len(storage):
        raise WeightError("it repeats the values of a smaller storage; save tensor.contiguous()")
    if view.extent > len(storage):
        raise WeightError("its shape reaches outside of its storage")
    strides = tuple(stride * view.dtype.itemsize for stride in view.strides)
    if not view.size:
        return np.empty(view.shape, view.dtype)
    begin = view.offset * view.dtype.itemsize
    return np.ndarray(view.shape, view.dtype, storage, begin, strides)  # which checks the bounds once more


def _entry(data: bytes, archive: zipfile.ZipFile, name: str, most: int | None = None) -> memoryview:
    """The bytes of a file of the archive, where they lie."""
    entry = archive.getinfo(name)
    if entry.compress_type != zipfile.ZIP_STORED or (most is not None and entry.file_size > most):
        raise WeightError("it is compressed, or describes more than a tensor")
    header = data[entry.header_offset : entry.header_offset + _LOCAL_HEADER]
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    begin = entry.header_offset + _LOCAL_HEADER + lengths
    piece = memoryview(data)[begin : begin + entry.file_size]
    if header[:4] != _LOCAL_MAGIC or len(piece) != entry.file_size:
        raise WeightError("it is truncated or corrupt")
    return piece


def _described(pickled: bytes) -> TensorView:
    for instruction, _, _ in pickletools.genops(pickled):
        if instruction.name not in _INSTRUCTIONS:
            raise WeightError(_OTHER)
    found = _LoneTensor(io.BytesIO(pickled)).load()
    if not isinstance(found, TensorView):
        raise WeightError(_OTHER)
    return found
