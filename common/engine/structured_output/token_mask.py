"""What the next token of an answer may be: its thinking first, then its grammar, within what its rules leave.

A guide follows the tokens that the host knows. The mask of the next token is computed as soon as the newest is known,
so that planning a step only picks it up, and a grammar that fails does so between two steps, for its answer alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from enum import Enum
from typing import Self

import numpy as np

from pagoda.common.engine.logit_edits import allowed_bits
from pagoda.common.engine.sampling import SamplingRules
from pagoda.common.engine.structured_output.grammar import Bits, Library, Matcher, Thinking

# Where an answer stands in its thinking: not begun, under way, over. Token ids only.


class Phase(Enum):
    """OPENING: the answer's tokens, none so far or some, may yet turn out to open the thinking."""

    OPENING = "opening"
    THINKING = "thinking"
    OVER = "over"


class ReasoningState:
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


class TokenMaskState:
    """The mask of one answer. `outputs` of its methods: the tokens generated so far.

    `bits` uint32 [ceil(V/32)]: the tokens that may come next; None: any. `error`: why no token may; the answer must
    end then. `finished`: the grammar took a token that ends it. `ends`: those tokens. `vocab`: V.
    """

    def __init__(
        self,
        rules: SamplingRules,
        vocab: int,
        ends: Sequence[int],
        *,
        library: Library | None = None,
        matcher: Matcher | None = None,
        thinking: Thinking | None = None,
    ) -> None:
        self.library, self.matcher = library, matcher
        self.bits: Bits | None = None
        self.error: str | None = None
        self.finished = False
        self._rules, self.vocab, self._ends = rules, vocab, tuple(ends)
        self._holds = thinking is not None and thinking.holds
        self._thought = ReasoningState(thinking)
        self._spelled = 0  # tokens of a possible start that the grammar took too
        self._lost = False  # the grammar did not take one of them
        allowed = rules.allowed_token_ids
        self._allowed = None if allowed is None else allowed_bits({0: allowed}, 1, vocab)[0]
        lone = {word[0] for word in rules.bad_words if len(word) == 1}
        self._never = self._only({token for token in lone if token < vocab}) if lone else None
        self._ended_by: dict[int, list[tuple[int, ...]]] = {}  # bad words of several tokens by the last but one
        for word in rules.bad_words:
            if len(word) > 1:
                self._ended_by.setdefault(word[-2], []).append(word)

    @property
    def consults_grammar(self) -> bool:
        """Whether the next mask takes one from the grammar's library."""
        if self.matcher is None or self._lost or self._thought.forced is not None:
            return False
        return self._holds or self._thought.phase is not Phase.THINKING

    def depends_on(self, unknown: int) -> bool:
        """Whether the mask of the token after `unknown` sampled tokens depends on what those are."""
        return unknown > 0 and (self.matcher is not None or self._thought.may_force_after(unknown))

    def accept(self, token: int) -> None:
        """Go on by a token; `bits` are old until `settle`."""
        before = self._thought.phase
        self._thought.accept(token)
        if self.matcher is None or (before is Phase.THINKING and not self._holds):
            return
        took = not self._lost and self.matcher.accept(token)
        if before is not Phase.OPENING or self._holds:
            self._took(took, token)
        elif self._thought.phase is Phase.THINKING:
            self.matcher.rollback(self._spelled + took)
            self._lost = False
        elif self._thought.phase is Phase.OPENING:
            self._spelled += took
            self._lost = not took
        else:
            self._took(took, token)

    def _took(self, took: bool, token: int) -> None:
        assert self.matcher is not None
        self.finished = took and token in self._ends
        if not took:
            self.error = self.matcher.error or f"token {token} does not fit the grammar"

    def settle(self, grammar: Bits | None, outputs: Sequence[int]) -> None:
        """Find `bits`, or `error`. `grammar`: what it allows, when `consults_grammar`."""
        if self.matcher is not None and self.matcher.error is not None:
            self.error = self.matcher.error
        bits = self._open_bits(grammar)
        if self.error is not None or bits is None:
            self.bits = bits
            return
        left = bits if self._allowed is None else bits & self._allowed
        if self._never is not None:
            left &= ~self._never
        for token in self._banned(outputs):
            if token < self.vocab:
                left[token // 32] &= ~np.uint32(1 << token % 32)
        if not left.any():
            self.error = self._why_none(len(outputs))
        self.bits = left

    def _open_bits(self, grammar: Bits | None) -> Bits | None:
        """What thinking and grammar allow, before the rules; a copy."""
        thought = self._thought
        if (forced := thought.forced) is not None:
            return self._only({forced})
        if grammar is not None:
            found: Bits = grammar | self._only(thought.openings)
            return found
        if self._lost:
            return self._only(thought.openings)
        if self.matcher is None:
            return None
        others: Bits = ~self._only(set(self._ends))  # a thought that ends the answer would leave it without its form
        return others

    def copy(self) -> TokenMaskState:
        """Another answer at the same place."""
        twin = copy.copy(self)
        twin.matcher = None if self.matcher is None else self.matcher.copy()
        twin._thought = self._thought.copy()
        return twin

    def _only(self, tokens: set[int]) -> Bits:
        only: Bits = allowed_bits({0: tuple(tokens)}, 1, self.vocab)[0]
        return only

    def _banned(self, outputs: Sequence[int]) -> list[int]:
        """What the rules forbid as the next token here, besides allowed_token_ids and bad words of one token."""
        rules = self._rules
        banned = list(rules.stop_ids) if len(outputs) < rules.min_tokens else []
        for word in self._ended_by.get(outputs[-1], ()) if outputs else ():
            head = len(word) - 1
            if head <= len(outputs) and tuple(outputs[len(outputs) - head :]) == word[:-1]:
                banned.append(word[-1])
        return banned

    def _why_none(self, generated: int) -> str:
        rules = self._rules
        if generated < rules.min_tokens and rules.stop_ids:
            return f"the grammar is complete after {generated} tokens, but min_tokens asks for {rules.min_tokens}"
        if rules.bad_words or rules.allowed_token_ids is not None:
            return f"after {generated} tokens bad_words or allowed_token_ids leave none that the grammar allows"
        return f"after {generated} tokens there is no token that the grammar allows"


def settle(guides: Sequence[tuple[TokenMaskState, Sequence[int]]]) -> None:
    """The next masks of some answers, each with its tokens so far; grammars of one library together."""
    asking = [(guide, outputs) for guide, outputs in guides if guide.consults_grammar]
    for guide, outputs in guides:
        if not guide.consults_grammar:
            guide.settle(None, outputs)
    for library in {id(guide.library): guide.library for guide, _ in asking}.values():
        assert library is not None
        ours = [(guide, outputs) for guide, outputs in asking if guide.library is library]
        bits = np.zeros((len(ours), -(-ours[0][0].vocab // 32)), np.uint32)
        library.fill([matcher for guide, _ in ours if (matcher := guide.matcher) is not None], bits)
        for (guide, outputs), row in zip(ours, bits):
            guide.settle(row, outputs)


def settled(guide: TokenMaskState, outputs: Sequence[int]) -> bool:
    """Whether an answer can go on; its next mask is found then."""
    if guide.error is None:
        settle([(guide, outputs)])
    return guide.error is None


def masks_after(guide: TokenMaskState, drafts: Sequence[int], outputs: Sequence[int]) -> Bits:
    """uint32 [1 + n, ceil(V/32)]: what may come after none, one, ... all n drafted tokens; the guide stays.

    What stands after a draft that is not allowed, or that ends the answer, is all ones: nobody gets there.
    """
    ahead = guide.copy()
    masks = np.full((1 + len(drafts), -(-guide.vocab // 32)), 0xFFFFFFFF, np.uint32)
    if guide.bits is not None:
        masks[0] = guide.bits
    known = list(outputs)
    for place, draft in enumerate(drafts, 1):
        if not masks[place - 1, draft // 32] >> np.uint32(draft % 32) & np.uint32(1):
            break
        ahead.accept(draft)
        known.append(draft)
        if ahead.finished or not settled(ahead, known):
            break
        if ahead.bits is not None:
            masks[place] = ahead.bits
    return masks
