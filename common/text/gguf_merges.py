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

_BASE: Final = 0x9E3779B97F4A7C15  # The base is odd, so that its powers have inverses modulo 2**64.
_MIX: Final = np.uint64(0xD6E8FEB86659FD93)
_FILTER_BITS: Final = 22
_GUESS_BITS: Final = 21
_CHUNK_TOKENS: Final = 1 << 14  # This bounds the memory of temporaries.
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
    splits = vocabulary.splits(able)
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
    """Tokens by a polynomial hash of their text: the sum of (character + 1) * base**position."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self.lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
        self._ends = np.cumsum(self.lengths)
        self._starts = self._ends - self.lengths
        self._text = np.frombuffer("".join(tokens).encode("utf-32-le", "surrogatepass"), np.uint32)
        longest = int(self.lengths.max(initial=0))
        self._power = _powers(_BASE, longest + 1)
        self._inverse = _powers(pow(_BASE, -1, 1 << 64), longest + 1)
        self._hashes = np.concatenate([self._prefixes(chunk)[2] for chunk in _chunks(len(tokens))])
        self.ids = _Ids(self._hashes)

    def joined(self, left: Array, right: Array) -> Array:
        """Hashes of the texts of two tokens together."""
        hashes: Array = self._hashes[right] * self._power[self.lengths[left]]
        hashes += self._hashes[left]
        return hashes

    def splits(self, mergeable: Array) -> _Splits:
        """Return every split of a mergeable token into two tokens."""
        unions: list[Array] = []
        lefts: list[Array] = []
        rights: list[Array] = []
        for chunk in _chunks(len(self.lengths)):
            length, left, _ = self._prefixes(chunk)
            candidate = self.ids.possible(left)
            candidate &= np.repeat(mergeable[chunk], self.lengths[chunk])
            candidate &= length > 0
            candidates = np.flatnonzero(candidate)
            union = np.repeat(np.arange(chunk.start, chunk.stop), self.lengths[chunk])[candidates]
            left = left[candidates]
            right = (self._hashes[union] - left) * self._inverse[length[candidates]]
            possible = np.flatnonzero(self.ids.possible(right))
            left_ids = self.ids.of(left[possible])
            right_ids = self.ids.of(right[possible])
            tokens = np.flatnonzero((left_ids >= 0) & (right_ids >= 0))
            unions.append(union[possible][tokens])
            lefts.append(left_ids[tokens])
            rights.append(right_ids[tokens])
        return _Splits(union=np.concatenate(unions), left=np.concatenate(lefts), right=np.concatenate(rights))

    def _prefixes(self, chunk: slice) -> tuple[Array, Array, Array]:
        """For each character of some tokens: length and hash of the part before it; hashes of the whole tokens."""
        sizes = self.lengths[chunk]
        first = self._starts[chunk]
        begin = first[0]
        end = self._ends[chunk][-1]
        length = np.arange(end - begin) - np.repeat(first - begin, sizes)
        terms = self._power[length]
        terms *= self._text[begin:end] + np.uint64(1)
        sums = np.zeros(len(terms) + 1, np.uint64)
        np.cumsum(terms, out=sums[1:])
        before = sums[first - begin]
        return length, sums[:-1] - np.repeat(before, sizes), sums[self._ends[chunk] - begin] - before


@dataclass(frozen=True, slots=True)
class _Splits:
    """Tokens as two tokens each: ids, by id of the union, then by the length of the left part."""

    union: Array
    left: Array
    right: Array

    def take(self, index: Array) -> _Splits:
        return _Splits(self.union[index], self.left[index], self.right[index])


class _UsedSplits:
    """Finds the split of each token that BPE merges: the last step of merging the token's own characters.

    Two parts can stand beside each other only if no merge across their border came first. Undoing their own merges,
    last first, shows each pair of tokens that stood at the border. Short tokens come first: their splits are needed.
    """

    def __init__(self, vocabulary: _HashedVocabulary, splits: _Splits, rank: Array, mergeable: Array) -> None:
        """`rank`: of each token, in the order of merging."""
        self._vocabulary = vocabulary
        self._splits = splits
        self._lengths = vocabulary.lengths
        self._merged = np.where(self._lengths > 1, rank, np.int32(-1))
        self._across = np.append(
            np.where(mergeable, rank, _NEVER), np.int32(_NEVER)
        )  # The last entry stands for no token.
        self._known = self._lengths == 1
        self._left = self._right = np.zeros(0, np.int64)

    def found(self) -> _Splits:
        """Return one split per token; all of them if parts of a token are merged after it, or it has several."""
        every = self._splits
        size = len(self._lengths)
        self._left, self._right = (np.arange(size) for _ in range(2))
        lengths = self._lengths[every.union]
        by_length = np.argsort(lengths.astype(np.min_scalar_type(lengths.max(initial=0))), kind="stable")
        longer = np.flatnonzero(np.diff(lengths[by_length])) + 1
        chosen = [self._level(index) for index in np.split(by_length, longer)]
        used = every.take(np.sort(np.concatenate(chosen)))
        later = np.maximum(self._merged[used.left], self._merged[used.right]) >= self._merged[used.union]
        return every if later.any() or (used.union[1:] == used.union[:-1]).any() else used

    def _level(self, index: Array) -> Array:
        """Return the indices of used splits among those of tokens of one length, and record them."""
        every = self._splits
        union = every.union[index]
        left = every.left[index]
        right = every.right[index]
        kept = np.flatnonzero(self._known[left] & self._known[right])
        index = index[kept]
        union = union[kept]
        left = left[kept]
        right = right[kept]
        chosen = []
        while len(index):
            alone = _occur_once(union) | (np.maximum(self._merged[left], self._merged[right]) < 0)
            chosen.append(index[alone])
            self._known[union[alone]] = True
            kept = np.flatnonzero(~self._known[union])
            index = index[kept]
            union = union[kept]
            left = left[kept]
            right = right[kept]
            left, right, limit = self._undo(left, right)
            kept = np.flatnonzero(~self._merges_before(limit, left, right))
            index = index[kept]
            union = union[kept]
            left = left[kept]
            right = right[kept]
        used = np.concatenate(chosen) if chosen else index
        union = every.union[used]
        self._left[union] = every.left[used]
        self._right[union] = every.right[used]
        return used

    def _undo(self, left: Array, right: Array) -> tuple[Array, Array, Array]:
        """Undo the later of the merges into left and right; return what stands at the border, and its rank.

        A merge across the border comes first if its rank is lower: of equal ones the leftmost is first.
        """
        of_left = self._merged[left]
        of_right = self._merged[right]
        undone = of_left > of_right
        limit = np.where(undone, of_left, of_right + 1)
        return np.where(undone, self._right[left], left), np.where(undone, right, self._left[right]), limit

    def _merges_before(self, limit: Array, left: Array, right: Array) -> Array:
        """Return whether left and right, beside each other, are merged before the limit."""
        hashes = self._vocabulary.joined(left, right)
        before = np.zeros(len(hashes), np.bool_)
        possible = np.flatnonzero(self._vocabulary.ids.possible(hashes))
        before[possible] = self._across[self._vocabulary.ids.of(hashes[possible])] < limit[possible]
        return before


def _occur_once(values: Array) -> Array:
    """Return which of sorted values are there once."""
    differs = np.concatenate([[True], values[1:] != values[:-1], [True]])
    once: Array = differs[1:] & differs[:-1]
    return once


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
        index = np.minimum(np.searchsorted(self._sorted, hashes[missed]), len(self._sorted) - 1)
        positions[missed] = np.where(self._sorted[index] == hashes[missed], self._order[index], -1)
        return positions


def _chunks(tokens: int) -> list[slice]:
    return [slice(first, min(first + _CHUNK_TOKENS, tokens)) for first in range(0, tokens, _CHUNK_TOKENS)]


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
