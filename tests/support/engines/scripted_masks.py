"""Token masks that depend on every token of an answer, without a grammar."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
from support.suite.clock import Clock

from pagoda.common.engine.core import EngineCore
from pagoda.common.engine.messages import EngineRequest

FINAL = 5
"""The token that ends a masked answer."""


def allowed(outputs: Sequence[int], vocab: int) -> list[int]:
    """Return the tokens that may follow `outputs`: about a third, others after each token."""
    digest = 11
    for token in outputs:
        digest = (digest * 29 + token + 1) % 10_007
    return [token for token in range(vocab) if (token * 7 + digest) % 3 == 0]


class SlowLibrary:
    """A grammar library some of whose masks take a second of a clock: `slow` in a hundred."""

    def __init__(self, clock: Clock, slow: int) -> None:
        self.clock, self.slow, self.count = clock, slow, 0

    def fill(self, matchers: Sequence[object], bits: np.ndarray) -> None:
        for _ in matchers:
            self.count += 1
            if self.count * 37 % 100 < self.slow:
                self.clock.advance(1.0)


QUICK = SlowLibrary(Clock(), 0)


class ScriptedMask:
    """A mask state (structured_output.token_mask.TokenMaskState) with the masks of `allowed`."""

    consults_grammar = True

    def __init__(self, vocab: int, library: SlowLibrary = QUICK) -> None:
        self.vocab, self.library, self.matcher = vocab, library, self
        self.finished, self.error = False, None
        self.refresh(None, ())

    def copy(self) -> ScriptedMask:
        return copy.copy(self)

    def depends_on(self, unknown: int) -> bool:
        return unknown > 0

    def accept(self, token: int) -> None:
        if not self.is_stale:  # It is stale between accepted drafts whose masks are slow.
            assert self.bits[token // 32] >> (token % 32) & 1, f"token {token} was not allowed"
        self.finished = token == FINAL
        self.is_stale = True

    def grow(self, size: int) -> None:
        pass

    def release(self) -> None:
        pass

    def refresh(self, grammar: np.ndarray | None, outputs: Sequence[int]) -> None:
        self.is_stale = False
        self.bits = np.zeros(-(-self.vocab // 32), np.uint32)
        for token in allowed(outputs, self.vocab):
            self.bits[token // 32] |= np.uint32(1 << token % 32)


def add_masked(core: EngineCore, request: EngineRequest, vocab: int, library: SlowLibrary = QUICK) -> None:
    """Add a request that samples under a ScriptedMask, and measure masks by its library's clock: by a real one, a mask
    that a busy machine interrupts would be a slow one.
    """
    scheduler: Any = core._scheduler
    for each in (shard.scheduler for shard in scheduler.shards) if hasattr(scheduler, "shards") else (scheduler,):
        each.masks._clock = library.clock
    core._grammars._add(request, ScriptedMask(vocab, library))
