"""The merges that a sentencepiece vocabulary implies: its tokens have scores, and the union with the best merges first.

Every split of a token into two tokens is a merge. A large vocabulary has two million places where a token could be
split; which of them leave two tokens is computed by numpy from hashes of the parts.
Source: Kudo and Richardson, "SentencePiece" (2018), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_BASE: Final = 0x9E3779B97F4A7C15  # odd, so that powers of it have inverses modulo 2**64
_MIX: Final = np.uint64(0xD6E8FEB86659FD93)
_FILTER_BITS: Final = 22
_GUESS_BITS: Final = 20
_TOKENS_AT_ONCE: Final = 1 << 14  # what is computed for them fits a processor's cache


def merges_of_scores(
    tokens: Sequence[str], scores: Sequence[float], mergeable: Sequence[bool] | Array
) -> list[tuple[str, str]]:
    """The pairs whose union is a mergeable token, best score first, then by id.

    Raises ValueError when the lengths differ. The order of the splits of one token does not matter: what merged before
    leaves one of them at most. Two strings of one hash would yield a pair whose union is no token, which the library
    refuses; at 64 bits that is one vocabulary of ten million.
    """
    if not len(tokens) == len(scores) == len(mergeable):
        raise ValueError(f"{len(tokens)} tokens, {len(scores)} scores and {len(mergeable)} types")
    union, left, right = _splits(tokens, np.asarray(mergeable, np.bool_))
    order = np.argsort(-np.asarray(scores, np.float64)[union], kind="stable")
    texts = np.array(tokens, np.object_)
    return list(zip(texts[left[order]].tolist(), texts[right[order]].tolist()))


def _splits(tokens: Sequence[str], mergeable: Array) -> tuple[Array, Array, Array]:
    """Ids of each mergeable token and of the two tokens it splits into, for every split, in the order of ids."""
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    text = _HashedText("".join(tokens))
    ends = np.cumsum(lengths)
    starts = ends - lengths
    ids = _Ids(text.hashes(starts, ends))
    parts: list[tuple[Array, Array, Array]] = []
    for first in range(0, len(tokens), _TOKENS_AT_ONCE):
        some = slice(first, first + _TOKENS_AT_ONCE)
        begin, here = starts[first], lengths[some]
        left = text.prefixes(starts[some], here)  # of the part of a token before each of its characters
        inside = np.repeat(mergeable[some], here) & ids.possible(left)
        inside[starts[some][here > 0] - begin] = False  # nothing is before the first
        at = np.flatnonzero(inside)
        union = np.repeat(np.arange(first, first + len(here)), here)[at]
        left, right = left[at], text.hashes(at + begin, ends[union])
        known = ids.possible(right)
        union, pair = union[known], (ids.of(left[known]), ids.of(right[known]))
        known = (pair[0] >= 0) & (pair[1] >= 0)
        parts.append((union[known], pair[0][known], pair[1][known]))
    union, left, right = (np.concatenate(column) for column in zip(*parts))
    return union, left, right


class _HashedText:
    """The hash of any part of a text: the sum of its characters, each times a power of a base by its place."""

    def __init__(self, text: str) -> None:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        self._sums = np.zeros(len(codes) + 1, np.uint64)
        # Counted from 1, so that no character is without weight.
        np.cumsum((codes + np.uint64(1)) * _powers(_BASE, len(codes)), out=self._sums[1:])
        self._back = _powers(pow(_BASE, -1, 1 << 64), len(self._sums))

    def hashes(self, start: Array, end: Array) -> Array:
        """Of the parts from `start` to `end`; parts of the same text have the same hash wherever they are."""
        found: Array = (self._sums[end] - self._sums[start]) * self._back[start]
        return found

    def prefixes(self, start: Array, length: Array) -> Array:
        """Of the parts from each start to each place within `length` of it; one part's places follow another's."""
        places = slice(start[0], start[-1] + length[-1])
        found: Array = self._sums[places] - np.repeat(self._sums[start], length)
        found *= np.repeat(self._back[start], length)
        return found


class _Ids:
    """Hash -> position in `hashes`."""

    def __init__(self, hashes: Array) -> None:
        self._hashes = hashes
        self._order = np.argsort(hashes)
        self._sorted = hashes[self._order]
        self._used = np.zeros(1 << _FILTER_BITS, np.bool_)
        self._used[_slot(hashes, _FILTER_BITS)] = True
        self._guess = np.zeros(1 << _GUESS_BITS, np.int32)
        self._guess[_slot(hashes, _GUESS_BITS)] = np.arange(len(hashes))

    def possible(self, hashes: Array) -> Array:
        """False for most hashes that have no position."""
        return self._used[_slot(hashes, _FILTER_BITS)]

    def of(self, hashes: Array) -> Array:
        """The position of each hash, -1 where there is no such hash."""
        found = self._guess[_slot(hashes, _GUESS_BITS)]
        missed = np.flatnonzero(self._hashes[found] != hashes)
        at = np.minimum(np.searchsorted(self._sorted, hashes[missed]), len(self._sorted) - 1)
        found[missed] = np.where(self._sorted[at] == hashes[missed], self._order[at], -1)
        return found


def _powers(base: int, count: int) -> Array:
    """base**0, base**1, ... modulo 2**64."""
    powers = np.full(count, base, np.uint64)
    powers[:1] = 1
    return np.cumprod(powers, out=powers)


def _slot(hashes: Array, bits: int) -> Array:
    slots = hashes >> np.uint64(29)
    slots ^= hashes
    slots *= _MIX
    slots >>= np.uint64(64 - bits)
    return slots
