"""The layout of a model on the devices: heads in slots, layers in repeating segments, caches in stacks.

Computed from the spec and the tensor parallel size, without jax arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from pagoda.common.engine.kv_cache.spec import KvLayout
from pagoda.common.errors import ConfigError
from pagoda.common.models.mixers import (
    Attention,
    GatedDelta,
    KimiDelta,
    LatentAttention,
    LightningAttention,
    Mamba,
    Mamba2,
    Mixer,
    ShortConvolution,
)
from pagoda.common.models.mixers.caches import IndexCache
from pagoda.common.models.spec import Layer, ModelSpec
from pagoda.common.models.supported import unsupported_mixer
from pagoda.common.models.transformers_spec import AnySpec

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """Assignment of heads to slots. A slot has one KV head and `group` query head positions.

    Of `LatentAttention`, `KimiDelta` and `LightningAttention` every head is a KV head; of `GatedDelta` key heads are KV
    heads and value heads query heads; of `Mamba2` groups are KV heads and heads query heads. With more devices than KV
    heads a KV head is copied to several slots, which divide its query heads. Empty positions hold zeros.
    """

    slots: int  # a multiple of the tensor parallel size
    group: int
    copies: int  # slots per KV head
    heads: int
    kv_heads: int

    @classmethod
    def of(cls, mixer: Mixer, tensor: int) -> HeadLayout:
        """Return the layout with the least compute and storage. Raise ConfigError with more devices than heads."""
        heads, kv_heads = _head_counts(mixer)
        if tensor > heads:
            kind = (
                "query heads" if isinstance(mixer, Attention | LatentAttention) else f"heads of {type(mixer).__name__}"
            )
            raise ConfigError(
                "--tensor-parallel-size", f"{tensor} devices cannot share {heads} {kind}; use {heads} or less"
            )
        per_head = heads // kv_heads

        def cost(copies: int) -> tuple[int, int]:
            slots = -(-kv_heads * copies // tensor) * tensor
            return slots * (-(-per_head // copies) + 2), slots

        copies = min(range(1, per_head + 1), key=cost)
        return cls(cost(copies)[1], -(-per_head // copies), copies, heads, kv_heads)

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


def slot_parts(mixer: Attention, group: int) -> int:
    """Return the heads that a slot projects: queries, key, value if as wide, gates of the output's channels.

    Not the value if it is the key; neither if they are another layer's.
    """
    one = mixer.values_are_keys or mixer.value_width != mixer.head_dim
    keys_and_values = 0 if mixer.shares_cache_of is not None else 1 if one else 2
    return group + keys_and_values + (group if mixer.output_gate and not mixer.gate_per_head else 0)


def _head_counts(mixer: Mixer) -> tuple[int, int]:
    """Return the number of query heads and of KV heads."""
    match mixer:
        case Attention():
            return mixer.heads, mixer.kv_heads
        case LatentAttention():
            return mixer.heads, mixer.heads
        case GatedDelta():
            return mixer.value_heads, mixer.key_heads
        case Mamba2():
            return mixer.heads, mixer.groups
        case KimiDelta() | LightningAttention():
            return mixer.heads, mixer.heads
        case _:
            raise unsupported_mixer(mixer)


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
    return tuple(
        replace(
            layer,
            blend=None,
            mixers=tuple(
                replace(mixer, shares_cache_of=0)
                if isinstance(mixer, Attention) and mixer.shares_cache_of is not None
                else mixer
                for mixer in layer.mixers
            ),
        )
        for layer in layers
    )


@dataclass(frozen=True, slots=True)
class KvStack:
    """K and V of every token, [L, P, R, B, 128]: pages sharded over data, KV head rows over tensor devices."""

    slots: int
    head_dim: int
    value_dim: int
    axes: ClassVar[str] = ".PK.."


@dataclass(frozen=True, slots=True)
class LatentStack:
    """The latent and rotary key of every token, [L, P, R, B, 128], whole on every tensor device.

    An indexer's keys are stored like latents of their width, without rotary channels.
    """

    rank: int
    rope_dim: int
    axes: ClassVar[str] = ".P..."


@dataclass(frozen=True, slots=True)
class TailStack:
    """The last inputs of a convolution, float32 [L, P, slots * rows, width]: `rows` tokens of each slot's channels."""

    slots: int
    rows: int
    width: int
    axes: ClassVar[str] = ".PK."


@dataclass(frozen=True, slots=True)
class StateStack:
    """The state of every head, or of those that share keys, float32 [L, P, heads, key_dim, value_dim]."""

    heads: int
    key_dim: int
    value_dim: int
    axes: ClassVar[str] = ".PK.."


Stack = KvStack | LatentStack | TailStack | StateStack
"""What an array of the cache holds, over all its layers L and blocks P. Sizes are of all devices together."""


def cache_stacks(mixer: Mixer, tensor: int) -> tuple[tuple[Stack, ...], ...]:
    """Return for each of the mixer's caches the arrays in which it is stored."""
    caches = mixer.caches()
    if len(caches) > 1 and isinstance(caches[1], IndexCache):
        return stacks_of(mixer, tensor), (LatentStack(caches[1].head_dim, 0),)
    return (stacks_of(mixer, tensor),) if caches else ()


def stacks_of(mixer: Mixer, tensor: int) -> tuple[Stack, ...]:
    """Return the arrays in which the mixer's first cache is stored."""
    match mixer:
        case Attention():
            return (KvStack(HeadLayout.of(mixer, tensor).slots, mixer.head_dim, mixer.value_width),)
        case LatentAttention():
            return (LatentStack(mixer.latent_dim, mixer.rope.dim),)
        case GatedDelta():
            heads = HeadLayout.of(mixer, tensor)
            width = 2 * mixer.key_dim + heads.group * mixer.value_dim
            tail = TailStack(heads.slots, mixer.taps - 1, width)
            return tail, StateStack(heads.slots * heads.group, mixer.key_dim, mixer.value_dim)
        case Mamba2():
            heads = HeadLayout.of(mixer, tensor)
            width = heads.group * mixer.head_dim
            tail = TailStack(heads.slots, mixer.taps - 1, width + 2 * mixer.state_dim)
            return tail, StateStack(heads.slots, mixer.state_dim, width)
        case Mamba():
            width = padded(mixer.channels, tensor) // tensor
            return TailStack(tensor, mixer.taps - 1, width), StateStack(tensor, mixer.state_dim, width)
        case KimiDelta():
            slots = HeadLayout.of(mixer, tensor).slots
            dim = mixer.head_dim
            return TailStack(slots, mixer.taps - 1, 3 * dim), StateStack(slots, dim, dim)
        case LightningAttention():
            return (StateStack(HeadLayout.of(mixer, tensor).slots, mixer.head_dim, mixer.head_dim),)
        case ShortConvolution():
            return (TailStack(tensor, mixer.taps - 1, padded(mixer.channels, tensor) // tensor),)
        case _:
            raise unsupported_mixer(mixer)


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
    kinds_of = [kinds for mixer in (*spec.mixers, *drafter) for kinds in cache_stacks(mixer, tensor)]
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
    shared = any(isinstance(mixer, Attention) and mixer.shares_cache_of is not None for mixer in spec.mixers)
    return index.depths if shared else (1,) * len(index.depths)


def padded(size: int, tensor: int) -> int:
    """Return `size` rounded up to a multiple of `tensor`."""
    return -(-size // tensor) * tensor
