"""Write a dense model as a folder in the `compressed-tensors` format, which pagoda, vLLM and transformers read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import numpy as np

from pagoda.common.errors import ModelError
from pagoda.common.models.family import Family
from pagoda.common.models.primitives import Param
from pagoda.common.weights.dtypes import BFLOAT16, to_bfloat16, to_float32
from pagoda.common.weights.quantization.config import EMBEDDINGS
from pagoda.common.weights.quantization.on_the_fly import is_matrix, quantize, rounded_int4, scheme_of
from pagoda.common.weights.quantization.schemes import int4_group
from pagoda.common.weights.quantization.tensors import Array, Floats, QuantizedTensor, Value
from pagoda.common.weights.rules import TensorUse, stored_tensors
from pagoda.common.weights.safetensors import write_safetensors

METHODS: Final = ("int4", "int8", "fp8")
"""What matrices can be written in."""

SHARD_BYTES: Final = 2 << 30
"""Bytes of a weight file, which is in memory until it is complete."""

_WEIGHT: Final = ".weight"
_ZERO: Final = 8
"""Zero point of the numbers without offsets."""

_FORMATS: Final = {"int4": "pack-quantized", "int8": "int-quantized", "fp8": "float-quantized"}
_TOKEN: Final = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
_GROUPS: Final[Mapping[str, Mapping[str, Any]]] = {
    "int4": {
        "weights": {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True, "dynamic": False},
        "input_activations": None,
    },
    "int8": {
        "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False},
        "input_activations": {"type": "int", **_TOKEN},
    },
    "fp8": {
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
        "input_activations": {"type": "float", **_TOKEN},
    },
}
"""The config group of each method."""

_WEIGHT_FILES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".index.json")


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    num_bytes: int  # bytes of all tensors
    quantised: tuple[str, ...]  # names of layers
    ignored: tuple[str, ...]  # names of layers that stay dense
    config: Mapping[str, Any]  # the quantization_config

    @property
    def summary(self) -> str:
        return (
            f"{len(self.quantised):,} matrices in {self.config['format']}, {len(self.ignored):,} others, "
            f"{self.num_bytes / (1 << 20):,.0f} MiB"
        )


def write_quantized(
    tensors: Iterable[tuple[str, Value]],
    uses: Callable[[str], TensorUse],
    params: Mapping[str, Param],
    method: str,
    dtype: str | None,
    folder: Path,
    shard_bytes: int = SHARD_BYTES,
) -> Exported:
    """Write the weights of a model: its layers' matrices quantised, all else in `dtype` (None: as it comes).

    `tensors`: experts one by one, see `experts_one_by_one`. `uses`: see `tensor_uses`. Memory: a weight file of
    `shard_bytes` and one tensor. Raise ModelError for a stack of experts in one tensor, which the format does not have,
    or a model without a matrix to quantise.
    """
    rounding = _Rounding.of(method, params)
    writer = _ShardWriter(folder, shard_bytes)
    quantised = []
    ignored = ["lm_head"]
    for name, value in tensors:
        module = name.removesuffix(_WEIGHT)
        use = uses(name)
        matrix = bool(use.params) and all(is_matrix(param) for param in use.params)
        array = value.dequantize() if isinstance(value, QuantizedTensor) else value
        if matrix and array.ndim > 2:
            raise ModelError(
                f"tensor {name} {list(array.shape)} has several experts, which compressed-tensors stores one by one; "
                f"quantise them while loading, with pagoda serve --quantization {method}"
            )
        if matrix and use.by_rows and module != name and scheme_of(method, array.shape[1]) is not None:
            for part, values in rounding.tensors(module, array):
                writer.add(part, values)
            quantised.append(module)
            continue
        if module != name and array.ndim == 2 and module not in ignored and not _is_table(use):
            ignored.append(module)
        writer.add(name, _as(array, dtype))
    if not quantised:
        raise ModelError("the model has no matrix that can be quantised; serve it as it is")
    writer.finish()
    return Exported(writer.num_bytes, tuple(quantised), tuple(ignored), rounding.config(ignored))


_WRITTEN_NAMES: Final[Mapping[str, tuple[tuple[str, str | None], ...]]] = {
    "BailingMoeForCausalLM": (("model.word_embeddings.*", None), ("*.attention.*", None)),
    "BailingMoeV2ForCausalLM": (("model.word_embeddings.*", None), ("*.attention.*", None), ("*.expert_bias", None)),
    "Ernie4_5_MoeForCausalLM": (("*.moe_statics.*", None),),
    "ExaoneMoeForCausalLM": (("*.mlp.e_score_correction_bias", None),),
    "FalconForCausalLM": (("*.ln_*", "before_ffn"),),
    "FalconH1ForCausalLM": (("model.final_layernorm.*", None),),
    "JambaForCausalLM": (("model.final_layernorm.*", None),),
    "KimiLinearForCausalLM": (("*.gate.e_score_correction_bias", None),),
    "MiMoV2FlashForCausalLM": (("*.[qkv]_proj.*", None), ("*.attention_sink_bias", None)),
    "NemotronHForCausalLM": (("*.mixer.o_proj.*", "q"),),
    "PhiForCausalLM": (("model.final_layernorm.*", None), ("*.self_attn.dense.*", None)),
    "Qwen2MoeForCausalLM": (("*.shared_expert.*", None),),
    "Qwen3NextForCausalLM": (("*.shared_expert.*", None),),
    "Qwen3_5ForCausalLM": (("*.in_proj_qkv.*", "decay"), ("*.in_proj_[zab].*", "decay")),
    "Qwen3_5MoeForCausalLM": (
        ("*.in_proj_qkv.*", "decay"),
        ("*.in_proj_[zab].*", "decay"),
        ("*.shared_expert.*", None),
    ),
}
"""Architecture -> names of tensors that transformers writes, where its family reads others, too.

