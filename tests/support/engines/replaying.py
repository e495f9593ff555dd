"""A proposer that knows the texts: it proposes what follows in them, with errors at given places."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from pagoda.common.engine.core import MakeScheduler
from pagoda.common.engine.scheduling.scheduler import Scheduler
from pagoda.common.engine.speculative.proposer import DraftContext, Drafter

Wrong = Callable[[str, int], bool]
"""Request and place in its answer -> whether the token proposed for it is wrong."""


class Replaying:
    """`texts`: the answer of each request. `most`: tokens per proposal, at most, by request and place."""

    name = "replaying"

    def __init__(
        self,
        texts: Mapping[str, Sequence[int]],
        wrong: Wrong = lambda request, place: False,
        most: Callable[[str, int], int] = lambda request, place: 1000,
    ) -> None:
        self.texts, self.wrong, self.most = texts, wrong, most
        self.contexts: list[DraftContext] = []

    def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        self.contexts += contexts
        return [self._continue(context) for context in contexts]

    def finish(self, request_id: str, outputs: Sequence[int]) -> None:
        pass  # the texts stay known

    def _continue(self, context: DraftContext) -> list[int]:
        name = context.request_id
        text, start = self.texts[name], len(context.outputs) + len(context.drafts)
        count = min(context.num_tokens, self.most(name, start))
        return [
            (token + 1) % 5 if self.wrong(name, place) else token
            for place, token in enumerate(text[start : start + count], start)
        ]


def drafting(proposer: Replaying, vocab: int, clock: Callable[[], float] = time.monotonic) -> MakeScheduler:
    """What makes schedulers with that proposer."""
    return partial(Scheduler, drafter=Drafter(proposer, vocab), clock=clock)
