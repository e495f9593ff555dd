"""A checkpoint written by `pagoda convert`: a model folder whose weights are stored in a backend's layout.

config.json, generation_config.json, tokenizer files     as in any model folder
manifest.json                                            description of the arrays
arrays/                                                  the arrays, in a format of the backend that wrote them
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
FORMAT: Final = 2
_MANIFEST: Final = "manifest.json"


@dataclass(frozen=True, slots=True)
class Leaf:
    """One stored array."""

    shape: tuple[int, ...]
    axes: str  # One logical axis letter per dimension.
    dtype: str
    checksum: int  # Checksum of the values, computed by the writing backend.

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Description of the arrays."""

    format: int = FORMAT
    pagoda: str  # The version of pagoda that wrote them.
    architectures: tuple[str, ...]
    dtype: str
    tensor_parallel_size: int
    leaves: Mapping[str, Leaf]  # Parameter path -> array.

    @property
    def summary(self) -> str:
        """One line for people."""
        elements = sum(leaf.size for leaf in self.leaves.values())
        devices = "1 device" if self.tensor_parallel_size == 1 else f"{self.tensor_parallel_size} devices"
        return f"{elements:,} {self.dtype} elements in {len(self.leaves)} arrays, laid out for {devices}"

    def write(self, folder: Path) -> None:
        """Write manifest.json into `folder`. Raises OSError."""
        (folder / _MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1))


class ShardedCheckpoint(FolderCheckpoint):
    """An open folder of `pagoda convert`: config and manifest, no named tensors."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, ())
        self.manifest = read_manifest(folder)

    @property
    def arrays(self) -> Path:
        """Folder of the arrays."""
        return self.folder / ARRAYS


def is_sharded(folder: Path) -> bool:
    """Whether a folder has a manifest and arrays."""
    return (folder / _MANIFEST).is_file() and (folder / ARRAYS).is_dir()


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a folder. Raises ModelError if it is missing, invalid or of another format version."""
    path = folder / _MANIFEST
    try:
        data = path.read_bytes()
        version = msgspec.json.decode(data)["format"]
        if version != FORMAT:
            raise ModelError(f"{path} has format {version}, this version reads {FORMAT}; convert the model again")
        return msgspec.json.decode(data, type=Manifest)
    except FileNotFoundError:
        raise ModelError(f"{folder}: no {_MANIFEST}, so no sharded checkpoint; make one with pagoda convert") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError):
        raise ModelError(f"{path} is no manifest of a sharded checkpoint; convert the model again") from None
