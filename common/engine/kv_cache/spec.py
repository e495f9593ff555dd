"""KV cache specs of mixers, and how layers are assigned to KV groups. Pure arithmetic on tokens, blocks and bytes.

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
from pagoda.common.models.spec import Mixer, ModelSpec


@dataclass(frozen=True, slots=True)
class FullCache:
    """K and V of every token."""

    kv_heads: int
    head_dim: int

    def block_elements(self, block_size: int) -> int:
        """Return the elements per block and layer."""
        return 2 * self.kv_heads * self.head_dim * block_size


@dataclass(frozen=True, slots=True)
class WindowCache:
    """K and V of the last `window` tokens; blocks entirely before the window are released."""

    kv_heads: int
    head_dim: int
    window: int

    def block_elements(self, block_size: int) -> int:
        """Return the elements per block and layer."""
        return 2 * self.kv_heads * self.head_dim * block_size


@dataclass(frozen=True, slots=True)
class LatentCache:
    """One compressed vector per token, shared by all heads (MLA): `rank` latent and `rope_dim` rotary channels."""

    rank: int
    rope_dim: int

    def block_elements(self, block_size: int) -> int:
        """Return the elements per block and layer."""
        return (self.rank + self.rope_dim) * block_size


@dataclass(frozen=True, slots=True)
class StateCache:
    """Recurrent state: `elements` numbers per sequence, in one block. Never shared between sequences."""

    elements: int

    def block_elements(self, block_size: int) -> int:
        """Return the elements per block and layer."""
        return self.elements


CacheSpec = FullCache | WindowCache | LatentCache | StateCache


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share one block table."""

    spec: CacheSpec
    layers: tuple[int, ...]  # layer indices; layers[j] uses cache array j
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


def cache_spec(mixer: Mixer) -> CacheSpec:
    """Return the cache spec of a mixer."""
    if mixer.window is None:
        return FullCache(mixer.kv_heads, mixer.head_dim)
    return WindowCache(mixer.kv_heads, mixer.head_dim, mixer.window)


def kv_layout(spec: ModelSpec, block_size: int, *, hybrid: bool = True) -> KvLayout:
    """Return groups of equal size over the layers of a model; the last group of a kind may be short.

    The group size is the smallest number of layers of any kind, so that no kind wastes more than one group's padding.
    `hybrid` False: one group, in which layers with a window keep every token. Raises ConfigError if the layers' K and
    V differ in shape.
    """
    kinds: dict[CacheSpec, list[int]] = {}
    for index, layer in enumerate(spec.layers):
        kinds.setdefault(cache_spec(layer.mixer), []).append(index)
    if not hybrid and len(kinds) > 1:
        return KvLayout((_one_group(spec, list(kinds)),), block_size)
    size = min(len(layers) for layers in kinds.values())
    groups = [
        KvGroup(kind, tuple(layers[start : start + size]))
        for kind, layers in kinds.items()
        for start in range(0, len(layers), size)
    ]
    return KvLayout(tuple(groups), block_size)


def _one_group(spec: ModelSpec, kinds: list[CacheSpec]) -> KvGroup:
    """Every layer, keeping every token."""
    whole = {FullCache(kind.kv_heads, kind.head_dim) for kind in kinds if isinstance(kind, FullCache | WindowCache)}
    if len(whole) != 1 or not all(isinstance(kind, FullCache | WindowCache) for kind in kinds):
        raise ConfigError(
            "--disable-hybrid-kv-cache-manager",
            "the layers of this model keep K and V of different shapes, which one group cannot store; drop the flag",
        )
    return KvGroup(whole.pop(), tuple(range(len(spec.layers))), tuple(layer.mixer.window for layer in spec.layers))
