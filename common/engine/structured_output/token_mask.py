"""The tokens that may follow in an answer: reasoning first, then the grammar, within what the sampling rules allow.

A mask state follows the tokens that the host knows. The next mask is computed as soon as the newest token is known, so
that planning a step only picks it up, and a grammar that fails does so between two steps, for its request alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from enum import Enum
from typing import Self

import numpy as np

from pagoda.common.engine.sampling.logit_edits import allowed_bits
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.structured_output.grammar import Bits, Library, Matcher, Thinking
from pagoda.common.engine.structured_output.memory import CompiledGrammar


class Phase(Enum):
    """Phase of an answer's reasoning. OPENING: its tokens so far may still turn out to be a start sequence."""

    OPENING = "opening"
    THINKING = "thinking"
    OVER = "over"


class ReasoningState:
    """Follows the reasoning of one answer by token ids."""

    def __init__(self, thinking: Thinking | None) -> None:
        self._thinking = thinking
        self._tail: tuple[int, ...] = ()  # the newest tokens, as many as may be part of a start or an end
        self.count = 0  # reasoning tokens so far, without the start sequence
        self.phase = Phase.OVER
        if thinking is not None and (thinking.open or thinking.starts):
            self.phase = Phase.THINKING if thinking.open else Phase.OPENING

    @property
    def forced(self) -> int | None:
        """The token that must come next because the budget is spent."""
        thinking = self._thinking
        if thinking is None or self.phase is not Phase.THINKING:
            return None
        if thinking.budget is None or self.count < thinking.budget:
            return None
        end = thinking.ends[0]
        return end[max(size for size in range(len(end)) if self._tail[len(self._tail) - size :] == end[:size])]

    @property
    def openings(self) -> set[int]:
        """Tokens that continue a start sequence."""
        if self._thinking is None or self.phase is not Phase.OPENING:
            return set()
        size = len(self._tail)
        return {start[size] for start in self._thinking.starts if len(start) > size and start[:size] == self._tail}

    def may_force_after(self, unknown: int) -> bool:
        """True if a token may be forced once `unknown` more are known."""
        thinking = self._thinking
        if thinking is None or thinking.budget is None or self.phase is Phase.OVER:
            return False
        return self.count + unknown >= thinking.budget

    def accept(self, token: int) -> None:
        """Advance by a token."""
        if self._thinking is None or self.phase is Phase.OVER:
            return
        if self.phase is Phase.OPENING:
            continues = token in self.openings
            self._tail += (token,)
            if self._tail in self._thinking.starts:
                self.phase = Phase.THINKING
                self._tail = ()
            elif not continues:
                self.phase = Phase.OVER
            return
        self.count += 1
        longest = max(map(len, self._thinking.ends))
        self._tail = (*self._tail, token)[-longest:]
        if any(self._tail[-len(end) :] == end for end in self._thinking.ends):
            self.phase = Phase.OVER

    def copy(self) -> Self:
        """Return an independent copy."""
        return copy.copy(self)


