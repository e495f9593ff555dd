"""Which part of every logical axis a rank holds: one table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pagoda.common.errors import ConfigError
from pagoda.common.models.spec import Mlp, ModelSpec

SPLIT: Final = frozenset("NKFV")
"""Logical axes that ranks share out: query heads, KV heads, ffn width, vocabulary. All others are whole everywhere."""

VOCAB_MULTIPLE: Final = 64
"""Rows of the vocabulary that a rank holds are padded to a multiple of this, which matrix products want."""


@dataclass(frozen=True, slots=True)
class RankShard:
    """Rank number `rank` of `size`."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """The one that adds what must be added once."""
        return self.rank == 0

    def share(self, total: int) -> int:
        """How many of `total` heads or channels a rank holds; fewer heads than ranks: one, by several ranks."""
        return max(total // self.size, 1)

    def copies(self, total: int) -> int:
        """How many ranks hold the same head."""
        return max(self.size // total, 1)

    def vocab(self, vocab: int) -> int:
        """Rows of the embedding and the head on a rank, padding included."""
        multiple = VOCAB_MULTIPLE * self.size
        return -(-vocab // multiple) * VOCAB_MULTIPLE

    def cut(self, axis: str, extent: int, kv_heads: int = 1) -> slice:
        """The part of a parameter's axis that this rank holds; of "V" what there is of it, which may be nothing.

        `kv_heads`: how many heads an axis "K" of `extent` channels consists of.
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
    """Raises ConfigError when `size` ranks cannot share the model's heads and widths evenly."""
    if (why := _obstacle(spec, size)) is None:
        return
    heads = min(layer.mixer.heads for layer in spec.layers)
    fitting = [str(fewer) for fewer in range(1, heads + 1) if _obstacle(spec, fewer) is None]
    raise ConfigError("--tensor-parallel-size", f"{size} ranks cannot share {why} evenly; use {_either(fitting)}")


def _obstacle(spec: ModelSpec, size: int) -> str | None:
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
