"""Weight loading: canonical weights are copied into a rank's fused and sharded tensors, and quantized if configured.

A matrix that is packed at load is assembled unpacked on the device and packed when its last part arrives. A matrix
that the checkpoint holds in a packing scheme is copied as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from pagoda.backends.reference.model.ops import to_torch
from pagoda.backends.torch_cuda.kernels.weight_only import PackedMatrix, Scheme, pack
from pagoda.backends.torch_cuda.model.parameters import Empty, Matrix, Pack, RankParams
from pagoda.backends.torch_cuda.parallel import RankShard
from pagoda.common.backend import Weight
from pagoda.common.errors import ConfigError, WeightError
from pagoda.common.models.primitives import Param
from pagoda.common.models.shapes import checked, lacking, params
from pagoda.common.models.spec import ModelSpec
from pagoda.common.weights.quantization import Float8, Int8, QuantizedTensor, Value, log_dequantized
from pagoda.common.weights.quantization import Scheme as StoredScheme

SCHEMES: Final[Mapping[str, Scheme]] = {
    "fp8": "fp8",
    "fp8_per_channel": "fp8",
    "int8": "int8",
    "int8_per_channel_weight_only": "int8",
    "int4": "int4",
}
"""Value of --quantization -> packing scheme."""

_FUSED: Final = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "inner", "up": "inner", "o": "out"}
"""Last part of a canonical name -> that of its fused tensor; biases follow their matrices."""

_ONCE: Final = ("out_bias", "down_bias")
"""Biases of all-reduced products: only the first rank adds them."""

_MATRICES: Final = (".qkv", ".out", ".inner", ".down")
"""Name suffixes of layers' matrices that may be packed; not the router's, which is small and sensitive."""


def packing(method: str | None) -> Pack | None:
    """Return how matrices of layers are packed, None if they are not. `method`: a value of --quantization, or None.

    Raise ConfigError for a method that this backend does not support.
    """
    if method is None:
        return None
    if method not in SCHEMES:
        raise ConfigError("--quantization", f"torch_cuda does not support {method}; use {', '.join(SCHEMES)}")
    return partial(pack, scheme=SCHEMES[method])


def packing_of(scheme: StoredScheme | None) -> Scheme | None:
    """Return the packing scheme of the same numbers; None: of dense parameters, and of blocks of inputs."""
    match scheme:
        case Float8("tensor" | "channel"):
            return "fp8"
        case Int8("tensor" | "channel"):
            return "int8"
        case _:
            return None


class Loader:
    """Allocates a rank's parameters and fills them."""

    def __init__(
        self,
        spec: ModelSpec,
        shard: RankShard,
        dtype: torch.dtype,
        empty: Empty,
        pack: Pack | None = None,
        allocators: Mapping[str, Empty] | None = None,
        schemes: Mapping[str, StoredScheme] | None = None,
    ) -> None:
        """`empty`: allocates parameters, except those with an own entry in `allocators`; `pack`: quantizes matrices.

        `schemes`: of parameters that the checkpoint holds quantised.
        """
        self._spec, self._dtype, self._pack = spec, dtype, pack
        self._layout = make_layout(spec, shard)
        self._stored = _stored_packings(self._layout, schemes or {})
        self._unfinished: dict[str, Tensor] = {}
        allocators = allocators or {}
        self.params = RankParams(
            {name: self._allocate(name, allocators.get(name, empty)) for name in self._layout.shapes}
        )

    def _allocate(self, name: str, empty: Empty) -> Matrix:
        shape = self._layout.shapes[name]
        if (stored := self._stored.get(name)) is not None:
            data = empty(shape, torch.int8 if stored == "int8" else torch.float8_e4m3fn)
            return PackedMatrix(stored, data, empty(shape[:-1], torch.float32), shape[-1])
        if self._pack is None or not self._packs(name):
            return empty(shape, self._dtype)
        like = self._pack(torch.empty(shape, dtype=self._dtype, device="meta"))
        data, scale = (empty(tuple(part.shape), part.dtype) for part in (like.data, like.scale))
        return replace(like, data=data, scale=scale)

    def fill(self, weights: Iterable[Weight]) -> None:
        """Load every parameter. Raise WeightError as `update`, or naming a missing parameter. Can be called again."""
        missing = params(self._spec)
        self._write(weights, missing)
        if missing:
            raise lacking(missing)

    def update(self, weights: Iterable[Weight]) -> None:
        """Replace parameters in place, which captured graphs read.

        Raise WeightError naming a parameter that is unknown, repeated, misshapen, not quantised as stated, or missing
        beside others of its matrix, which is quantised as a whole. A collection is checked before anything changes.
        """
        missing = params(self._spec)
        if isinstance(weights, Collection):
            self._check_parts(missing.keys() - {name for name, _ in weights})
        try:
            self._write(weights, missing)
            self._check_parts(missing.keys())
        finally:
            self._unfinished.clear()

    def _check_parts(self, missing: Collection[str]) -> None:
        """Raise WeightError if parts of a matrix that is quantised at load are missing while others came."""
        parts: dict[str, list[str]] = {}
        for name, placement in self._layout.placements.items():
            if placement is not None and self._packs(placement.tensor):
                parts.setdefault(placement.tensor, []).append(name)
        for tensor, names in parts.items():
            lacks = [name for name in names if name in missing]
            if 0 < len(lacks) < len(names):
                raise WeightError(f"parameters of {tensor} are quantised together; send {', '.join(lacks)} too")

    def _packs(self, tensor: str) -> bool:
        """Return whether a tensor is quantised when its last part arrives."""
        return self._pack is not None and tensor in self._layout.matrices and tensor not in self._stored

    @torch.inference_mode()
    def _write(self, weights: Iterable[Weight], missing: dict[str, Param]) -> None:
        """Write the rank's part of each parameter, removing it from `missing`."""
        placements = self._layout.placements
        dequantised: list[str] = []
        parts = Counter(each.tensor for each in placements.values() if each is not None)
        for name, value in checked(weights, missing):
            if (placement := placements[name]) is None:
                continue
            if placement.tensor in self._stored:
                self._put_stored(name, placement, value)
                continue
            part: Value = value[placement.cut]
            if isinstance(part, QuantizedTensor):
                dequantised.append(name)
                part = part.dequantize()
            self._put(placement, to_torch(part))
            parts[placement.tensor] -= 1
            if not parts[placement.tensor]:
                self._finish(placement.tensor)
        log_dequantized(dequantised, "torch_cuda")

    def _put_stored(self, name: str, placement: TensorSlice, value: Value) -> None:
        """Copy a rank's part of a quantised parameter: numbers and scales."""
        matrix = self.params.matrix(placement.tensor)
        assert isinstance(matrix, PackedMatrix), "allocated as such"
        if not isinstance(value, QuantizedTensor) or packing_of(value.scheme) != matrix.scheme:
            raise WeightError(f"parameter {name} is not {matrix.scheme}, as its config.json states; download it again")
        part = value[placement.cut]
        scales = part.channel_scales()
        assert scales is not None, "a packing scheme has scales per channel"
        matrix.data[placement.into].copy_(to_torch(part.data))
        matrix.scale[placement.into[:-1]].copy_(to_torch(scales))

    def _put(self, placement: TensorSlice, part: Tensor) -> None:
        target = self._target(placement.tensor)
        if part.dtype != target.dtype:
            part = part.to(target.device)  # cast on the device
        target[placement.into].copy_(part)

    def _target(self, name: str) -> Tensor:
        """Return the tensor in which the parts of a matrix are assembled."""
        matrix = self.params.matrix(name)
        if isinstance(matrix, Tensor):
            return matrix
        if name not in self._unfinished:
            shape = self._layout.shapes[name]
            self._unfinished[name] = torch.empty(shape, dtype=self._dtype, device=matrix.data.device)
        return self._unfinished[name]

    def _finish(self, name: str) -> None:
        matrix = self.params.matrix(name)
        if isinstance(matrix, PackedMatrix):
            assert self._pack is not None, "a packed parameter needs a pack function"
            packed = self._pack(self._unfinished.pop(name))
            matrix.data.copy_(packed.data)
            matrix.scale.copy_(packed.scale)
        elif (filled := self._layout.filled.get(name)) is not None:
            matrix[filled:].zero_()


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Where a canonical parameter is stored: `tensor[into] = parameter[cut]`, one slice per axis."""

    tensor: str
    into: tuple[slice, ...]
    cut: tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The tensors of a rank."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # by tensor
    placements: dict[str, TensorSlice | None] = field(default_factory=dict)  # by canonical parameter; None: not here
    matrices: set[str] = field(default_factory=set)  # tensors that may be packed: [out, in], experts [E, out, in]
    filled: dict[str, int] = field(default_factory=dict)  # vocabulary tensors: rows without padding


def make_layout(spec: ModelSpec, shard: RankShard) -> RankLayout:
    """Return a rank's layout: q, k, v fused, gate and up fused, sharded. `ranks.check` must have passed."""
    layout = RankLayout()
    for param in params(spec).values():
        name = _fused_name(param.name)
        if not shard.first and name.endswith(_ONCE):
            layout.placements[param.name] = None
            continue
        _place(layout, name, param, _cut(spec, param, shard))
        if param.axes[0] == "V":
            layout.filled[name] = layout.shapes[name][0]
            layout.shapes[name] = (shard.vocab(spec.vocab), *layout.shapes[name][1:])
        if name.endswith(_MATRICES):
            layout.matrices.add(name)
    return layout


