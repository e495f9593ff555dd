"""How heads, channels and caches are divided among the devices: heads in slots, caches in stacks of one shape.

Computed from sizes and the tensor parallel size, without jax arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from pagoda.common.errors import ConfigError

LANES: Final = 128
"""Columns of a TPU's registers."""


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """Assignment of heads to slots. A slot has one KV head and `group` query head positions.

    A KV head is whatever several query heads share: keys and values, or the key of a recurrence. With more devices than
    KV heads a KV head is copied to several slots, which divide its query heads. Empty positions hold zeros.
    """

    slots: int  # a multiple of the tensor parallel size
    group: int
    copies: int  # slots per KV head
    heads: int
    kv_heads: int

    @classmethod
    def of(cls, *, heads: int, kv_heads: int, tensor: int, words: str = "query heads") -> HeadLayout:
        """Return the layout with the least compute and storage.

        `words`: for the heads in an error message. Raise ConfigError with more devices than heads.
        """
        if tensor > heads:
            raise ConfigError(
                "--tensor-parallel-size", f"{tensor} devices cannot share {heads} {words}; use {heads} or less"
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


def _gather(rows: npt.NDArray[np.generic], index: npt.NDArray[np.int64]) -> npt.NDArray[np.generic]:
    """Return rows[index] with zeros where the index is -1; a view if the order does not change."""
    if np.array_equal(index.ravel(), np.arange(len(rows))):
        return rows.reshape(*index.shape, *rows.shape[1:])
    taken = rows[index]
    taken[index < 0] = 0
    return taken


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
    """The last inputs of a convolution, in float32: for each of `rows` tokens the channels of all slots."""

    slots: int
    rows: int
    width: int
    axes: ClassVar[str] = ".PK."  # [L, P, rows, 128], see `execution.tiles`


@dataclass(frozen=True, slots=True)
class StateStack:
    """The state of every head, or of those that share keys, float32 [L, P, heads, key_dim, value_dim]."""

    heads: int
    key_dim: int
    value_dim: int
    axes: ClassVar[str] = ".PK.."


@dataclass(frozen=True, slots=True)
class DraftStack:
    """What a recurrence reads of the drafts of a sequence's last step, float32: for each the channels of all slots."""

    slots: int
    drafts: int  # at most, in a step
    width: int
    axes: ClassVar[str] = ".PK."  # [L, P, rows, 128], see `execution.tiles`


Stack = KvStack | LatentStack | TailStack | StateStack | DraftStack
"""What an array of the cache holds, over all its layers L and blocks P. Sizes are of all devices together."""


def padded(size: int, tensor: int) -> int:
    """Return `size` rounded up to a multiple of `tensor`."""
    return -(-size // tensor) * tensor
