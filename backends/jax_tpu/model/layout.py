"""How a model is laid out on the devices: heads in slots, layers in repeating segments.

Pure arithmetic over the spec and the degree of tensor parallelism. Knows no jax arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagoda.common.engine.kv_cache.spec import FullCache, KvLayout, WindowCache
from pagoda.common.errors import ConfigError, ModelError
from pagoda.common.models.spec import Attention, Layer, ModelSpec

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """Heads on `slots`, a multiple of the devices: each slot has one KV head and room for `group` query heads.

    With more devices than KV heads a KV head gets several slots (`copies`) that share out its query heads; places left
    over hold zeros. `kv_of` int [slots]: KV head of each slot; `heads_of` int [slots, group]; -1 where empty.
    """

    slots: int
    group: int
    copies: int
    heads: int
    kv_heads: int

    @classmethod
    def of(cls, mixer: Attention, tensor: int) -> HeadLayout:
        """The layout that computes and stores least. Raises ConfigError when there are more devices than heads."""
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
        """KV head of each slot, -1 for an empty one."""
        slot = np.arange(self.slots)
        return np.where(slot < self.kv_heads * self.copies, slot // self.copies, -1)

    @property
    def heads_of(self) -> npt.NDArray[np.int64]:
        """Query head of each place, -1 for an empty one."""
        per_head = self.heads // self.kv_heads
        within = (np.arange(self.slots) % self.copies)[:, None] * self.group + np.arange(self.group)
        head = self.kv_of[:, None] * per_head + within
        return np.where((within < per_head) & (self.kv_of[:, None] >= 0), head, -1)

    @property
    def first_copy(self) -> npt.NDArray[np.float32]:
        """float32 [slots]: 1 where a slot is the first of its KV head, else 0; sums over slots count a head once."""
        slot = np.arange(self.slots)
        return ((slot % self.copies == 0) & (self.kv_of >= 0)).astype(np.float32)

    def queries(self, rows: npt.NDArray[np.generic], head_dim: int) -> npt.NDArray[np.generic]:
        """[N*H, ...] -> [slots, group, H, ...]."""
        return _spread(rows.reshape(self.heads, head_dim, *rows.shape[1:]), self.heads_of)

    def keys(self, rows: npt.NDArray[np.generic], head_dim: int) -> npt.NDArray[np.generic]:
        """[K*H, ...] -> [slots, H, ...]."""
        return _spread(rows.reshape(self.kv_heads, head_dim, *rows.shape[1:]), self.kv_of)


def _spread(rows: npt.NDArray[np.generic], index: npt.NDArray[np.int64]) -> npt.NDArray[np.generic]:
    """rows[index] with zeros where the index is -1; a view where nothing moves."""
    if np.array_equal(index.ravel(), np.arange(len(rows))):
        return rows.reshape(*index.shape, *rows.shape[1:])
    taken = rows[index]
    taken[index < 0] = 0
    return taken


@dataclass(frozen=True, slots=True)
class Segment:
    """`repeats` runs of the same `block` of layers, from layer number `first` on."""

    first: int
    block: tuple[Layer, ...]
    repeats: int

    @property
    def numbers(self) -> Int32:
        """Layer numbers, [repeats, len(block)]."""
        count = self.repeats * len(self.block)
        return (self.first + np.arange(count, dtype=np.int32)).reshape(self.repeats, len(self.block))


def segments(layers: tuple[Layer, ...]) -> tuple[Segment, ...]:
    """The layers cut into repeating blocks; each cut covers as many layers as it can with the shortest block."""
    found, at = [], 0
    while at < len(layers):
        period, repeats = max(
            ((period, _repeats(layers, at, period)) for period in range(1, (len(layers) - at) // 2 + 1)),
            key=lambda cut: (cut[0] * cut[1] if cut[1] > 1 else 0, -cut[0]),
            default=(1, 1),
        )
        if repeats == 1:
            period = 1
        found.append(Segment(at, layers[at : at + period], repeats))
        at += period * repeats
    return tuple(found)


def _repeats(layers: tuple[Layer, ...], at: int, period: int) -> int:
    """How often the block of `period` layers at `at` follows itself, the first included."""
    count = 1
    block = layers[at : at + period]
    while layers[at + count * period : at + (count + 1) * period] == block:
        count += 1
    return count


@dataclass(frozen=True, slots=True)
class CachePlaces:
    """Where each layer's K and V are: its KV group, its index in the stacked cache, and which stack that is.

    One entry per layer. `shapes`: (KV head slots, head dim) of each stack; `depths`: how many layers it holds. Groups
    whose layers have the same shape share a stack, as they share the pool of blocks.
    """

    group: tuple[int, ...]
    index: tuple[int, ...]
    stack: tuple[int, ...]
    shapes: tuple[tuple[int, int], ...]
    depths: tuple[int, ...]


def cache_places(spec: ModelSpec, layout: KvLayout, tensor: int) -> CachePlaces:
    """Places of every layer. Raises ModelError for a cache this backend does not have."""
    places = np.zeros((3, len(spec.layers)), np.int32)
    depths: dict[tuple[int, int], int] = {}
    for number, group in enumerate(layout.groups):
        if not isinstance(group.spec, FullCache | WindowCache):
            raise ModelError(f"the jax_tpu backend has no cache for {type(group.spec).__name__}")
        for index, layer in enumerate(group.layers):
            mixer = spec.layers[layer].mixer
            shape = (HeadLayout.of(mixer, tensor).slots, mixer.head_dim)
            depths[shape] = max(depths.get(shape, 0), index + 1)
            places[:, layer] = number, index, list(depths).index(shape)
    groups, indices, stacks = (tuple(row) for row in places.tolist())
    return CachePlaces(groups, indices, stacks, tuple(depths), tuple(depths.values()))


def padded(size: int, tensor: int) -> int:
    """`size` rounded up to a multiple of the devices that share it."""
    return -(-size // tensor) * tensor
