"""A checkpoint folder as `save_pretrained` writes it: config.json, weight files, and the index of shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from pagoda.common.errors import ModelError, WeightError
from pagoda.common.models.family import Family
from pagoda.common.weights.files import NamedTensor, leaves_folder, read_file, read_json
from pagoda.common.weights.quantization.read import KEYS, states_quantization
from pagoda.common.weights.quantization.schemes import Scheme
from pagoda.common.weights.safetensors import SafetensorsFile
from pagoda.common.weights.torch_bin import TorchFile


class WeightFile(Protocol):
    """An open file of tensors."""

    path: Path

    @property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of each tensor by name."""
        ...

    def tensor(self, name: str) -> npt.NDArray[np.generic]: ...


class FolderCheckpoint:
    """A checkpoint folder. `formats`: weight formats to look for, best first; empty: no weights, only the config.

    `eager`: read each safetensors file whole before yielding its tensors, instead of mapping it.
    """

    gguf_metadata: Mapping[str, Any] | None = None

    def __init__(self, folder: Path, formats: Sequence[str], *, eager: bool = False) -> None:
        self.folder = folder
        self._eager = eager
        self._config = read_json(folder / "config.json")
        self._files = _open_files(folder, formats)

    @property
    def path(self) -> Path:
        return self.folder

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(name for _, names in self._files for name in names)

    @property
    def num_tensors(self) -> int:
        return sum(len(names) for _, names in self._files)

    @property
    def num_bytes(self) -> int:
        return sum(file.sizes[name] for file, names in self._files for name in names)

    @property
    def schemes(self) -> Mapping[str, Scheme]:
        """Schemes of the tensors that `tensors` yields quantised: none, numbers and scales are tensors of their own."""
        return {}

    def config(self) -> dict[str, Any]:
        """Return the content of config.json, with the quantisation that Model Optimizer states in a file beside it."""
        path = self.folder / _MODELOPT
        if any(states_quantization(self._config.get(key)) for key in KEYS) or not path.is_file():
            return dict(self._config)
        return {**self._config, "quantization_config": {"quant_method": "modelopt", **read_json(path)}}

    def generation_config(self) -> dict[str, Any]:
        """Return the content of generation_config.json; {} without that file."""
        path = self.folder / "generation_config.json"
        return read_json(path) if path.is_file() else {}

    def tensors(self) -> Iterator[NamedTensor]:
        """Yield every tensor, file by file, as views of the mapped files."""
        for file, names in self._files:
            if self._eager and isinstance(file, SafetensorsFile):
                yield from _tensors(SafetensorsFile(file.path, read_file(file.path)), names)
            else:
                yield from _tensors(file, names)

    def family(self, family: Family) -> Family:
        """Return the family as it is: its rules are for Hugging Face's names."""
        return family


def code_files(folder: Path) -> dict[str, str]:
    """Return the text of the folder's Python files by name, without those of more than `_MAX_CODE` bytes."""
    files = [path for path in sorted(folder.glob("*.py")) if path.stat().st_size <= _MAX_CODE]
    return {path.name: path.read_text(encoding="utf-8", errors="replace") for path in files}


def _tensors(file: WeightFile, names: Iterable[str]) -> Iterator[NamedTensor]:
    for name in names:
        yield name, file.tensor(name)


_MAX_CODE: Final = 1 << 20
"""Maximum size of a Python file that is searched, in bytes: several times that of the largest published ones."""

_MODELOPT = "hf_quant_config.json"
_SUFFIXES = {"safetensors": ".safetensors", "pt": ".bin"}
_STEMS = {"safetensors": "model", "pt": "pytorch_model"}
_FAIRSEQ2 = "model.pt"


def _open_files(folder: Path, formats: Sequence[str]) -> list[tuple[WeightFile, list[str]]]:
    if not formats:
        return []
    for kind in formats:
        single_file = folder / f"{_STEMS[kind]}{_SUFFIXES[kind]}"
        index = single_file.with_name(f"{single_file.name}.index.json")
        if index.is_file():
            return _open_shards(index, kind)
        if single_file.is_file():
            return _open_all([single_file], kind)
        loose = sorted(folder.glob(f"{_STEMS[kind]}*{_SUFFIXES[kind]}"))
        if loose:
            return _open_all(loose, kind)
        if kind == "pt" and (folder / _FAIRSEQ2).is_file():
            return _open_all([folder / _FAIRSEQ2], kind)
    expected = " or ".join(f"{_STEMS[kind]}{_SUFFIXES[kind]}" for kind in formats)
    raise ModelError(
        f"{folder}: no weights: expected {expected} (or an index of shards); "
        "download the model's weights, or use --load-format dummy for random ones"
    )


def _open(path: Path, kind: str) -> WeightFile:
    return SafetensorsFile(path) if kind == "safetensors" else TorchFile(path)


def _open_all(paths: list[Path], kind: str) -> list[tuple[WeightFile, list[str]]]:
    files_by_tensor: dict[str, Path] = {}
    result = []
    for path in paths:
        file = _open(path, kind)
        for name in file.sizes:
            if name in files_by_tensor:
                raise WeightError(f"{path}: tensor {name} is in {files_by_tensor[name].name} too")
            files_by_tensor[name] = path
        result.append((file, list(file.sizes)))
    return result


def _open_shards(index: Path, kind: str) -> list[tuple[WeightFile, list[str]]]:
    shards: dict[str, list[str]] = {}
    for name, shard in _weight_map(index).items():
        shards.setdefault(shard, []).append(name)
    result = []
    for shard, names in shards.items():
        file = _open(_shard_path(index, shard), kind)
        missing = next((name for name in names if name not in file.sizes), None)
        if missing is not None:
            raise WeightError(f"{file.path}: tensor {missing} is missing, which {index.name} assigns to it")
        result.append((file, names))
    return result


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise WeightError(f"{index}: corrupt: no weight_map from tensor names to file names")
    if not weight_map:
        raise WeightError(f"{index}: corrupt: its weight_map is empty")
    return weight_map


def _shard_path(index: Path, shard: str) -> Path:
    """Path of a shard. Names are untrusted: they must stay inside the index's folder."""
    parts = PurePosixPath(shard).parts
    if not parts or leaves_folder(shard):
        raise WeightError(f"{index}: names {shard!r}, which is not a file inside the checkpoint's folder")
    path = index.parent.joinpath(*parts)
    try:
        is_file = path.is_file()
    except OSError:  # The name is too long.
        is_file = False
    if not is_file:
        raise WeightError(f"{index}: names the shard {shard}, which is missing; download it again")
    return path
