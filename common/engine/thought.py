"""Where an answer stands in its thinking: not begun, under way, over. Token ids only."""

from __future__ import annotations

import copy
from enum import Enum
from typing import Self

from pagoda.common.engine.grammar import Thinking


class Phase(Enum):
    """OPENING: the answer's tokens, none so far or some, may yet turn out to open the thinking."""

    OPENING = "opening"
    THINKING = "thinking"
    OVER = "over"


class Thought:
    """The thinking of one answer, followed token by token. `thinking`: None: there is none to follow.

    `count`: tokens of it so far, those that open it not counted. `phase`: where it is.
    """

    def __init__(self, thinking: Thinking | None) -> None:
        self._asked = thinking
        self._tail: tuple[int, ...] = ()  # the newest tokens, as many as may be part of a start or an end
        self.count = 0
        self.phase = Phase.OVER
        if thinking is not None and (thinking.open or thinking.starts):
            self.phase = Phase.THINKING if thinking.open else Phase.OPENING

    @property
    def forced(self) -> int | None:
        """The token that must come next, because the budget is spent."""
        asked = self._asked
        if asked is None or self.phase is not Phase.THINKING or asked.budget is None or self.count < asked.budget:
            return None
        end = asked.ends[0]
        return end[max(size for size in range(len(end)) if self._tail[len(self._tail) - size :] == end[:size])]

    @property
    def openings(self) -> set[int]:
        """What may come next as part of a start."""
        if self._asked is None or self.phase is not Phase.OPENING:
            return set()
        said = len(self._tail)
        return {start[said] for start in self._asked.starts if len(start) > said and start[:said] == self._tail}

    def may_force_after(self, unknown: int) -> bool:
        """Whether a token may be forced once `unknown` more are known."""
        asked = self._asked
        if asked is None or asked.budget is None or self.phase is Phase.OVER:
            return False
        return self.count + unknown >= asked.budget

    def accept(self, token: int) -> None:
        """Go on by a token."""
        if self._asked is None or self.phase is Phase.OVER:
            return
        if self.phase is Phase.OPENING:
            going_on = token in self.openings
            self._tail += (token,)
            if self._tail in self._asked.starts:
                self.phase, self._tail = Phase.THINKING, ()
            elif not going_on:
                self.phase = Phase.OVER
            return
        self.count += 1
        longest = max(map(len, self._asked.ends))
        self._tail = (*self._tail, token)[-longest:]
        if any(self._tail[-len(end) :] == end for end in self._asked.ends):
            self.phase = Phase.OVER

    def copy(self) -> Self:
        """Another answer at the same place."""
        return copy.copy(self)
