"""Memory-map, read or parse (JSON) the files of a checkpoint."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from pagoda.common.errors import ModelError, WeightError

NamedTensor = tuple[str, npt.NDArray[np.generic]]
"""A tensor's name and values; bfloat16 and float8 as in `common.weights.dtypes`."""


def map_file(path: Path) -> npt.NDArray[np.uint8]:
    """Memory-map a file, uint8 [bytes].

    Copy-on-write: the array is writable, and writes never reach the file.
    Raises WeightError if the file is missing, empty or unreadable.
    """
    with _open(path) as file:
        try:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except ValueError:
            raise WeightError(f"{path}: the file is empty; download it again") from None
    return np.frombuffer(mapping, dtype=np.uint8)


def read_file(path: Path) -> npt.NDArray[np.uint8]:
    """Read a whole file sequentially, uint8 [bytes]. Raises WeightError if it is missing or unreadable."""
    with _open(path) as file:
        return np.fromfile(file, dtype=np.uint8)


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except FileNotFoundError:
        raise WeightError(f"{path}: no such file; the checkpoint is incomplete, download it again") from None
    except OSError as error:
        raise WeightError(f"{path}: cannot be read ({error.strerror})") from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ModelError naming file and problem."""
    value = _parse_json(path)
    if not isinstance(value, dict):
        raise ModelError(f"{path}: contains a JSON {type(value).__name__}, expected an object")
    return value


def read_json_list(path: Path) -> list[Any]:
    """Return the JSON array in a file. Raises ModelError naming file and problem."""
    value = _parse_json(path)
    if not isinstance(value, list):
        raise ModelError(f"{path}: contains a JSON {type(value).__name__}, expected an array")
    return value


def _parse_json(path: Path) -> object:
    try:
        value: object = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON ({error}); download it again") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from None
    return value


def leaves_folder(name: str) -> bool:
    """True if a relative path from an untrusted file may lead outside of its folder."""
    return name.startswith("/") or ".." in PurePosixPath(name).parts or any(char in name for char in "\\\0:")


def array_at(
    data: npt.NDArray[np.uint8], offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> npt.NDArray[np.generic]:
    """Return the array of `dtype` and `shape` at byte `offset`: a view if the address is aligned, else a copy."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    array = data[offset : offset + size].view(dtype).reshape(shape)
    return array if array.flags.aligned else array.copy()
