"""Borders: the positions of a sequence at which recurrent state is copied into the prefix cache.

A recurrent layer overwrites its state with every token, and a copy takes as much memory as thousands of tokens of K and
V. So copies are made where a later request is likely to start, always after whole pages:

    prompt                                                                    answer
    |--------------------|---------------------------------|-----------------|---------|---------|------->
          interval       junction                          stable end        every min_distance tokens
          1024, 2048 ... where an earlier prompt differs   without what the  each replaces the one before
                         and has left no state             generation prompt
                                                           adds

Chunks of prompts end at borders. A border closer than `min_distance` to the cached prefix that the sequence starts from
would save less than its copy and its chunk cost, and is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagoda.common.config.groups.cache import StateSnapshots


@dataclass(frozen=True, slots=True)
class SequenceBorders:
    """The borders of one sequence from its start in a row on, in tokens."""

    marks: tuple[int, ...]  # ascending: junction and end of the stable part
    first: int  # no border is before it
    known: int  # tokens known when the sequence got its row; those after them are generated


class BorderRule:
    """Chooses the borders of all sequences. Positions and distances are in tokens."""

    def __init__(self, snapshots: StateSnapshots, block_size: int) -> None:
        self._unit = _rounded_up(snapshots.unit, block_size)
        everywhere = snapshots.mode == "all"
        self._interval = self._unit if everywhere else _rounded_up(snapshots.interval, self._unit)
        self._min_distance = 1 if everywhere else max(snapshots.min_distance, 1)
        self._answer_interval = _rounded_up(self._min_distance, self._unit)

    @property
    def unit(self) -> int:
        """All borders are multiples of it."""
        return self._unit

    def of_sequence(self, *, cached: int, matched: int, stable: int, known: int) -> SequenceBorders:
        """Return the borders of a sequence that starts after `cached` of its `known` tokens.

        `matched`: tokens whose K and V are cached. `stable`: prompt tokens that later requests are expected to repeat.
        The last known token is computed in any case, so no state before it is kept for a repetition of the same prompt.
        """
        first = cached + self._min_distance
        marks = {position // self._unit * self._unit for position in (matched, min(stable, known - 1))}
        return SequenceBorders(tuple(sorted(mark for mark in marks if mark >= first)), first, known)

    def after(self, borders: SequenceBorders, position: int) -> int:
        """Return the first border after `position`."""
        start = max(position, borders.first - 1)
        following = [mark for mark in borders.marks if mark > position]
        following.append(_next_multiple(max(start, borders.known - 1), self._answer_interval))
        if self._interval:
            following.append(_next_multiple(start, self._interval))
        return min(following)

    def is_replaced(self, borders: SequenceBorders, border: int) -> bool:
        """True if the next border of the answer takes the place of this one."""
        return border >= borders.known and not (self._interval and border % self._interval == 0)

    def most(self, num_tokens: int) -> int:
        """Return the number of copies that a sequence of `num_tokens` tokens is expected to keep.

        Those of the interval, the end of the prompt's stable part and the newest of the answer; at most one per unit.
        """
        of_interval = num_tokens // self._interval if self._interval else 0
        return min(of_interval + 2, num_tokens // self._unit)


def _rounded_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _next_multiple(position: int, unit: int) -> int:
    return (position // unit + 1) * unit
