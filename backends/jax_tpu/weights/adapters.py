"""Write LoRA adapters into their slots: host arrays of one slot, and the program that puts them there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from pagoda.backends.jax_tpu.model.lora import entries_per_slot, slot_axis
from pagoda.backends.jax_tpu.model.mixers.registry import ops_of
from pagoda.backends.jax_tpu.model.model import Leaves, Model
from pagoda.backends.jax_tpu.parallel import named_sharding
from pagoda.backends.jax_tpu.weights.arrange import Path, Placement
from pagoda.backends.jax_tpu.weights.placement import placements
from pagoda.common.models.primitives import Param
from pagoda.common.weights.lora.weights import AdapterWeights, LowRank, adaptable
from pagoda.common.weights.rope_order import half_split

Array = npt.NDArray[Any]

_ROW_PARALLEL = ("out", "down")
"""Matrices whose inputs are sharded."""

_SINGLE = {"embed": ("embed_lora",), "head": ("head_lora",)}


def adapted_matrices(model: Model) -> dict[str, Param]:
    """Return the matrices that adapters may change: those of modules with slots."""
    modules = _modules(model)
    return {name: param for name, param in adaptable(model.spec).items() if name in modules}


def _modules(model: Model) -> dict[str, Path]:
    """Return the path of the module with a matrix's adapters, of all that have one.

    That of the matrix's array, or of its module: one for its inputs and one for its output.
    """
    paths = set(model.paths)
    places = placements(model.spec, model.tensor)
    modules: dict[str, Path] = dict(_SINGLE)
    for name in adaptable(model.spec).keys() - modules.keys():
        *parent, last = places[name].target
        shared = "lora_out" if last in _ROW_PARALLEL else "lora_in"
        own = (*parent, f"{last}_lora")
        modules[name] = own if (*own, "a") in paths else (*parent, shared)
    return {name: path for name, path in modules.items() if (*path, "a") in paths}


@dataclass(frozen=True, slots=True)
class AdapterWriter:
    """Arranges adapters as the arrays of one slot."""

    model: Model

    def parts(self, weights: AdapterWeights) -> tuple[jax.Array, ...]:
        """Return a slot of each adapter array, in the order of `Model.adapter_leaves`, on the devices."""
        arrays = {self.model.paths[index]: np.zeros(_slot(self.model, index).shape, _slot(self.model, index).dtype)
                  for index in self.model.adapter_leaves}  # fmt: skip
        places = placements(self.model.spec, self.model.tensor)
        projections = self._projections()
        modules = _modules(self.model)
        ordered = half_split(self.model.spec, ((name, each.b) for name, each in weights.matrices.items()))
        scaled = ((name, each.factor[:, None]) for name, each in weights.matrices.items() if each.factor is not None)
        factors = {name: np.asarray(factor)[:, 0] for name, factor in half_split(self.model.spec, scaled)}
        for name, b in ordered:
            if name in projections:  # not values that are keys
                given = weights.matrices[name]
                matrix = LowRank(given.a, np.asarray(b), factors.get(name), given.copy)
                _put(arrays, name, matrix, places[name], modules[name], projections[name])
        return tuple(
            jax.make_array_from_callback(array.shape, _slot(self.model, index).sharding, array.__getitem__)
            for index, array in zip(self.model.adapter_leaves, arrays.values())
        )

    def _projections(self) -> dict[str, int]:
        """Return the index of each matrix among those of its module: in the order of the array that they share."""
        places = placements(self.model.spec, self.model.tensor)
        modules = _modules(self.model)
        members: dict[tuple[Path, tuple[int, ...]], list[str]] = {}
        for name in adapted_matrices(self.model):
            if self._is_projected(name):
                members.setdefault((modules[name], places[name].start[:1]), []).append(name)
        for names in members.values():
            if len({places[name].target for name in names}) == 1:
                names.sort(key=lambda name: places[name].start)
        return {name: number for names in members.values() for number, name in enumerate(names)}

    def _is_projected(self, name: str) -> bool:
        """Return whether a matrix has an array of its own; values that are keys have that of the keys."""
        if ".mixers." not in name:
            return True
        _, layer, _, number, parameter = name.split(".")
        mixer = self.model.spec.layers[int(layer)].mixers[int(number)]
        return ops_of(mixer).has_projection(mixer, parameter)


def _put(
    arrays: Mapping[Path, Array], name: str, matrix: LowRank, placement: Placement, module: Path, number: int
) -> None:
    """Write a matrix of rank R into the first R ranks of its arrays, padding the others' axes, and DoRA's factors."""
    rank = matrix.a.shape[-2]
    if matrix.copy is not None:
        arrays[f"{name}_copies", "rows"][0, : len(matrix.copy)] = matrix.copy
        arrays[f"{name}_copies", "used"][0] = 1
    growth = None if matrix.factor is None else matrix.factor - 1
    if name == "embed":
        arrays[*module, "b"][: len(matrix.b), :rank] = matrix.b
        arrays[*module, "a"][:rank] = matrix.a
        if growth is not None:
            arrays[*module, "growth"][0] = growth
        return
    if name == "head":
        if growth is not None:
            arrays[*module, "growth", 0][0, : len(growth)] = growth
        arrays[*module, "a"][0, :rank] = matrix.a
        arrays[*module, "b", 0][:rank, : len(matrix.b)] = matrix.b.T
        return
    repeat = placement.start[0]
    last = placement.target[-1]
    if matrix.a.ndim > 2:  # of experts
        a = arrays[*module, "a"][repeat]
        b = arrays[*module, "b", number][repeat, :, 0]
        if last in _ROW_PARALLEL:
            a[:, number, : matrix.a.shape[2], :rank] = matrix.a.swapaxes(1, 2)
            b[:, :rank, : matrix.b.shape[1]] = matrix.b.swapaxes(1, 2)
        else:
            a[:, number, :rank, : matrix.a.shape[2]] = matrix.a
            b[:, : matrix.b.shape[1], :rank] = matrix.b
        return
    if last in _ROW_PARALLEL:
        a = np.asarray(placement.arrange(matrix.a))[0]
        b = matrix.b.T
    else:
        a = matrix.a
        b = _outputs(name, matrix.b, placement)
        growth = None if growth is None else _outputs(name, growth[:, None], placement)[0]
    if growth is not None:
        arrays[*module, "growth", number][repeat, 0, : len(growth)] = growth
    arrays[*module, "a"][repeat, number, :rank, : a.shape[1]] = a
    arrays[*module, "b", number][repeat, :rank, : b.shape[1]] = b


def _outputs(name: str, rows: Array, placement: Placement) -> Array:
    """Return a B [F, n] as [n, ...] with the outputs in the order, and the axes, of the decoder's matrix."""
    arranged = np.moveaxis(np.asarray(placement.arrange(rows))[0], -1, 0)
    return arranged[:, 0] if ".ffn." in name else arranged  # without the axis of gate and up


