"""The layout of a model on the devices: layers in repeating segments, and their caches in stacks.

Computed from the spec and the tensor parallel size, without jax arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pagoda.backends.jax_tpu.model.mixers.registry import ops_of
from pagoda.backends.jax_tpu.model.slots import Stack
from pagoda.common.engine.kv_cache.spec import KvLayout
from pagoda.common.models.mixers import Mixer
from pagoda.common.models.mixers.caches import StateCache
from pagoda.common.models.spec import Layer, ModelSpec
from pagoda.common.models.transformers_spec import AnySpec

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Segment:
    """A block of layers that repeats."""

    first: int  # number of its first layer
    block: tuple[Layer, ...]
    repeats: int

    @property
    def numbers(self) -> Int32:
        """Return the layer numbers, [repeats, len(block)]."""
        count = self.repeats * len(self.block)
        return (self.first + np.arange(count, dtype=np.int32)).reshape(self.repeats, len(self.block))


def segments(layers: tuple[Layer, ...]) -> tuple[Segment, ...]:
    """Split the layers into repeating blocks: greedily the longest run, with the shortest block.

    A layer with a blend, or whose input a later one blends in, begins a segment: inputs are blended between segments.
    """
    blends = {index: layer.blend.layer for index, layer in enumerate(layers) if layer.blend is not None}
    cuts = sorted({0, len(layers), *blends.keys(), *blends.values()})
    return tuple(part for first, end in pairwise(cuts) for part in _segments(layers[:end], first))


def _segments(layers: tuple[Layer, ...], start: int) -> Iterator[Segment]:
    """Yield the segments of the layers from `start` on."""
    while start < len(layers):
        period, repeats = max(
            ((period, _repeats(layers, start, period)) for period in range(1, (len(layers) - start) // 2 + 1)),
            key=lambda cut: (cut[0] * cut[1] if cut[1] > 1 else 0, -cut[0]),
            default=(1, 1),
        )
        if repeats == 1:
            period = 1
        yield Segment(start, layers[start : start + period], repeats)
        start += period * repeats


def _repeats(layers: tuple[Layer, ...], start: int, period: int) -> int:
    """Count the consecutive repeats of the block of `period` layers at `start`, at least 1."""
    count = 1
    block = _arithmetic(layers[start : start + period])
    while _arithmetic(layers[start + count * period : start + (count + 1) * period]) == block:
        count += 1
    return count


def _arithmetic(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Return the layers without blends, and with one number for all whose caches are read."""
    numberless = [tuple(ops_of(mixer).without_layer_numbers(mixer) for mixer in layer.mixers) for layer in layers]
    return tuple(replace(layer, blend=None, mixers=mixers) for layer, mixers in zip(layers, numberless))


@dataclass(frozen=True, slots=True)
class CacheIndex:
    """Each cache's index into the stacked arrays. Caches of a pool and shape share a stack."""

    group: tuple[int, ...]  # per cache: KV group, which selects the block table
    index: tuple[int, ...]  # per cache: index within its stack
    arrays: tuple[tuple[int, ...], ...]  # per cache: its arrays
    stacks: tuple[Stack, ...]  # per array
    depths: tuple[int, ...]  # per array: layers
    pools: tuple[int, ...]  # per array: block pool

    def after(self, first: int) -> CacheIndex:
        """Return the index of the caches from number `first` on, numbered from 0, in the same arrays."""
        return replace(self, group=self.group[first:], index=self.index[first:], arrays=self.arrays[first:])


def build_cache_index(spec: AnySpec, layout: KvLayout, tensor: int, drafter: tuple[Mixer, ...] = ()) -> CacheIndex:
    """Assign every cache to a stack. `drafter`: mixers of a drafter model, whose caches come after the model's."""
    drafts = max((group.spec.drafts for group in layout.groups if isinstance(group.spec, StateCache)), default=0)
    kinds_of = [
        (*kinds, *ops_of(mixer).draft_stacks(mixer, tensor, drafts))
        for mixer in (*spec.mixers, *drafter)
        for kinds in ops_of(mixer).stacks(mixer, tensor)
    ]
    entries: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())] * len(kinds_of)
    stacks: list[Stack] = []
    depths: list[int] = []
    pools: list[int] = []
    first: dict[tuple[int, tuple[Stack, ...]], int] = {}  # by pool and kinds of its arrays
    for number, group in enumerate(layout.groups):
        for index, cache in enumerate(group.layers):
            kinds = kinds_of[cache]
            start = first.setdefault((group.pool, kinds), len(stacks))
            if start == len(stacks):
                stacks += kinds
                depths += [0] * len(kinds)
                pools += [group.pool] * len(kinds)
            arrays = tuple(range(start, start + len(kinds)))
            for array in arrays:
                depths[array] = max(depths[array], index + 1)
            entries[cache] = number, index, arrays
    groups, indices, numbers = zip(*entries)
    return CacheIndex(groups, indices, numbers, tuple(stacks), tuple(depths), tuple(pools))


def scratch_depths(spec: ModelSpec, index: CacheIndex) -> tuple[int, ...]:
    """Return the layers of each array in a pooling step: 1, which every layer overwrites, unless others read it."""
    shared = any(not mixer.caches() for mixer in spec.mixers)
    return index.depths if shared else (1,) * len(index.depths)
