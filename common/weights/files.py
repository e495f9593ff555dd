"""Files of a checkpoint, mapped into memory or read as JSON. Knows nothing of any tensor format."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from pagoda.common.errors import ModelError, WeightError

NamedTensor = tuple[str, npt.NDArray[np.generic]]
"""A checkpoint's own name for a tensor and its values; bfloat16 and float8 tagged as in `narrow`."""


def map_file(path: Path) -> npt.NDArray[np.uint8]:
    """The bytes of a file as a lazily read array.

    The mapping is private: arrays cut from it are writable, and what is written never reaches the file.
    Raises WeightError for a file that is absent, empty or unreadable.
    """
    with _opened(path) as file:
        try:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except ValueError:
            raise WeightError(f"{path}: the file is empty; download it again") from None
    return np.frombuffer(mapping, dtype=np.uint8)


def read_file(path: Path) -> npt.NDArray[np.uint8]:
    """The bytes of a file, read whole from front to back. Raises WeightError for one absent or unreadable."""
    with _opened(path) as file:
        return np.fromfile(file, dtype=np.uint8)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except FileNotFoundError:
        raise WeightError(f"{path}: no such file; the checkpoint is incomplete, download it again") from None
    except OSError as error:
        raise WeightError(f"{path}: cannot be read ({error.strerror})") from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelError naming the file and what is wrong with it."""
    value = _json(path)
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds a JSON {type(value).__name__}, expected an object")
    return value


def read_json_list(path: Path) -> list[Any]:
    """The JSON array in a file. Raises ModelError naming the file and what is wrong with it."""
    value = _json(path)
    if not isinstance(value, list):
        raise ModelError(f"{path}: holds a JSON {type(value).__name__}, expected an array")
    return value


def _json(path: Path) -> object:
    try:
        found: object = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON ({error}); download it again") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from None
    return found


def as_array(
    data: npt.NDArray[np.uint8], offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> npt.NDArray[np.generic]:
    """`shape` elements of `dtype` at `offset` bytes: a view where the address is aligned, else a copy."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    array = data[offset : offset + size].view(dtype).reshape(shape)
    return array if array.flags.aligned else array.copy()
