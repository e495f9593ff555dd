"""The merges that a sentencepiece BPE vocabulary implies: it has scores in place of a list of merges.

Source: Kudo and Richardson, "SentencePiece" (2018), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_BASE: Final = 0x9E3779B97F4A7C15  # odd, so that powers of it have inverses modulo 2**64
_MIX: Final = np.uint64(0xD6E8FEB86659FD93)
_FILTER_BITS: Final = 23
_GUESS_BITS: Final = 22
_CHUNK_TOKENS: Final = 1 << 16  # bounds the memory of temporaries
_NEVER: Final = np.iinfo(np.int32).max


def merges_from_scores(
    tokens: Sequence[str],
    scores: Sequence[float],
    mergeable: Sequence[bool] | Array,
    fallbacks: Sequence[bool] | Array | None = None,
) -> list[tuple[str, str]]:
    """Return the pairs of tokens to merge into a mergeable token, highest score first, then by id.

    `fallbacks`: tokens that stand for characters which are not in the vocabulary.

    BPE merges into a token from one pair only: the last two parts of the token's own text, whatever surrounds it. The
    other pairs are left out, which halves the time the library takes, unless this vocabulary makes it hard to tell.

    A large vocabulary has about two million split positions; candidates are filtered by 64-bit hashes in numpy. A hash
    collision would yield a pair that is no token, which the library rejects (about one vocabulary in ten million).
    Raises ValueError if the lengths differ.
    """
    if not len(tokens) == len(scores) == len(mergeable):
        raise ValueError(f"{len(tokens)} tokens, {len(scores)} scores and {len(mergeable)} types")
    able = np.asarray(mergeable, np.bool_)
    vocabulary = _HashedVocabulary(tokens)
    splits = _splits(vocabulary, able)
    best = np.argsort(-np.asarray(scores, np.float64), kind="stable")
    rank = np.empty(len(tokens), np.int32)
    rank[best] = np.arange(len(tokens), dtype=np.int32)
    symbols = np.zeros(len(tokens), np.bool_) if fallbacks is None else np.asarray(fallbacks, np.bool_)
    if not (vocabulary.ids.repeats or symbols[splits.left].any() or symbols[splits.right].any()):
        splits = _UsedSplits(vocabulary, splits, rank, able).found()
    order = np.argsort(rank[splits.union], kind="stable")
    texts = np.array(tokens, np.object_)
    return list(zip(texts[splits.left[order]].tolist(), texts[splits.right[order]].tolist()))


class _HashedVocabulary:
    """All tokens in one text, and their ids by hash."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self.lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
        self.text = _HashedText("".join(tokens))
        self.ends = np.cumsum(self.lengths)
        self.starts = self.ends - self.lengths
        self.ids = _Ids(self.text.hashes(self.starts, self.ends))


@dataclass(frozen=True, slots=True)
class _Splits:
    """Tokens as two tokens each: ids, by id of the union, then by the length of the left part."""

    union: Array
    left: Array
    right: Array

    def take(self, index: Array) -> _Splits:
        return _Splits(self.union[index], self.left[index], self.right[index])


def _splits(vocabulary: _HashedVocabulary, mergeable: Array) -> _Splits:
    """Return every split of a mergeable token into two tokens."""
    text, ids, starts, ends = vocabulary.text, vocabulary.ids, vocabulary.starts, vocabulary.ends
    parts: list[tuple[Array, Array, Array]] = []
    for first in range(0, len(starts), _CHUNK_TOKENS):
        chunk = slice(first, first + _CHUNK_TOKENS)
        begin, sizes = starts[first], vocabulary.lengths[chunk]
        left = text.prefixes(starts[chunk], sizes)  # for each character of a token: the part before it
        candidate = np.repeat(mergeable[chunk], sizes) & ids.possible(left)
        candidate[starts[chunk][sizes > 0] - begin] = False  # the empty prefix
        at = np.flatnonzero(candidate)
        union = np.repeat(np.arange(first, first + len(sizes)), sizes)[at]
        left, right = left[at], text.hashes(at + begin, ends[union])
        known = ids.possible(right)
        union, pair = union[known], (ids.of(left[known]), ids.of(right[known]))
        known = (pair[0] >= 0) & (pair[1] >= 0)
        parts.append((union[known], pair[0][known], pair[1][known]))
    return _Splits(*(np.concatenate(column) for column in zip(*parts)))


