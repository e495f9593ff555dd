"""Arrays of heads laid out for one number of devices, brought into the layout for another.

Heads lie in slots that depend on the number of devices (`layout.HeadLayout`): a KV head may be copied, and places may
be empty. Where each head went is asked of `placement` itself, by sending numbers in place of weights through it; so
there is one description of the layout, and this cannot disagree with it.
"""

from __future__ import annotations

from itertools import zip_longest
from math import prod
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from pagoda.backends.jax_tpu.model import Model
from pagoda.backends.jax_tpu.placement import Path, placements, seen
from pagoda.common.models.shapes import params

Index = npt.NDArray[np.int32]
HEADS: Final = "K"
_UNMOVED: Final = "LD"  # axes of an array of heads that no placement cuts or reorders


def moves(there: Model, here: Model) -> dict[Path, Index]:
    """For each array of heads that differs: which place of `there` each place of `here` takes, -1 for an empty one.

    Places are counted over all axes but L and D.
    """
    shapes = dict(zip(there.paths, (leaf.shape for leaf in there.leaves)))
    differing = {path for path, leaf in zip(here.paths, here.leaves) if leaf.shape != shapes.get(path)}
    before, after = _numbered(there), _numbered(here)
    return {path: _taken(before[path], numbers) for path, numbers in after.items() if path in differing}


def move(values: jax.Array, axes: str, index: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """An array with L and D around its axes of heads -> one of `shape`, taken as `index` int32 [n] of `moves` says."""
    outer = axes.index(HEADS)
    inner = prod(size for axis, size in zip(axes[outer:], shape[outer:]) if axis in _UNMOVED)
    rows = values.reshape(prod(shape[:outer]), -1, inner)
    return jnp.where((index >= 0)[:, None], rows[:, jnp.maximum(index, 0)], 0).reshape(shape)


def _numbered(model: Model) -> dict[Path, npt.NDArray[np.int64]]:
    """Per array of heads, in the size it has without L and D: the number of what lies at each place, 0 for nothing.

    Numbers are the same in every layout. Layers that repeat are alike, so the first stands for all.
    """
    found = {
        path: np.zeros([1 if axis in _UNMOVED else size for axis, size in zip(axes, leaf.shape)], np.int64)
        for path, axes, leaf in zip(model.paths, model.axes, model.leaves)
        if HEADS in axes
    }
    known, first = params(model.spec), 1
    for name, place in placements(model.spec, model.tensor).items():
        if name not in known or place.target not in found or place.start[0]:
            continue
        shape = [1 if axis in _UNMOVED else size for axis, size in zip(known[name].axes, known[name].shape)]
        part = place.arrange(np.arange(first, first + prod(shape)).reshape(shape))
        window = zip_longest(place.start, part.shape, fillvalue=0)
        target = found[place.target]
        target = target.reshape(seen(target.shape, part.shape))
        target[tuple(slice(start, start + size) for start, size in window)] = part
        first += prod(shape)
    return found


def _taken(there: npt.NDArray[np.int64], here: npt.NDArray[np.int64]) -> Index:
    """The place in `there` of each number in `here`; the first of several copies."""
    order = np.argsort(there, axis=None, kind="stable")
    at = np.searchsorted(there.ravel()[order], here.ravel())
    return np.where(here.ravel() > 0, order[np.minimum(at, len(order) - 1)], -1).astype(np.int32)