def _slot(model: Model, index: int) -> jax.ShapeDtypeStruct:
    """Return the shape of one slot of an adapter array."""
    leaf = model.leaves[index]
    axes = model.axes[index]
    assert model.lora is not None, "has slots"
    ranks = slot_axis(axes)
    assert ranks is not None, "an array of adapters"
    shape = (*leaf.shape[:ranks], entries_per_slot(axes, model.lora.rank), *leaf.shape[ranks + 1 :])
    whole = f"{axes[:ranks]}.{axes[ranks + 1 :]}"  # those of one slot need not divide
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=named_sharding(model.mesh, whole))


def slot_shapes(model: Model) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return the shapes of `AdapterWriter.parts`."""
    return tuple(_slot(model, index) for index in model.adapter_leaves)


def write_slot(model: Model, arrays: Leaves, parts: Leaves, slot: jax.Array) -> Leaves:
    """Return the adapter arrays with `parts` in a slot."""
    assert model.lora is not None, "has slots"
    written = []
    for index, array, part in zip(model.adapter_leaves, arrays, parts):
        axes = model.axes[index]
        axis = slot_axis(axes)
        assert axis is not None, "an array of adapters"
        begin = slot * entries_per_slot(axes, model.lora.rank)
        written.append(jax.lax.dynamic_update_slice_in_dim(array, part, begin, axis))
    return tuple(written)
