"""Logical parameters -> the tensors of a rank: q, k, v in one, gate and up in one, cut where ranks share.

Pure arithmetic over the spec. Knows no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from pagoda.backends.torch_cuda.sharding import Shard
from pagoda.common.models.shapes import Param, params
from pagoda.common.models.spec import ModelSpec

_FUSED: Final = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "inner", "up": "inner", "o": "out"}
"""Last part of a canonical name -> that of the tensor it lies in; biases follow their matrices."""

_ONCE: Final = ("out_bias", "down_bias")
"""Biases of products whose sum over the ranks is the result: the first rank has them."""

_MATRICES: Final = (".qkv", ".out", ".inner", ".down")
"""Last parts of the names of products within layers, but for the router's, which is small and decides much."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a canonical parameter lies: `tensor[into] = parameter[cut]`, one slice for each axis."""

    tensor: str
    into: tuple[slice, ...]
    cut: tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of a rank.

    `shapes`: of each by name. `places`: of each canonical parameter, None: not on this rank. `matrices`: the tensors
    that may be packed in fewer bits, those of the products of layers, [out, in] or, of experts, [E, out, in].
    `filled`: rows of those over the vocabulary that have a place; behind them is padding.
    """

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    places: dict[str, Place | None] = field(default_factory=dict)
    matrices: set[str] = field(default_factory=set)
    filled: dict[str, int] = field(default_factory=dict)


def make_layout(spec: ModelSpec, shard: Shard) -> Layout:
    """The layout of the rank; `sharding.check` holds."""
    layout = Layout()
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


def _place(layout: Layout, name: str, param: Param, cut: tuple[slice, ...]) -> None:
    """Put the part `cut` of a parameter behind what the tensor already holds, along its rows."""
    extents = [part.stop - part.start for part in cut]
    rows = 1 if param.axes.startswith("EF") else 0  # of every expert
    before = layout.shapes[name][rows] if name in layout.shapes else 0
    into = [slice(0, extent) for extent in extents]
    into[rows] = slice(before, before + extents[rows])
    layout.places[param.name] = Place(name, tuple(into), cut)
    layout.shapes[name] = tuple(part.stop for part in into)


def _cut(spec: ModelSpec, param: Param, shard: Shard) -> tuple[slice, ...]:
    kv_heads = 1
    if param.name.startswith("layers."):
        kv_heads = spec.layers[int(param.name.split(".")[1])].mixer.kv_heads
    return tuple(shard.cut(axis, extent, kv_heads) for axis, extent in zip(param.axes, param.shape))
