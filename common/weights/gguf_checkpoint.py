"""A GGUF file as a checkpoint: metadata as a Hugging Face config, tensors under Hugging Face names and layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from pagoda.common.errors import WeightError
from pagoda.common.weights.dequantize import stored_dtype
from pagoda.common.weights.gguf import GgufFile, GgufTensor
from pagoda.common.weights.gguf_config import generation_config, hf_config
from pagoda.common.weights.gguf_names import LAYOUTS
from pagoda.common.weights.mapped import NamedTensor


class GgufCheckpoint:
    """One model in one file. Quantised tensors come as float32, others in their own dtype.

    `weights`: False yields no tensors (the config alone is wanted).
    """

    def __init__(self, file: GgufFile, weights: bool = True) -> None:
        self.file = file
        self.folder: Path = file.path.parent
        self.gguf_metadata: Mapping[str, Any] | None = file.metadata
        self._config = hf_config(file)
        self._layout = LAYOUTS[file.metadata["general.architecture"]]
        self._tensors = self._served() if weights else ()

    def _served(self) -> tuple[GgufTensor, ...]:
        """The tensors that Hugging Face has too. Raises WeightError for one that this architecture does not have."""
        result = []
        for name, info in self.file.tensors.items():
            try:
                target = self._layout.rename(name)
            except (KeyError, ValueError):
                architecture = self.file.metadata["general.architecture"]
                raise WeightError(f"{self.file.path}: tensor {name} is unknown in a {architecture} model") from None
            if target is not None:
                result.append(info)
        return tuple(result)

    @property
    def path(self) -> Path:
        """What opens it again: the file."""
        return self.file.path

    @property
    def num_tensors(self) -> int:
        """How many tensors `tensors` yields; stacked experts count one by one."""
        return sum(info.shape[0] if "{e}" in str(self._layout.rename(info.name)) else 1 for info in self._tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays that `tensors` yields."""
        return sum(prod(info.shape) * self._itemsize(info) for info in self._tensors)

    def _itemsize(self, info: GgufTensor) -> int:
        shifted = self._layout.minus_one and info.name.endswith("norm.weight")
        return 4 if shifted else stored_dtype(info.type).itemsize

    def config(self) -> dict[str, Any]:
        """The config dict that Hugging Face would hold for this model."""
        return dict(self._config)

    def generation_config(self) -> dict[str, Any]:
        """End-of-text ids; GGUF carries no sampling defaults."""
        return generation_config(self.file)

    def tensors(self) -> Iterator[NamedTensor]:
        """Every tensor under its Hugging Face name, dequantised one by one in the order of the file."""
        for info in self._tensors:
            yield from self._layout.restore(info.name, self.file.tensor(info.name), self._config)
