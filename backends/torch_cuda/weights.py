"""The stream of canonical weights -> a rank's tensors: each parameter's part straight into its place.

A matrix that is packed is put together beside the others first, and packed when its last part has come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from pagoda.backends.reference.model.ops import to_torch
from pagoda.backends.torch_cuda.kernels.weight_only import PackedMatrix, Scheme, pack
from pagoda.backends.torch_cuda.model.parameters import Empty, Matrix, Pack, RankParams
from pagoda.backends.torch_cuda.parallel.sharding import RankShard
from pagoda.common.backend import Weight
from pagoda.common.errors import ConfigError, WeightError
from pagoda.common.models.shapes import Param, params
from pagoda.common.models.spec import ModelSpec

# Logical parameters -> the tensors of a rank: q, k, v in one, gate and up in one, cut where ranks share.
#
# Pure arithmetic over the spec. Knows no tensors.

_FUSED: Final = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "inner", "up": "inner", "o": "out"}
"""Last part of a canonical name -> that of the tensor it lies in; biases follow their matrices."""

_ONCE: Final = ("out_bias", "down_bias")
"""Biases of products whose sum over the ranks is the result: the first rank has them."""

_MATRICES: Final = (".qkv", ".out", ".inner", ".down")
"""Last parts of the names of products within layers, but for the router's, which is small and decides much."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a canonical parameter lies: `tensor[into] = parameter[cut]`, one slice for each axis."""

    tensor: str
    into: tuple[slice, ...]
    cut: tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The tensors of a rank.

    `shapes`: of each by name. `places`: of each canonical parameter, None: not on this rank. `matrices`: the tensors
    that may be packed in fewer bits, those of the products of layers, [out, in] or, of experts, [E, out, in].
    `filled`: rows of those over the vocabulary that have a place; behind them is padding.
    """

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    places: dict[str, Placement | None] = field(default_factory=dict)
    matrices: set[str] = field(default_factory=set)
    filled: dict[str, int] = field(default_factory=dict)


def make_layout(spec: ModelSpec, shard: RankShard) -> RankLayout:
    """The layout of the rank; `sharding.check` holds."""
    layout = RankLayout()
    for param in params(spec).values():
        name = _fused(param.name)
        if not shard.first and name.endswith(_ONCE):
            layout.places[param.name] = None
            continue
        _place(layout, name, param, _cut(spec, param, shard))
        if param.axes[0] == "V":
            layout.filled[name] = layout.shapes[name][0]
            layout.shapes[name] = (shard.vocab(spec.vocab), *layout.shapes[name][1:])
        if name.endswith(_MATRICES):
            layout.matrices.add(name)
    return layout


def _fused(name: str) -> str:
    """The tensor that a canonical parameter lies in."""
    stem, _, last = name.rpartition(".")
    matrix, bias = last.removesuffix("_bias"), "_bias" if last.endswith("_bias") else ""
    return f"{stem}.{_FUSED[matrix]}{bias}" if stem and matrix in _FUSED else name


def _place(layout: RankLayout, name: str, param: Param, cut: tuple[slice, ...]) -> None:
    """Put the part `cut` of a parameter behind what the tensor already holds, along its rows."""
    extents = [part.stop - part.start for part in cut]
    rows = 1 if param.axes.startswith("EF") else 0  # of every expert
    before = layout.shapes[name][rows] if name in layout.shapes else 0
    into = [slice(0, extent) for extent in extents]
    into[rows] = slice(before, before + extents[rows])
    layout.places[param.name] = Placement(name, tuple(into), cut)
    layout.shapes[name] = tuple(part.stop for part in into)


def _cut(spec: ModelSpec, param: Param, shard: RankShard) -> tuple[slice, ...]:
    kv_heads = 1
    if param.name.startswith("layers."):
        kv_heads = spec.layers[int(param.name.split(".")[1])].mixer.kv_heads
    return tuple(shard.cut(axis, extent, kv_heads) for axis, extent in zip(param.axes, param.shape))


class Loader:
    """A rank's parameters in memory that `empty` gives, and what fills them.

    `pack`: for the matrices of layers. `elsewhere`: the memory of those that shall not lie in what `empty` gives.
    """

    def __init__(
        self,
        spec: ModelSpec,
        shard: RankShard,
        dtype: torch.dtype,
        empty: Empty,
        pack: Pack | None = None,
        elsewhere: Mapping[str, Empty] | None = None,
    ) -> None:
        self._spec, self._dtype, self._pack = spec, dtype, pack
        self._layout = make_layout(spec, shard)
        self._unfinished: dict[str, Tensor] = {}
        own = elsewhere or {}
        self.params = RankParams({name: self._allocate(name, own.get(name, empty)) for name in self._layout.shapes})

    def _allocate(self, name: str, empty: Empty) -> Matrix:
        shape = self._layout.shapes[name]
        if self._pack is None or name not in self._layout.matrices:
            return empty(shape, self._dtype)
        like = self._pack(torch.empty(shape, dtype=self._dtype, device="meta"))
        data, scale = (empty(tuple(part.shape), part.dtype) for part in (like.data, like.scale))
        return replace(like, data=data, scale=scale)

    @torch.inference_mode()
    def fill(self, weights: Iterable[Weight]) -> None:
        """Take every parameter, each once; of each only the rank's part is read. Can be called again.

        Raises WeightError naming a parameter that is unknown, repeated, misshapen or missing.
        """
        waiting, places = params(self._spec), self._layout.places
        parts = Counter(place.tensor for place in places.values() if place is not None)
        for name, array in weights:
            param = waiting.pop(name, None)
            if param is None:
                raise WeightError(f"parameter {name} is unknown or came twice")
            if array.shape != param.shape:
                raise WeightError(f"parameter {name} has shape {array.shape}, the model needs {param.shape}")
            if (place := places[name]) is None:
                continue
            self._put(place, to_torch(array[place.cut]))
            parts[place.tensor] -= 1
            if not parts[place.tensor]:
                self._finish(place.tensor)
        if waiting:
            raise WeightError(f"the checkpoint lacks {len(waiting)} parameters, first {next(iter(waiting))}")

    def _put(self, place: Placement, part: Tensor) -> None:
        target = self._target(place.tensor)
        if part.dtype != target.dtype:
            part = part.to(target.device)  # cast there
        target[place.into].copy_(part)

    def _target(self, name: str) -> Tensor:
        """Where the parts of a matrix are put together."""
        held = self.params.matrix(name)
        if isinstance(held, Tensor):
            return held
        if name not in self._unfinished:
            shape = self._layout.shapes[name]
            self._unfinished[name] = torch.empty(shape, dtype=self._dtype, device=held.data.device)
        return self._unfinished[name]

    def _finish(self, name: str) -> None:
        """All parts are there."""
        held = self.params.matrix(name)
        if isinstance(held, PackedMatrix):
            assert self._pack is not None, "what is packed can be packed again"
            packed = self._pack(self._unfinished.pop(name))
            held.data.copy_(packed.data)
            held.scale.copy_(packed.scale)
        elif (filled := self._layout.filled.get(name)) is not None:
            held[filled:].zero_()


# The matrices of the layers in fewer bits, made as they are read: which values of --quantization there are.

SCHEMES: Final[Mapping[str, Scheme]] = {
    "fp8": "fp8",
    "fp8_per_channel": "fp8",
    "int8": "int8",
    "int8_per_channel_weight_only": "int8",
    "int4": "int4",
}


def packing(method: str | None) -> Pack | None:
    """How matrices of layers are packed; None: they stay as they are. `method`: a value of --quantization, or None.

    Raises ConfigError for what is another backend's.
    """
    if method is None:
        return None
    if method not in SCHEMES:
        raise ConfigError("--quantization", f"torch_cuda cannot make weights {method}; use {', '.join(SCHEMES)}")
    return partial(pack, scheme=SCHEMES[method])
