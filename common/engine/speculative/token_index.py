"""Earlier occurrences of n-grams in a text that grows: hash chains, as compressors of the LZ77 family have them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from pagoda.common.engine.step import EMBEDDED, Int32

_MASK: Final = (1 << 64) - 1
_BASE: Final = 0x9E3779B97F4A7C15
"""Multiplier of the polynomial hash of an n-gram, modulo 2^64."""

_MIX: Final = 0xD6E8FEB86659FD93
"""Multiplier after which the top bits of a hash are its slot."""

_MIN_BITS: Final = 8
_BATCH: Final = 32
"""From this number of new tokens on numpy links them, below it Python."""

_STEPS: Final = 64
"""Links of a chain that are followed, at most, in search of one n-gram."""


class TokenIndex:
    """A text of token ids in which the n-grams of some lengths are found, the newest occurrence first.

    Adding a token and finding an occurrence take constant time. Memory: 4 bytes per token, and 8 to 12 more per token
    and length. EMBEDDED tokens are in the text, but n-grams with one are not found.
    """

    def __init__(self, lengths: Sequence[int], tokens: Int32 | None = None) -> None:
        """`lengths`: of the n-grams. `tokens` int32 [n]: the text's beginning."""
        self.tokens = array("i")
        self._chains = {length: _Chains() for length in lengths}
        if tokens is not None:
            self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Int32 | Sequence[int]) -> None:
        """Add tokens at the end."""
        start = len(self.tokens)
        self.tokens.extend(tokens) if not isinstance(tokens, np.ndarray) else self.tokens.frombytes(tokens.tobytes())
        for length, chains in self._chains.items():
            if len(self.tokens) - start < _BATCH and len(self.tokens) <= chains.room:
                for end in range(max(start, length), len(self.tokens)):
                    chains.add(self.tokens[end - length : end], end)
            else:
                chains.add_many(np.frombuffer(self.tokens, np.int32), length, start)

    def ends_of(self, tail: Sequence[int], length: int) -> Iterator[int]:
        """Yield where the last `length` tokens of `tail` occurred, the newest first: the index of the token after them.

        Follows a bounded number of links, so that old occurrences may be missed.
        """
        gram = array("i", tail[-length:])
        if len(gram) == length:
            for end in self._chains[length].candidates(gram):
                if self.tokens[end - length : end] == gram:
                    yield end

    def match_length(self, end: int, tail: Sequence[int], most: int) -> int:
        """Return how many of the last tokens of `tail` stand before index `end`, at most `most`."""
        tokens, most = self.tokens, min(most, end, len(tail))
        for length in range(1, most + 1):
            if tokens[end - length] != tail[-length]:
                return length - 1
        return most


class _Chains:
    """The chains of the n-grams of one length. An n-gram is named by the index of the token after it, its end."""

    def __init__(self) -> None:
        self._shift = 64 - _MIN_BITS
        self._heads = array("i", bytes(4 << _MIN_BITS))  # slot -> newest end; 0: none
        self._previous = array("i")  # end -> the end before it in its chain; 0: none

    @property
    def room(self) -> int:
        """Tokens that fit without more slots."""
        return len(self._heads)

    def add(self, gram: array[int], end: int) -> None:
        """Put one n-gram at the head of its chain."""
        previous = self._previous
        if len(previous) <= end:
            previous.frombytes(bytes(4 * (end + 1 - len(previous))))
        if EMBEDDED not in gram:
            slot = _slot(gram, self._shift)
            previous[end] = self._heads[slot]
            self._heads[slot] = end

    def candidates(self, gram: array[int]) -> Iterator[int]:
        """Yield the ends of the n-grams in a slot, the newest first."""
        end = self._heads[_slot(gram, self._shift)]
        for _ in range(_STEPS):
            if not end:
                return
            yield end
            end = self._previous[end]

    def add_many(self, tokens: Int32, length: int, start: int) -> None:
        """Add the n-grams that end before tokens [start, n); all again, with more slots, if there are too few."""
        if len(tokens) > self.room:
            bits = max(_MIN_BITS, (2 * len(tokens) - 1).bit_length())
            self._shift, self._heads, start = 64 - bits, array("i", bytes(4 << bits)), 0
            self._previous = array("i")
        self._previous.frombytes(bytes(4 * (len(tokens) - len(self._previous))))
        ends = _ends(tokens, length, max(start, length))
        if not len(ends):
            return
        slots = _slots(tokens, length, ends, self._shift)
        heads, previous = np.frombuffer(self._heads, np.int32), np.frombuffer(self._previous, np.int32)
        order = np.argsort(slots, kind="stable")
        slots, ends = slots[order], ends[order]
        same = slots[1:] == slots[:-1]
        first, last = np.append(True, ~same), np.append(~same, True)
        previous[ends[1:][same]] = ends[:-1][same]
        previous[ends[first]] = heads[slots[first]]
        heads[slots[last]] = ends[last]


def _ends(tokens: Int32, length: int, start: int) -> npt.NDArray[np.intp]:
    """Return the ends from `start` on of the n-grams without an EMBEDDED token."""
    ends = np.arange(start, len(tokens))
    embedded = np.flatnonzero(tokens == EMBEDDED)
    if len(embedded):
        before = np.searchsorted(embedded, ends) - np.searchsorted(embedded, ends - length)
        ends = ends[before == 0]
    return ends


def _slot(gram: array[int], shift: int) -> int:
    value = 0
    for token in gram:
        value = (value * _BASE + token) & _MASK
    return ((value ^ value >> 32) * _MIX & _MASK) >> shift


def _slots(tokens: Int32, length: int, ends: npt.NDArray[np.intp], shift: int) -> npt.NDArray[np.intp]:
    """Return the slots of the n-grams at `ends`, as `_slot` does."""
    values = np.zeros(len(ends), np.uint64)
    for offset in range(-length, 0):
        values = values * np.uint64(_BASE) + tokens[ends + offset].astype(np.uint64)
    values = (values ^ values >> np.uint64(32)) * np.uint64(_MIX)
    return (values >> np.uint64(shift)).astype(np.intp)
