"""A GGUF file as a checkpoint: its configuration under Hugging Face's keys, and the tensors under their own names.

Values are in the layout of the parameters. Blocks stay as they are in the file, views of it where the layout is the
same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from pagoda.common.errors import WeightError
from pagoda.common.models.family import Family, TensorRule
from pagoda.common.weights.dtypes import to_float32
from pagoda.common.weights.files import NamedTensor
from pagoda.common.weights.gguf.architectures import generation_config, hf_config
from pagoda.common.weights.gguf.dequantize import stored_dtype
from pagoda.common.weights.gguf.file import GgufFile, GgufTensor
from pagoda.common.weights.gguf.layouts import RowChange, changes, latent_heads
from pagoda.common.weights.gguf.names import CONFIG_TENSORS, NUMBERS, pattern, weight_rules, with_rules
from pagoda.common.weights.quantization.schemes import Scheme
from pagoda.common.weights.quantization.tensors import Floats, QuantizedTensor, Value, scaled

_LATENT_KEYS = ".attn_k_b."
_LATENT_VALUES = ".attn_v_b."
"""In the names of a pair of tensors that fill one parameter."""


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
        self._architecture = str(file.metadata["general.architecture"])
        self._changes = changes(self._architecture)
        self._rules = weight_rules(self._architecture, file.tensors)
        self._tensors = self._weights() if weights else ()
        self._blocks = frozenset(self._kept(self._tensors))
        self._numbers = tuple(self._layer_numbers()) if weights else ()

    def family(self, family: Family) -> Family:
        """Return a family with the rules for the names of this file's tensors."""
        return with_rules(family, self._rules)

    def _weights(self) -> tuple[GgufTensor, ...]:
        """Return the tensors that are weights. Raises WeightError for an unknown one, or half of a pair."""
        sources = {rule.source for rule in self._rules if isinstance(rule, TensorRule)}
        result = []
        for name, info in self.file.tensors.items():
            if self._drafts(name) or self._scaled(name) is not None:
                continue
            partner = _partner(name)
            if partner is not None and partner not in self.file.tensors:
                raise WeightError(f"{self.file.path}: tensor {partner} is missing")
            if _LATENT_VALUES in name or _stem(name) in CONFIG_TENSORS:
                continue
            if pattern(name) not in sources:
                raise WeightError(f"{self.file.path}: tensor {name} is unknown in a {self._architecture} model")
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
            change = self._changes.get(_stem(info.name))
            by_rows = (change is None or isinstance(change, RowChange)) and _partner(info.name) is None
            if by_rows and info.type.is_quantized and len(info.shape) > 1 and not info.name.endswith(".bias"):
                yield info.name

    @property
    def schemes(self) -> dict[str, Scheme]:
        """Schemes of the tensors of blocks. From the file's head."""
        tensors = self._tensors or self._weights()
        kept = self._blocks or frozenset(self._kept(tensors))
        return {info.name: self.file.block_scheme(info.name) for info in tensors if info.name in kept}

    def _drafts(self, name: str) -> bool:
        """Whether a tensor belongs to a layer after the last one, which only proposes drafts."""
        if not self.file.metadata.get(f"{self._architecture}.nextn_predict_layers") or not name.startswith("blk."):
            return False
        index = name.split(".", 2)[1]
        return index.isdigit() and int(index) >= self._config["num_hidden_layers"]

    def _layer_numbers(self) -> Iterator[NamedTensor]:
        """Yield the parameters that are numbers in the metadata."""
        for key in NUMBERS:
            values = self.file.metadata.get(key) or self.file.metadata.get(f"{self._architecture}.{key}")
            for layer, value in enumerate(values or ()):
                yield f"blk.{layer}.{key}", np.array([value], np.float32)

    @property
    def path(self) -> Path:
        return self.file.path

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of all arrays that `tensors` yields."""
        return frozenset((*(name for name, _ in self._numbers), *(info.name for info in self._tensors)))

    @property
    def num_tensors(self) -> int:
        """Number of tensors that `tensors` yields."""
        return len(self._numbers) + len(self._tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays that `tensors` yields."""
        return sum(map(self._num_bytes, self._tensors)) + sum(value.nbytes for _, value in self._numbers)

    def _num_bytes(self, info: GgufTensor) -> int:
        if info.name in self._blocks:
            return info.size
        partner = _partner(info.name)
        parts = [info] if partner is None else [info, self.file.tensors[partner]]
        return sum(prod(part.shape) * stored_dtype(part.type).itemsize for part in parts)

    def config(self) -> dict[str, Any]:
        return dict(self._config)

    def generation_config(self) -> dict[str, Any]:
        """Return the end-of-text ids; GGUF has no sampling defaults."""
        return generation_config(self.file)

    def tensors(self) -> Iterator[tuple[str, Value]]:
        """Yield every tensor in file order, in the layout of its parameter."""
        yield from self._numbers
        for info in self._tensors:
            yield info.name, self._restored(info)

    def _restored(self, info: GgufTensor) -> Value:
        """Return what a tensor of the file holds. Raises WeightError for a shape that does not fit the metadata."""
        partner = _partner(info.name)
        try:
            value = self._changed(info.name)
            if partner is None:
                return value
            values = self._changed(partner)
            assert not isinstance(value, QuantizedTensor)
            assert not isinstance(values, QuantizedTensor)
            return latent_heads(keys=value, values=values)
        except WeightError as error:
            if str(self.file.path) in str(error):
                raise
            raise WeightError(f"{self.file.path}: tensor {info.name}: {error}; download it again") from None
        except (ValueError, IndexError, ArithmeticError) as error:
            raise WeightError(
                f"{self.file.path}: tensor {info.name}: its shape {list(info.shape)} does not fit the metadata "
                f"({error}); download it again"
            ) from error

    def _changed(self, name: str) -> Value:
        """Return a tensor in the layout of its parameter, times its scales."""
        tensor: Value = self.file.blocks(name) if name in self._blocks else self.file.tensor(name)
        change = self._changes.get(_stem(name))
        if isinstance(tensor, QuantizedTensor):
            if change is not None:
                assert isinstance(change, RowChange)
                tensor = change.apply(tensor, self._config)
        elif change is not None:
            tensor = change(tensor, self._config)
        scales = self._scales(name)
        return tensor if scales is None else self._times(name, tensor, scales)

    def _scales(self, name: str) -> Floats | None:
        """Return what the values of a tensor are multiplied by: a number, or one per expert; None without any."""
        scale = f"{name.removesuffix('.weight')}.scale"
        if scale not in self.file.tensors or not self._has_scales(name):
            return None
        return to_float32(self.file.tensor(scale)).reshape(-1)

    def _times(self, name: str, tensor: Value, scales: Floats) -> Value:
        matrices = tensor.shape[0] if len(tensor.shape) > 2 else 1
        if scales.size not in (1, matrices):
            stem = name.removesuffix(".weight")
            raise WeightError(f"{self.file.path}: tensor {stem}.scale has {scales.size} scales for {matrices} matrices")
        if scales.size == 1:
            return scaled(tensor, float(scales[0]))
        if not isinstance(tensor, QuantizedTensor):
            return to_float32(tensor) * scales.reshape(-1, *(1,) * (tensor.ndim - 1))
        rows = tensor.shape[:-1]
        return replace(tensor, row_scales=np.broadcast_to(scales.reshape(-1, 1), rows).copy())


def _stem(name: str) -> str:
    """Return a tensor's name without `blk.N.` and `.weight` or `.bias`."""
    return pattern(name).removeprefix("blk.{l}.").removesuffix(".weight").removesuffix(".bias")


def _partner(name: str) -> str | None:
    """Return the tensor that fills one parameter together with this one, if any."""
    return name.replace(_LATENT_KEYS, _LATENT_VALUES) if _LATENT_KEYS in name else None