def _stored_packings(layout: RankLayout, schemes: Mapping[str, StoredScheme]) -> dict[str, Scheme]:
    """Return the packing schemes of the matrices all parts of which are stored in that scheme."""
    packings: dict[str, set[Scheme | None]] = {}
    for name, placement in layout.placements.items():
        if placement is not None and placement.tensor in layout.matrices:
            packings.setdefault(placement.tensor, set()).add(packing_of(schemes.get(name)))
    return {
        tensor: packing
        for tensor, (packing, *others) in ((tensor, tuple(parts)) for tensor, parts in packings.items())
        if packing is not None and not others
    }


def _fused_name(name: str) -> str:
    """Return the name of the tensor that a canonical parameter is stored in."""
    stem, _, last = name.rpartition(".")
    matrix, bias = last.removesuffix("_bias"), "_bias" if last.endswith("_bias") else ""
    return f"{stem}.{_FUSED[matrix]}{bias}" if stem and matrix in _FUSED else name


def _place(layout: RankLayout, name: str, param: Param, cut: tuple[slice, ...]) -> None:
    """Append the part `cut` of a parameter to its tensor, along the rows."""
    extents = [part.stop - part.start for part in cut]
    rows = 1 if param.axes.startswith("EF") else 0  # axis 0 is the expert
    before = layout.shapes[name][rows] if name in layout.shapes else 0
    into = [slice(0, extent) for extent in extents]
    into[rows] = slice(before, before + extents[rows])
    layout.placements[param.name] = TensorSlice(name, tuple(into), cut)
    layout.shapes[name] = tuple(part.stop for part in into)


def _cut(spec: ModelSpec, param: Param, shard: RankShard) -> tuple[slice, ...]:
    kv_heads = 1
    if param.name.startswith("layers."):
        kv_heads = spec.layers[int(param.name.split(".")[1])].attention.kv_heads
    return tuple(shard.cut(axis, extent, kv_heads) for axis, extent in zip(param.axes, param.shape))
