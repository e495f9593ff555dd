"""Weight loading: canonical weights are copied into a rank's fused and sharded tensors, and quantized if configured.

A matrix that is packed at load is assembled unpacked on the device and packed when its last part arrives. A matrix
that the checkpoint holds in a scheme of the kernels is allocated when its last part arrives, since the types of scales
and offsets depend on their values, and keeps numbers and scales.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from math import gcd
from typing import Final

import torch
from torch import Tensor

from pagoda.backends.reference.model.ops import to_torch
from pagoda.backends.torch_cuda.kernels.linear.weight_only import PackedMatrix, pack
from pagoda.backends.torch_cuda.model.mixers.registry import ops_of
from pagoda.backends.torch_cuda.model.parameters import Empty, Matrix, Pack, RankParams
from pagoda.backends.torch_cuda.parallel.tensor_parallel import RankShard
from pagoda.backends.torch_cuda.schemes import ROUNDED_ON_DEVICE, KernelScheme, packed_scheme
from pagoda.backends.torch_cuda.weights.arrange import RankLayout, TensorSlice
from pagoda.backends.torch_cuda.weights.quantized_layout import (
    MIN_GROUP,
    as_scheme,
    estimated_form,
    form_of,
    least_group,
    write,
)
from pagoda.common.backend import Weight
from pagoda.common.errors import ConfigError, WeightError
from pagoda.common.models.mixers import Mixer
from pagoda.common.models.primitives import Param
from pagoda.common.models.shapes import checked, lacking, params
from pagoda.common.models.spec import ModelSpec
from pagoda.common.weights.quantization.schemes import INT4_GROUPS, ROUNDED, Activations, Scheme, int4_group
from pagoda.common.weights.quantization.tensors import QuantizedTensor, Value, log_dequantized
from pagoda.common.weights.rope_order import half_split

_FUSED_FFN: Final = {
    **{"gate": "inner", "up": "inner"},
    **{"gate_adapter_out": "inner_adapter_out", "up_adapter_out": "inner_adapter_out"},
}
"""Last part of a feed-forward block's canonical name -> that of its fused tensor; biases follow their matrices."""

_ONCE: Final = ("out_bias", "down_bias")
"""Biases of all-reduced products: only the first rank adds them."""

_MATRIX_AXES: Final = 2
_NARROWER: Final[Mapping[KernelScheme, KernelScheme]] = {"int8": "int4"}
"""Schemes whose numbers become wider beside others in one matrix, by those."""

_MATRICES: Final = frozenset({"gate", "out", "inner", "down"})
"""Last parts of the names of layers' tensors beside mixers that may be packed; not the router's, which is sensitive."""

_SMALL_MATRICES: Final = frozenset({"left", "right"})
"""The same of those that stay packed where a checkpoint holds them so."""


def packing(method: str | None) -> Pack | None:
    """Return how matrices of layers are packed, None if they are not. `method`: a value of --quantization, or None.

    Raise ConfigError for a method that this backend does not support.
    """
    if method is None:
        return None
    if method not in ROUNDED_ON_DEVICE:
        raise ConfigError("--quantization", f"torch_cuda does not support {method}; use {', '.join(ROUNDED_ON_DEVICE)}")
    stored = ROUNDED[method]
    scheme = packed_scheme(stored, experts=False)
    assert scheme is not None, "the kernels multiply what they round to"
    return lambda weight: replace(_pack(weight, scheme), activations=stored.activations)


def _pack(weight: Tensor, scheme: KernelScheme) -> PackedMatrix:
    """Quantize in the largest int4 groups that divide the inputs; if none do, the last group is padded."""
    return pack(weight, scheme, int4_group(weight.shape[-1]) or INT4_GROUPS[0])


