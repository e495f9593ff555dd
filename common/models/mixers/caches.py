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
    """Recurrent state: `elements` float32 numbers per sequence, in one block. Never shared between sequences.

    With speculative decoding the inputs of a step's drafts stand behind the state (see StepPlan).
    """

    elements: int
    inputs: int  # Channels of a token that the next state follows from.
    grouped: int = 0  # Elements of `groups` groups of heads, which several tensor-parallel ranks may read.
    grouped_inputs: int = 0  # Channels of these groups.
    groups: int = 1
    drafts: int = 0  # Number of drafts whose inputs a block has room for.

    def block_elements(self, block_size: int) -> int:
        """Return the elements per block and layer."""
        return self.elements + self.drafts * self.inputs

    def elements_of_rank(self, ranks: int) -> int:
        """Return the elements of a block on each tensor-parallel rank."""
        state = self._of_rank(self.elements, self.grouped, ranks)
        return state + self.drafts * self._of_rank(self.inputs, self.grouped_inputs, ranks)

    def _of_rank(self, total: int, grouped: int, ranks: int) -> int:
        """Return a rank's part of `total`: with fewer groups than ranks, a group is on several."""
        return (total - grouped) // ranks + grouped // min(ranks, self.groups)


CacheSpec = FullCache | WindowCache | LatentCache | IndexCache | StateCache
