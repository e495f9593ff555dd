"""The layout of a model on the devices: heads in slots, layers in repeating segments, caches in stacks.

Computed from the spec and the tensor parallel size, without jax arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagoda.common.engine.kv_cache.spec import KvLayout
from pagoda.common.errors import ConfigError, ModelError
from pagoda.common.models.caches import FullCache, WindowCache
from pagoda.common.models.mixers import Attention
from pagoda.common.models.spec import Layer, ModelSpec

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """Assignment of heads to slots. A slot has one KV head and `group` query head positions.

    With more devices than KV heads a KV head is copied to several slots, which divide its query heads. Empty positions
    hold zeros.
    """

    slots: int  # a multiple of the tensor parallel size
    group: int
    copies: int  # slots per KV head
    heads: int
    kv_heads: int

    @classmethod
    def of(cls, mixer: Attention, tensor: int) -> HeadLayout:
        """Return the layout with the least compute and storage. Raise ConfigError with more devices than heads."""
        if tensor > mixer.heads:
            raise ConfigError(
                "--tensor-parallel-size",
                f"{tensor} devices cannot share {mixer.heads} query heads; use {mixer.heads} or less",
            )
        per_head = mixer.heads // mixer.kv_heads

        def cost(copies: int) -> tuple[int, int]:
            slots = -(-mixer.kv_heads * copies // tensor) * tensor
            return slots * (-(-per_head // copies) + 2), slots

        copies = min(range(1, per_head + 1), key=cost)
        return cls(cost(copies)[1], -(-per_head // copies), copies, mixer.heads, mixer.kv_heads)

    @property
    def kv_of(self) -> npt.NDArray[np.int64]:
        """Return the KV head of each slot, int [slots]; -1 if empty."""
        slot = np.arange(self.slots)
        return np.where(slot < self.kv_heads * self.copies, slot // self.copies, -1)

    @property
    def heads_of(self) -> npt.NDArray[np.int64]:
        """Return the query head of each position, int [slots, group]; -1 if empty."""
        per_head = self.heads // self.kv_heads
        within = (np.arange(self.slots) % self.copies)[:, None] * self.group + np.arange(self.group)
        head = self.kv_of[:, None] * per_head + within
        return np.where((within < per_head) & (self.kv_of[:, None] >= 0), head, -1)

    @property
    def first_copy(self) -> npt.NDArray[np.float32]:
        """Return float32 [slots]: 1 for the first slot of each KV head, else 0, so that sums count a head once."""
        slot = np.arange(self.slots)
        return ((slot % self.copies == 0) & (self.kv_of >= 0)).astype(np.float32)

    def queries(self, rows: npt.NDArray[np.generic], head_dim: int) -> npt.NDArray[np.generic]:
        """Arrange query heads: [N*H, ...] -> [slots, group, H, ...]."""
        return _gather(rows.reshape(self.heads, head_dim, *rows.shape[1:]), self.heads_of)

    def keys(self, rows: npt.NDArray[np.generic], head_dim: int) -> npt.NDArray[np.generic]:
        """Arrange KV heads: [K*H, ...] -> [slots, H, ...]."""
        return _gather(rows.reshape(self.kv_heads, head_dim, *rows.shape[1:]), self.kv_of)


def _gather(rows: npt.NDArray[np.generic], index: npt.NDArray[np.int64]) -> npt.NDArray[np.generic]:
    """Return rows[index] with zeros where the index is -1; a view if the order does not change."""
    if np.array_equal(index.ravel(), np.arange(len(rows))):
        return rows.reshape(*index.shape, *rows.shape[1:])
    taken = rows[index]
    taken[index < 0] = 0
    return taken


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
    """Split the layers into repeating blocks: greedily the longest run, with the shortest block."""
    result, start = [], 0
    while start < len(layers):
        period, repeats = max(
            ((period, _repeats(layers, start, period)) for period in range(1, (len(layers) - start) // 2 + 1)),
            key=lambda cut: (cut[0] * cut[1] if cut[1] > 1 else 0, -cut[0]),
            default=(1, 1),
        )
        if repeats == 1:
            period = 1
        result.append(Segment(start, layers[start : start + period], repeats))
        start += period * repeats
    return tuple(result)


def _repeats(layers: tuple[Layer, ...], start: int, period: int) -> int:
    """Count the consecutive repeats of the block of `period` layers at `start`, at least 1."""
    count = 1
    block = layers[start : start + period]
    while layers[start + count * period : start + (count + 1) * period] == block:
        count += 1
    return count


@dataclass(frozen=True, slots=True)
class CacheIndex:
    """Each layer's index into the stacked caches. Layers of a pool and shape share a stack."""

    group: tuple[int, ...]  # per layer: KV group, which selects the block table
    index: tuple[int, ...]  # per layer: index within its stack
    stack: tuple[int, ...]  # per layer: which stack
    shapes: tuple[tuple[int, int], ...]  # per stack: (KV head slots, head dim)
    depths: tuple[int, ...]  # per stack: layers
    pools: tuple[int, ...]  # per stack: block pool


def build_cache_index(spec: ModelSpec, layout: KvLayout, tensor: int) -> CacheIndex:
    """Assign every layer to a stack. Raise ModelError for an unsupported kind of cache."""
    entries = np.zeros((3, len(spec.layers)), np.int32)
    depths: dict[tuple[int, int, int], int] = {}  # by pool, slots and head dim
    for number, group in enumerate(layout.groups):
        if not isinstance(group.spec, FullCache | WindowCache):
            raise ModelError(f"the jax_tpu backend does not support caches of kind {type(group.spec).__name__}")
        for index, layer in enumerate(group.layers):
            mixer = spec.layers[layer].attention
            shape = (group.pool, HeadLayout.of(mixer, tensor).slots, mixer.head_dim)
            depths[shape] = max(depths.get(shape, 0), index + 1)
            entries[:, layer] = number, index, list(depths).index(shape)
    groups, indices, stacks = (tuple(row) for row in entries.tolist())
    shapes, pools = tuple(shape[1:] for shape in depths), tuple(shape[0] for shape in depths)
    return CacheIndex(groups, indices, stacks, shapes, tuple(depths.values()), pools)


def padded(size: int, tensor: int) -> int:
    """Return `size` rounded up to a multiple of `tensor`."""
    return -(-size // tensor) * tensor
