"""Sharding of parameters over tensor-parallel ranks, by logical axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pagoda.common.errors import ConfigError
from pagoda.common.models.spec import Mlp, ModelSpec

SPLIT: Final = frozenset("NKFV")
"""Sharded logical axes: query heads, KV heads, ffn width, vocabulary. All others are replicated."""

VOCAB_MULTIPLE: Final = 64
"""A rank's rows of the vocabulary are padded to a multiple, for efficient matrix products."""


@dataclass(frozen=True, slots=True)
class RankShard:
    """Rank number `rank` of `size`."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this rank adds what must be added once."""
        return self.rank == 0

    def share(self, total: int) -> int:
        """Return how many of `total` heads or channels a rank has; with fewer heads than ranks 1, replicated."""
        return max(total // self.size, 1)

    def copies(self, total: int) -> int:
        """Return how many ranks have the same head."""
        return max(self.size // total, 1)

    def vocab(self, vocab: int) -> int:
        """Return a rank's rows of the embedding and the head, padding included."""
        multiple = VOCAB_MULTIPLE * self.size
        return -(-vocab // multiple) * VOCAB_MULTIPLE

    def cut(self, axis: str, extent: int, kv_heads: int = 1) -> slice:
        """Return this rank's part of a parameter's axis; of "V" without padding, so possibly empty.

        `kv_heads`: heads that an axis "K" of `extent` channels consists of.
        """
        if axis not in SPLIT:
            return slice(0, extent)
        if axis == "V":
            rows = self.vocab(extent)
            return slice(min(self.rank * rows, extent), min((self.rank + 1) * rows, extent))
        parts = min(self.size, kv_heads) if axis == "K" else self.size
        part = self.rank * parts // self.size
        return slice(extent * part // parts, extent * (part + 1) // parts)


def check(spec: ModelSpec, size: int) -> None:
    """Raise ConfigError if the model's heads and widths do not divide evenly over `size` ranks."""
    if (indivisible := _indivisible(spec, size)) is None:
        return
    heads = min(layer.mixer.heads for layer in spec.layers)
    fitting = [str(fewer) for fewer in range(1, heads + 1) if _indivisible(spec, fewer) is None]
    raise ConfigError(
        "--tensor-parallel-size", f"{size} ranks cannot share {indivisible} evenly; use {_either(fitting)}"
    )


def _indivisible(spec: ModelSpec, size: int) -> str | None:
    for layer in dict.fromkeys(spec.layers):
        mixer = layer.mixer
        if mixer.heads % size:
            return f"{mixer.heads} query heads"
        if mixer.kv_heads % size and size % mixer.kv_heads:
            return f"{mixer.kv_heads} KV heads"
        width = layer.ffn.width if isinstance(layer.ffn, Mlp) else layer.ffn.expert.width
        if width % size:
            return f"the ffn width of {width}"
    return None


def _either(sizes: list[str]) -> str:
    return " or ".join([", ".join(sizes[:-1]), sizes[-1]] if len(sizes) > 1 else sizes)
