"""How the caches of layers are assigned to KV groups. Pure arithmetic on tokens, blocks and bytes.

Caches with equal blocks share a pool; each pool numbers its blocks from 0. Layer j of every group of a pool uses array
j of that pool, so a block id has the same bytes in every group of the pool. A layer with several caches is in several
groups, one that reads the cache of an earlier layer in none:

    pool 0  group 0 (full)    layers 5, 11        block 7 -> arrays 0, 1
            group 1 (window)  layers 0, 1         block 8 -> arrays 0, 1
            group 2 (window)  layers 2, 3         block 9 -> arrays 0, 1
    pool 1  group 3 (state)   layers 4, 6, 7      block 7 -> arrays 0, 1, 2
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pagoda.common.errors import ConfigError
from pagoda.common.models.mixers.caches import CacheSpec, FullCache, StateCache, WindowCache
from pagoda.common.models.transformers_spec import AnySpec


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Caches of layers that share one block table."""

    spec: CacheSpec
    layers: tuple[int, ...]  # cache numbers (see ModelSpec.caches); layers[j] uses cache array j
    windows: tuple[int | None, ...] = ()  # each layer's window where several share the table; (): that of `spec`
    pool: int = 0  # index in KvLayout.pools

    @property
    def seen(self) -> tuple[int | None, ...]:
        """The window of each layer, in tokens; None sees all."""
        window = self.spec.window if isinstance(self.spec, WindowCache) else None
        return self.windows or (window,) * len(self.layers)


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """Blocks of one size, which several groups may share."""

    kind: CacheSpec  # what a block holds per layer; windows share the blocks of full caches
    block_elements: int  # elements of a block in all of the pool's arrays


@dataclass(frozen=True)
class KvLayout:
    """The groups of a model and the number of tokens in a page. Raises ValueError if a pool's blocks would differ."""

    groups: tuple[KvGroup, ...]
    block_size: int

    def __post_init__(self) -> None:
        kinds = {(group.pool, block_kind(group.spec)) for group in self.groups}
        if sorted(pool for pool, _ in kinds) != list(range(len(kinds))):
            raise ValueError(f"every pool needs caches of one kind, the pools are {sorted(kinds, key=str)}")

    @cached_property
    def has_states(self) -> bool:
        """True if a layer has recurrent state."""
        return any(isinstance(group.spec, StateCache) for group in self.groups)

    @cached_property
    def views(self) -> tuple[tuple[int, int | None], ...]:
        """Distinct (group, window) pairs: each is a block table with an attention mask."""
        return tuple(dict.fromkeys((number, seen) for number, group in enumerate(self.groups) for seen in group.seen))

    @cached_property
    def pools(self) -> tuple[PoolSpec, ...]:
        """The block pools, in the order of KvGroup.pool."""
        return tuple(self._pool_spec(groups) for groups in self.groups_by_pool)

    @cached_property
    def groups_by_pool(self) -> tuple[tuple[KvGroup, ...], ...]:
        """The groups of each pool."""
        count = 1 + max(group.pool for group in self.groups)
        return tuple(tuple(group for group in self.groups if group.pool == pool) for pool in range(count))

    def _pool_spec(self, groups: tuple[KvGroup, ...]) -> PoolSpec:
        kind = block_kind(groups[0].spec)
        arrays = max(len(group.layers) for group in groups)
        return PoolSpec(kind, arrays * kind.block_elements(self.block_size))


def per_pool(numbers: Iterable[int]) -> str:
    """Return one number per pool as text, such as "64" or "64 + 9"."""
    return " + ".join(map(str, numbers))


def block_kind(spec: CacheSpec) -> CacheSpec:
    """Return the spec that stands for all caches with the same blocks."""
    return FullCache(spec.kv_heads, spec.head_dim, spec.value_dim) if isinstance(spec, WindowCache) else spec


def kv_layout(
    spec: AnySpec, block_size: int, *, hybrid: bool = True, drafter: tuple[CacheSpec, ...] = (), drafts: int = 0
) -> KvLayout:
    """Return the groups of a model's layers; those of a pool have equal size, but for the last one of a kind.

    `drafter`: the caches of a drafter model, which are numbered after the model's own. `drafts`: the most
    drafts of a sequence in a step; a block of recurrent state has room for their inputs.

    The size is the smallest number of layers of any kind in the pool, so that no kind wastes more than one group's
    padding. `hybrid` False: one group, in which layers with a window keep every token. Raises ConfigError if the
    caches differ in shape.
    """
    kinds: dict[CacheSpec, list[int]] = {}
    states = (replace(cache, drafts=drafts) if isinstance(cache, StateCache) else cache for cache in spec.caches)
    caches = (*states, *drafter)
    for index, cache in enumerate(caches):
        kinds.setdefault(cache, []).append(index)
    if not hybrid and len(kinds) > 1:
        return KvLayout((_one_group(caches),), block_size)
    return layout_of(kinds, block_size)


def layout_of(kinds: Mapping[CacheSpec, Sequence[int]], block_size: int) -> KvLayout:
    """Return the layout of these layers by kind of cache; see `kv_layout`."""
    sizes: dict[CacheSpec, int] = {}  # layers per group of each pool
    for kind, layers in kinds.items():
        sizes[block_kind(kind)] = min(len(layers), sizes.get(block_kind(kind), len(layers)))
    pools = {kind: pool for pool, kind in enumerate(sizes)}
    groups: list[KvGroup] = []
    for kind, layers in kinds.items():
        pool = pools[block_kind(kind)]
        size = sizes[block_kind(kind)]
        parts = (tuple(layers[start : start + size]) for start in range(0, len(layers), size))
        groups.extend(KvGroup(kind, part, pool=pool) for part in parts)
    return KvLayout(tuple(groups), block_size)


def _one_group(caches: tuple[CacheSpec, ...]) -> KvGroup:
    """Every layer, keeping every token."""
    keyed = [cache for cache in caches if isinstance(cache, FullCache | WindowCache)]
    full_specs = {FullCache(cache.kv_heads, cache.head_dim, cache.value_dim) for cache in keyed}
    if len(full_specs) != 1 or len(keyed) < len(caches):
        raise ConfigError(
            "--disable-hybrid-kv-cache-manager",
            "this model keeps caches of different shapes, which one group cannot store; drop the flag",
        )
    windows = tuple(cache.window if isinstance(cache, WindowCache) else None for cache in keyed)
    return KvGroup(full_specs.pop(), tuple(range(len(caches))), windows)