class Loader:
    """Allocates a rank's parameters and fills them."""

    def __init__(
        self,
        spec: ModelSpec | None,
        shard: RankShard,
        dtype: torch.dtype,
        empty: Empty,
        pack: Pack | None = None,
        allocators: Mapping[str, Empty] | None = None,
        schemes: Mapping[str, Scheme] | None = None,
        *,
        parameters: Mapping[str, Param] | None = None,
        attention: Mixer | None = None,
    ) -> None:
        """`empty`: allocates parameters, except those with an own entry in `allocators`; `pack`: quantizes matrices.

        `schemes`: of parameters that the checkpoint holds quantised. `parameters`: of a drafter, in place of those of
        the spec, which is None if it has no layers; `attention`: that in front of its layers.
        """
        self._spec = spec
        self._dtype = dtype
        self._pack = pack
        self._parameters = _parameters(spec, parameters)
        self._layout = make_layout(spec, shard, self._parameters, attention)
        self._schemes = schemes or {}
        self._stored = _stored_packings(self._layout, self._schemes)
        self._unfinished: dict[str, Tensor] = {}
        self._waiting: dict[str, dict[int, QuantizedTensor]] = {}  # stored tensor -> its parts by first row
        allocators = allocators or {}
        self._allocators = {name: allocators.get(name, empty) for name in self._layout.shapes}
        self._matrices = {name: self._allocate(name, self._allocators[name]) for name in self._layout.shapes}
        self.params = RankParams(self._matrices)

    def _allocate(self, name: str, empty: Empty) -> Matrix:
        shape = self._layout.shapes[name]
        if (stored := self._stored.get(name)) is not None:
            return self._estimate(name, stored)
        if self._pack is None or not self._packs(name):
            return empty(shape, torch.float32 if name in self._layout.float32 else self._dtype)
        like = self._pack(torch.empty(shape, dtype=self._dtype, device="meta"))
        return like.mapped(lambda part: empty(tuple(part.shape), part.dtype))

    def _estimate(self, name: str, stored: KernelScheme) -> PackedMatrix:
        """Return a stored matrix on the meta device, as large as it may become."""
        parts = {
            part: each for part, each in self._layout.placements.items() if each is not None and each.tensor == name
        }
        groups = [least_group(self._schemes[part], each.cut[-1]) for part, each in parts.items()]
        sizes = [size for size in groups if size is not None]
        form = estimated_form(stored, self._schemes[next(iter(parts))], gcd(*sizes) if sizes else None)
        return form.allocate(self._layout.shapes[name], _meta)

    def fill(self, weights: Iterable[Weight]) -> None:
        """Load every parameter. Raise WeightError as `update`, or naming a missing parameter. Can be called again."""
        missing = dict(self._parameters)
        self._write(weights, missing)
        if missing:
            raise lacking(missing)

    def update(self, weights: Iterable[Weight]) -> None:
        """Replace parameters in place, which captured graphs read.

        Raise WeightError naming a parameter that is unknown, repeated, misshapen, not quantised as stated, or missing
        beside others of its matrix, which is quantised as a whole. A collection is checked before anything changes.
        """
        missing = dict(self._parameters)
        if isinstance(weights, Collection):
            self._check_parts(missing.keys() - {name for name, _ in weights})
        try:
            self._write(weights, missing)
            self._check_parts(missing.keys())
        finally:
            self._unfinished.clear()
            self._waiting.clear()

    def _check_parts(self, missing: Collection[str]) -> None:
        """Raise WeightError if parts of a matrix that is quantised at load are missing while others came."""
        parts: dict[str, list[str]] = {}
        for name, placement in self._layout.placements.items():
            if placement is not None and self._is_whole(placement.tensor):
                parts.setdefault(placement.tensor, []).append(name)
        for tensor, names in parts.items():
            lacks = [name for name in names if name in missing]
            if 0 < len(lacks) < len(names):
                raise WeightError(f"parameters of {tensor} are quantised together; send {', '.join(lacks)} too")

    def _is_whole(self, tensor: str) -> bool:
        """Return whether the parts of a tensor only change together."""
        matrix = self._matrices[tensor]
        fused = isinstance(matrix, PackedMatrix) and (matrix.order is not None or matrix.input_scale is not None)
        return fused or self._packs(tensor)

    def _packs(self, tensor: str) -> bool:
        """Return whether a tensor is quantised when its last part arrives."""
        return self._pack is not None and tensor in self._layout.matrices and tensor not in self._stored

    @torch.inference_mode()
    def _write(self, weights: Iterable[Weight], missing: dict[str, Param]) -> None:
        """Write the rank's part of each parameter, removing it from `missing`."""
        placements = self._layout.placements
        dequantised: list[str] = []
        parts = Counter(each.tensor for each in placements.values() if each is not None)
        values = checked(weights, missing)
        for name, value in values if self._spec is None else half_split(self._spec, values):
            if (placement := placements[name]) is None:
                continue
            if placement.tensor in self._stored:
                self._put_stored(name, placement, value)
                continue
            if isinstance(value, QuantizedTensor):
                dequantised.append(name)
                part = value.values(placement.cut)
            else:
                part = value[placement.cut]
            self._put(placement, to_torch(part))
            parts[placement.tensor] -= 1
            if not parts[placement.tensor]:
                self._finish(placement.tensor)
        log_dequantized(dequantised, "torch_cuda")

    def _put_stored(self, name: str, placement: TensorSlice, value: Value) -> None:
        """Copy a rank's part of a quantised parameter, the first time when all parts of its matrix are there."""
        tensor = placement.tensor
        matrix = self.params.matrix(tensor)
        scheme = self._stored[tensor]
        assert isinstance(matrix, PackedMatrix), "allocated as such"
        experts = len(self._layout.shapes[tensor]) > _MATRIX_AXES
        if not isinstance(value, QuantizedTensor) or packed_scheme(value.scheme, experts) not in (
            scheme,
            _NARROWER.get(scheme, scheme),
        ):
            raise WeightError(f"parameter {name} is not {scheme}, as its config.json states; download it again")
        try:
            part = as_scheme(value, scheme)[placement.cut]
            if not matrix.data.is_meta and not self._is_whole(tensor):
                write(matrix, placement.into[-2].start, part)
                return
            waiting = self._waiting.setdefault(tensor, {})
            waiting[placement.into[-2].start] = part
            if sum(each.shape[-2] for each in waiting.values()) < self._layout.shapes[tensor][-2]:
                return
            parts = sorted(self._waiting.pop(tensor).items(), key=lambda each: each[0])
            if matrix.data.is_meta:
                form = form_of(scheme, parts, rounds=self._dtype != torch.float32)
                matrix = form.allocate(self._layout.shapes[tensor], self._allocators[tensor])
                self._matrices[tensor] = matrix
            for first, each in parts:
                write(matrix, first, each)
        except WeightError as error:
            raise WeightError(f"parameter {name} ({scheme}): {error}") from None

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
            for part, tensor in matrix.tensors.items():
                tensor.copy_(packed.tensors[part])
        elif (filled := self._layout.filled.get(name)) is not None:
            matrix[filled:].zero_()


