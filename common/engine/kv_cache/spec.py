"""How the caches of layers are assigned to KV groups. Pure arithmetic on tokens, blocks and bytes.

One pool of blocks serves all groups. A group holds at most `layers_per_group` layers; layer j of every group uses
array j of the backend's cache, so a block id has the same bytes in every group:

    group 0 (full)    layers 5, 11        block 7 -> arrays 0, 1
    group 1 (window)  layers 0, 1         block 8 -> arrays 0, 1
    group 2 (window)  layers 2, 3         block 9 -> arrays 0, 1
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pagoda.common.errors import ConfigError
from pagoda.common.models.caches import CacheSpec, FullCache, WindowCache
from pagoda.common.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share one block table."""

    spec: CacheSpec
    layers: tuple[int, ...]  # cache numbers (see ModelSpec.caches); layers[j] uses cache array j
    windows: tuple[int | None, ...] = ()  # of each layer, where several windows share the table; (): of `spec`

    @property
    def seen(self) -> tuple[int | None, ...]:
        """The window of each layer, in tokens; None sees all."""
        window = self.spec.window if isinstance(self.spec, WindowCache) else None
        return self.windows or (window,) * len(self.layers)


@dataclass(frozen=True)
class KvLayout:
    """The groups of a model and the number of tokens in a block."""

    groups: tuple[KvGroup, ...]
    block_size: int

    @cached_property
    def views(self) -> tuple[tuple[int, int | None], ...]:
        """Distinct (group, window) pairs: each is a block table with an attention mask."""
        return tuple(dict.fromkeys((number, each) for number, group in enumerate(self.groups) for each in group.seen))

    @property
    def layers_per_group(self) -> int:
        """Cache arrays that the backend allocates."""
        return max(len(group.layers) for group in self.groups)

    @property
    def block_elements(self) -> int:
        """Elements of one block id over all cache arrays."""
        widest = max(group.spec.block_elements(self.block_size) for group in self.groups)
        return widest * self.layers_per_group


def kv_layout(spec: ModelSpec, block_size: int, *, hybrid: bool = True) -> KvLayout:
    """Return groups of equal size over the layers of a model; the last group of a kind may be short.

    The group size is the smallest number of layers of any kind, so that no kind wastes more than one group's padding.
    `hybrid` False: one group, in which layers with a window keep every token. Raises ConfigError if the layers' K and
    V differ in shape.
    """
    kinds: dict[CacheSpec, list[int]] = {}
    for index, cache in enumerate(spec.caches):
        kinds.setdefault(cache, []).append(index)
    if not hybrid and len(kinds) > 1:
        return KvLayout((_one_group(spec.caches),), block_size)
    size = min(len(layers) for layers in kinds.values())
    groups = [
        KvGroup(kind, tuple(layers[start : start + size]))
        for kind, layers in kinds.items()
        for start in range(0, len(layers), size)
    ]
    return KvLayout(tuple(groups), block_size)


def _one_group(caches: tuple[CacheSpec, ...]) -> KvGroup:
    """Every layer, keeping every token."""
    keyed = [cache for cache in caches if isinstance(cache, FullCache | WindowCache)]
    whole = {FullCache(cache.kv_heads, cache.head_dim) for cache in keyed}
    if len(whole) != 1 or len(keyed) < len(caches):
        raise ConfigError(
            "--disable-hybrid-kv-cache-manager",
            "the layers of this model keep K and V of different shapes, which one group cannot store; drop the flag",
        )
    windows = tuple(cache.window if isinstance(cache, WindowCache) else None for cache in keyed)
    return KvGroup(whole.pop(), tuple(range(len(caches))), windows)
