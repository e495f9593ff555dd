"""Earlier occurrences of n-grams in a text that grows: hash chains, as compressors of the LZ77 family have them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from pagoda.common.engine.steps.contract import EMBEDDED, Int32

_MASK: Final = (1 << 64) - 1
_BASE: Final = 0x9E3779B97F4A7C15
"""Multiplier of the polynomial hash of an n-gram, modulo 2^64."""

_MIX: Final = 0xD6E8FEB86659FD93
"""Multiplier after which the top bits of a hash are its slot."""

_MIN_BITS: Final = 8
_FEW: Final = 32
"""Up to this number of new tokens Python links them, above it numpy."""

_STEPS: Final = 64
"""Links of a chain that are followed, at most, in search of one n-gram."""


def hashes_of(tail: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Return the hashes of the last `lengths[0]`, `lengths[1]`, ... tokens, an ascending list; fewer if `tail` is
    shorter.
    """
    hashes = []
    value = 0
    done = 0
    for length in lengths:
        if length > len(tail):
            break
        for position in range(done + 1, length + 1):
            value = value * _BASE + tail[-position] & _MASK
        done = length
        hashes.append((value ^ value >> 32) * _MIX & _MASK)
    return hashes


class TokenIndex:
    """A text of token ids in which the n-grams of some lengths are found, the newest occurrence first.

    An n-gram is named by its end, the index of the token after it. Adding a token and finding an occurrence take
    constant time. Memory: 4 bytes per token, and 12 to 20 more per token and length. EMBEDDED tokens are in the text,
    but n-grams with one are not found.
    """

    def __init__(self, lengths: Sequence[int], tokens: Int32 | Sequence[int] = ()) -> None:
        """`lengths`: of the n-grams, ascending. `tokens`: the text's beginning."""
        self.tokens = array("i")
        self._lengths = tuple(lengths)
        self._shift = 64 - _MIN_BITS  # shift that leaves a hash's top bits, its slot
        self._heads = [array("i", bytes(4 << _MIN_BITS)) for _ in lengths]  # slot -> newest end; 0: none
        self._previous = [array("i") for _ in lengths]  # end -> the end before it in its chain; 0: none
        self._clean_from = 0  # no EMBEDDED token from here on
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Int32 | Sequence[int]) -> None:
        """Add tokens at the end."""
        start = len(self.tokens)
        if isinstance(tokens, np.ndarray):
            self.tokens.frombytes(tokens.tobytes())
        else:
            self.tokens.extend(tokens)
        if len(self.tokens) > len(self._heads[0]):
            self._grow()
            start = self._clean_from = 0
        if len(self.tokens) - start > _FEW:
            self._link(start)
        else:
            self._link_few(start)

    def ends_of(self, tail: Sequence[int], index: int, hash: int) -> Iterator[int]:
        """Yield the ends of the last tokens of `tail`, as many as length number `index` says, the newest first.

        `hash`: of these tokens, see `hashes_of`. Follows a bounded number of links: old occurrences may be missed.
        """
        length = self._lengths[index]
        tokens = self.tokens
        previous = self._previous[index]
        end = self._heads[index][hash >> self._shift]
        gram = None
        for _ in range(_STEPS):
            if not end:
                return
            if gram is None:
                gram = array("i", tail[-length:])
            if tokens[end - length : end] == gram:
                yield end
            end = previous[end]

    def match_length(self, end: int, tail: Sequence[int], least: int, most: int) -> int:
        """Return how many of the last tokens of `tail` stand before index `end`: `least` do, at most `most` count."""
        tokens = self.tokens
        most = min(most, end, len(tail))
        for length in range(least + 1, most + 1):
            if tokens[end - length] != tail[-length]:
                return length - 1
        return most

    def _grow(self) -> None:
        """Make room for twice the tokens; the text is to be linked again."""
        bits = (2 * len(self.tokens) - 1).bit_length()
        self._shift = 64 - bits
        self._heads = [array("i", bytes(4 << bits)) for _ in self._lengths]
        self._previous = [array("i") for _ in self._lengths]

    def _link_few(self, start: int) -> None:
        """Add the n-grams that end before tokens from `start` on."""
        tokens = self.tokens
        lengths = self._lengths
        longest = self._lengths[-1]
        added = bytes(4 * (len(tokens) - start))
        for previous in self._previous:
            previous.frombytes(added)
        for end in range(start, len(tokens)):
            clean = self._clean_from
            hashes = hashes_of(tokens[max(clean, end - longest) : end], lengths)
            for hash, heads, previous in zip(hashes, self._heads, self._previous):
                slot = hash >> self._shift
                previous[end] = heads[slot]
                heads[slot] = end
            if tokens[end] == EMBEDDED:
                self._clean_from = end + 1

    def _link(self, start: int) -> None:
        """The same with numpy, for many tokens."""
        tokens = np.frombuffer(self.tokens, np.int32)
        first = max(0, start - self._lengths[-1])  # tokens before that are in none of the new n-grams
        embedded = first + np.flatnonzero(tokens[first:] == EMBEDDED)
        if len(embedded):
            self._clean_from = int(embedded[-1]) + 1
        added = bytes(4 * (len(tokens) - start))
        value = np.zeros(len(tokens) - start, np.uint64)
        done = 0
        for length, own_heads, own_previous in zip(self._lengths, self._heads, self._previous):
            own_previous.frombytes(added)
            for offset in range(done + 1, length + 1):
                value = value * np.uint64(_BASE) + _shifted(tokens, start, offset)
            done = length
            ends = np.arange(max(start, length), len(tokens))
            hashes = (value ^ value >> np.uint64(32)) * np.uint64(_MIX)
            slots: Int32 = (hashes[len(hashes) - len(ends) :] >> np.uint64(self._shift)).astype(np.int32)
            if len(embedded):
                clean = np.searchsorted(embedded, ends) == np.searchsorted(embedded, ends - length)
                ends = ends[clean]
                slots = slots[clean]
            if len(ends):
                _chain(np.frombuffer(own_heads, np.int32), np.frombuffer(own_previous, np.int32), slots, ends)


def _shifted(tokens: Int32, start: int, offset: int) -> npt.NDArray[np.uint64]:
    """Return the tokens `offset` before those from `start` on, 0 before the first."""
    begin = start - offset
    values = tokens[max(0, begin) : len(tokens) - offset].astype(np.uint64)
    return values if begin >= 0 else np.concatenate([np.zeros(min(-begin, len(tokens) - start), np.uint64), values])


def _chain(heads: Int32, previous: Int32, slots: Int32, ends: npt.NDArray[np.intp]) -> None:
    """Put `ends` [n > 0], ascending, at the heads of the chains of `slots` [n]."""
    order = np.argsort(slots, kind="stable")
    slots = slots[order]
    ends = ends[order]
    same = slots[1:] == slots[:-1]
    first = np.append(True, ~same)
    last = np.append(~same, True)
    previous[ends[1:][same]] = ends[:-1][same]
    previous[ends[first]] = heads[slots[first]]
    heads[slots[last]] = ends[last]
