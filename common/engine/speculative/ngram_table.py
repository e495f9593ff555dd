"""The newest earlier occurrence of each sequence's last tokens, for all sequences of a step at once.

Every text has a region of three arrays: its tokens, and hash chains of its n-grams, as compressors of the LZ77 family
have them. What a step adds and looks up is computed by numpy over all sequences, so a sequence costs about a
microsecond.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from pagoda.common.engine.steps.contract import EMBEDDED, Bool, Int32

Index = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]

_BASE: Final = np.uint64(0x9E3779B97F4A7C15)
"""Multiplier of the polynomial hash of an n-gram, modulo 2^64."""

_MIX: Final = np.uint64(0xD6E8FEB86659FD93)
"""Multiplier after which the top bits of a hash are its entry in `_heads`."""

_MIN_BITS: Final = 9
"""Logarithm of the smallest region, in tokens."""

_LINKS: Final = 64
"""Links of a chain that are followed, at most: old occurrences may be missed."""


def spread(counts: Index) -> tuple[Index, Index]:
    """Return for each of counts[0], counts[1], ... tokens its owner, and its number among the owner's."""
    owners = np.repeat(np.arange(len(counts)), counts)
    return owners, np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)


class NgramTable:
    """Texts of token ids by number. An n-gram is named by its end, the index of the token after it; 0 is no end.

    n-grams of `shortest` tokens are indexed, those with an EMBEDDED token are not. Memory: 12 to 24 bytes per token.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        """Of the last `shortest` to `longest` tokens the longest match is found."""
        self._shortest = shortest
        self._longest = longest
        self._tokens, self._heads, self._previous = (np.zeros(0, np.int32) for _ in range(3))
        self._used = 0  # entries of the arrays in use
        self._free: dict[int, list[int]] = {}  # logarithm of the size -> first indices of regions
        self._numbers: list[int] = []  # numbers of removed texts, to be used again
        # Each text has the first index of its region, the logarithm of its size, its tokens and where the last EMBEDDED
        # one ends.
        self._first, self._bits, self._lengths, self._clean_from = (np.zeros(0, np.int64) for _ in range(4))

    def add(self, tokens: Int32) -> int:
        """Return the number of a new text."""
        if not self._numbers:
            count = len(self._first)
            self._numbers = list(range(2 * count + 7, count - 1, -1))
            grown = len(self._numbers)
            columns = self._first, self._bits, self._lengths, self._clean_from
            self._first, self._bits, self._lengths, self._clean_from = (
                np.concatenate([column, np.zeros(grown, np.int64)]) for column in columns
            )
        number = self._numbers.pop()
        bits = max(_MIN_BITS, (len(tokens) + 1).bit_length())
        first = self._take(bits)
        self._first[number] = first
        self._bits[number] = bits
        self._lengths[number] = len(tokens)
        self._tokens[first : first + len(tokens)] = tokens
        embedded = np.flatnonzero(tokens == EMBEDDED)
        self._clean_from[number] = embedded[-1] + 1 if len(embedded) else 0
        self._index(number, embedded)
        return number

    def remove(self, number: int) -> None:
        """Forget a text, whose number may be given to another one."""
        self._free.setdefault(int(self._bits[number]), []).append(int(self._first[number]))
        self._numbers.append(number)

    def lengths(self, numbers: Index) -> Index:
        """Return the tokens of texts [n]."""
        return self._lengths[numbers]

    def extend(self, numbers: Index, counts: Index, tokens: Int32) -> None:
        """Add `counts` [n] tokens at the end of the texts `numbers` [n], one text's after another's, none EMBEDDED."""
        starts = self._lengths[numbers]
        positions, flat, owners, offsets = self._write(numbers, starts, counts, tokens)
        self._lengths[numbers] = starts + counts
        owning = numbers[owners]
        entries = self._first[owning] + self._entries(self._hash(flat), self._bits[owning])
        clean = positions >= self._clean_from[owning] + self._shortest
        for offset in range(int(counts.max(initial=0))):  # one token of each text at a time: chains are in order
            chosen = np.flatnonzero((offsets == offset) & clean)
            heads = entries[chosen]
            self._previous[flat[chosen]] = self._heads[heads]
            self._heads[heads] = positions[chosen]

    def write_drafts(self, numbers: Index, counts: Index, tokens: Int32) -> Index:
        """Write drafts after the texts until these are extended. Return the lengths [n] with them."""
        lengths = self._lengths[numbers]
        if len(tokens):
            self._write(numbers, lengths, counts, tokens)
        return lengths + counts

    def find(self, numbers: Index, lengths: Index) -> Index:
        """Return the end [n] of the longest match, among equals the newest, of the last tokens of each text.

        `lengths` [n]: of the texts with their drafts.
        """
        first = self._first[numbers]
        places = np.arange(1, self._longest + 1)
        flat = first + lengths
        tails = self._tokens[flat[:, None] - places]  # [n, longest], the last token first
        reach = np.minimum(lengths, self._longest)
        ends = self._heads[first + self._entries(self._hash(flat), self._bits[numbers])].astype(np.int64)
        ends[lengths < self._shortest] = 0
        best = np.zeros_like(lengths)
        best_ends = np.zeros_like(lengths)
        active = np.flatnonzero(ends)
        ends = ends[active]
        for _ in range(_LINKS):
            if not len(active):
                break
            match_ends = first[active] + ends
            same = self._tokens[match_ends[:, None] - places] == tails[active]
            matched = np.logical_and.accumulate(same, axis=1).sum(1)
            matched = np.minimum(matched, np.minimum(ends, reach[active]))
            better = (matched >= self._shortest) & (matched > best[active])
            improved = active[better]
            best[improved] = matched[better]
            best_ends[improved] = ends[better]
            ends = self._previous[match_ends].astype(np.int64)
            going_on = (ends > 0) & (best[active] < self._longest)
            active = active[going_on]
            ends = ends[going_on]
        return best_ends

    def continuations(self, numbers: Index, ends: Index, lengths: Index, width: int) -> Int32:
        """Return the `width` tokens from each of `ends` on, int32 [n, width].

        After a text with its drafts (`lengths` [n]) come the returned tokens themselves: a loop goes on.
        """
        offsets = np.arange(width) % np.maximum(lengths - ends, 1)[:, None]
        tokens: Int32 = self._tokens[(self._first[numbers] + ends)[:, None] + offsets]
        return tokens

    def _write(self, numbers: Index, starts: Index, counts: Index, tokens: Int32) -> tuple[Index, Index, Index, Index]:
        """Write tokens into the texts from `starts` [n] on, `counts` [n] each.

        Return of each token its index in its text and in the arrays, its text in `numbers`, and its number there.
        """
        needed = starts + counts
        for index in np.flatnonzero(needed > 1 << self._bits[numbers]).tolist():
            self._grow(int(numbers[index]), int(needed[index]))
        owners, offsets = spread(counts)
        positions = starts[owners] + offsets
        flat = self._first[numbers[owners]] + positions
        self._tokens[flat] = tokens
        return positions, flat, owners, offsets

    def _hash(self, flat: Index) -> UInt64:
        """Return the hashes of the n-grams in front of these indices of the arrays."""
        value = np.zeros(len(flat), np.uint64)
        for offset in range(1, self._shortest + 1):
            value = value * _BASE + self._tokens[flat - offset].astype(np.uint64)
        return (value ^ value >> np.uint64(32)) * _MIX

    def _entries(self, hashes: UInt64, bits: Index) -> Index:
        """Return the entries of hashes in the heads of a region."""
        return (hashes >> (64 - bits).astype(np.uint64)).astype(np.int64)

    def _take(self, bits: int) -> int:
        """Return the first index of a region of 2^bits tokens, whose heads are 0."""
        size = 1 << bits
        if free := self._free.get(bits):
            first = free.pop()
        else:
            first = self._used
            self._used = self._used + size
            if self._used > len(self._tokens):
                grown = max(self._used, 2 * len(self._tokens)) - len(self._tokens)
                columns = self._tokens, self._heads, self._previous
                self._tokens, self._heads, self._previous = (
                    np.concatenate([column, np.zeros(grown, np.int32)]) for column in columns
                )
        self._heads[first : first + size] = 0
        return first

    def _grow(self, number: int, needed: int) -> None:
        """Move a text to a region of at least twice its size."""
        before = int(self._first[number])
        bits = int(self._bits[number])
        length = int(self._lengths[number])
        self._free.setdefault(bits, []).append(before)
        tokens = self._tokens[before : before + length].copy()
        self._bits[number] = max(bits + 1, needed.bit_length())
        self._first[number] = first = self._take(int(self._bits[number]))
        self._tokens[first : first + length] = tokens
        self._index(number, np.flatnonzero(tokens == EMBEDDED))

    def _index(self, number: int, embedded: npt.NDArray[np.intp]) -> None:
        """Put every n-gram of a text, whose tokens `embedded` are EMBEDDED, at the heads of the region's chains."""
        first = int(self._first[number])
        bits = int(self._bits[number])
        length = int(self._lengths[number])
        ends = np.arange(self._shortest, length)
        if len(embedded):
            clean: Bool = np.searchsorted(embedded, ends) == np.searchsorted(embedded, ends - self._shortest)
            ends = ends[clean]
        if not len(ends):
            return
        entries = self._entries(self._hash(first + ends), np.full(len(ends), bits)).astype(np.int32)
        order = np.argsort(entries, kind="stable")  # Sorting 32 bits is twice as fast as 64.
        entries = entries[order]
        ends = ends[order]
        same = entries[1:] == entries[:-1]
        begins = np.append(True, ~same)
        last = np.append(~same, True)
        self._previous[first + ends[1:][same]] = ends[:-1][same]
        self._previous[first + ends[begins]] = 0
        self._heads[first + entries[last]] = ends[last]
