"""A checkpoint as `pagoda convert` writes it: a model folder whose weights are a backend's own arrays.

    config.json, generation_config.json, tokenizer files     as in any model folder
    manifest.json                                            what the arrays are
    arrays/                                                  the arrays, for the backend that wrote them

Knows the manifest; how arrays are read and laid out is the backend's affair.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

import msgspec

from pagoda.common.errors import ModelError
from pagoda.common.weights.folder import FolderCheckpoint

ARRAYS: Final = "arrays"
FORMAT: Final = 1
_MANIFEST: Final = "manifest.json"


@dataclass(frozen=True, slots=True)
class Leaf:
    """One stored array. `axes`: a logical axis letter per dimension; `checksum`: the writer's, of its values."""

    shape: tuple[int, ...]
    axes: str
    dtype: str
    checksum: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What the arrays are: who wrote them, of which model, laid out for how many devices, each by its path."""

    format: int = FORMAT
    pagoda: str
    architectures: tuple[str, ...]
    dtype: str
    tensor_parallel_size: int
    leaves: Mapping[str, Leaf]

    @property
    def summary(self) -> str:
        """One line for people."""
        numbers = sum(leaf.size for leaf in self.leaves.values())
        devices = "1 device" if self.tensor_parallel_size == 1 else f"{self.tensor_parallel_size} devices"
        return f"{numbers:,} {self.dtype} numbers in {len(self.leaves)} arrays, laid out for {devices}"

    def write(self, folder: Path) -> None:
        """Write it into a folder. Raises OSError."""
        (folder / _MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1))


class ShardedCheckpoint(FolderCheckpoint):
    """A folder of `convert`, opened: config and manifest. It has no named tensors."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, ())
        self.manifest = read_manifest(folder)

    @property
    def arrays(self) -> Path:
        """Where the arrays lie."""
        return self.folder / ARRAYS


def is_sharded(folder: Path) -> bool:
    """Whether a folder looks like one that `convert` wrote."""
    return (folder / _MANIFEST).is_file() and (folder / ARRAYS).is_dir()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder. Raises ModelError when there is none, or not one that this version reads."""
    path = folder / _MANIFEST
    try:
        data = path.read_bytes()
        stated = msgspec.json.decode(data)["format"]
        if stated != FORMAT:
            raise ModelError(f"{path} has format {stated}, this version reads {FORMAT}; convert the model again")
        return msgspec.json.decode(data, type=Manifest)
    except FileNotFoundError:
        raise ModelError(f"{folder}: no {_MANIFEST}, so no sharded checkpoint; make one with pagoda convert") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError):
        raise ModelError(f"{path} is no manifest of a sharded checkpoint; convert the model again") from None
