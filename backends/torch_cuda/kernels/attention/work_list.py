"""Decode attention in pieces: sequences are cut by their length, so that all programs of a launch read about as much.

The host cuts them once per step for all layers. How many pieces there can be is fixed when a graph is captured, before
lengths are known; which sequence and positions a piece has is read on the device. Layers with sliding windows skip the
pieces in front of it.

Long pieces come first, what is left of each sequence last: programs start in that order (list scheduling by decreasing
length, Graham, 1969).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.frame.launch import Chip

Int32 = npt.NDArray[np.int32]

GRAIN: Final = 64
"""Tokens: pieces begin at multiples. Shorter ones cost more than they hide."""

WAVES: Final = 2
"""Waves of programs that sequences are cut into together; one for a single sequence."""

NO_SEQUENCE: Final = -1
"""Sequence of an unused piece."""

WHOLE: Final = -1
"""Slot of a piece that is all of its sequence: its result is final."""

MAX_WAVES: Final = 8
"""Maximum waves of programs over sequences of equal lengths: with more, neither a partial wave nor one long sequence
costs much."""

GOOD_OCCUPANCY: Final = 0.95
"""Fraction of the best occupancy that suffices: the fewest pieces that reach it are chosen."""

_OPEN: Final = 2**31 - 1
"""End of the last piece of a sequence: whatever the device says that its length is."""


def pieces_for(seqs: int, programs_per_piece: int, chip: Chip, programs: int) -> int:
    """Return into how many pieces `seqs` sequences are cut at most, besides one remainder of each.

    `programs_per_piece`: its KV heads, or blocks of them; `programs`: that run concurrently on a multiprocessor.
    """
    return max(1, min(seqs, WAVES) * programs * chip.sms // programs_per_piece)


@cache
def pieces_of_each(seqs: int, programs_per_piece: int, longest: int, chip: Chip, programs: int) -> int:
    """Return into how many pieces each of `seqs` sequences is cut whose lengths, up to `longest`, are about equal.

    The last wave of programs should fill the chip, too. The other arguments are those of `pieces_for`.
    """
    slots = programs * chip.sms
    pairs = seqs * programs_per_piece
    maximum = max(1, min(-(-longest // GRAIN), MAX_WAVES * slots // pairs))
    minimum = max(1, min(maximum, min(seqs, WAVES) * slots // pairs))

    def occupancy(pieces: int) -> float:
        programs = pairs * pieces
        return programs / (-(-programs // slots) * slots)

    best = max(map(occupancy, range(minimum, maximum + 1)))
    return next(n for n in range(minimum, maximum + 1) if occupancy(n) >= GOOD_OCCUPANCY * best)


@dataclass(frozen=True, slots=True, eq=False)
class WorkList:
    """The pieces of a step's decodes, on the device."""

    items: Tensor  # int32 [M, 4]: sequence, first position, end, slot of the partial result
    merges: Tensor  # int32 [S, 2]: the first slot of a sequence, and its pieces; one piece has no slot

    @property
    def num_slots(self) -> int:
        """Slots of partial results that suffice: fewer than M - S sequences are longer than a piece."""
        items = len(self.items)
        seqs = len(self.merges)
        return min(items, 2 * (items - seqs))


class WorkPlanner:
    """Cuts the sequences of steps. A list fits sequences of any lengths, but balances those it was made for."""

    def __init__(self) -> None:
        self._pieces = 0
        self._kv_lens = self._merges = self._items = np.zeros(0, np.int32)

    def plan(self, kv_lens: Int32, pieces: int, items: Int32, merges: Int32) -> None:
        """Cut sequences of kv_lens [S] tokens into `pieces` and remainders: write items [M, 4], merges [S or more, 2].

        M is at least S + pieces; see `WorkList`. The last list is kept while lengths differ by less than GRAIN.
        """
        if pieces != self._pieces or len(kv_lens) != len(self._kv_lens) or self._outdated(kv_lens):
            self._pieces = pieces
            self._kv_lens = kv_lens.copy()
            self._items, self._merges = plan_work(kv_lens, pieces)
        number = len(self._items)
        seqs = len(kv_lens)
        items[:number] = self._items
        merges[:seqs] = self._merges
        items[number:] = NO_SEQUENCE
        merges[seqs:] = 0

    def _outdated(self, kv_lens: Int32) -> bool:
        return bool((np.abs(kv_lens - self._kv_lens) >= GRAIN).any())


def plan_work(kv_lens: Int32, pieces: int) -> tuple[Int32, Int32]:
    """Return the items int32 [n, 4], n at most S + pieces, and merges [S, 2] of sequences of kv_lens [S] tokens."""
    share = max(1, -(-int(kv_lens.sum(dtype=np.int64)) // (pieces * GRAIN))) * GRAIN
    counts = -(-kv_lens // share)
    several = np.where(counts > 1, counts, 0)
    slots = np.cumsum(several) - several
    sequences = np.repeat(np.arange(len(kv_lens)), counts)
    piece = np.arange(len(sequences)) - (np.cumsum(counts) - counts)[sequences]
    begins = piece * share
    pieces_of = counts[sequences]
    order = np.argsort(-np.minimum(kv_lens[sequences] - begins, share), kind="stable")
    ends = np.where(piece == pieces_of - 1, _OPEN, begins + share)
    places = np.where(pieces_of > 1, slots[sequences] + piece, WHOLE)
    items = np.stack((sequences, begins, ends, places), 1)[order].astype(np.int32)
    return items, np.stack((slots, counts), 1).astype(np.int32)


def cut_evenly(kv_lens: Tensor, pieces: int) -> WorkList | None:
    """Return the list, made on the device, of sequences of kv_lens int32 [S] tokens, each in `pieces` equal parts.

    None for one piece: attention without a list takes each sequence in one piece.
    """
    if pieces == 1:
        return None
    numbers = torch.arange(len(kv_lens) * pieces, dtype=torch.int32, device=kv_lens.device).view(-1, pieces)
    piece = numbers[:1]
    sequences = numbers[:, :1] // pieces
    share = (kv_lens[:, None] + (GRAIN * pieces - 1)) // (GRAIN * pieces) * GRAIN
    begins = piece * share
    ends = torch.where(piece == pieces - 1, _OPEN, begins + share)
    items = torch.stack((sequences.expand_as(numbers), begins, ends, numbers), 2).view(-1, 4)
    merges = torch.cat((numbers[:, :1], torch.full_like(sequences, pieces)), 1)
    return WorkList(items.to(torch.int32), merges)


@cache
def fixed_work(seqs: int, longest: int, pieces: int, device: torch.device) -> WorkList | None:
    """Return the list of sequences that mostly have `longest` tokens, each in `pieces` parts; see `cut_evenly`."""
    return cut_evenly(torch.full((seqs,), longest, dtype=torch.int32, device=device), pieces)
