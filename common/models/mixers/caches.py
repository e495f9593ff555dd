"""The kinds of cache that mixers keep per sequence, and the elements of each per block.

A mixer may keep several. `block_elements` alone says how many entries a block holds for its tokens: one per token, or
one for all.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FullCache:
    """K and V of every token."""

    kv_heads: int
    head_dim: int
    value_dim: int | None = None  # None: values are as wide as keys.

    def block_elements(self, block_size: int) -> int:
        """Return the elements per block and layer."""
        return self.kv_heads * (self.head_dim + (self.value_dim or self.head_dim)) * block_size


@dataclass(frozen=True, slots=True)
class WindowCache:
    """K and V of the last `window` tokens; blocks entirely before the window are released."""

    kv_heads: int
    head_dim: int
    window: int
    value_dim: int | None = None  # None: values are as wide as keys.

    def block_elements(self, block_size: int) -> int:
        """Return the elements per block and layer."""
        return self.kv_heads * (self.head_dim + (self.value_dim or self.head_dim)) * block_size


@dataclass(frozen=True, slots=True)
class LatentCache:
    """One compressed vector per token, shared by all heads (MLA): `rank` latent and `rope_dim` rotary channels."""

    rank: int
    rope_dim: int

    def block_elements(self, block_size: int) -> int:
        """Return the elements per block and layer."""
        return (self.rank + self.rope_dim) * block_size


@dataclass(frozen=True, slots=True)
class IndexCache:
    """One key of `head_dim` channels per token, with which an indexer selects the tokens that are attended to."""

    head_dim: int

    def block_elements(self, block_size: int) -> int:
        """Return the elements per block and layer."""
        return self.head_dim * block_size


@dataclass(frozen=True, slots=True)
class StateCache:
    """Recurrent state: `elements` float32 numbers per sequence, in one block. Never shared between sequences."""

    elements: int
    grouped: int = 0  # Elements of `groups` groups of heads, which several tensor-parallel ranks may read.
    groups: int = 1

    def block_elements(self, block_size: int) -> int:
        """Return the elements per block and layer."""
        return self.elements

    def elements_of_rank(self, ranks: int) -> int:
        """Return the elements on each tensor-parallel rank: with fewer groups than ranks, a group is on several."""
        return (self.elements - self.grouped) // ranks + self.grouped // min(ranks, self.groups)


CacheSpec = FullCache | WindowCache | LatentCache | IndexCache | StateCache