class TokenMaskState:
    """The token mask of one answer. `outputs` of its methods: the tokens generated so far."""

    def __init__(
        self,
        rules: SamplingRules,
        vocab: int,
        ends: Sequence[int],  # tokens that end an answer
        *,
        compiled: CompiledGrammar | None = None,
        thinking: Thinking | None = None,
    ) -> None:
        self.matcher: Matcher | None = None if compiled is None else compiled.matcher.copy()
        self._compiled = compiled
        self.is_stale = False  # `bits` are not those of the next token
        self.bits: Bits | None = None  # uint32 [ceil(V/32)] the tokens that may come next; None: any
        self.error: str | None = None  # why no token may come next; the answer must end
        self.finished = False  # the grammar accepted a token that ends it
        self._rules = rules
        self.vocab = vocab
        self._ends = tuple(ends)
        self._in_grammar = thinking is not None and thinking.in_grammar
        self._reasoning = ReasoningState(thinking)
        self._accepted = 0  # tokens of a possible start sequence that the grammar accepted, too
        self._rejected = False  # the grammar did not accept one of them
        allowed = rules.allowed_token_ids
        self._allowed = None if allowed is None else allowed_bits({0: allowed}, 1, vocab)[0]
        single = {word[0] for word in rules.bad_words if len(word) == 1}
        self._never = self._only({token for token in single if token < vocab}) if single else None
        self._by_last_head: dict[int, list[tuple[int, ...]]] = {}  # bad words of several tokens by the last but one
        for word in rules.bad_words:
            if len(word) > 1:
                self._by_last_head.setdefault(word[-2], []).append(word)

    @property
    def library(self) -> Library | None:
        """What compiled the grammar."""
        return None if self._compiled is None else self._compiled.library

    @property
    def consults_grammar(self) -> bool:
        """True if the next mask needs one from the grammar's library."""
        if self.matcher is None or self._rejected or self._reasoning.forced is not None:
            return False
        return self._in_grammar or self._reasoning.phase is not Phase.THINKING

    def depends_on(self, unknown: int) -> bool:
        """True if the mask after `unknown` more sampled tokens depends on what those are."""
        return unknown > 0 and (self.matcher is not None or self._reasoning.may_force_after(unknown))

    def accept(self, token: int) -> None:
        """Advance by a token; `bits` are stale until `refresh`."""
        self.is_stale = True
        before = self._reasoning.phase
        self._reasoning.accept(token)
        if self.matcher is None or (before is Phase.THINKING and not self._in_grammar):
            return
        accepted = not self._rejected and self.matcher.accept(token)
        if before is not Phase.OPENING or self._in_grammar:
            self._advance(self.matcher, accepted, token)
        elif self._reasoning.phase is Phase.THINKING:
            self.matcher.rollback(self._accepted + accepted)
            self._rejected = False
        elif self._reasoning.phase is Phase.OPENING:
            self._accepted += accepted
            self._rejected = not accepted
        else:
            self._advance(self.matcher, accepted, token)

    def _advance(self, matcher: Matcher, accepted: bool, token: int) -> None:
        self.finished = accepted and token in self._ends
        if not accepted:
            self.error = matcher.error or f"token {token} does not fit the grammar"

    def refresh(self, grammar: Bits | None, outputs: Sequence[int]) -> None:
        """Compute `bits` or `error`. `grammar`: the grammar's mask, if `consults_grammar`."""
        self.is_stale = False
        if self.matcher is not None and self.matcher.error is not None:
            self.error = self.matcher.error
            if self._compiled is not None:
                self._compiled.spoil()
        if self._compiled is not None and self._compiled.refused:
            self.error = self._compiled.refused
        bits = self._before_rules(grammar)
        if self.error is not None or bits is None:
            self.bits = bits
            return
        allowed = bits if self._allowed is None else bits & self._allowed
        if self._never is not None:
            allowed &= ~self._never
        for token in self._banned(outputs):
            if token < self.vocab:
                allowed[token // 32] &= ~np.uint32(1 << token % 32)
        if not allowed.any():
            self.error = self._empty_mask_error(len(outputs))
        self.bits = allowed

    def _before_rules(self, grammar: Bits | None) -> Bits | None:
        """Return the tokens that reasoning and grammar allow, as a copy."""
        if (forced := self._reasoning.forced) is not None:
            return self._only({forced})
        if grammar is not None:
            with_openings: Bits = grammar | self._only(self._reasoning.openings)
            return with_openings
        if self._rejected:
            return self._only(self._reasoning.openings)
        if self.matcher is None:
            return None
        others: Bits = ~self._only(set(self._ends))  # ending inside the reasoning would leave no constrained answer
        return others

    def grow(self, size: int) -> None:
        """Count memory that the grammar's library took for this answer, in bytes."""
        if self._compiled is not None:
            self._compiled.grow(size)

    def release(self) -> None:
        """Let the grammar's memory go: the answer has ended, though others may hold this state for some time."""
        compiled = self._compiled
        self._compiled = None
        self.matcher = None
        if compiled is not None:
            compiled.leave()

    def copy(self) -> TokenMaskState:
        """Return an independent copy."""
        twin = copy.copy(self)
        twin.matcher = None if self.matcher is None else self.matcher.copy()
        twin._reasoning = self._reasoning.copy()
        return twin

    def _only(self, tokens: set[int]) -> Bits:
        only: Bits = allowed_bits({0: tuple(tokens)}, 1, self.vocab)[0]
        return only

    def _banned(self, outputs: Sequence[int]) -> list[int]:
        """Return the next tokens that min_tokens and bad words of several tokens forbid."""
        rules = self._rules
        banned = list(rules.stop_ids) if len(outputs) < rules.min_tokens else []
        for word in self._by_last_head.get(outputs[-1], ()) if outputs else ():
            head = len(word) - 1
            if head <= len(outputs) and tuple(outputs[len(outputs) - head :]) == word[:-1]:
                banned.append(word[-1])
        return banned

    def _empty_mask_error(self, generated: int) -> str:
        rules = self._rules
        if generated < rules.min_tokens and rules.stop_ids:
            return f"the grammar is complete after {generated} tokens, but min_tokens is {rules.min_tokens}"
        if rules.bad_words or rules.allowed_token_ids is not None:
            return f"after {generated} tokens bad_words or allowed_token_ids exclude all tokens that the grammar allows"
        return f"after {generated} tokens the grammar allows no token"


def refresh_masks(states: Sequence[tuple[TokenMaskState, Sequence[int]]]) -> None:
    """Compute the next masks of several answers, each with its outputs; one call per grammar library."""
    with_grammar = [(state, outputs) for state, outputs in states if state.consults_grammar]
    for state, outputs in states:
        if not state.consults_grammar:
            state.refresh(None, outputs)
    for library in {id(state.library): state.library for state, _ in with_grammar}.values():
        if library is None:
            raise RuntimeError("a mask consults a grammar whose library was released")
        group = [(state, outputs) for state, outputs in with_grammar if state.library is library]
        bits = np.zeros((len(group), -(-group[0][0].vocab // 32)), np.uint32)
        library.fill([matcher for state, _ in group if (matcher := state.matcher) is not None], bits)
        for (state, outputs), row in zip(group, bits):
            state.refresh(row, outputs)


def masks_after(state: TokenMaskState, drafts: Sequence[int], outputs: Sequence[int]) -> Bits:
    """Return the masks after none, one, ... all n drafted tokens, uint32 [1 + n, ceil(V/32)]; `state` is unchanged.

    Rows after a rejected or final draft token are all ones (unreachable).
    """
    ahead = state.copy()
    masks = np.full((1 + len(drafts), -(-state.vocab // 32)), 0xFFFFFFFF, np.uint32)
    if state.bits is not None:
        masks[0] = state.bits
    known_outputs = list(outputs)
    for index, draft in enumerate(drafts, 1):
        if not masks[index - 1, draft // 32] >> np.uint32(draft % 32) & np.uint32(1):
            break
        ahead.accept(draft)
        known_outputs.append(draft)
        if ahead.finished:
            break
        if ahead.error is None:
            refresh_masks([(ahead, known_outputs)])
        if ahead.error is not None:
            break
        if ahead.bits is not None:
            masks[index] = ahead.bits
    return masks