def _parameters(spec: ModelSpec | None, parameters: Mapping[str, Param] | None) -> Mapping[str, Param]:
    """Return those given, else those of the spec."""
    if parameters is not None:
        return parameters
    assert spec is not None, "of a drafter without layers the parameters are given"
    return params(spec)


def make_layout(
    spec: ModelSpec | None,
    shard: RankShard,
    parameters: Mapping[str, Param] | None = None,
    attention: Mixer | None = None,
) -> RankLayout:
    """Return a rank's layout: q, k, v fused, gate and up fused, sharded. `ranks.check` must have passed.

    `spec`, `parameters`, `attention`: see `Loader`.
    """
    layout = RankLayout()
    for param in _parameters(spec, parameters).values():
        mixer = attention if param.name.startswith("inputs.attention.") else _mixer(spec, param.name)
        name = _fused_name(param.name, mixer)
        if not shard.first and name.endswith(_ONCE):
            layout.placements[param.name] = None
            continue
        _place(layout, name, param, _cut(mixer, param, shard))
        if param.axes[0] == "V":
            layout.filled[name] = layout.shapes[name][0]
            layout.shapes[name] = (shard.vocab(param.shape[0]), *layout.shapes[name][1:])
        if name.startswith("layers."):
            part = _part(name, mixer)
            if part in (_MATRICES if mixer is None else ops_of(mixer).matrices):
                layout.matrices.add(name)
            if part in (_SMALL_MATRICES if mixer is None else ops_of(mixer).small_matrices) and not param.float32:
                layout.small_matrices.add(name)
        if param.float32:
            layout.float32.add(name)
    return layout


