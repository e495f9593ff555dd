"""A GGUF file as a Hugging Face checkpoint: config, and tensors under Hugging Face names and in its layouts.

Blocks stay as they are in the file, views of it where the layout is the same. They run along the inputs of a matrix:
tensors of blocks are [..., O, I] even where Hugging Face's layout is transposed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from pagoda.common.errors import WeightError
from pagoda.common.weights.dtypes import to_float32
from pagoda.common.weights.files import NamedTensor
from pagoda.common.weights.gguf.architectures import LAYOUTS, generation_config, hf_config
from pagoda.common.weights.gguf.dequantize import stored_dtype
from pagoda.common.weights.gguf.file import GgufFile, GgufTensor
from pagoda.common.weights.quantization.tensors import Blocks, Floats, Scheme, Value, scaled


class GgufCheckpoint:
    """A model in one GGUF file.

    Vectors of blocks, and matrices of which the layout changes more than the order of rows, are float32.
    `weights`: False yields no tensors, only the config.
    """

    def __init__(self, file: GgufFile, weights: bool = True) -> None:
        self.file = file
        self.folder: Path = file.path.parent
        self.gguf_metadata: Mapping[str, Any] | None = file.metadata
        self._config = hf_config(file)
        self._layout = LAYOUTS[file.metadata["general.architecture"]].for_file(file.tensors)
        self._tensors = self._known_tensors() if weights else ()
        self._blocks = frozenset(self._kept(self._tensors))
        self._numbers = tuple(self._layer_numbers()) if weights else ()

    def _known_tensors(self) -> tuple[GgufTensor, ...]:
        """Tensors that are Hugging Face weights. Raises WeightError for one unknown in this architecture."""
        result = []
        for name, info in self.file.tensors.items():
            if self._drafts(name) or self._scaled(name) is not None:
                continue
            try:
                target = self._layout.rename(name)
            except (KeyError, ValueError):
                architecture = self.file.metadata["general.architecture"]
                raise WeightError(f"{self.file.path}: tensor {name} is unknown in a {architecture} model") from None
            partner = self._layout.partner(name)
            if partner is not None and partner not in self.file.tensors:
                raise WeightError(f"{self.file.path}: tensor {partner} is missing")
            if target is not None:
                result.append(info)
        return tuple(result)

    def _scaled(self, name: str) -> str | None:
        """Return the weight that a scale belongs to, or None. `.input_scale` is that of activations, and not used."""
        stem, _, suffix = name.rpartition(".")
        weight = f"{stem}.weight"
        return weight if suffix in ("scale", "input_scale") and self._has_scales(weight) else None

    def _has_scales(self, weight: str) -> bool:
        """Whether a tensor has scales in a tensor beside it, as those of NVFP4 do; experts of Gemma 4 have others."""
        return weight in self.file.tensors and self.file.tensors[weight].type.name == "NVFP4"

    def _kept(self, tensors: Iterable[GgufTensor]) -> Iterator[str]:
        """Yield the names of the tensors whose blocks stay as they are."""
        for info in tensors:
            if self._layout.is_partner(info.name):
                continue
            partner = self._layout.partner(info.name)
            parts = [info] if partner is None else [info, self.file.tensors[partner]]
            matrices = all(part.type.is_quantized and len(part.shape) > 1 for part in parts)
            if matrices and self._layout.keeps_blocks(info.name, [part.type for part in parts]):
                yield from (part.name for part in parts)

    @property
    def schemes(self) -> dict[str, Scheme]:
        """Schemes of the tensors of blocks, by Hugging Face names. From the file's head."""
        tensors = self._tensors or self._known_tensors()
        kept = self._blocks or frozenset(self._kept(tensors))
        return {
            target: Blocks(info.type)
            for info in tensors
            if info.name in kept and not self._layout.is_partner(info.name)
            for target in self._layout.targets(info.name, info.shape[0])
        }

    def _drafts(self, name: str) -> bool:
        """Whether a tensor belongs to a layer after the last one, which only proposes drafts."""
        architecture = self.file.metadata["general.architecture"]
        if not self.file.metadata.get(f"{architecture}.nextn_predict_layers") or not name.startswith("blk."):
            return False
        index = name.split(".", 2)[1]
        return index.isdigit() and int(index) >= self._config["num_hidden_layers"]

    def _layer_numbers(self) -> Iterator[NamedTensor]:
        """Parameters that are numbers in the metadata."""
        for name, key in self._layout.numbers.items():
            values = self.file.metadata.get(key) or self.file.metadata.get(
                f"{self.file.metadata['general.architecture']}.{key}"
            )
            for layer, value in enumerate(values or ()):
                yield f"{self._layout.prefix}.{layer}.{name}", np.array([value], np.float32)

    @property
    def path(self) -> Path:
        return self.file.path

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of all arrays that `tensors` yields."""
        whole = (info for info in self._tensors if not self._layout.is_partner(info.name))
        stored = (self._layout.targets(info.name, info.shape[0] if info.shape else 1) for info in whole)
        return frozenset((*(name for name, _ in self._numbers), *(name for names in stored for name in names)))

    @property
    def num_tensors(self) -> int:
        """Number of tensors that `tensors` yields; stacked experts count individually."""
        return len(self._numbers) + sum(self._num_targets(info) for info in self._tensors)

    def _num_targets(self, info: GgufTensor) -> int:
        if self._layout.is_partner(info.name):
            return 0
        return len(self._layout.targets(info.name, info.shape[0] if info.shape else 1))

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays that `tensors` yields."""
        return sum(map(self._num_bytes, self._tensors)) + sum(value.nbytes for _, value in self._numbers)

    def _num_bytes(self, info: GgufTensor) -> int:
        if info.name in self._blocks:
            return info.size
        return prod(info.shape) * (4 if self._layout.shifts_norm(info.name) else stored_dtype(info.type).itemsize)

    def config(self) -> dict[str, Any]:
        return dict(self._config)

    def generation_config(self) -> dict[str, Any]:
        """Return the end-of-text ids; GGUF has no sampling defaults."""
        return generation_config(self.file)

    def tensors(self) -> Iterator[tuple[str, Value]]:
        """Yield every tensor under its Hugging Face name, in file order."""
        yield from self._numbers
        for info in self._tensors:
            if not self._layout.is_partner(info.name):
                yield from self._restored(info)

    def _restored(self, info: GgufTensor) -> list[tuple[str, Value]]:
        """Return what a tensor of the file holds. Raises WeightError for a shape that does not fit the metadata."""
        partner = self._layout.partner(info.name)
        try:
            second = None if partner is None else self._value(partner)
            restored = self._layout.restore(info.name, self._value(info.name), self._config, second)
            scales = self._scales(info.name, partner)
            return list(restored if scales is None else self._times(restored, info, scales))
        except WeightError as error:
            if str(self.file.path) in str(error):
                raise
            raise WeightError(f"{self.file.path}: tensor {info.name}: {error}; download it again") from None
        except (ValueError, IndexError, ArithmeticError) as error:
            raise WeightError(
                f"{self.file.path}: tensor {info.name}: its shape {list(info.shape)} does not fit the metadata "
                f"({error}); download it again"
            ) from error

    def _scales(self, name: str, partner: str | None) -> Floats | None:
        """Return what the values of a tensor are multiplied by: a number, or one per expert; None without any.

        NVFP4's matrices have those. Raises WeightError for a matrix that is joined from two with different ones.
        """
        own = self._stored_scales(name)
        if partner is None:
            return own
        one = np.ones(1, np.float32)
        other = self._stored_scales(partner)
        if not np.array_equal(one if own is None else own, one if other is None else other):
            raise WeightError(f"{self.file.path}: tensors {name} and {partner} have different scales; convert it again")
        return own

    def _stored_scales(self, name: str) -> Floats | None:
        scale = f"{name.removesuffix('.weight')}.scale"
        if scale not in self.file.tensors or not self._has_scales(name):
            return None
        return to_float32(self.file.tensor(scale)).reshape(-1)

    def _times(
        self, tensors: Iterable[tuple[str, Value]], info: GgufTensor, scales: Floats
    ) -> Iterator[tuple[str, Value]]:
        targets = self._num_targets(info)
        if scales.size not in (1, targets):
            stem = info.name.removesuffix(".weight")
            raise WeightError(f"{self.file.path}: tensor {stem}.scale has {scales.size} scales for {targets} matrices")
        for (name, value), scale in zip(tensors, np.broadcast_to(scales, targets), strict=True):
            yield name, scaled(value, float(scale))

    def _value(self, name: str) -> Value:
        return self.file.blocks(name) if name in self._blocks else self.file.tensor(name)