class _UsedSplits:
    """Finds the split of each token that BPE merges: the last step of merging the token's own characters.

    Two parts can stand beside each other only if no merge across their border came first. Undoing their own merges,
    last first, shows each pair of tokens that stood at the border. Short tokens come first: their splits are needed.
    """

    def __init__(self, vocabulary: _HashedVocabulary, splits: _Splits, rank: Array, mergeable: Array) -> None:
        """`rank`: of each token, in the order of merging."""
        self._vocabulary, self._splits = vocabulary, splits
        self._lengths = vocabulary.lengths
        self._merged = np.where(self._lengths > 1, rank, np.int32(-1))
        self._across = np.append(np.where(mergeable, rank, _NEVER), np.int32(_NEVER))  # the last: no token
        self._known = self._lengths == 1
        self._left = self._right = np.zeros(0, np.int64)

    def found(self) -> _Splits:
        """Return one split per token; all of them if parts of a token are merged after it, or it has several."""
        every, size = self._splits, len(self._lengths)
        self._left, self._right = (np.arange(size) for _ in range(2))
        lengths = self._lengths[every.union]
        by_length = np.argsort(lengths, kind="stable")
        longer = np.flatnonzero(np.diff(lengths[by_length])) + 1
        chosen = [self._level(index) for index in np.split(by_length, longer)]
        used = every.take(np.sort(np.concatenate(chosen)))
        later = np.maximum(self._merged[used.left], self._merged[used.right]) >= self._merged[used.union]
        return every if later.any() or (used.union[1:] == used.union[:-1]).any() else used

    def _level(self, index: Array) -> Array:
        """Return the indices of used splits among those of tokens of one length, and record them."""
        every = self._splits
        index = index[self._known[every.left[index]] & self._known[every.right[index]]]
        at = self._vocabulary.starts[every.union[index]] + self._lengths[every.left[index]]
        left, right = every.left[index], every.right[index]
        chosen = []
        while len(index):
            alone = _occur_once(every.union[index]) | (np.maximum(self._merged[left], self._merged[right]) < 0)
            chosen.append(index[alone])
            self._known[every.union[index[alone]]] = True
            kept = np.flatnonzero(~self._known[every.union[index]])
            index, at, left, right = index[kept], at[kept], left[kept], right[kept]
            left, right, limit = self._undo(left, right)
            kept = np.flatnonzero(~self._merges_before(limit, at, left, right))
            index, at, left, right = index[kept], at[kept], left[kept], right[kept]
        used = np.concatenate(chosen) if chosen else index
        union = every.union[used]
        self._left[union], self._right[union] = every.left[used], every.right[used]
        return used

    def _undo(self, left: Array, right: Array) -> tuple[Array, Array, Array]:
        """Undo the later of the merges into left and right; return what stands at the border, and its rank.

        A merge across the border comes first if its rank is lower: of equal ones the leftmost is first.
        """
        of_left, of_right = self._merged[left], self._merged[right]
        undone = of_left > of_right
        limit = np.where(undone, of_left, of_right + 1)
        return np.where(undone, self._right[left], left), np.where(undone, right, self._left[right]), limit

    def _merges_before(self, limit: Array, at: Array, left: Array, right: Array) -> Array:
        """Return whether left and right, with the border at a place in the text, are merged before the limit."""
        hashes = self._vocabulary.text.hashes(at - self._lengths[left], at + self._lengths[right])
        before = np.zeros(len(hashes), np.bool_)
        possible = np.flatnonzero(self._vocabulary.ids.possible(hashes))
        before[possible] = self._across[self._vocabulary.ids.of(hashes[possible])] < limit[possible]
        return before


def _occur_once(values: Array) -> Array:
    """Return which of sorted values are there once."""
    differs = np.concatenate([[True], values[1:] != values[:-1], [True]])
    once: Array = differs[1:] & differs[:-1]
    return once


class _HashedText:
    """Polynomial hash of any substring: the sum of (character + 1) * base**position, shifted back to position 0."""

    def __init__(self, text: str) -> None:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        self._sums = np.zeros(len(codes) + 1, np.uint64)
        np.cumsum((codes + np.uint64(1)) * _powers(_BASE, len(codes)), out=self._sums[1:])
        self._back = _powers(pow(_BASE, -1, 1 << 64), len(self._sums))

    def hashes(self, start: Array, end: Array) -> Array:
        """Hashes of the substrings [start, end); equal substrings have equal hashes at any position."""
        hashes: Array = (self._sums[end] - self._sums[start]) * self._back[start]
        return hashes

    def prefixes(self, start: Array, length: Array) -> Array:
        """Hashes of all prefixes (from length 0) of consecutive substrings, concatenated."""
        positions = slice(start[0], start[-1] + length[-1])
        hashes: Array = self._sums[positions] - np.repeat(self._sums[start], length)
        hashes *= np.repeat(self._back[start], length)
        return hashes


class _Ids:
    """Index from hash to position in `hashes`. `repeats`: a hash is there twice."""

    def __init__(self, hashes: Array) -> None:
        self._hashes = hashes
        self._order = np.argsort(hashes)
        self._sorted = hashes[self._order]
        self.repeats = bool((self._sorted[1:] == self._sorted[:-1]).any())
        self._used = np.zeros(1 << _FILTER_BITS, np.bool_)
        self._used[_slot(hashes, _FILTER_BITS)] = True
        self._guess = np.zeros(1 << _GUESS_BITS, np.int32)
        self._guess[_slot(hashes, _GUESS_BITS)] = np.arange(len(hashes))

    def possible(self, hashes: Array) -> Array:
        """False for most hashes that are not in the index (a one-hash Bloom filter)."""
        return self._used[_slot(hashes, _FILTER_BITS)]

    def of(self, hashes: Array) -> Array:
        """Position of each hash, -1 if absent."""
        positions = self._guess[_slot(hashes, _GUESS_BITS)]
        missed = np.flatnonzero(self._hashes[positions] != hashes)
        at = np.minimum(np.searchsorted(self._sorted, hashes[missed]), len(self._sorted) - 1)
        positions[missed] = np.where(self._sorted[at] == hashes[missed], self._order[at], -1)
        return positions


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
