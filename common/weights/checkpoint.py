"""One face for every kind of checkpoint: a config as Hugging Face writes it and a stream of tensors under its names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pagoda.common.config.groups.model import LOAD_FORMATS
from pagoda.common.errors import ModelError
from pagoda.common.weights.files import NamedTensor
from pagoda.common.weights.folder import FolderCheckpoint
from pagoda.common.weights.gguf.checkpoint import GgufCheckpoint
from pagoda.common.weights.gguf.file import GgufFile, pick_gguf
from pagoda.common.weights.hub import resolve_model
from pagoda.common.weights.sharded import ShardedCheckpoint, is_sharded


class Checkpoint(Protocol):
    """A model at rest. Opening one reads headers only."""

    @property
    def path(self) -> Path:
        """The folder or file that opens it again, without a hub."""
        ...

    @property
    def folder(self) -> Path:
        """Where the files beside the weights lie (tokenizer, chat template)."""
        ...

    @property
    def gguf_metadata(self) -> Mapping[str, Any] | None:
        """The metadata of a GGUF file, its vocabulary included; None for other formats."""
        ...

    @property
    def num_tensors(self) -> int:
        """How many tensors `tensors` yields."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays that `tensors` yields."""
        ...

    def config(self) -> dict[str, Any]:
        """The model's config under the keys of its config.json."""
        ...

    def generation_config(self) -> dict[str, Any]:
        """Default sampling and end-of-text ids under the keys of generation_config.json; may be empty."""
        ...

    def tensors(self) -> Iterator[NamedTensor]:
        """Every tensor once, under its Hugging Face name, one at a time. Raises WeightError on corrupt data."""
        ...


_FOLDER_ONLY = ("safetensors", "pt", "sharded_state")
_FOLDER_FORMATS = {"auto": ("safetensors", "pt"), "safetensors": ("safetensors",), "pt": ("pt",), "dummy": ()}


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
    """The checkpoint MODEL names, see `resolve_model`; of a hub id what is missing is fetched.

    `load_format` restricts what is looked for; `dummy`, and any other with `weights` off, reads the config and yields
    no tensors. `eager`: safetensors files are read whole instead of mapped.
    Raises ModelError or WeightError, one line with cause and remedy.
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
    if not (path / "config.json").is_file():
        raise ModelError(f"{path}: no config.json in this folder; is it a model's folder?")
    if load_format == "sharded_state" or (load_format == "auto" and is_sharded(path)):
        return ShardedCheckpoint(path)
    return FolderCheckpoint(path, _FOLDER_FORMATS[load_format] if weights else (), eager=eager)


def _open_file(path: Path, load_format: str, weights: bool) -> Checkpoint:
    if path.suffix in (".safetensors", ".bin", ".pt", ".pth"):
        raise ModelError(f"{path}: weights alone are not a model; give the folder that holds it and config.json")
    if load_format in _FOLDER_ONLY:
        raise ModelError(f"{path}: is a file, but --load-format {load_format} reads a folder")
    return GgufCheckpoint(GgufFile(path), weights=weights)


def _gguf_in(folder: Path, load_format: str) -> Path | None:
    """The folder's GGUF file where that is what to open: asked for, or alone in the folder."""
    if load_format in _FOLDER_ONLY:
        return None
    if load_format != "gguf" and any(next(folder.glob(pattern), None) for pattern in ("*.safetensors*", "*.bin*")):
        return None
    if load_format == "dummy" and (folder / "config.json").is_file():
        return None
    names = [file.name for file in sorted(folder.glob("*.gguf"))]
    try:
        return folder / pick_gguf(names) if names else None
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from None