def _part(name: str, mixer: Mixer | None) -> str:
    """Return the last part of the name of a layer's tensor: all of it within a mixer, else its last word."""
    if mixer is None:
        return name.rpartition(".")[2]
    _, _, _, _, part = name.split(".", 4)  # layers.N.mixers.N.part
    return part


def _stored_packings(layout: RankLayout, schemes: Mapping[str, Scheme]) -> dict[str, KernelScheme]:
    """Return the kernels' schemes of the matrices all parts of which are stored in one.

    Numbers of 4 bits beside numbers of 8 become those.
    """
    packings: dict[str, set[tuple[KernelScheme | None, Activations | None]]] = {}
    for name, placement in layout.placements.items():
        if placement is not None and placement.tensor in layout.matrices | layout.small_matrices:
            packings.setdefault(placement.tensor, set()).add(_packing(schemes.get(name), placement))
    chosen: dict[str, KernelScheme] = {}
    for tensor, kinds in packings.items():
        names = {scheme for scheme, _ in kinds}
        if len(kinds) == 1 and (scheme := names.pop()) is not None:
            chosen[tensor] = scheme
        elif kinds == {("int8", None), ("int4", None)}:
            chosen[tensor] = "int8"
    return chosen


def _packing(stored: Scheme | None, placement: TensorSlice) -> tuple[KernelScheme | None, Activations | None]:
    """Return the kernels' scheme of a part and how its input is rounded; None: no kernel multiplies it."""
    if stored is None:
        return None, None
    scheme = packed_scheme(stored, len(placement.cut) > _MATRIX_AXES)
    group = least_group(stored, placement.cut[-1])
    divided = stored.ordered and placement.cut_inputs
    if scheme is None or divided or (group is not None and group < MIN_GROUP):
        return None, None
    return scheme, stored.activations


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _mixer(spec: ModelSpec | None, name: str) -> Mixer | None:
    """Return the mixer that a canonical parameter belongs to; None: to none."""
    if spec is None or not name.startswith("layers.") or ".mixers." not in name:
        return None
    _, layer, _, index, *_ = name.split(".")
    return spec.layers[int(layer)].mixers[int(index)]


def _fused_name(name: str, mixer: Mixer | None) -> str:
    """Return the name of the tensor that a canonical parameter is stored in."""
    stem, _, last = name.rpartition(".")
    matrix = last.removesuffix("_bias")
    bias = "_bias" if last.endswith("_bias") else ""
    if stem.endswith((".per_layer", ".indexer", ".blocks")):
        return name
    fused = _FUSED_FFN if mixer is None else ops_of(mixer).fused
    return f"{stem}.{fused[matrix]}{bias}" if stem and matrix in fused else name


def _place(layout: RankLayout, name: str, param: Param, cut: tuple[slice, ...]) -> None:
    """Append the part `cut` of a parameter to its tensor, along the rows."""
    extents = [part.stop - part.start for part in cut]
    rows = 1 if param.axes.startswith("EF") else 0  # axis 0 is the expert
    before = layout.shapes[name][rows] if name in layout.shapes else 0
    into = [slice(0, extent) for extent in extents]
    into[rows] = slice(before, before + extents[rows])
    layout.placements[param.name] = TensorSlice(name, tuple(into), cut, extents[-1] < param.shape[-1])
    layout.shapes[name] = tuple(part.stop for part in into)


def _cut(mixer: Mixer | None, param: Param, shard: RankShard) -> tuple[slice, ...]:
    kv_heads = 1 if mixer is None else ops_of(mixer).key_heads(mixer)
    return tuple(shard.cut(axis, extent, kv_heads) for axis, extent in zip(param.axes, param.shape))