Each with the last part of a parameter that the layer must have beside it, if any.
"""


def hugging_face_tensors(
    architecture: str, family: Family, params: Mapping[str, Param], weights: Iterable[tuple[str, Value]]
) -> Iterator[tuple[str, Array]]:
    """Yield weights, dense and not scaled, as the tensors that transformers writes for a model of an architecture."""
    written = _WRITTEN_NAMES.get(architecture, ())

    def preferred(source: str, param: str) -> bool:
        stem = param.rpartition(".")[0]
        return any(
            fnmatchcase(source, pattern) and (beside is None or f"{stem}.{beside}" in params)
            for pattern, beside in written
        )

    return stored_tensors(family.rules, params, weights, preferred)


def copy_other_files(source: Path, folder: Path) -> None:
    """Copy what a model folder has beside config and weights: tokenizer, templates, generation config, code."""
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        hidden = any(part.startswith(".") for part in relative.parts)
        if path.is_file() and not hidden and not path.name.endswith(_WEIGHT_FILES) and str(relative) != "config.json":
            (folder / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / relative)


@dataclass(frozen=True, slots=True)
class _Rounding:
    """How matrices are rounded, and what is stored of them."""

    method: str
    group: int  # inputs of an int4 group
    symmetric: bool  # int4 has no zero points

    @classmethod
    def of(cls, method: str, params: Mapping[str, Param]) -> _Rounding:
        """Return that of a model: one int4 group size, the largest that fits every matrix besides those none fits.

        Experts have no zero points: few versions of few engines multiply such.
        """
        matrices = [param for param in params.values() if is_matrix(param)]
        groups = [int4_group(param.shape[-1]) for param in matrices]
        group = min((group for group in groups if group is not None), default=1)
        symmetric = method != "int4" or any(".experts." in param.name for param in matrices)
        return cls(method, group, symmetric)

    def tensors(self, module: str, array: Array) -> Iterator[tuple[str, Array]]:
        """Yield the tensors that the weight of a layer is stored in."""
        if self.method != "int4":
            scheme = scheme_of(self.method, array.shape[1])
            assert scheme is not None, "methods of 8 bits fit any matrix"
            tensor = quantize(array, scheme)
            yield f"{module}.weight", tensor.data
            yield f"{module}.weight_scale", tensor.scales
            return
        tensor = rounded_int4(array, self.group, symmetric=self.symmetric)
        # Two numbers a byte, first input in the lower half, are eight a word in the same order.
        yield f"{module}.weight_packed", np.ascontiguousarray(tensor.data).view("<i4")
        yield f"{module}.weight_scale", to_bfloat16(tensor.scales)
        yield f"{module}.weight_shape", np.array(tensor.shape, np.int64)
        if tensor.offsets is not None:
            yield f"{module}.weight_zero_point", _packed_zeros(tensor.offsets, tensor.scales)

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """Return the quantization_config of a model whose layers `ignored` stay dense."""
        weights = dict(_GROUPS[self.method]["weights"])
        if self.method == "int4":
            weights |= {"group_size": self.group, "symmetric": self.symmetric}
        layers = {**_GROUPS[self.method], "weights": weights, "output_activations": None, "targets": ["Linear"]}
        return {
            "quant_method": "compressed-tensors",
            "format": _FORMATS[self.method],
            "quantization_status": "compressed",
            "config_groups": {"group_0": layers},
            "ignore": list(ignored),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }


def _packed_zeros(offsets: Floats, scales: Floats) -> Array:
    """Return zero points int32 [O / 8, groups], those of eight outputs to a word, of offsets and scales [O, groups]."""
    zeros = np.rint(_ZERO - offsets / scales).astype(np.uint8).T
    nibbles = np.pad(zeros, ((0, 0), (0, -zeros.shape[1] % 8)))
    words = np.ascontiguousarray(nibbles[:, ::2] | nibbles[:, 1::2] << 4).view("<i4")
    return np.ascontiguousarray(words.T)


def _is_table(use: TensorUse) -> bool:
    """Whether a tensor is a table of embeddings, which is no linear layer."""
    return any(param.name in EMBEDDINGS for param in use.params)


def _as(array: Array, dtype: str | None) -> Array:
    """Return floats of 16 bits or more in a dtype; others unchanged."""
    if dtype is None or not (array.dtype == BFLOAT16 or array.dtype.kind == "f"):
        return array
    if dtype == "bfloat16":
        return array if array.dtype == BFLOAT16 else to_bfloat16(to_float32(array))
    return to_float32(array).astype(dtype)


class _ShardWriter:
    """Writes tensors into numbered safetensors files and their index."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self._folder = folder
        self._limit = shard_bytes
        self._waiting: dict[str, Array] = {}
        self._bytes = 0
        self._shards: list[list[str]] = []
        self.num_bytes = 0

    def add(self, name: str, array: Array) -> None:
        if self._waiting and self._bytes + array.nbytes > self._limit:
            self._write()
        self._waiting[name] = array
        self._bytes += array.nbytes

    def _write(self) -> None:
        self._shards.append(list(self._waiting))
        write_safetensors(self._path(len(self._shards)), self._waiting)
        self.num_bytes += self._bytes
        self._waiting = {}
        self._bytes = 0

    def _path(self, number: int) -> Path:
        return self._folder / f"model-{number:05d}.safetensors"

    def finish(self) -> None:
        """Write the rest, and name the files as readers expect: by number and count, or `model.safetensors`."""
        if self._waiting:
            self._write()
        count = len(self._shards)
        if count == 1:
            self._path(1).replace(self._folder / "model.safetensors")
            return
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        for number, name in enumerate(names, start=1):
            self._path(number).replace(self._folder / name)
        index = {
            "metadata": {"total_size": self.num_bytes},
            "weight_map": {tensor: name for name, tensors in zip(names, self._shards) for tensor in tensors},
        }
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
