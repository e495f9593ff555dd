"""Open any kind of checkpoint as a Hugging Face config, a stream of tensors, and the rules for their names."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from pagoda.common.config.groups.model import LOAD_FORMATS
from pagoda.common.errors import ModelError
from pagoda.common.models.family import Family
from pagoda.common.weights.folder import FolderCheckpoint
from pagoda.common.weights.gguf.checkpoint import GgufCheckpoint
from pagoda.common.weights.gguf.file import GgufFile
from pagoda.common.weights.hub import gguf_in, resolve_model
from pagoda.common.weights.quantization.schemes import Scheme
from pagoda.common.weights.quantization.tensors import Value
from pagoda.common.weights.sharded import ShardedCheckpoint, is_sharded


class Checkpoint(Protocol):
    """A model on disk. Opening one reads headers only.

    The quantised layers of a folder come as several tensors, which `quantization.read` joins.
    """

    @property
    def path(self) -> Path:
        """Local folder or file that this checkpoint can be opened from again."""
        ...

    @property
    def folder(self) -> Path:
        """Folder of the files beside the weights (tokenizer, chat template)."""
        ...

    @property
    def gguf_metadata(self) -> Mapping[str, Any] | None:
        """Metadata of a GGUF file, including its vocabulary; None for other formats."""
        ...

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors where headers have them; else empty."""
        ...

    @property
    def num_tensors(self) -> int:
        """Number of tensors that `tensors` yields."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors that `tensors` yields."""
        ...

    @property
    def schemes(self) -> Mapping[str, Scheme]:
        """Schemes of the tensors that `tensors` yields quantised."""
        ...

    def config(self) -> dict[str, Any]:
        """Return the model's config under the keys of a config.json."""
        ...

    def generation_config(self) -> dict[str, Any]:
        """Return default sampling parameters and end-of-text ids, keyed as in generation_config.json; may be empty."""
        ...

    def tensors(self) -> Iterator[tuple[str, Value]]:
        """Yield every tensor once, under its name in the file. Raises WeightError for corrupt data."""
        ...

    def family(self, family: Family) -> Family:
        """Return the model's family with the rules for the names of this checkpoint's tensors."""
        ...


_FOLDER_ONLY = ("safetensors", "pt", "sharded_state")
_FOLDER_FORMATS = {"auto": ("safetensors", "pt"), "safetensors": ("safetensors",), "pt": ("pt",), "dummy": ()}


_ORBAX_FILES: Final = (
    "_CHECKPOINT_METADATA",
    "_METADATA",
    "*/_METADATA",
    "*/_CHECKPOINT_METADATA",
    "*/items/_METADATA",
)
"""What a folder has that Orbax or MaxText wrote: a checkpoint, a step of it, or all steps."""


def open_checkpoint(
    model: str | Path,
    load_format: str = "auto",
    *,
    weights: bool = True,
    revision: str | None = None,
    token: str | None = None,
    download_dir: str | None = None,
    ignore_patterns: Sequence[str] = (),
    eager: bool = False,
) -> Checkpoint:
    """Open the checkpoint that MODEL names (see `resolve_model`), downloading it if it is a hub id.

    `load_format` restricts the formats to look for; with `dummy`, or without `weights`, only the config is read.
    `eager`: read safetensors files whole instead of mapping them.
    Raises ModelError or WeightError.
    """
    if load_format not in LOAD_FORMATS:
        raise ModelError(f"load format {load_format} is unknown; known: {', '.join(LOAD_FORMATS)}")
    weights = weights and load_format != "dummy"
    path = resolve_model(
        str(model),
        load_format,
        weights=weights,
        revision=revision,
        token=token,
        download_dir=download_dir,
        ignore_patterns=ignore_patterns,
    )
    file = path if path.is_file() else _gguf_in(path, load_format)
    if file is not None:
        return _open_file(file, load_format, weights)
    if load_format == "gguf":
        raise ModelError(f"{path}: no .gguf file in this folder")
    if not (path / "config.json").is_file() and any(any(path.glob(pattern)) for pattern in _ORBAX_FILES):
        raise ModelError(
            f"{path}: Orbax checkpoints, as MaxText writes them, are not read: they have no config.json and name their "
            "tensors in a way of their own; export it first with MaxText's to_huggingface script"
        )
    if not (path / "config.json").is_file():
        raise ModelError(f"{path}: no config.json in this folder; is it a model's folder?")
    if load_format == "sharded_state" or (load_format == "auto" and is_sharded(path)):
        return ShardedCheckpoint(path)
    return FolderCheckpoint(path, _FOLDER_FORMATS[load_format] if weights else (), eager=eager)


def _open_file(path: Path, load_format: str, weights: bool) -> Checkpoint:
    if path.suffix in (".safetensors", ".bin", ".pt", ".pth"):
        raise ModelError(f"{path}: weights alone are not a model; give the folder that contains them and config.json")
    if load_format in _FOLDER_ONLY:
        raise ModelError(f"{path}: is a file, but --load-format {load_format} reads a folder")
    return GgufCheckpoint(GgufFile(path), weights=weights)


def _gguf_in(folder: Path, load_format: str) -> Path | None:
    """The folder's GGUF file, if the format is gguf or the folder has no other weights."""
    if load_format in _FOLDER_ONLY:
        return None
    if load_format != "gguf" and any(next(folder.glob(pattern), None) for pattern in ("*.safetensors*", "*.bin*")):
        return None
    if load_format == "dummy" and (folder / "config.json").is_file():
        return None
    return gguf_in(folder)
